"""A verification pass computed as plain decoding computes it: attention, and where it must be layers, row by row.

Reading n tokens at once and reading them one by one give the same law, but not the same bits: in half precision a sum
over more keys, some of them masked, is rounded otherwise, and at a near-tie the greedy text takes another way.
Attention is the first reason. With each position attending by itself, over its own keys, it gives bit for bit what
single steps give. oneDNN's half precision products of a few rows mostly do not depend on how many rows there are.
Layers with many inputs can be exceptions (seen from 4,000 on with one processor, from 1,000 on with an AMD EPYC).
Layers are tried, and where all exceptions are small enough to stay in the processor's cache they take rows one by one.

Those bits have a price: torch multiplies a bfloat16 matrix by one row several times slower than by four. Where they
cannot be had (exceptions too large) or do not matter (drafters), heads that share keys are read together instead, and
a drafter reads its prompt in blocks, for which torch's products are twice as fast as its attention.

Imports transformers, so it is imported where a model is read.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hetspec.runtime.views import mapped_view
from hetspec.runtime.weights import PackedLinear

STEPWISE, GROUPED_PASSES, DRAFTER = "hetspec_stepwise", "hetspec_grouped_passes", "hetspec_drafter"
BLOCK = 128  # positions of a prompt that attend together
MOST = 16  # positions; a longer pass is a prompt, which plain decoding reads at once, too
CACHED_BYTES = 4 << 20  # of a layer's weights, that a second row reads from the processor's cache
OUTPUTS = 60_000  # looked at before a layer counts as no exception; one in some thousands differs where it is


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
    if n == 1 or n > MOST or n == m or not _ordinary(module, options):
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


def grouped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Scaled dot-product attention of the last positions of a text; heads that share keys are read together.

    Args:
        query: [B, heads, n, size].
        key, value: [B, key heads, m, size], sizes of values may differ; the n positions are the last of the m.
        mask: bool or added to the scores, [B or 1, 1 or heads, n, m], or None where causality is all.
        scale: of the scores; None for 1/√size.

    Returns:
        [B, n, heads, size].
    """
    batch, heads, n, size = query.shape
    key_heads, m = key.shape[1:3]
    group = heads // key_heads
    if mask is None and n > 1:
        mask = torch.ones(n, m, dtype=torch.bool, device=query.device).tril(m - n)[None, None]
    if mask is not None:
        alike = mask.shape[1] == 1  # over heads
        by_head = mask[:, :, None].expand(-1, 1, group, n, m) if alike else mask
        mask = by_head.reshape(mask.shape[0], 1 if alike else key_heads, group * n, m)
    rows = query.reshape(batch, key_heads, group * n, size)
    out = scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
    return out.view(batch, heads, n, value.shape[-1]).transpose(1, 2)


