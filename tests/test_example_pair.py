"""The committed example pair: it loads, and (slow) it is what its two tokenizers give today."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hetspec.artifact import PairArtifact
from hetspec.errors import UnknownSource
from hetspec.tracking import load_pair

EXAMPLE = Path(__file__).parent.parent / "artifacts" / "example-pair"


def test_the_example_pair_loads_and_agrees_with_itself():
    pair = load_pair(EXAMPLE)
    assert (pair.target.name, pair.drafter.name) == ("mistral-v3", "smollm2-135m")
    images = np.unique(pair.map.d2t[pair.map.d2t >= 0])
    controls = pair.figures["map"]["controls_mapped"]
    assert len(images) == pair.figures["map"]["intersection_count"] + controls == 21_754 + controls
    assert (pair.map.first >= 0).sum() >= pair.drafter.text_tokens


@pytest.mark.slow
def test_the_example_pair_is_what_its_tokenizers_give():
    from hetspec.prep.build import prepare
    from hetspec.prep.intersect import build_map
    from hetspec.sources import load_tokenizer

    pair = PairArtifact.from_pretrained(EXAMPLE)
    try:
        target, drafter = (prepare(load_tokenizer(side.name)) for side in (pair.target, pair.drafter))
    except UnknownSource as error:
        pytest.skip(f"LOUD SKIP, a package has vanished: {error}")
    pair.require(target.vocabulary, drafter.vocabulary)
    fresh = build_map(target.vocabulary, drafter.vocabulary, target.segmenter)
    for name in ("d2t", "t2d", "first"):
        assert np.array_equal(getattr(fresh, name), getattr(pair.map, name))
