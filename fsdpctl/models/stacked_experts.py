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
    fake_input_gradient,
    fake_product,
)

_MATRICES = ("gate_up_proj", "up_proj", "down_proj")
_RANK_MULTIPLE = 8  # grouped_mm on GPUs requires rows of a multiple of 16 bytes
Shape = tuple[int, ...]


# ---- products with quantized matrices ----------------------------------------------------


def _forward(
    x: Tensor, stored: Tensor, ends: Tensor, shape: list[int], transposed: bool, quant: str
) -> Tensor:
    count, *matrix_shape = shape
    # While text is generated, there are fewer rows than experts: dequantize only the used experts.
    # The bytes of an expert must be whole groups.
    if len(x) < count and prod(matrix_shape) % GROUP == 0:
        expert_ids = torch.searchsorted(ends, torch.arange(len(x), device=x.device), right=True)
        stored = stored.view(count, -1)[expert_ids].view(-1)
        weight = QUANT_FORMATS[quant].dequantize(stored, (len(x), *matrix_shape), x.dtype)
        right = weight if transposed else weight.transpose(-2, -1)
        return torch.bmm(x.unsqueeze(1), right).squeeze(1)
    weight = QUANT_FORMATS[quant].dequantize(stored, shape, x.dtype)
    return F.grouped_mm(x, weight if transposed else weight.transpose(-2, -1), offs=ends)


def _backward(
    gradient: Tensor, stored: Tensor, ends: Tensor, shape: list[int], transposed: bool, quant: str
) -> Tensor:
    weight = QUANT_FORMATS[quant].dequantize(stored, shape, gradient.dtype)
    right = weight.transpose(-2, -1) if transposed else weight
    return F.grouped_mm(gradient.contiguous(), right, offs=ends)


_FORWARD = operator("quantized_experts", _forward, fake_product)
_BACKWARD = operator("quantized_experts_backward", _backward, fake_input_gradient)


class _QuantizedGroupedMm(torch.autograd.Function):
    """A grouped product that saves the quantized bytes for backward, not the matrices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stored: Tensor, ends: Tensor, *args: Any) -> Tensor:
        ctx.save_for_backward(stored, ends)
        ctx.args = args
        return _FORWARD(x, stored, ends, *args)  # type: ignore[no-any-return]  # torch is untyped here

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (_BACKWARD(gradient, *ctx.saved_tensors, *ctx.args), *[None] * (2 + len(ctx.args)))


# ---- modules -----------------------------------------------------------------------------


class ExpertAdapter(nn.Module):
    """A low-rank pair for each expert: B_e A_e x.

    A has the shape (rank * experts, in), with rows sorted by expert; B has the shape
    (out, rank * experts), with columns sorted by rank, then by expert.
    """

    def __init__(self, in_features: int, out_features: int, total_rank: int) -> None:
        super().__init__()
        self.lora_A = UninitializedLinear(in_features, total_rank, bias=False, device="meta")
        self.lora_B = UninitializedLinear(total_rank, out_features, bias=False, device="meta")

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Project (rows, in), sorted by expert, to (rows, out); `ends`: where experts' rows end."""
        lora_a, lora_b, count = self.lora_A.weight, self.lora_B.weight, len(ends)
        a_matrices = lora_a.view(count, -1, lora_a.shape[1]).transpose(-2, -1)
        b_matrices = lora_b.view(len(lora_b), -1, count).permute(2, 1, 0).contiguous()
        return F.grouped_mm(F.grouped_mm(x, a_matrices, offs=ends), b_matrices, offs=ends)


