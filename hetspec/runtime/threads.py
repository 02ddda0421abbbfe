"""How many threads a short read uses: on a CPU, waking others for every small layer can cost more than they do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch

LOOKS = 3  # at either number of threads
ENOUGH_SECONDS = 2.0  # for looking
GAIN = 0.9  # one thread must take at most this share of the time of many


class ShortReads:
    """Runs short reads with one thread where that was faster when it was tried.

    Tried once for each number of threads that torch is set to. torch's setting belongs to the process: it is changed
    for the read only and set back; what other Python threads compute meanwhile is slower or faster, not otherwise.
    """

    def __init__(self) -> None:
        self._alone: dict[int, bool] = {}

    @contextlib.contextmanager
    def __call__(self, read: Callable[[], object]) -> Iterator[None]:
        """Sets the threads for what is inside.

        Args:
            read: one short read, for trying.
        """
        threads = torch.get_num_threads()
        if threads == 1:
            yield
            return
        if threads not in self._alone:
            self._alone[threads] = False  # while it is tried, reads come through here, too
            self._alone[threads] = faster_alone(read, threads)
        if not self._alone[threads]:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def faster_alone(read: Callable[[], object], threads: int) -> bool:
    """Whether the read is faster with one thread than with so many; the fastest of a few times each."""
    best = {threads: float("inf"), 1: float("inf")}
    started = time.perf_counter()
    read()  # what only the first one does
    try:
        for _ in range(LOOKS):
            for count in best:
                torch.set_num_threads(count)
                before = time.perf_counter()
                read()
                best[count] = min(best[count], time.perf_counter() - before)
            if time.perf_counter() - started > ENOUGH_SECONDS:
                break
    finally:
        torch.set_num_threads(threads)
    return best[1] < GAIN * best[threads]
