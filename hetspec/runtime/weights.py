"""Other layouts of a model's weights on the CPU, to read fewer bytes per step or to read them faster.

One token's forward is as fast as the weights can be read. "packed" weights are the same bfloat16 numbers in the order
oneDNN likes; "int8" and "int4" are coarser copies. A drafter may be as coarse as it likes: what it proposes is judged
by the very law it was drawn from, so acceptance is all it can cost. A target may only be packed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetspec.errors import InvalidInput, UnsupportedModel
from hetspec.runtime.views import shallow_view

WEIGHTS = ("auto", "own", "packed", "int8", "int4")
TARGET_WEIGHTS = ("own", "packed", "auto")
# From this many positions on (prompts), a forward is bound by arithmetic: the model's own layer is faster.
WIDE = 17
GROUP = 32  # int4 weights that share a scale
INT4_ROWS = 16  # the int4 kernel takes multiples of this
SHARE_OF_MEMORY = 0.6  # of the available memory, that a copy made unasked may take


class Relaid(nn.Module):
    """Linear layers with another layout of their weights for short reads; long ones use the layers themselves.

    Weights that change (training goes on, another checkpoint is loaded into the model) are laid out again.

    Args:
        linears: one, or several of the same inputs, whose outputs are computed as one's, side by side; all or none
            with a bias; bfloat16, on the CPU; not changed.
    """

    bias: Tensor | None

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        self.in_features = linears[0].in_features
        self.out_features = sum(linear.out_features for linear in linears)
        self.own = linears  # a tuple: not children, their weights are not read in a step
        self._lay_out()

    def _lay_out(self) -> None:
        self._state = [_state(linear) for linear in self.own]
        self._lay(self._whole("weight").detach())
        self.bias = None if self.own[0].bias is None else self._whole("bias").detach()

    def _whole(self, name: str) -> Tensor:
        parts = [getattr(linear, name) for linear in self.own]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _lay(self, weight: Tensor) -> None:
        """Makes the copy of the weights, [out, in]."""
        raise NotImplementedError

    @property
    def packed_bytes(self) -> int:
        """Bytes that a step reads."""
        raise NotImplementedError

    def multiply(self, x: Tensor) -> Tensor:
        """[n, out] from [n, in], the bias added."""
        raise NotImplementedError

    def _biased(self, product: Tensor) -> Tensor:
        return product if self.bias is None else product + self.bias

    def dequantised(self) -> Tensor:
        """float32[out, in], the weights as they are stored."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """[..., out] from [..., in]."""
        rows = x.reshape(-1, self.in_features)
        if rows.shape[0] >= WIDE:
            return self._unpacked(x)
        if [_state(linear) for linear in self.own] != self._state:
            self._lay_out()
        return self.multiply(rows).view(*x.shape[:-1], self.out_features)

    def _unpacked(self, x: Tensor) -> Tensor:
        outs = [linear(x) for linear in self.own]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)


class PackedLinear(Relaid):
    """The same bfloat16 weights, in oneDNN's blocked order: a third more bytes per second."""

    def _lay(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)

    @property
    def packed_bytes(self) -> int:
        """Two per weight."""
        return 2 * self.in_features * self.out_features

    def multiply(self, x: Tensor) -> Tensor:
        """[n, out] from [n, in]; sums in float32 and rounds once, the bias with it: the bits of a plain layer."""
        if x.shape[0] == 1 and self.bias is not None and len(self.own) == 1:
            return self._unpacked(x)  # which some processors sum in an order of its own
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out

    def dequantised(self) -> Tensor:
        """The layers' own weights."""
        return self._whole("weight").detach().float()


