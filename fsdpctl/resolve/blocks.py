"""Activation checkpointing and compilation of a model's blocks, before it is sharded."""

import os
from shutil import which
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_PRODUCTS = ("mm", "addmm")
_ATTENTION = (
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)
_ROUTING = ("topk",)  # which experts a token is sent to
_VARLEN = "torch_attn"  # namespace of attention within documents, loaded on first use


def _ops(names: tuple[str, ...]) -> frozenset[Any]:
    packets = (getattr(torch.ops.aten, name, None) for name in names)
    return frozenset(packet.default for packet in packets if packet is not None)


class _SelectivePolicy:
    """Save outputs of attention and of every second matrix product; recompute the others.

    The policy of torchtitan's selective checkpointing by operator.
    """

    def __init__(self) -> None:
        self._kept, self._products = _ops(_ATTENTION + _ROUTING), _ops(_PRODUCTS)
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


def _routing_contexts() -> Any:
    return create_selective_checkpoint_contexts([*_ops(_ROUTING)])


def _recomputed(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(block._plain_forward, *args, use_reentrant=False, **kwargs)


def _recomputed_selectively(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(
        block._plain_forward,
        *args,
        use_reentrant=False,
        context_fn=_selective_contexts,
        **kwargs,
    )


def _recomputed_but_routing(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(
        block._plain_forward, *args, use_reentrant=False, context_fn=_routing_contexts, **kwargs
    )


_FORWARDS = {"full": _recomputed, "selective": _recomputed_selectively}


def checkpoint_block(block: nn.Module, mode: str) -> None:
    """Make `block` recompute its activations in backward; `mode` is full or selective.

    The forward is replaced and hooks stay outside of it, so that names and units do not change. The
    choice of experts is saved: recomputed with other rounding, a token could go to another one.
    """
    block._plain_forward = block.forward  # type: ignore[assignment]  # a method, not a submodule
    forward = _FORWARDS[mode]
    if mode == "full" and any("expert" in name for name, _ in block.named_parameters()):
        forward = _recomputed_but_routing
    block.forward = MethodType(forward, block)


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
