"""Recurrent layers of transformers as the kernels that GPUs run, on the meta device.

Without these kernels, transformers loops over tokens or chunks, which takes minutes to trace and
far more memory. The kernels compute all chunks side by side, keep their inputs for backward, and
compute states there again. They are those of flash-linear-attention (gated delta rule: Yang et
al., 2024; Kimi delta attention: 2025) and mamba_ssm (Gu and Dao, Mamba, 2023; Dao and Gu, Mamba-2,
2024).
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import isfunction, unwrap
from typing import Any

import torch
from torch import Tensor, nn

_CHUNK = 64  # tokens, of the delta rules
_SCANNED = 2048  # tokens between two states that a selective scan keeps
_OF_BACKWARD = 3  # times a forward's products: the states again, and two for each
Products = Callable[..., Tensor]  # of the inputs, which it must not hold: checkpointing frees them


class _Kernel(torch.autograd.Function):
    """A kernel that keeps its inputs, and what `kept` makes of them, for backward."""

    @staticmethod
    def forward(ctx: Any, products: Products, kept: Products, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs, kept(*inputs))
        ctx.products = products
        return products(*inputs)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        *inputs, _kept = ctx.saved_tensors
        for _time in range(_OF_BACKWARD):
            ctx.products(*inputs)
        needed = ctx.needs_input_grad[2:]
        pairs = zip(inputs, needed, strict=True)
        return (None, None, *(torch.empty_like(each) if need else None for each, need in pairs))


def _run(products: Products, kept: Products, inputs: Sequence[Tensor | None]) -> Tensor:
    given = [each for each in inputs if each is not None]
    out: Tensor = _Kernel.apply(products, kept, *given)  # type: ignore[no-untyped-call]  # torch's
    return out


def _read(like: Tensor, *shape: int) -> Tensor:
    """Return a tensor that is read in that shape, and takes no memory of its own."""
    return like.new_empty(1).expand(shape)


def _delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *_: Any, **about: Any
) -> tuple[Tensor, None]:
    """Return the result for values of shape (batch, length, heads, width), and no state."""
    batch, length, heads, out = value.shape
    width, rows = key.shape[-1], batch * heads * -(-length // _CHUNK)

    def products(query: Tensor, key: Tensor, value: Tensor, *_: Tensor) -> Tensor:
        within = torch.bmm(_read(key, rows, _CHUNK, width), _read(key, rows, width, _CHUNK))
        scores = torch.bmm(_read(query, rows, _CHUNK, width), _read(key, rows, width, _CHUNK))
        decayed = torch.bmm(within, _read(key, rows, _CHUNK, width))
        values = torch.bmm(within, _read(value, rows, _CHUNK, out))
        states = torch.bmm(_read(key, rows, width, _CHUNK), values)
        values = torch.bmm(decayed, states)
        torch.bmm(_read(query, rows, _CHUNK, width), states)
        torch.bmm(scores, values)
        return torch.empty_like(value, memory_format=torch.contiguous_format)

    def kept(_: Tensor, key: Tensor, *others: Tensor) -> Tensor:
        return key.new_empty(batch, length, heads, _CHUNK)

    return _run(products, kept, (query, key, value, g, beta)), None


def _chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803  # transformers' names, by which it calls
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int,
    D: Tensor | None = None,  # noqa: N803
    **about: Any,
) -> Tensor:
    """Return the result of Mamba-2 for states of shape (batch, length, heads, width)."""
    chunk, (batch, length, heads, width) = chunk_size, hidden_states.shape
    chunks, (groups, size) = -(-length // chunk), B.shape[-2:]
    rows = batch * heads * chunks

    def products(x: Tensor, _: Tensor, __: Tensor, b: Tensor, c: Tensor, *more: Tensor) -> Tensor:
        shared = batch * groups * chunks
        torch.bmm(_read(c, shared, chunk, size), _read(b, shared, size, chunk))
        states = torch.bmm(_read(b, rows, size, chunk), _read(x, rows, chunk, width))
        torch.bmm(_read(c, rows, chunk, size), states)
        torch.bmm(_read(x, rows, chunk, chunk), _read(x, rows, chunk, width))
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def kept(x: Tensor, *others: Tensor) -> Tensor:
        return x.new_empty(batch, heads, chunks, chunk, dtype=torch.float32)

    return _run(products, kept, (hidden_states, dt, A, B, C, D, about.get("dt_bias")))


def _selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    **about: Any,
) -> Tensor:
    """Return the result of Mamba for states of shape (batch, width, length)."""
    size, (batch, width, length) = A.shape[-1], hidden_states.shape

    def products(x: Tensor, dt: Tensor, *others: Tensor) -> Tensor:
        return (x + dt).mul_(x)  # the work of its kernel: inputs as large as the result

    def kept(x: Tensor, *others: Tensor) -> Tensor:
        return x.new_empty(batch, width, -(-length // _SCANNED), 2 * size, dtype=torch.float32)

    return _run(products, kept, (hidden_states, dt, A, B, C, D, z, about.get("delta_bias")))


_FLA, _MAMBA = "flash-linear-attention", "mamba-ssm"
MODULES = {_FLA: "fla", _MAMBA: "mamba_ssm"}  # by which they are imported
# By the function of transformers that calls them, with the package that has them.
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
    """Let the models of transformers that are loaded call these kernels inside."""
    models = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("transformers.models.") and ".modeling_" in name
    ]
    replaced = []
    try:
        for module in models:
            for name, (kernel, _) in _KERNELS.items():
                if (plain := vars(module).get(name)) is not None:
                    replaced.append((module, name, plain))
                    setattr(module, name, kernel)
        yield
    finally:
        for module, name, plain in replaced:
            setattr(module, name, plain)
