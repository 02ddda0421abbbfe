"""RDK against TLI over head sizes, on text like the calibration's and on text unlike it.

rdk_curve.py PAIR_RUN [--unlike PAIR_RUN] [--sizes 25% 10% 5% 1%] [--scores overlap random] [--json]
Both runs must hold a calibration of the same pair; weights are fitted on the first one's contexts only.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

import numpy as np

from hetspec.console import quiet_libraries
from hetspec.errors import HetspecError
from hetspec.prep.fit import acceptances, fit_mixture, interval, mass_on
from hetspec.prep.priors import mean_kernel
from hetspec.prep.prune import HeadChooser
from hetspec.prep.weights import components, require_contexts
from hetspec.tracking import load_pair


def main() -> int:
    """Runs the step; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pair")
    parser.add_argument("--unlike", default="")
    parser.add_argument("--sizes", nargs="+", default=["25%", "10%", "5%", "1%"])
    parser.add_argument("--scores", nargs="+", default=["overlap", "random"])
    parser.add_argument("--tracking-uri", default=None)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    quiet_libraries()
    try:
        pair = load_pair(arguments.pair, uri=arguments.tracking_uri)
        tests = {"like": require_contexts(pair).held_out}
        if arguments.unlike:
            other = load_pair(arguments.unlike, uri=arguments.tracking_uri)
            tests["unlike"] = require_contexts(other).held_out
        rows = []
        for score in arguments.scores:
            chooser = HeadChooser.of(pair, score=score)
            for size in chooser.sizes(",".join(arguments.sizes), "auto"):
                rows += measure(pair, chooser.head(size), size, score, tests)
    except HetspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if arguments.json:
        print(json.dumps({"rows": rows}))
        return 0
    print("score     rows      text    p(I∩H)  TLI    kernel      θ     λ     RDK    gain (95 %)")
    for r in rows:
        print(
            f"{r['score']:<9} {r['rows']:<9,} {r['text']:<7} {r['target_mass']:.4f}  {r['tli']:.3f}  {r['prior']:<10} "
            f"{r['theta']:.3f} {r['lam']:.3f} {r['rdk']:.3f}  {r['gain']['mean']:+.4f} "
            f"({r['gain']['low']:+.4f} to {r['gain']['high']:+.4f})"
        )
    return 0


def measure(pair, head, size, score, tests):  # type: ignore[no-untyped-def]
    """One row for each kernel and test text."""
    calibration = require_contexts(pair)
    kept = None if head is None else head.kept
    images = pair.map.d2t if kept is None else pair.map.d2t[kept]
    reached = np.zeros(len(pair.map.t2d), dtype=bool)
    reached[images[images >= 0]] = True
    kernels = {"mean": mean_kernel(pair.map, calibration.mean), **pair.kernels}
    rows = []
    for prior, kernel in kernels.items():
        weights = fit_mixture(calibration.fit.p, components(calibration.fit, pair.map, kernel, kept)).weights
        for text, contexts in tests.items():
            laws = np.stack(components(contexts, pair.map, kernel, kept))
            tli, rdk = acceptances(contexts.p, laws[0]), acceptances(contexts.p, weights @ laws)
            rows.append(
                {
                    "score": score,
                    "rows": size,
                    "text": text,
                    "prior": prior,
                    "target_mass": float(mass_on(contexts.p, reached).mean()),
                    "tli": float(tli.mean()),
                    "rdk": float(rdk.mean()),
                    "theta": float(weights[2]),
                    "lam": float(weights[1]),
                    "gain": asdict(interval(rdk - tli, contexts.documents)),
                }
            )
    return rows


if __name__ == "__main__":
    sys.exit(main())
