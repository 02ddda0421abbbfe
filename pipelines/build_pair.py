"""Builds one pair and saves it to a directory, without MLflow: build_pair.py TARGET DRAFTER DIRECTORY."""

from __future__ import annotations

import argparse
import sys

from hetspec.errors import HetspecError
from hetspec.prep.build import build_pair, corpus, prepare
from hetspec.sources import load_tokenizer, named_texts


def main() -> int:
    """Runs the step; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("drafter")
    parser.add_argument("directory")
    parser.add_argument("--text", default="stdlib", help="running text for coverages: stdlib or humaneval")
    arguments = parser.parse_args()
    try:
        sides = [prepare(load_tokenizer(name)) for name in (arguments.target, arguments.drafter)]
        pair = build_pair(
            sides[0],
            sides[1],
            corpus(named_texts(arguments.text)),
            arguments.text,
            lambda line: print(line, file=sys.stderr),
        )
        print(pair.save_pretrained(arguments.directory))
    except HetspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
