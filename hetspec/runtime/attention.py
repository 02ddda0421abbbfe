"""Attention of a verification pass, computed as plain decoding computes it: one position at a time.

Reading n tokens at once and reading them one by one give the same law, but not the same bits: in half precision a sum
over more keys, some of them masked, is rounded otherwise, and at a near-tie the greedy text takes another way.
oneDNN's half precision products of a few rows do not depend on how many rows there are (but for layers with several
thousand inputs, whose sums may differ in the last bit); attention is what does. With each position attending by itself,
over its own keys, a pass gives bit for bit what single steps give, and costs no more: the mask and the copy of keys and
values for every query head are left out.

Imports transformers, so it is imported where a model is read.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hetspec.runtime.views import mapped_view

NAME = "hetspec_stepwise"
MOST = 16  # positions; a longer pass is a prompt, which plain decoding reads at once, too


def stepwise_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Scaled dot-product attention of the last positions of a text, one at a time.

    Args:
        module: the attention layer.
        query: [B, heads, n, size].
        key, value: [B, key heads, m, size]; the n positions are the last of the m.
        attention_mask: bool[B or 1, 1 or heads, n, m], or None where causality is all.
        options: as transformers passes them to its own function.

    Returns:
        [B, n, heads, size], and None for the weights.
    """
    n, m = query.shape[2], key.shape[2]
    if n == 1 or n > MOST or n == m:
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return out, None
    outs = []
    for j in range(n):
        seen = m - n + j + 1
        mask = None if attention_mask is None else attention_mask[:, :, j : j + 1, :seen]
        if mask is not None and (bool(mask.all()) if mask.dtype == torch.bool else not bool(mask.any())):
            mask = None
        own = (query[:, :, j : j + 1], key[:, :, :seen], value[:, :, :seen])
        outs.append(sdpa_attention_forward(module, *own, mask, **options)[0])
    return torch.cat(outs, dim=1), None


AttentionInterface.register(NAME, stepwise_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def stepwise_view(model: Any) -> Any:
    """A view of a model that reads with `stepwise_attention`, where that makes passes equal to single steps.

    That is in half precision on the CPU, with transformers' "sdpa" attention; any other model is returned as it is.

    Args:
        model: a transformers causal language model; neither it nor its configurations are changed.
    """
    half = model.dtype in (torch.bfloat16, torch.float16) and model.device.type == "cpu"
    if not half or getattr(model.config.get_text_config(), "_attn_implementation", "") != "sdpa":
        return model
    configs: dict[int, Any] = {}

    def other(config: Any) -> Any:
        if id(config) not in configs:
            configs[id(config)] = made = copy.copy(config)
            made._attn_implementation_internal = NAME
        return configs[id(config)]

    def change(view: Any) -> None:
        if getattr(getattr(view, "config", None), "_attn_implementation", "") == "sdpa":
            view.config = other(view.config)

    return mapped_view(model, change)
