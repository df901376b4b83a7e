"""Experts whose matrices are stacked in one parameter: frozen, quantized, and with LoRA adapters.

The forward computes the same as transformers' `grouped_mm_experts_forward`: rows are sorted by
expert, and each expert multiplies its rows. Quantized matrices are dequantized for one product at a
time; if there are fewer rows than experts, only the matrices in use are dequantized. The adapter of
a stacked matrix has a low-rank pair for each expert, in the form of PEFT's `target_parameters`.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpctl.config.model import LoraConfig
from fsdpctl.errors import UsageError
from fsdpctl.models.custom_ops import operator
from fsdpctl.models.quantized import (
    BLOCK,
    GROUP,
    QUANT_FORMATS,
    QuantFormat,
    QuantizedModule,
    UninitializedLinear,
)

_MATRICES = ("gate_up_proj", "up_proj", "down_proj")
_RANK_MULTIPLE = 8  # grouped_mm on GPUs requires rows of a multiple of 16 bytes
Shape = tuple[int, ...]


# ---- products with quantized matrices ----------------------------------------------------


def _forward(
    x: Tensor, packed: Tensor, ends: Tensor, shape: list[int], transposed: bool, packing: str
) -> Tensor:
    count, *matrix = shape
    # While text is generated, there are fewer rows than experts: dequantize only those in use.
    if len(x) < count and prod(matrix) % GROUP == 0:
        used = torch.searchsorted(ends, torch.arange(len(x), device=x.device), right=True)
        packed = packed.view(count, -1)[used].view(-1)
        weight = QUANT_FORMATS[packing].dequantize(packed, (len(x), *matrix), x.dtype)
        right = weight if transposed else weight.transpose(-2, -1)
        return torch.bmm(x.unsqueeze(1), right).squeeze(1)
    weight = QUANT_FORMATS[packing].dequantize(packed, shape, x.dtype)
    return F.grouped_mm(x, weight if transposed else weight.transpose(-2, -1), offs=ends)


def _backward(
    gradient: Tensor, packed: Tensor, ends: Tensor, shape: list[int], transposed: bool, packing: str
) -> Tensor:
    weight = QUANT_FORMATS[packing].dequantize(packed, shape, gradient.dtype)
    right = weight.transpose(-2, -1) if transposed else weight
    return F.grouped_mm(gradient.contiguous(), right, offs=ends)


def _forward_shape(
    x: Tensor, packed: Tensor, ends: Tensor, shape: list[int], transposed: bool, packing: str
) -> Tensor:
    return x.new_empty(len(x), shape[1 + transposed])


def _backward_shape(
    gradient: Tensor, packed: Tensor, ends: Tensor, shape: list[int], transposed: bool, packing: str
) -> Tensor:
    return gradient.new_empty(len(gradient), shape[2 - transposed])


_FORWARD = operator("packed_experts", _forward, _forward_shape)
_BACKWARD = operator("packed_experts_backward", _backward, _backward_shape)


class _QuantizedGroupedMm(torch.autograd.Function):
    """A grouped product that saves the quantized bytes for backward, not the matrices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, ends: Tensor, *about: Any) -> Tensor:
        ctx.save_for_backward(packed, ends)
        ctx.about = about
        return _FORWARD(x, packed, ends, *about)  # type: ignore[no-any-return]  # torch's

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (_BACKWARD(gradient, *ctx.saved_tensors, *ctx.about), *[None] * (2 + len(ctx.about)))


# ---- modules -----------------------------------------------------------------------------


