"""Several prompts at once: each row runs its own decoding loop, and their forwards are brought together.

The loops know nothing of each other, so each row commits what it would commit alone (up to the rounding of a
padded forward). They are threads used as coroutines: exactly one runs at a time, in a fixed order, and a loop that
asks for a forward rests until every other one has come as far. Drafter forwards go first; when all rows wait for
the target, one padded pass serves them all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from hetspec.runtime.models import CachedModel, ModelRow, Reading, read_together


class Cancelled(BaseException):
    """Ends the loop of a row after another row failed."""


class Lane(threading.Thread):
    """One row's loop, which runs only while it has the turn."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.work = work
        self.waiting: tuple[CachedModel, Reading] | None = None
        self.error: BaseException | None = None
        self.ended = self.cancelled = False
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)

    def run(self) -> None:
        """The loop, once it gets its first turn."""
        self._turn.acquire()
        try:
            if not self.cancelled:
                self.work()
        except Cancelled:
            pass
        except BaseException as error:  # handed to the caller's thread
            self.error = error
        self.ended = True
        self._back.release()

    def resume(self) -> None:
        """Gives the lane the turn until it waits or ends; called by the one that brings the forwards together."""
        self.waiting = None
        self._turn.release()
        self._back.acquire()

    def ask(self, model: CachedModel, reading: Reading) -> Tensor:
        """Gives the turn back until the reading is answered; called inside the lane."""
        self.waiting = (model, reading)
        self._back.release()
        self._turn.acquire()
        if self.cancelled:
            raise Cancelled
        assert reading.logits is not None
        return reading.logits


class JointRow(ModelRow):
    """A row whose forwards are read together with those of the other lanes.

    Args:
        model: of the row.
        first: whether its model goes before others that are waited for, as a drafter's does.
    """

    def __init__(self, model: CachedModel, *, first: bool = False) -> None:
        super().__init__(model)
        self.model, self.first = model, first

    def forward(self, ids: list[int], keep: int) -> Tensor:
        """As `ModelRow.forward`; outside a lane, alone."""
        lane = threading.current_thread()
        if not isinstance(lane, Lane):
            return super().forward(ids, keep)
        return lane.ask(self.model, Reading(self, ids, keep))


def run_together(works: Sequence[Callable[[], None]]) -> None:
    """Runs the loops side by side to their ends.

    Raises:
        Whatever a loop raises first; the others are ended.
    """
    lanes = [Lane(work) for work in works]
    for lane in lanes:
        lane.start()
    ready = lanes
    try:
        while ready:
            for lane in ready:
                lane.resume()
                if lane.error is not None:
                    raise lane.error
            waiting = [(lane, *lane.waiting) for lane in lanes if lane.waiting is not None]
            if not waiting:
                return
            model = next((m for _, m, r in waiting if getattr(r.row, "first", False)), waiting[0][1])
            together = [(lane, reading) for lane, m, reading in waiting if m is model]
            read_together(model, [reading for _, reading in together])
            ready = [lane for lane, _ in together]
    finally:
        for lane in lanes:
            if not lane.ended:
                lane.cancelled = True
                lane.resume()
            lane.join()
