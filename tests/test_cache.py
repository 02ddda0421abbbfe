"""The cache that grows in place against transformers' own, which copies."""

from __future__ import annotations

import torch
from transformers import DynamicCache

from hetspec.runtime.cache import LEAST_ROOM, new_cache
from hetspec.runtime.models import CachedModel
from tests.toys import tiny_model


def test_any_updates_and_crops_hold_what_the_plain_cache_holds():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        ours, theirs = new_cache(), DynamicCache()
        for _ in range(12):
            n = int(torch.randint(1, 60, (), generator=generator))
            keys, values = torch.randn(2, 1, 3, n, 4, generator=generator)
            for mine, plain in zip(ours.update(keys, values, 0), theirs.update(keys, values, 0), strict=True):
                assert torch.equal(mine, plain)
            cut = int(torch.randint(0, ours.get_seq_length() + 1, (), generator=generator))
            ours.crop(-cut)
            theirs.crop(-cut)
            assert ours.get_seq_length() == theirs.get_seq_length()


def test_a_step_writes_in_place():
    cache = new_cache()
    one = torch.ones(1, 2, 1, 4)
    cache.update(one, one, 0)
    start = cache.layers[0].keys.data_ptr()
    for _ in range(LEAST_ROOM - 1):
        cache.update(one, one, 0)
    assert cache.layers[0].keys.data_ptr() == start
    cache.update(one, one, 0)  # no room left
    assert cache.layers[0].keys.data_ptr() != start


def test_views_put_in_from_outside_are_copied_before_they_are_added_to():
    cache = new_cache()
    first, second = torch.randn(2, 1, 2, 5, 4)
    cache.update(first, first, 0)
    foreign = torch.randn(3, 2, 9, 4)
    kept = foreign.clone()
    layer = cache.layers[0]
    layer.keys, layer.values = foreign[1:2, :, 2:7], foreign[1:2, :, 2:7]
    keys, _ = cache.update(second, second, 0)
    assert torch.equal(keys, torch.cat([kept[1:2, :, 2:7], second], dim=2))
    assert torch.equal(foreign, kept)


def test_a_row_forgets_its_room():
    row = CachedModel(tiny_model("llama", 96, seed=3)).new_row()
    first = row.forward([5, 6, 7], 1)
    row.forget()
    assert torch.equal(row.forward([5, 6, 7], 1), first)