class ExpertAdapter(nn.Module):
    """A low-rank pair for each expert: B_e A_e x, with A (rank experts, in), B (out, rank experts).

    Rows of A are sorted by expert; in a row of B, the ranks come before the experts.
    """

    def __init__(self, width: int, out: int, ranks: int) -> None:
        super().__init__()
        self.lora_A = UninitializedLinear(width, ranks, bias=False, device="meta")
        self.lora_B = UninitializedLinear(ranks, out, bias=False, device="meta")

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Project rows that are sorted by expert, from (rows, in) to (rows, out)."""
        down, up, count = self.lora_A.weight, self.lora_B.weight, len(ends)
        into = down.view(count, -1, down.shape[1]).transpose(-2, -1)
        back = up.view(len(up), -1, count).permute(2, 1, 0).contiguous()
        return F.grouped_mm(F.grouped_mm(x, into, offs=ends), back, offs=ends)


class StackedExperts(QuantizedModule):
    """The class that `use_our_forward` mixes into a class of experts of transformers."""

    shapes: Mapping[str, Shape]  # (experts, …) of each matrix, by name
    expert_adapters: nn.ModuleDict
    scale: float
    num_experts: int

    def quantized_shapes(self) -> Mapping[str, Shape]:
        return self.shapes if self.quant_format is not None else {}

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, (tokens, width)."""
        this: Any = self
        tokens, top = top_k_index.shape
        numbers, order = torch.sort(top_k_index.reshape(-1))
        counted = numbers.float() if numbers.device.type == "cpu" else numbers.int()
        counts = torch.histc(counted, bins=self.num_experts, min=0, max=self.num_experts - 1)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        name = "gate_up_proj" if this.has_gate else "up_proj"
        rows = self._multiply(name, hidden_states[order // top], numbers, ends)
        rows = this._apply_gate(rows) if this.has_gate else this.act_fn(rows)
        rows = self._multiply("down_proj", rows, numbers, ends)
        if this.has_post_expert_norm:
            rows = this.post_expert_norm(rows)
        rows = rows * top_k_weights.reshape(-1)[order].unsqueeze(-1)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        return rows[inverse].view(tokens, top, -1).sum(dim=1).to(hidden_states.dtype)

    def _multiply(self, matrix: str, x: Tensor, numbers: Tensor, ends: Tensor) -> Tensor:
        this: Any = self
        weight: Tensor = getattr(self, matrix)
        out: Tensor
        if self.quant_format is None:
            right = weight if this.is_transposed else weight.transpose(-2, -1)
            x = x.to(weight.dtype)
            out = F.grouped_mm(x, right, offs=ends)
        else:
            options = [*self.shapes[matrix]], this.is_transposed, self.quant_format.name
            out = _QuantizedGroupedMm.apply(x, weight, ends, *options)  # type: ignore[no-untyped-call]  # torch's
        if this.has_bias:
            out = out + getattr(self, f"{matrix}_bias")[numbers]
        if matrix in self.expert_adapters:
            out = torch.add(out, self.expert_adapters[matrix](x, ends), alpha=self.scale)
        return out


def stacked_experts(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules that compute all experts of a layer by transformers' interface, by name."""
    for name, each in module.named_modules():
        if hasattr(each, "_is_expert_parallel") and expert_matrices(each):
            yield name, each


def expert_matrices(experts: nn.Module) -> list[str]:
    if isinstance(experts, StackedExperts):
        return [*experts.shapes]
    params = experts._parameters.items()
    return [name for name, x in params if name in _MATRICES and x is not None and x.ndim == 3]


@cache
def _with_our_forward(kind: type) -> type:
    return type(kind.__name__, (StackedExperts, kind), {"__module__": kind.__module__})


def use_our_forward(experts: Any) -> StackedExperts:
    """Change the class of `experts` in place, so that it uses `StackedExperts.forward`."""
    if not isinstance(experts, StackedExperts):
        shapes = {word: tuple(getattr(experts, word).shape) for word in expert_matrices(experts)}
        kind: type = type(experts)
        experts.__class__ = _with_our_forward(kind)
        experts.shapes, experts.quant_format, experts.scale = shapes, None, 1.0
        experts.expert_adapters = nn.ModuleDict()
    return experts  # type: ignore[no-any-return]  # its class was replaced


def quantize_experts(name: str, experts: Any, quant_format: QuantFormat) -> None:
    """Replace the matrices by uninitialized quantized ones; UsageError if experts share blocks."""
    adopted = use_our_forward(experts)
    for matrix, (count, rows, columns) in adopted.shapes.items():
        if rows * columns % BLOCK:
            raise UsageError(
                f"model.base_dtype={quant_format.name}: {name}.{matrix} has {rows} x {columns} "
                f"weights per expert, not a multiple of {BLOCK}; set model.quantize_experts=false"
            )
        device = getattr(adopted, matrix).device
        setattr(adopted, matrix, quant_format.empty(count * rows * columns, device))
    adopted.quant_format = quant_format


def add_adapters(experts: Any, matrices: list[str], config: LoraConfig) -> None:
    """Add an adapter to each of `matrices`; UsageError if adapters of experts do not support it."""
    assert config.rank is not None
    if config.rank % _RANK_MULTIPLE:
        problem = f"expected a multiple of {_RANK_MULTIPLE} for adapters of experts"
        raise UsageError(f"model.lora.rank={config.rank}: {problem}")
    if config.dropout:
        problem = "not supported with adapters of experts"
        raise UsageError(f"model.lora.dropout={config.dropout:g}: {problem}")
    adopted: Any = use_our_forward(experts)
    adopted.scale = config.scale
    for matrix in (each for each in adopted.shapes if each in matrices):
        count, rows, columns = adopted.shapes[matrix]
        width, out = (rows, columns) if adopted.is_transposed else (columns, rows)
        adopted.expert_adapters[matrix] = ExpertAdapter(width, out, config.rank * count)