class StackedExperts(QuantizedModule):
    """The class that `use_stacked_forward` mixes into a class of experts of transformers."""

    shapes: Mapping[str, Shape]  # (experts, …) of each matrix, by name
    expert_adapters: nn.ModuleDict
    scale: float
    num_experts: int

    def quantized_shapes(self) -> Mapping[str, Shape]:
        return self.shapes if self.quant_format is not None else {}

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, (tokens, hidden)."""
        this: Any = self  # has the attributes of transformers' class
        tokens, top_k = top_k_index.shape
        expert_ids, order = torch.sort(top_k_index.reshape(-1))
        # On the CPU, histc takes only floats.
        indices = expert_ids.float() if expert_ids.device.type == "cpu" else expert_ids.int()
        counts = torch.histc(indices, bins=self.num_experts, min=0, max=self.num_experts - 1)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        name = "gate_up_proj" if this.has_gate else "up_proj"
        rows = self._multiply(name, hidden_states[order // top_k], expert_ids, ends)
        rows = this._apply_gate(rows) if this.has_gate else this.act_fn(rows)
        rows = self._multiply("down_proj", rows, expert_ids, ends)
        if this.has_post_expert_norm:
            rows = this.post_expert_norm(rows)
        rows = rows * top_k_weights.reshape(-1)[order].unsqueeze(-1)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        return rows[inverse].view(tokens, top_k, -1).sum(dim=1).to(hidden_states.dtype)

    def _multiply(self, matrix: str, x: Tensor, expert_ids: Tensor, ends: Tensor) -> Tensor:
        this: Any = self  # has the attributes of transformers' class
        weight: Tensor = getattr(self, matrix)
        if self.quant_format is None:
            right = weight if this.is_transposed else weight.transpose(-2, -1)
            x = x.to(weight.dtype)
            out = F.grouped_mm(x, right, offs=ends)
        else:
            options = [*self.shapes[matrix]], this.is_transposed, self.quant_format.name
            out = _QuantizedGroupedMm.apply(x, weight, ends, *options)  # type: ignore[no-untyped-call]  # torch is untyped here
        if this.has_bias:
            out = out + getattr(self, f"{matrix}_bias")[expert_ids]
        if matrix in self.expert_adapters:
            out = torch.add(out, self.expert_adapters[matrix](x, ends), alpha=self.scale)
        return out


def named_experts(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name and module of the stacked experts of each layer that supports grouped_mm."""
    for name, each in module.named_modules():
        # transformers sets the attribute in modules that use its interface.
        if hasattr(each, "_is_expert_parallel") and expert_matrices(each):
            yield name, each


def expert_matrices(experts: nn.Module) -> list[str]:
    if isinstance(experts, StackedExperts):
        return [*experts.shapes]
    params = experts._parameters.items()
    return [name for name, x in params if name in _MATRICES and x is not None and x.ndim == 3]


@cache
def _stacked_class(cls: type) -> type:
    return type(cls.__name__, (StackedExperts, cls), {"__module__": cls.__module__})


def use_stacked_forward(experts: Any) -> StackedExperts:
    """Change the class of `experts` in place, so that it uses `StackedExperts.forward`."""
    if not isinstance(experts, StackedExperts):
        shapes = {name: tuple(getattr(experts, name).shape) for name in expert_matrices(experts)}
        cls: type = type(experts)
        experts.__class__ = _stacked_class(cls)
        experts.shapes, experts.quant_format, experts.scale = shapes, None, 1.0
        experts.expert_adapters = nn.ModuleDict()
    return experts  # type: ignore[no-any-return]  # its class was replaced


def quantize_experts(name: str, experts: Any, quant_format: QuantFormat) -> None:
    """Replace the matrices by uninitialized quantized ones; UsageError if experts share blocks."""
    stacked = use_stacked_forward(experts)
    for matrix, (count, rows, columns) in stacked.shapes.items():
        if rows * columns % BLOCK:
            raise UsageError(
                f"model.base_dtype={quant_format.name}: {name}.{matrix} has {rows} x {columns} "
                f"weights per expert, not a multiple of {BLOCK}; set model.quantize_experts=false"
            )
        device = getattr(stacked, matrix).device
        setattr(stacked, matrix, quant_format.empty(count * rows * columns, device))
    stacked.quant_format = quant_format


def add_adapters(experts: Any, matrices: list[str], config: LoraConfig) -> None:
    """Add an adapter to each of `matrices`; UsageError if adapters of experts do not support it."""
    assert config.rank is not None
    if config.rank % _RANK_MULTIPLE:
        problem = f"expected a multiple of {_RANK_MULTIPLE} for adapters of experts"
        raise UsageError(f"model.lora.rank={config.rank}: {problem}")
    if config.dropout:
        problem = "not supported with adapters of experts"
        raise UsageError(f"model.lora.dropout={config.dropout:g}: {problem}")
    stacked: Any = use_stacked_forward(experts)
    stacked.scale = config.scale
    for matrix in (each for each in stacked.shapes if each in matrices):
        count, rows, columns = stacked.shapes[matrix]
        in_features, out_features = (rows, columns) if stacked.is_transposed else (columns, rows)
        total_rank = config.rank * count
        stacked.expert_adapters[matrix] = ExpertAdapter(in_features, out_features, total_rank)
