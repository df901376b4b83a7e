"""Functions of flat tensors of which torch.compile makes few kernels, if a run asks for it.

Their operators run one by one otherwise, and each reads and writes all elements.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

# Triton would else contract a product and a sum, and divide with an error of two units.
_AS_EAGER: Any = {"emulate_precision_casts": True, "eager_numerics.division_rounding": True}
_device_type: str | None = None


@contextmanager
def fusing(device_type: str | None) -> Iterator[None]:
    """Fuse kernels of tensors on this type of device in a block; None: of none."""
    global _device_type
    before, _device_type = _device_type, device_type
    try:
        yield
    finally:
        _device_type = before


def fuses(device: torch.device) -> bool:
    return device.type == _device_type


@torch.no_grad()  # Dynamo would guard it
def run_fused(function: Callable[..., None], *args: Any) -> None:
    """Call a function that writes to tensors, compiled once for all sizes from 2."""
    compiled(function)(*args)


@cache
def compiled(function: Callable[..., None]) -> Callable[..., None]:
    return torch.compile(function, dynamic=True, options=_AS_EAGER)
