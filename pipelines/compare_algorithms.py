"""Compares the algorithms on one pair and logs the comparison to MLflow.

compare_algorithms.py TARGET DRAFTER [--temperatures 0 0.6 1] [--code N] [--prose N] [--max-new-tokens N]
The pair must have a co-segmentation kernel (hetspec-prep build-affinity TARGET DRAFTER).
"""

from __future__ import annotations

import argparse
import json
import sys

from hetspec.console import load_engine, quiet_libraries
from hetspec.errors import HetspecError
from hetspec.sources import named_texts
from hetspec.tracking import Store, load_pair

PROSE = (
    "The history of the bicycle begins in the early nineteenth century, when",
    "Rain fell on the harbour all night, and in the morning the fishermen",
    "A good dictionary does more than define words; it",
)


def main() -> int:
    """Runs the step; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("drafter")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    parser.add_argument("--code", type=int, default=3, help="HumanEval prompts")
    parser.add_argument("--prose", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--num-draft-tokens", type=int, default=5)
    parser.add_argument("--verify", default="token", choices=["token", "block"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tracking-uri", default=None)
    arguments = parser.parse_args()
    code = named_texts("humaneval")
    sets = {
        "code": code[:: max(1, len(code) // max(1, arguments.code))][: arguments.code],
        "prose": list(PROSE[: arguments.prose]),
    }
    quiet_libraries()  # before torch is imported
    from hetspec.runtime.bench import compare

    try:
        store = Store(arguments.tracking_uri)
        pair = load_pair(
            (arguments.target, arguments.drafter), uri=arguments.tracking_uri, part="kernel-cosegment"
        )
        engine = load_engine(pair, dtype=arguments.dtype)
        for temperature in arguments.temperatures:
            for name, prompts in sets.items():
                if not prompts:
                    continue
                rows = compare(
                    engine,
                    prompts,
                    temperature=temperature,
                    num_draft_tokens=arguments.num_draft_tokens,
                    max_new_tokens=arguments.max_new_tokens,
                    verify=arguments.verify,
                    say=lambda line: print(line, file=sys.stderr, flush=True),
                )
                setting = {
                    "target": pair.target.name,
                    "drafter": pair.drafter.name,
                    "prompts": name,
                    "temperature": temperature,
                    "num_draft_tokens": arguments.num_draft_tokens,
                    "max_new_tokens": arguments.max_new_tokens,
                    "dtype": arguments.dtype,
                    "verify": arguments.verify,
                }
                run_id = store.log_comparison(setting, [row.as_dict() for row in rows])
                record = {**setting, "run_id": run_id, "contestants": [row.as_dict() for row in rows]}
                print(json.dumps(record), flush=True)
    except HetspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
