"""Decoder layers of a drafter in few torch calls: half of a small model's time goes between the products.

The three projections into attention are one product, so are the two into the gate; each norm is one call; heads that
share keys are read together. It rounds otherwise than transformers' layer, which is a drafter's own affair: what it
proposes is judged by the very law it was drawn from.

Imports transformers, so it is imported where a model is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer, Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from hetspec.runtime.attention import MOST, grouped

KINDS = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer, Gemma3DecoderLayer)


class FusedLayer(nn.Module):
    """A decoder layer for short reads; long ones (prompts) use the layer it was made from.

    Args:
        layer: of one of KINDS, for which `fits` holds; not changed.
        made: a linear layer that computes several of the same inputs side by side.
    """

    def __init__(self, layer: Any, made: Callable[..., nn.Module]) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        products = (
            made(attention.q_proj, attention.k_proj, attention.v_proj),
            made(attention.o_proj),
            made(mlp.gate_proj, mlp.up_proj),
            made(mlp.down_proj),
        )
        before: tuple[nn.Module, ...] = (layer.input_layernorm, layer.post_attention_layernorm)
        after: tuple[nn.Module, ...] = ()
        if type(layer) is Gemma3DecoderLayer:  # which norms what comes out of attention and gate, too
            before = (layer.input_layernorm, layer.pre_feedforward_layernorm)
            after = (layer.post_attention_layernorm, layer.post_feedforward_layernorm)
        self.parts = nn.ModuleList([*products, *before, *after])  # what a step reads
        # In tuples: looking a child up takes nn.Module longer than some of the products.
        self._products, self._before, self._after, self._layer = products, before, after, (layer,)
        self._head_norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        self._key_heads = attention.k_proj.out_features // attention.head_dim
        self._heads = attention.q_proj.out_features // attention.head_dim
        self._number, self._size, self._scale = attention.layer_idx, attention.head_dim, attention.scaling

    @staticmethod
    def fits(layer: nn.Module) -> bool:
        """Whether it is a layer of KINDS with nothing of others (adapters, hooks, quantised weights) in it."""
        if type(layer) not in KINDS:
            return False
        products = [m for name, m in layer.named_modules() if name.endswith("_proj")]
        hooked = any(m._forward_hooks or m._forward_pre_hooks for m in layer.modules())
        causal = getattr(layer.self_attn, "is_causal", True)
        return causal and len(products) == 7 and all(type(m) is nn.Linear for m in products) and not hooked

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> Tensor:
        """[B, n, h] from [B, n, h], arguments as transformers passes them (the cache's name depends on its version)."""
        assert position_embeddings is not None
        cos, sin = position_embeddings
        batch, n, _ = hidden_states.shape
        held = past_key_values if cache is None else cache
        if n > MOST or held is None or cos.shape[-1] != self._size:
            named = {"past_key_values": held} if cache is None else {"cache": held}
            return self._layer[0](  # type: ignore[no-any-return]
                hidden_states,
                attention_mask=attention_mask,
                position_embeddings=position_embeddings,
                **named,
                **options,
            )
        qkv, o, gate_up, down = self._products
        heads, key_heads = self._heads, self._key_heads

        x = hidden_states
        parts = qkv(_normed(x, self._before[0])).view(batch, n, heads + 2 * key_heads, self._size)
        query, key, value = parts.split((heads, key_heads, key_heads), dim=2)
        if self._head_norms is not None:
            query, key = map(_normed, (query, key), self._head_norms)
            both = torch.cat((query, key), dim=2)
        else:
            both = parts[:, :, : heads + key_heads]
        half = self._size // 2
        turned = torch.cat((-both[..., half:], both[..., :half]), dim=-1)
        both = (both * cos[:, :, None] + turned * sin[:, :, None]).transpose(1, 2)
        keys, values = held.update(both[:, heads:], value.transpose(1, 2), self._number)
        seen = grouped(both[:, :heads], keys, values, attention_mask, self._scale)
        out: Tensor = o(seen.reshape(batch, n, heads * self._size))
        x = x + (_normed(out, self._after[0]) if self._after else out)
        gate, up = gate_up(_normed(x, self._before[1])).chunk(2, dim=-1)
        out = down(self._layer[0].mlp.act_fn(gate) * up)
        x = x + (_normed(out, self._after[1]) if self._after else out)
        return x


def _normed(x: Tensor, norm: Any) -> Tensor:
    """RMSNorm in one call; the weight multiplies before the rounding, not after it as in transformers' Llama."""
    if type(norm) is Gemma3RMSNorm:  # its weight is kept less one
        plain = rms_norm(x, norm.weight.shape, None, norm.eps)
        return torch.addcmul(plain, plain, norm.weight)
    return rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
