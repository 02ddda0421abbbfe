"""Int8 weights for a drafter on the CPU: half the bytes to read per step, and the output's law untouched.

What a drafter proposes is judged by the very law it was drawn from, so a coarser drafter costs acceptance at most.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hetspec.errors import UnsupportedModel


class Int8Linear(nn.Module):
    """A linear layer with symmetric int8 weights, one scale per output row; activations stay as they are.

    Args:
        linear: bfloat16, on the CPU; not changed.
    """

    packed: Tensor  # int8[out, in]
    scale: Tensor  # [out]

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        wide = linear.weight.detach().float()
        scale = (wide.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        self.register_buffer("packed", (wide / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale.to(linear.weight.dtype))
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """[..., out] from [..., in]."""
        product = torch._weight_int8pack_mm(x.reshape(-1, self.in_features), self.packed, self.scale)
        out = product.reshape(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias

    def dequantised(self, x: Tensor) -> Tensor:
        """The same without the fast kernel: the obvious twin."""
        out = x.float() @ (self.packed.float() * self.scale.float()[:, None]).T
        return out if self.bias is None else out + self.bias.float()


def int8_view(model: Any) -> Any:
    """A view of a model whose linear layers have int8 weights; the model itself stays as it is.

    Embeddings and everything that is not a plain linear layer (experts kept in one tensor, say) are shared.

    Args:
        model: a transformers causal language model in bfloat16 on the CPU.

    Raises:
        UnsupportedModel: another dtype or device, a quantised model, or nothing to convert.
    """
    name = type(model).__name__
    if (
        model.dtype != torch.bfloat16
        or model.device.type != "cpu"
        or not hasattr(torch, "_weight_int8pack_mm")
    ):
        raise UnsupportedModel(
            f"int8 weights pay for bfloat16 on the CPU; {name} is {str(model.dtype).removeprefix('torch.')} on "
            f"{model.device}.",
            "Load the drafter in bfloat16 on the CPU, or leave int8 out.",
        )
    view = _converted(model)
    if view is model:
        raise UnsupportedModel(f"{name} has no plain linear layer to convert.", "Leave int8 out.")
    return view


def _converted(module: Any) -> Any:
    from hetspec.runtime.models import shallow_view

    if type(module) is nn.Linear:
        return Int8Linear(module)
    children = {name: _converted(child) for name, child in module._modules.items() if child is not None}
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    view = shallow_view(module)
    view._modules.update(children)
    return view
