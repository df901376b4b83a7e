"""Activation checkpointing and compilation of a model's blocks, before it is sharded."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from shutil import which
from types import MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fsdpctl.models.quantized import OPERATORS

_PRODUCTS = ("mm", "addmm")
_ATTENTION = (
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)
_VARLEN = "torch_attn"  # namespace of attention within documents, loaded on first use


def _ops(names: tuple[str, ...]) -> frozenset[Any]:
    packets = (getattr(torch.ops.aten, name, None) for name in names)
    return frozenset(packet.default for packet in packets if packet is not None)


class _SelectivePolicy:
    """Save outputs of attention and of every second matrix product; recompute the others.

    The policy of torchtitan's selective checkpointing by operator.
    """

    def __init__(self) -> None:
        self._kept, self._products = _ops(_ATTENTION), {*_ops(_PRODUCTS), *OPERATORS}
        self._counts = {False: 0, True: 0}  # in forward, and during recomputation

    def __call__(
        self, context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        """Return whether the output of one operator is saved."""
        if op in self._products:
            self._counts[context.is_recompute] += 1
            keeps = self._counts[context.is_recompute] % 2 == 1
        else:
            keeps = op in self._kept or op.namespace == _VARLEN
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_SelectivePolicy())


class _Routing(TorchDispatchMode):
    """Keeps the experts that tokens are sent to in forward, and sends them there again."""

    def __init__(self, chosen: list[Tensor], *, again: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._chosen, self._again, self._next = chosen, again, 0

    def __enter__(self) -> Self:
        self._next = 0  # a graph that is kept can be recomputed twice
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.topk.default:
            return func(*args, **(kwargs or {}))
        if not self._again:
            result = func(*args, **(kwargs or {}))
            self._chosen.append(result[1])
            return result
        indices = self._chosen[self._next]
        self._next += 1
        return args[0].gather(args[2] if len(args) > 2 else -1, indices), indices


def _routing_contexts() -> tuple[_Routing, _Routing]:
    chosen: list[Tensor] = []
    return _Routing(chosen, again=False), _Routing(chosen, again=True)


@contextmanager
def _both(first: Any, second: Any) -> Iterator[None]:
    with first, second:
        yield


def _selective_routing_contexts() -> Any:
    # The policy's mode is above, so that it sees the operators of forward again.
    pairs = zip(_routing_contexts(), _selective_contexts(), strict=True)
    return tuple(_both(*pair) for pair in pairs)


def _recomputed(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(block._plain_forward, *args, use_reentrant=False, **kwargs)


def _recomputed_within(contexts: Callable[[], Any]) -> Callable[..., Any]:
    def recomputed(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward = block._plain_forward
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return recomputed


# By mode: of a block without experts, and with experts.
_FORWARDS = {
    "full": (_recomputed, _recomputed_within(_routing_contexts)),
    "selective": (
        _recomputed_within(_selective_contexts),
        _recomputed_within(_selective_routing_contexts),
    ),
}


def checkpoint_block(block: nn.Module, mode: str) -> None:
    """Make `block` recompute its activations in backward; `mode` is full or selective.

    The forward is replaced and hooks stay outside of it, so that names and units do not change. The
    choice of experts is saved: recomputed with other rounding, a token could go to another one.
    """
    block._plain_forward = block.forward  # type: ignore[assignment]  # a method, not a submodule
    has_experts = any("expert" in name for name, _ in block.named_parameters())
    block.forward = MethodType(_FORWARDS[mode][has_experts], block)


def compile_block(block: nn.Module) -> None:
    """Compile the forward of `block` with torch.compile; equal blocks share the result."""
    block.forward = torch.compile(block.forward)


def missing_compiler(device: str) -> str | None:
    """Return the reason why torch.compile cannot work on this machine, or None.

    It generates C++ for the CPU. For CUDA, Triton needs a C compiler.
    """
    variable, names = ("CC", ["gcc", "clang"]) if device == "cuda" else ("CXX", ["g++"])
    given = os.environ.get(variable)
    wanted = [given] if given else names
    return None if any(map(which, wanted)) else f"compiler {' or '.join(wanted)} not found"
