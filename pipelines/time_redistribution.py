"""Times RDK's laws against the vocabulary size, on random laws: the first-order form (no matrix) and kernels.

time_redistribution.py [--sizes 8192 16384 …] [--repeats N] [--json]
The first-order form must be linear in N: its time per entry is printed beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import numpy as np
import torch

from hetspec.runtime.kernels import Redistribution, TargetKernel, cold_law

SIZES = (8192, 16384, 32768, 65536, 131072, 262144)
TOP = 64  # entries of a kernel's row


def laws(size: int, random: np.random.Generator) -> dict[str, Redistribution]:
    """The same map, half of the target inside I, with and without a kernel."""
    images = np.where(np.arange(size) % 2 == 0, np.arange(size), -1)
    intersection = TargetKernel.from_map(images, size)
    reached = images >= 0
    cold = cold_law(random.dirichlet(np.full(size, 0.1)).astype(np.float32), reached)
    inside = np.flatnonzero(reached)
    busy = inside[: len(inside) // 8]  # rows of common tokens
    rows = np.repeat(busy, TOP)
    kernel = TargetKernel(rows, random.integers(0, size, len(rows)), np.full(len(rows), 1 / TOP), size)
    return {
        "tli": Redistribution(intersection, None, None, 0.0, 0.0),
        "first order": Redistribution(intersection, None, cold, 0.1, 0.0),
        "kernel": Redistribution(intersection, kernel, cold, 0.1, 0.2),
    }


def main() -> int:
    """Runs the step; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    contestants = [
        (size, name, law, torch.from_numpy(random.dirichlet(np.full(size, 0.1)).astype(np.float32)))
        for size in arguments.sizes
        for name, law in laws(size, random).items()
    ]
    seen: dict[tuple[int, str], list[float]] = {(size, name): [] for size, name, _, _ in contestants}
    for _ in range(arguments.repeats + 3):  # taking turns; the first rounds warm up
        for size, name, law, q in contestants:
            started = time.perf_counter()
            law.apply(q)
            seen[size, name].append(time.perf_counter() - started)
    rows = [
        {"size": size, "law": name, "seconds": statistics.median(times[3:])}
        for (size, name), times in seen.items()
    ]
    sizes = np.log([r["size"] for r in rows if r["law"] == "first order"])
    times = np.log([r["seconds"] for r in rows if r["law"] == "first order"])
    exponent = float(np.polyfit(sizes, times, 1)[0]) if len(sizes) > 1 else None
    if arguments.json:
        print(json.dumps({"rows": rows, "first_order_exponent": exponent}))
        return 0
    print(f"{'N':>8}  {'law':<12} {'µs':>9} {'ns per entry':>13}")
    for row in rows:
        seconds = row["seconds"]
        print(
            f"{row['size']:>8,}  {row['law']:<12} {1e6 * seconds:>9.0f} {1e9 * seconds / row['size']:>13.2f}"
        )
    if exponent is not None:
        print(f"first order: time grows as N^{exponent:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
