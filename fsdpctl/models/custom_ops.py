"""Custom operators of fsdpctl, and functions that torch.compile fuses into few kernels.

torch.compile calls the operators without looking inside them. They do not use
`torch.library.custom_op`, whose calls take 15% longer.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

_LIBRARY = torch.library.Library("fsdpctl", "DEF")  # deleting the library unregisters operators
PRODUCT_OPERATORS: dict[Any, Callable[..., Any]] = {}
"""The functions of operators that compute matrix products or their operands, by operator."""
# Without these options, Triton fuses products and sums (FMA), and divides with an error of 2 ulp.
_EAGER_ROUNDING: Any = {"emulate_precision_casts": True, "eager_numerics.division_rounding": True}
_device_type: str | None = None  # device type whose kernels are fused


def operator(
    name: str,
    function: Callable[..., Any],
    fake: Callable[..., Any] | None,
    *,
    writes: Iterable[str] = (),
    is_product: bool = True,
) -> Any:
    """Register and return an operator that calls `function`.

    The annotations of `function` give the schema; it mutates the arguments named in `writes`.
    `fake` returns a result without values. `is_product` adds it to PRODUCT_OPERATORS.
    """
    schema = torch.library.infer_schema(function, mutates_args=[*writes])
    _LIBRARY.define(f"{name}{schema}")
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    if fake is not None:
        torch.library.register_fake(f"fsdpctl::{name}", fake, lib=_LIBRARY)
    op = getattr(torch.ops.fsdpctl, name).default
    if is_product:
        PRODUCT_OPERATORS[op] = function
    return op


@contextmanager
def fuse_kernels(device_type: str | None) -> Iterator[None]:
    """Fuse kernels of tensors on this type of device inside the block; None fuses none.

    Outside the block, operators run one by one, and each reads and writes all elements.
    """
    global _device_type
    previous, _device_type = _device_type, device_type
    try:
        yield
    finally:
        _device_type = previous


def is_fusing(device: torch.device) -> bool:
    return device.type == _device_type


@torch.no_grad()  # Dynamo would guard on the grad mode and compile twice
def run_fused(function: Callable[..., None], *args: Any) -> None:
    """Call a function that writes to tensors, in compiled form."""
    compiled(function)(*args)


@cache
def compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Return `function` compiled once for all sizes from 2."""
    return torch.compile(function, dynamic=True, options=_EAGER_ROUNDING)
