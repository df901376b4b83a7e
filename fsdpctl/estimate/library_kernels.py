"""Kernels of other libraries, imitated on the meta device: recurrent layers and fused experts.

Without the kernels of flash-linear-attention and mamba_ssm, transformers loops over tokens or
chunks, which takes minutes to trace and far more memory. The kernels compute all chunks side by
side, save their inputs for backward, and compute the states again there: the gated delta rule (Yang
et al., 2024), Kimi delta attention (2025), Mamba (Gu and Dao, 2023) and Mamba-2 (Dao and Gu, 2024).

Liger's kernels run the experts of a layer as one operator.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import isfunction, unwrap
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpctl.models.adapter_names import EXPERT_ADAPTERS

_CHUNK_TOKENS = 64  # chunk of the delta rules
_SCAN_TOKENS = 2048  # between two states that a selective scan saves
# Backward computes the states again, and two products for each product of the forward: three times
# the work of the forward.
_BACKWARD_FORWARDS = 3
# Computes the products from the inputs. It must not hold the inputs: checkpointing frees them.
Products = Callable[..., Tensor]


class _Kernel(torch.autograd.Function):
    """A kernel that saves its inputs and `saved(*inputs)` for backward."""

    @staticmethod
    def forward(ctx: Any, products: Products, saved: Products, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs, saved(*inputs))
        ctx.products = products
        return products(*inputs)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        *inputs, _saved = ctx.saved_tensors  # `_saved` must live until backward returns
        for _repeat in range(_BACKWARD_FORWARDS):
            ctx.products(*inputs)
        needed = ctx.needs_input_grad[2:]
        pairs = zip(inputs, needed, strict=True)
        return (None, None, *(torch.empty_like(each) if need else None for each, need in pairs))


def _run(products: Products, saved: Products, inputs: Sequence[Tensor | None]) -> Tensor:
    tensors = [each for each in inputs if each is not None]
    result: Tensor = _Kernel.apply(products, saved, *tensors)  # type: ignore[no-untyped-call]
    return result


def _unallocated(like: Tensor, *shape: int) -> Tensor:
    """Return a tensor of a shape that allocates a single element: only its reads are counted."""
    return like.new_empty(1).expand(shape)


def _delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *_: Any, **options: Any
) -> tuple[Tensor, None]:
    """Return the result for values of shape (batch, length, heads, out), and no final state."""
    batch, length, heads, out = value.shape
    dim, chunk, rows = key.shape[-1], _CHUNK_TOKENS, batch * heads * -(-length // _CHUNK_TOKENS)

    def products(query: Tensor, key: Tensor, value: Tensor, *_: Tensor) -> Tensor:
        queries, keys = partial(_unallocated, query, rows), partial(_unallocated, key, rows)
        chunk_scores = torch.bmm(keys(chunk, dim), keys(dim, chunk))
        scores = torch.bmm(queries(chunk, dim), keys(dim, chunk))
        decayed = torch.bmm(chunk_scores, keys(chunk, dim))
        values = torch.bmm(chunk_scores, _unallocated(value, rows, chunk, out))
        states = torch.bmm(keys(dim, chunk), values)
        values = torch.bmm(decayed, states)
        torch.bmm(queries(chunk, dim), states)
        torch.bmm(scores, values)
        return torch.empty_like(value, memory_format=torch.contiguous_format)

    def saved(_: Tensor, key: Tensor, *others: Tensor) -> Tensor:
        return key.new_empty(batch, length, heads, chunk)

    return _run(products, saved, (query, key, value, g, beta)), None


def _chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803  # transformers passes these names as keywords
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int,
    D: Tensor | None = None,  # noqa: N803
    **options: Any,
) -> Tensor:
    """Return the result of Mamba-2 for hidden states of shape (batch, length, heads, dim)."""
    chunk, (batch, length, heads, dim) = chunk_size, hidden_states.shape
    num_chunks, (groups, state) = -(-length // chunk), B.shape[-2:]
    rows, shared = batch * heads * num_chunks, batch * groups * num_chunks

    def products(x: Tensor, _: Tensor, __: Tensor, b: Tensor, c: Tensor, *more: Tensor) -> Tensor:
        torch.bmm(_unallocated(c, shared, chunk, state), _unallocated(b, shared, state, chunk))
        states = torch.bmm(_unallocated(b, rows, state, chunk), _unallocated(x, rows, chunk, dim))
        torch.bmm(_unallocated(c, rows, chunk, state), states)
        torch.bmm(_unallocated(x, rows, chunk, chunk), _unallocated(x, rows, chunk, dim))
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def saved(x: Tensor, *others: Tensor) -> Tensor:
        return x.new_empty(batch, heads, num_chunks, chunk, dtype=torch.float32)

    return _run(products, saved, (hidden_states, dt, A, B, C, D, options.get("dt_bias")))


def _selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Return the result of Mamba for hidden states of shape (batch, width, length)."""
    state_dim, (batch, width, length) = A.shape[-1], hidden_states.shape
    num_scans = -(-length // _SCAN_TOKENS)

    def products(x: Tensor, dt: Tensor, *others: Tensor) -> Tensor:
        # The kernel reads and writes as much as these elementwise operators.
        return (x + dt).mul_(x)

    def saved(x: Tensor, *others: Tensor) -> Tensor:
        return x.new_empty(batch, width, num_scans, 2 * state_dim, dtype=torch.float32)

    return _run(products, saved, (hidden_states, dt, A, B, C, D, z, options.get("delta_bias")))


_FLA, _MAMBA = "flash-linear-attention", "mamba-ssm"
MODULES = {_FLA: "fla", _MAMBA: "mamba_ssm"}  # the module of each package
# By the function of transformers that it replaces: the imitation, and the kernel's package.
_KERNELS: dict[str, tuple[Callable[..., Any], str]] = {
    "torch_chunk_gated_delta_rule": (_delta_rule, _FLA),
    "chunk_kimi_delta_attention": (_delta_rule, _FLA),
    "mamba2_chunk_scan": (_chunk_scan, _MAMBA),
    "mamba_selective_scan": (_selective_scan, _MAMBA),
}


def packages_of(module: nn.Module) -> tuple[str, ...]:
    """Return the packages whose kernels the layers of a module call on a GPU."""
    methods = (
        unwrap(method).__code__
        for kind in {type(each) for each in module.modules()}
        if kind.__module__.startswith("transformers.models.")
        for method in vars(kind).values()
        if isfunction(method)
    )
    called = {name for code in methods for name in code.co_names}
    return tuple(sorted({package for name, (_, package) in _KERNELS.items() if name in called}))


@contextmanager
def with_kernels() -> Iterator[None]:
    """Replace functions of the loaded models of transformers by imitations of the kernels."""
    models = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("transformers.models.") and ".modeling_" in name
    ]
    replaced = []
    try:
        for module in models:
            for name in _KERNELS.keys() & vars(module).keys():
                replaced.append((module, name, vars(module)[name]))
                setattr(module, name, _KERNELS[name][0])
        yield
    finally:
        for module, name, function in replaced:
            setattr(module, name, function)


