"""The attention kernel of this process, the device type assumed for meta tensors, and TF32."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdpctl.errors import UsageError
from fsdpctl.plan.attention_kernels import CUDNN, EFFICIENT, FLASH, FLASH3, FLASH4, KERNELS, MATH
from fsdpctl.plan.precision import TF32

_HALF_DTYPES = (torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256  # limit of flash and cuDNN kernels
_IMPLEMENTATIONS = {FLASH3: "FA3", FLASH4: "FA4"}  # torch's names of FlashAttention 2's successors
# Fallbacks if the selected kernel does not support the input, such as float32 or a mask.
_FALLBACKS = {
    **dict.fromkeys((FLASH, FLASH3, FLASH4), (EFFICIENT, MATH)),
    CUDNN: (FLASH, EFFICIENT, MATH), EFFICIENT: (MATH,), MATH: (),
}  # fmt: skip


@dataclass(slots=True)
class _KernelState:
    """The settings of the kernel. Dynamo guards on each of these values."""

    device_type: str = ""  # device type assumed for meta tensors
    needs_mask: bool = False  # the kernel does not support packed sequences
    repeats_kv: bool = False  # the kernel does not support grouped-query attention


_state = _KernelState()


@contextmanager
def use_kernel(kernel: str | None) -> Iterator[None]:
    """Compute attention with `kernel` inside the block; None leaves the choice to torch.

    Inputs that `kernel` does not support use a fallback. UsageError if `kernel` is not available.
    """
    if kernel not in KERNELS:  # None, or transformers' attention
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel  # the import takes a third of a second

    sdp: Any = SDPBackend
    backends = {CUDNN: sdp.CUDNN_ATTENTION, EFFICIENT: sdp.EFFICIENT_ATTENTION, MATH: sdp.MATH}
    order = [backends.get(name, sdp.FLASH_ATTENTION) for name in (kernel, *_FALLBACKS[kernel])]
    with assume_device(_state.device_type, kernel), ExitStack() as stack:
        if kernel in _IMPLEMENTATIONS:
            stack.callback(_activate(kernel))
        stack.enter_context(sdpa_kernel(order, set_priority=True))
        yield


def _activate(kernel: str) -> Callable[[], object]:
    """Make torch run `kernel` as FlashAttention 2; return a function that undoes the change."""
    from torch.nn import attention

    try:
        attention.activate_flash_attention_impl(_IMPLEMENTATIONS[kernel])
    except (ImportError, RuntimeError, ValueError) as error:
        raise UsageError(f"model.attention={kernel}: not available: {error}") from None
    # If this version of torch lacks the function, `kernel` stays active for the whole process.
    return getattr(attention, "restore_flash_attention_impl", lambda: None)


@contextmanager
def assume_device(device: str, kernel: str | None) -> Iterator[None]:
    """Inside the block, treat meta tensors as if they were on `device`, with `kernel`."""
    previous = _state.device_type, _state.needs_mask, _state.repeats_kv
    _state.device_type = device
    _state.needs_mask, _state.repeats_kv = kernel in (EFFICIENT, MATH), kernel == EFFICIENT
    try:
        yield
    finally:
        _state.device_type, _state.needs_mask, _state.repeats_kv = previous


@contextmanager
def tf32_matmuls(*, to_tf32: bool) -> Iterator[None]:
    """If `to_tf32`, round the operands of float32 products on CUDA to TF32 inside the block."""
    # torch raises an error if a process uses both this setting and the older allow_tf32.
    matmul = torch.backends.cuda.matmul
    previous = matmul.fp32_precision
    if to_tf32:
        matmul.fp32_precision = TF32
    try:
        yield
    finally:
        if to_tf32:
            matmul.fp32_precision = previous


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Disable cuDNN attention inside the block.

    cuDNN builds a plan for each new length, and generation adds a token per call.
    """
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)


def device_type(x: Tensor) -> str:
    return x.device.type if x.device.type != "meta" else _state.device_type


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which attention computes with `x`, under autocast too."""
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def has_varlen(device: str, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether a kernel for packed sequences supports the dtype and head dimension."""
    is_supported = dtype in _HALF_DTYPES and head_dim <= _MAX_HEAD_DIM
    return device == "cuda" and is_supported and not _state.needs_mask


def must_repeat_kv(query: Tensor, *, masked: bool) -> bool:
    """Return whether keys and values must be repeated for each head of the queries.

    Otherwise, torch would compute grouped-query attention with the slow math kernel.
    """
    if device_type(query) != "cuda":
        return False
    needs_math = query.shape[-1] > _MAX_HEAD_DIM or compute_dtype(query) not in _HALF_DTYPES
    return masked or needs_math or _state.repeats_kv