class Int8Linear(Relaid):
    """Symmetric int8 weights, one scale per output row; activations stay as they are."""

    def _lay(self, weight: Tensor) -> None:
        wide = weight.float()
        scale = (wide.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        self._weight = (wide / scale[:, None]).round().to(torch.int8)
        self._scale = scale.to(weight.dtype)

    @property
    def packed_bytes(self) -> int:
        """One per weight, and the scales."""
        return self._weight.numel() + 2 * self._scale.numel()

    def multiply(self, x: Tensor) -> Tensor:
        """[n, out] from [n, in]."""
        return self._biased(torch._weight_int8pack_mm(x, self._weight, self._scale))

    def dequantised(self) -> Tensor:
        """float32[out, in]."""
        return self._weight.float() * self._scale.float()[:, None]


class Int4Linear(Relaid):
    """Int4 weights in groups of 32 inputs with a scale and a middle each; activations stay as they are."""

    def _lay(self, weight: Tensor) -> None:
        steps, scale, middle = self.quantised(weight)
        self._packed = torch._convert_weight_to_int4pack_for_cpu(steps.int().flatten(1) + 8, 2)
        self._groups = torch.cat([scale, middle], dim=2).transpose(0, 1).contiguous()

    @staticmethod
    def quantised(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Steps −8…7 [out, groups, 32], scales and middles bfloat16[out, groups, 1] of weights [out, in]."""
        groups = weight.detach().float().reshape(len(weight), -1, GROUP)
        low, high = groups.aminmax(dim=2, keepdim=True)
        # Rounded to what the kernel reads before the weights are divided by it.
        scale = ((high - low) / 15).clamp(min=1e-8).bfloat16()
        middle = (low + 8 * scale.float()).bfloat16()
        steps = ((groups - middle.float()) / scale.float()).round().clamp(-8, 7)
        return steps, scale, middle

    @staticmethod
    def fits(linear: nn.Linear) -> bool:
        """Whether the kernel takes a layer of this shape."""
        return linear.in_features % GROUP == 0 and linear.out_features % INT4_ROWS == 0

    @property
    def packed_bytes(self) -> int:
        """Half a byte per weight, and the groups."""
        return self.in_features * self.out_features // 2 + 2 * self._groups.numel()

    def multiply(self, x: Tensor) -> Tensor:
        """[n, out] from [n, in]."""
        return self._biased(torch._weight_int4pack_mm_for_cpu(x, self._packed, GROUP, self._groups))

    def dequantised(self) -> Tensor:
        """float32[out, in]."""
        steps, scale, middle = self.quantised(self._whole("weight"))
        return (steps * scale.float() + middle.float()).flatten(1)


def relaid_view(model: Any, weights: str, *, fuse: bool = False) -> Any:
    """A view of a model whose linear layers read another layout; the model itself stays as it is.

    Embeddings and everything that is not a plain linear layer (experts kept in one tensor, say) are shared. With int4
    the LM head, whose rounding reaches the law directly, gets int8, and so does a layer the int4 kernel cannot take.

    Args:
        model: a transformers causal language model in bfloat16 on the CPU.
        weights: "packed", "int8", "int4"; "own" for the model as it is; "auto" is "packed" where that can be had and
            the memory has room for a second copy.
        fuse: make decoder layers of known kinds `FusedLayer`s, which round otherwise: for drafters.

    Raises:
        InvalidInput: not one of these.
        UnsupportedModel: another dtype or device, a quantised model, or nothing to convert.
    """
    if weights not in WEIGHTS:
        raise InvalidInput(f"unknown weights {weights!r}.", f"Choose one of {', '.join(WEIGHTS)}.")
    if weights == "own" or (weights == "auto" and (not _can_pack(model) or lacks_room(model))):
        return model
    name = type(model).__name__
    if model.dtype != torch.bfloat16 or model.device.type != "cpu":
        raise UnsupportedModel(
            f"{weights} weights pay for bfloat16 on the CPU; {name} is {str(model.dtype).removeprefix('torch.')} on "
            f"{model.device}.",
            "Load the model in bfloat16 on the CPU, or leave them out.",
        )
    if weights == "packed" and not _can_pack(model):
        raise UnsupportedModel(
            "this processor has no bfloat16 arithmetic for oneDNN.", "Leave packed weights out."
        )
    head = model.get_output_embeddings()

    def made(*linears: nn.Linear) -> Relaid:
        if weights in ("auto", "packed"):
            return PackedLinear(*linears)
        coarse = weights == "int4" and head not in linears and all(map(Int4Linear.fits, linears))
        return Int4Linear(*linears) if coarse else Int8Linear(*linears)

    def converted(module: nn.Module) -> nn.Module | None:
        if type(module) is nn.Linear:
            return made(module)
        return FusedLayer(module, made) if fuse and FusedLayer.fits(module) else None

    if fuse:
        from hetspec.runtime.fused import FusedLayer  # imports transformers

    view = _converted(model, converted)
    if view is model and weights != "auto":
        raise UnsupportedModel(
            f"{name} has no plain linear layer to convert.", f"Leave {weights} weights out."
        )
    return view


def step_bytes(module: Any) -> int:
    """Bytes of weights in a module, as a step reads them; a tensor shared by two modules counts once."""
    tensors = (*module.parameters(), *module.buffers())
    relaid = sum(m.packed_bytes for m in module.modules() if isinstance(m, Relaid))
    return relaid + sum(int(t.numel() * t.element_size()) for t in tensors)


def _can_pack(model: Any) -> bool:
    half = model.dtype == torch.bfloat16 and model.device.type == "cpu"
    return half and bool(torch.backends.mkldnn.enabled) and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _state(linear: nn.Linear) -> tuple[int, ...]:
    """Changes when the weights do; tensors made in inference mode cannot be changed outside it and keep no count."""
    weight, bias = linear.weight, linear.bias
    state = (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
    return state if bias is None else (*state, bias.data_ptr(), 0 if bias.is_inference() else bias._version)


def lacks_room(model: Any) -> bool:
    """Whether "auto" does not pack what could be packed: the copy would take over SHARE_OF_MEMORY of what there is."""
    wanted = sum(2 * m.weight.numel() for m in model.modules() if type(m) is nn.Linear)
    return _can_pack(model) and wanted > SHARE_OF_MEMORY * available_memory()


def available_memory() -> float:
    """Bytes that can be had without swapping, as Linux counts them; infinity where nothing says."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError, IndexError):
        return math.inf


def _converted(module: Any, converted: Callable[[nn.Module], nn.Module | None]) -> Any:
    if (other := converted(module)) is not None:
        return other
    children = {
        name: _converted(child, converted) for name, child in module._modules.items() if child is not None
    }
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    view = shallow_view(module)
    view._modules.update(children)
    return view