def fuse_experts(module: nn.Module) -> None:
    """Replace the forward of stacked experts without biases and adapters, in place."""
    for each in module.modules():
        weights = [getattr(each, name, None) for name in ("gate_up_proj", "down_proj")]
        names = ("gate_up_proj_bias", EXPERT_ADAPTERS.strip("."))
        has_extras = any(getattr(each, name, None) is not None for name in names)
        if not has_extras and all(isinstance(w, Tensor) and w.ndim == 3 for w in weights):
            each.forward = MethodType(_fused_forward, each)


def _fused_forward(self: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    out: Tensor = _FusedExperts.apply(x, self.gate_up_proj, self.down_proj, weights)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


class _FusedExperts(torch.autograd.Function):
    """The allocations of LigerFusedMoEFunction 0.8.5, which saves only products before the gate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
        ends = x.new_empty(len(up), dtype=torch.int32)
        gate_up = F.grouped_mm(_routed_rows(x, weights), up.transpose(-2, -1), offs=ends)
        gated = x.new_empty(weights.numel(), down.shape[-1])
        F.grouped_mm(_routed_rows(gated, weights), down.transpose(-2, -1), offs=ends)
        ctx.save_for_backward(x, up, down, weights, gate_up, ends)
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        x, up, down, weights, gate_up, ends = ctx.saved_tensors
        rows = _routed_rows(gradients[0], weights)
        grad_gate_up = _routed_rows(torch.empty_like(gate_up), weights)
        gated = F.grouped_mm(rows, down, offs=ends)
        grad_down = F.grouped_mm(rows.transpose(0, 1), gated, offs=ends)
        expanded = F.grouped_mm(grad_gate_up, up, offs=ends)
        grad_x = torch.zeros_like(x)
        del expanded  # Liger's kernel holds it until `grad_x` is allocated
        grad_up = F.grouped_mm(grad_gate_up.transpose(0, 1), _routed_rows(x, weights), offs=ends)
        return grad_x, grad_up, grad_down, torch.empty_like(weights)


def _routed_rows(x: Tensor, weights: Tensor) -> Tensor:
    """Return a row for each choice of an expert; the kernel reads rows by index, without a copy."""
    return x.as_strided((weights.numel(), x.shape[-1]), (0, 1))
