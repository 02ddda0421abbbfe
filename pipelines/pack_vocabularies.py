"""Packs byte-level vocabularies into small files for `gpu_check.py`, which has no network.

pack_vocabularies.py [--out pipelines/vocabularies]
A file is the list of merges, one per token in the order of their ids, compressed: the vocabulary is all bytes and what
each merge makes. Where a tokenizer lists several merges for a token, the one that its lower ranks lead to is kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
import math
from pathlib import Path

from hetspec.sources import load_tokenizer

NAMES = {"smollm2": "smollm2-135m", "deepseek": "deepseek-v4", "qwen": "qwen"}


def main() -> None:
    """Writes a file for each of NAMES."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "vocabularies")
    out = parser.parse_args().out
    out.mkdir(exist_ok=True)
    for name, packaged in NAMES.items():
        described = json.loads(load_tokenizer(packaged).tokenizer.to_str())["model"]
        merges = own_merges(described["vocab"], [tuple(merge) for merge in described["merges"]])
        text = "\n".join(map(" ".join, merges)).encode()
        path = out / f"{name}.merges.xz"
        path.write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
        print(f"{path}  {len(merges):,} merges, {path.stat().st_size:,} bytes")


def own_merges(vocabulary: dict[str, int], merges: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """One merge per token, by rank: the last one that merging the token's letters by the ranks below makes."""
    by_token: dict[str, list[tuple[str, ...]]] = {}
    for merge in merges:
        by_token.setdefault("".join(merge), []).append(merge)
    ranks = {token: vocabulary[token] for token in by_token}
    kept = []
    for token in sorted(by_token, key=ranks.__getitem__):
        choices = by_token[token]
        kept.append(choices[0] if len(choices) == 1 else last_merge(token, ranks))
    return kept


def last_merge(token: str, ranks: dict[str, int]) -> tuple[str, ...]:
    """The two parts left when the letters of a token are merged by all ranks below its own."""
    parts = list(token)
    while len(parts) > 2:
        made = [ranks.get(a + b, math.inf) for a, b in itertools.pairwise(parts)]
        at = made.index(min(made))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return tuple(parts)


if __name__ == "__main__":
    main()