def blocked(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Causal attention over a whole text, in plain products of blocks of rows; scores are rounded to the dtype.

    Args:
        query: [B, heads, n, size].
        key, value: [B, key heads, n, size], sizes of values may differ.
        scale: of the scores; None for 1/√size.

    Returns:
        [B, n, heads, size].
    """
    batch, heads, n, size = query.shape
    key_heads = key.shape[1]
    group = heads // key_heads
    query = query * (size**-0.5 if scale is None else scale)  # first, as float16 could not hold every product
    ahead = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=query.device).triu(1)
    outs = []
    for first in range(0, n, BLOCK):
        end = min(first + BLOCK, n)
        rows = query[:, :, first:end].reshape(batch, key_heads, -1, size)
        scores = rows @ key[:, :, :end].transpose(-1, -2)
        own = scores.view(batch, key_heads, group, end - first, end)[..., first:]
        own.masked_fill_(ahead[: end - first, : end - first], -torch.inf)
        outs.append((torch.softmax(scores, dim=-1) @ value[:, :, :end]).view(batch, heads, end - first, -1))
    return torch.cat(outs, dim=2).transpose(1, 2)


def drafter_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """`blocked` for prompts, `grouped` for short reads; arguments as in `stepwise_attention`.

    Biases of the keys (Qwen2) can make scores of some thousands, which half precision cannot tell apart.
    """
    whole = query.shape[2] == key.shape[2] > MOST
    biased = getattr(getattr(module, "k_proj", None), "bias", None) is not None
    if whole and attention_mask is None and not biased and _ordinary(module, options):
        return blocked(query, key, value, options.get("scaling")), None
    return grouped_attention(module, query, key, value, attention_mask, **options)


def grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    least: int = 1,
    **options: Any,
) -> tuple[Tensor, None]:
    """`grouped` for short reads, as transformers calls an attention function.

    Args:
        module: the attention layer.
        query, key, value, attention_mask, options: as in `stepwise_attention`.
        scaling: of the scores.
        least: positions; for fewer it is transformers' own function, whose bits plain decoding has.
    """
    n = query.shape[2]
    if not least <= n <= MOST or n == key.shape[2] or not _ordinary(module, options):
        options["scaling"] = scaling
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)[0], None
    return grouped(query, key, value, attention_mask, scaling), None


AttentionInterface.register(STEPWISE, stepwise_attention)
AttentionInterface.register(DRAFTER, drafter_attention)
AttentionInterface.register(GROUPED_PASSES, functools.partial(grouped_attention, least=2))
AttentionMaskInterface.register(STEPWISE, sdpa_mask)
AttentionMaskInterface.register(DRAFTER, sdpa_mask)
AttentionMaskInterface.register(GROUPED_PASSES, sdpa_mask)


def _ordinary(module: Any, options: dict[str, Any]) -> bool:
    """Whether it is causal attention without anything that only transformers' own function knows how to add."""
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    return causal and all(options.get(name) is None for name in ("position_bias", "softcap"))


class RowByRow(nn.Module):
    """A linear layer that takes the rows of a short read one by one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """[..., out] from [..., in]."""
        rows = x.reshape(-1, x.shape[-1])
        if not 1 < len(rows) <= MOST:
            return self.layer(x)  # type: ignore[no-any-return]
        return torch.cat([self.layer(row) for row in torch.split(rows, 1)]).reshape(*x.shape[:-1], -1)


def depends_on_rows(layer: nn.Module, inputs: int, outputs: int) -> bool:
    """Whether a half precision layer gives other bits for a row alone than among others; tried on random rows."""
    count = max(4, -(-OUTPUTS // outputs))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, inputs, generator=generator).to(_weight(layer).dtype)
    with torch.inference_mode():
        alone = torch.cat([layer(row) for row in torch.split(x, 1)])
        return not torch.equal(alone, torch.cat([layer(rows) for rows in torch.split(x, 4)]))


def _weight(layer: Any) -> Tensor:
    own = layer.own[0] if isinstance(layer, PackedLinear) else layer
    weight: Tensor = own.weight
    return weight


def exceptions(model: Any) -> set[tuple[int, int, bool]] | None:
    """Shapes (inputs, outputs, bias) of linear layers to be read row by row; None where that would cost too much."""
    found: dict[tuple[int, int, bool], bool] = {}
    for layer in model.modules():
        if (shape := _shape(layer)) and shape not in found:
            found[shape] = depends_on_rows(layer, *shape[:2])
            if found[shape] and _weight(layer).numel() * _weight(layer).element_size() > CACHED_BYTES:
                return None
    return {shape for shape, differs in found.items() if differs}


def _shape(layer: Any) -> tuple[int, int, bool] | None:
    if type(layer) not in (nn.Linear, PackedLinear):
        return None
    return layer.in_features, layer.out_features, layer.bias is not None


def is_plain(model: Any) -> bool:
    """Whether it is in half precision on the CPU with transformers' "sdpa" attention: what has views here."""
    half = model.dtype in (torch.bfloat16, torch.float16) and model.device.type == "cpu"
    return half and getattr(model.config.get_text_config(), "_attn_implementation", "") == "sdpa"


def target_view(model: Any) -> Any:
    """A view of a target whose passes over several tokens give the bits of single steps, or are at least fast.

    Args:
        model: a transformers causal language model; neither it nor its configurations are changed. Any that is not
            `is_plain` is returned as it is.
    """
    if not is_plain(model):
        return model
    one_by_one = exceptions(model)
    return _view(model, GROUPED_PASSES) if one_by_one is None else _view(model, STEPWISE, one_by_one)


def prompt_view(model: Any) -> Any:
    """A view of a target for its prompts, which plain decoding reads at once: no layer takes rows one by one."""
    return _view(model, STEPWISE) if is_plain(model) else model


def drafter_view(model: Any) -> Any:
    """A view of a drafter whose reads are fast; of any that is not `is_plain`, the model as it is."""
    return _view(model, DRAFTER) if is_plain(model) else model


def _view(model: Any, attention: str, one_by_one: Collection[tuple[int, int, bool]] = ()) -> Any:
    """A view of a model with other attention, and layers of some shapes row by row."""
    configs: dict[int, Any] = {}

    def other(config: Any) -> Any:
        if id(config) not in configs:
            configs[id(config)] = made = copy.copy(config)
            made._attn_implementation_internal = attention
        return configs[id(config)]

    def change(view: Any) -> None:
        if getattr(getattr(view, "config", None), "_attn_implementation", "") == "sdpa":
            view.config = other(view.config)
        for name, child in view._modules.items():
            if _shape(child) in one_by_one:
                view._modules[name] = RowByRow(child)

    return mapped_view(model, change)
