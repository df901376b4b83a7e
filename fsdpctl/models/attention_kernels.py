"""The attention kernel that this process uses, and the device type on which it is used."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdpctl.errors import UsageError
from fsdpctl.plan.attention_kernels import (
    CUDNN,
    EFFICIENT,
    FLASH,
    FLASH3,
    FLASH4,
    MATH,
    TRANSFORMERS,
)
from fsdpctl.plan.precision import TF32

_TWO_BYTES = (torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256  # heads that flash and cuDNN kernels support
_IMPLEMENTATIONS = {FLASH3: "FA3", FLASH4: "FA4"}  # torch's names of FlashAttention 2's successors
# The kernels that serve if the selected one cannot, such as in float32 or with a mask.
_FALLBACKS = {CUDNN: (FLASH, EFFICIENT, MATH), EFFICIENT: (MATH,), MATH: ()}


@dataclass(slots=True)
class _KernelState:
    """The settings of the kernel. Compiled blocks depend on each of these values."""

    assumed: str = ""  # the device type of tensors without memory
    takes_masks: bool = False  # the kernel has no mode for packed sequences: it needs a mask
    repeats: bool = False  # the kernel needs keys and values for each head of the queries


_state = _KernelState()


@contextmanager
def use_kernel(kernel: str | None) -> Iterator[None]:
    """Compute attention with `kernel` in a block; None: with the one that torch prefers.

    Another kernel serves operators that `kernel` cannot compute. UsageError if it is missing.
    """
    with ExitStack() as stack:
        if kernel not in (None, TRANSFORMERS):
            plain = kernel in (EFFICIENT, MATH)
            stack.enter_context(_settings(takes_masks=plain, repeats=kernel == EFFICIENT))
            _prefer(kernel, _FALLBACKS.get(kernel, (EFFICIENT, MATH)), stack)
        yield


def _prefer(kernel: str, behind: tuple[str, ...], stack: ExitStack) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel  # its import takes a third of a second

    if kernel in _IMPLEMENTATIONS:
        stack.callback(_activate(kernel))
    of: Any = SDPBackend
    backends = {CUDNN: of.CUDNN_ATTENTION, EFFICIENT: of.EFFICIENT_ATTENTION, MATH: of.MATH}
    order = [backends.get(name, SDPBackend.FLASH_ATTENTION) for name in (kernel, *behind)]
    stack.enter_context(sdpa_kernel(order, set_priority=True))


def _activate(kernel: str) -> Callable[[], object]:
    """Let torch run `kernel` for FlashAttention 2, and return a function that undoes it."""
    from torch.nn import attention

    try:
        attention.activate_flash_attention_impl(_IMPLEMENTATIONS[kernel])
    except (ImportError, RuntimeError, ValueError) as error:
        raise UsageError(f"model.attention={kernel}: not available: {error}") from None
    return getattr(attention, "restore_flash_attention_impl", lambda: None)


@contextmanager
def _settings(**values: Any) -> Iterator[None]:
    before = {name: getattr(_state, name) for name in values}
    for name, value in values.items():
        setattr(_state, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(_state, name, value)


@contextmanager
def assume_device(device: str, kernel: str | None) -> Iterator[None]:
    """Treat tensors without memory as those of `device` with `kernel`."""
    plain = kernel in (EFFICIENT, MATH)
    with _settings(assumed=device, takes_masks=plain, repeats=kernel == EFFICIENT):
        yield


@contextmanager
def tf32_matmuls(*, to_tf32: bool) -> Iterator[None]:
    """If `to_tf32`, round the operands of float32 products on CUDA to TF32 in a block."""
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    if to_tf32:  # the older allow_tf32 fails after this, and this after it
        products.fp32_precision = TF32
    try:
        yield
    finally:
        if to_tf32:
            products.fp32_precision = before


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Disable cuDNN: it plans each new length, and generated text grows by a token per call."""
    was_on = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_on)


def device_type(x: Tensor) -> str:
    return x.device.type if x.device.type != "meta" else _state.assumed


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which attention computes with `x`; autocast may narrow it."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def has_varlen_kernel(device: str, dtype: torch.dtype, width: int) -> bool:
    """Return whether a kernel for packed sequences supports heads of `width`."""
    in_two_bytes = dtype in _TWO_BYTES and width <= _MAX_HEAD_DIM
    return device == "cuda" and in_two_bytes and not _state.takes_masks


def must_repeat_kv(query: Tensor, *, masked: bool) -> bool:
    """Return whether only the math kernel would support heads that share keys and values."""
    if device_type(query) != "cuda":
        return False
    is_wide = query.shape[-1] > _MAX_HEAD_DIM or compute_dtype(query) not in _TWO_BYTES
    return masked or is_wide or _state.repeats
