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
from typing import Any

import torch
from torch import Tensor, nn

_CHUNK = 64  # tokens, of the delta rules
_SCANNED = 2048  # tokens between two states that a selective scan keeps
_OF_BACKWARD = 3  # times a forward's products: the states again, and two for each
Products = Callable[[], Tensor]


class _Kernel(torch.autograd.Function):
    """A kernel that keeps its inputs, and what `kept` makes, for backward."""

    @staticmethod
    def forward(ctx: Any, products: Products, kept: Products, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs, kept())
        ctx.products = products
        return products()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        *inputs, _kept = ctx.saved_tensors
        for _time in range(_OF_BACKWARD):
            ctx.products()
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

    def products() -> Tensor:
        within = torch.bmm(_read(key, rows, _CHUNK, width), _read(key, rows, width, _CHUNK))
        scores = torch.bmm(_read(query, rows, _CHUNK, width), _read(key, rows, width, _CHUNK))
        decayed = torch.bmm(within, _read(key, rows, _CHUNK, width))
        values = torch.bmm(within, _read(value, rows, _CHUNK, out))
        states = torch.bmm(_read(key, rows, width, _CHUNK), values)
        values = torch.bmm(decayed, states)
        torch.bmm(_read(query, rows, _CHUNK, width), states)
        torch.bmm(scores, values)
        return torch.empty_like(value, memory_format=torch.contiguous_format)

    def kept() -> Tensor:
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
    x, chunk = hidden_states, chunk_size
    batch, length, heads, width = x.shape
    chunks, (groups, size) = -(-length // chunk), B.shape[-2:]
    rows = batch * heads * chunks

    def products() -> Tensor:
        shared = batch * groups * chunks
        torch.bmm(_read(C, shared, chunk, size), _read(B, shared, size, chunk))
        states = torch.bmm(_read(B, rows, size, chunk), _read(x, rows, chunk, width))
        torch.bmm(_read(C, rows, chunk, size), states)
        torch.bmm(_read(x, rows, chunk, chunk), _read(x, rows, chunk, width))
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def kept() -> Tensor:
        return dt.new_empty(batch, heads, chunks, chunk, dtype=torch.float32)

    return _run(products, kept, (x, dt, A, B, C, D, about.get("dt_bias")))


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
    x, size = hidden_states, A.shape[-1]
    batch, width, length = x.shape

    def products() -> Tensor:
        # The work of its kernel, by memory: three inputs as large as the result.
        return (x + dt).mul_(x if z is None else z)

    def kept() -> Tensor:
        return x.new_empty(batch, width, -(-length // _SCANNED), 2 * size, dtype=torch.float32)

    return _run(products, kept, (x, dt, A, B, C, D, z, about.get("delta_bias")))


_FLA, _MAMBA = "flash-linear-attention", "mamba-ssm"
# By the function of transformers that calls them, with the package that has them.
_KERNELS: dict[str, tuple[Callable[..., Any], str]] = {
    "torch_chunk_gated_delta_rule": (_delta_rule, _FLA),
    "chunk_kimi_delta_attention": (_delta_rule, _FLA),
    "mamba2_chunk_scan": (_chunk_scan, _MAMBA),
    "mamba_selective_scan": (_selective_scan, _MAMBA),
}


def packages_of(module: nn.Module) -> tuple[str, ...]:
    """Return the packages whose kernels the layers of a module call on a GPU."""
    names = {type(each).__module__ for each in module.modules()}
    code = [vars(sys.modules[name]) for name in names if name in sys.modules]
    found = {package for name, (_, package) in _KERNELS.items() if any(name in x for x in code)}
    return tuple(sorted(found))


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
