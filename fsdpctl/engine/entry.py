"""A module as a user gives it: whether it can be sharded, and its buffers."""

import torch
from torch import nn

from fsdpctl.comm.base import Collectives
from fsdpctl.errors import EngineError


def check_values(module: nn.Module, *, needs_values: bool) -> None:
    """Check that a module can be sharded.

    Raises:
        EngineError: If a parameter or buffer has no values, or is not a real number.
    """
    for name, param in module.named_parameters():
        is_bytes = param.dtype == torch.uint8 and not param.requires_grad
        if not (param.dtype.is_floating_point or is_bytes):
            raise EngineError(
                f"parameter {name} is {param.dtype}; expected a real floating-point dtype, or "
                "frozen uint8"
            )
        if param.is_meta and needs_values:
            raise EngineError(f"parameter {name} is on the meta device, without values")
    for name, each in module.named_modules():
        if getattr(each, "sparse", False) is True:
            raise EngineError(f"{name}: sparse gradients are not supported; use sparse=False")
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise EngineError(f"buffer {name} is on the meta device, without values")


@torch.no_grad()
def move_buffers(module: nn.Module, device: torch.device, collectives: Collectives) -> None:
    """Move buffers to `device`, with the values of rank 0. Collective."""
    for each in module.modules():
        for key, buffer in each._buffers.items():
            if buffer is not None:
                moved = buffer.to(device).contiguous()
                # As bytes, because no backend supports every dtype.
                collectives.broadcast(moved.view(-1).view(torch.uint8))
                each._buffers[key] = moved
