"""Activation checkpointing and compilation of a model's blocks, before it is sharded."""

import inspect
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
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
    noop_context_fn,
)

from fsdpctl.config.schema import Config
from fsdpctl.engine.offloaded_inputs import HostInputs, OffloadedInput
from fsdpctl.errors import UsageError
from fsdpctl.models.custom_ops import PRODUCT_OPERATORS
from fsdpctl.models.module_spec import block_names
from fsdpctl.plan.recomputation import BlockCheckpointing

_MATMULS = ("mm", "addmm")
_ATTENTION = (
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)
# The namespace of varlen_attn's operators: torch registers them on first use, after `_ops` ran.
_VARLEN = "torch_attn"


def _ops(names: tuple[str, ...]) -> frozenset[Any]:
    packets = (getattr(torch.ops.aten, name, None) for name in names)
    return frozenset(packet.default for packet in packets if packet is not None)


class _SelectivePolicy:
    """A policy that saves outputs of attention and of every second matrix product.

    torchtitan's selective checkpointing by operator has this policy.
    """

    def __init__(self) -> None:
        self._attention, self._matmuls = _ops(_ATTENTION), {*_ops(_MATMULS), *PRODUCT_OPERATORS}
        self._counts = {False: 0, True: 0}  # matrix products, by `context.is_recompute`

    def __call__(
        self, context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        if op in self._matmuls:
            self._counts[context.is_recompute] += 1
            saves = self._counts[context.is_recompute] % 2 == 1
        else:
            saves = op in self._attention or op.namespace == _VARLEN
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_SelectivePolicy())


class _Routing(TorchDispatchMode):
    """A mode that records the router's choice of experts in forward, and repeats the choice later.

    Every `topk` is intercepted: in a block with experts, only routers are expected to call it.
    """

    def __init__(self, experts: list[Tensor], *, is_recompute: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._experts, self._is_recompute, self._next = experts, is_recompute, 0

    def __enter__(self) -> Self:
        self._next = 0  # with retain_graph, a block can be recomputed twice
        super().__enter__()  # type: ignore[no-untyped-call]  # untyped in torch
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.topk.default:
            return func(*args, **(kwargs or {}))
        if not self._is_recompute:
            result = func(*args, **(kwargs or {}))
            self._experts.append(result[1])
            return result
        indices = self._experts[self._next]
        self._next += 1
        # topk(input, k, dim): the values at the recorded indices, so that gradients flow.
        return args[0].gather(args[2] if len(args) > 2 else -1, indices), indices


def _routing_contexts() -> tuple[_Routing, _Routing]:
    experts: list[Tensor] = []
    return _Routing(experts, is_recompute=False), _Routing(experts, is_recompute=True)


class _NestedContexts:
    """A context within another context; both can be entered several times."""

    def __init__(self, outer: Any, inner: Any) -> None:
        self._contexts = outer, inner

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for each in self._contexts:
                stack.enter_context(each)
            self._exit_stack = stack.pop_all()

    def __exit__(self, *exc_info: Any) -> bool | None:
        return self._exit_stack.__exit__(*exc_info)


def _selective_routing_contexts() -> Any:
    # The policy is the inner mode, so that it sees the same operators in forward and recomputation.
    pairs = zip(_routing_contexts(), _selective_contexts(), strict=True)
    return tuple(_NestedContexts(*pair) for pair in pairs)


# By mode: the contexts of a block without experts, and of a block with experts.
_CONTEXTS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "full": (noop_context_fn, _routing_contexts),
    "selective": (_selective_contexts, _selective_routing_contexts),
}


class _SavedModuleBuffers:
    """A context that recomputes a block with the module buffers that it had before its forward.

    The recomputation then has the same results, and its writes to buffers are dropped, so that
    running statistics count a batch once. Modules in eval mode must not write to their buffers.
    """

    def __init__(self, block: nn.Module) -> None:
        self._buffers = [
            (each._buffers, key, buffer)
            for each in block.modules()
            for key, buffer in each._buffers.items()
            if each.training and buffer is not None
        ]
        # By id: a buffer that two modules share stays shared.
        self._saved = {id(each): each.detach().clone() for *_, each in self._buffers}

    def __enter__(self) -> None:
        # New copies: with retain_graph, a block can be recomputed twice.
        copies = {buffer_id: each.clone() for buffer_id, each in self._saved.items()}
        self._current = [buffers[key] for buffers, key, _ in self._buffers]
        for buffers, key, buffer in self._buffers:
            buffers[key] = copies[id(buffer)]

    def __exit__(self, *exc_info: Any) -> None:
        for (buffers, key, _), buffer in zip(self._buffers, self._current, strict=True):
            buffers[key] = buffer


def _with_recomputation(outer: Callable[[], Any], contexts: Callable[[], Any]) -> tuple[Any, Any]:
    """Return the contexts of a forward, and of its recomputation within the context `outer()`."""
    forward, recomputation = contexts()
    return forward, _NestedContexts(outer(), recomputation)


def _checkpointed_forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    options: Any = {"use_reentrant": False, "preserve_rng_state": block._is_random}
    return checkpoint(block._plain_forward, *args, **options, **kwargs)


def _make_checkpointed(contexts: Callable[[], Any]) -> Callable[..., Any]:
    if contexts is noop_context_fn:
        # torch.compile does not support `context_fn`. Not the function below: Dynamo limits the
        # recompilations of each function, and a model can have blocks of both modes.
        return _checkpointed_forward

    def checkpointed_forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = partial(checkpoint, block._plain_forward, use_reentrant=False)
        return run(*args, preserve_rng_state=block._is_random, context_fn=contexts, **kwargs)

    return checkpointed_forward


def _make_offloaded(contexts: Callable[[], Any]) -> Callable[..., Any]:
    """Return a forward that offloads its first floating-point tensor to the host."""

    def offloaded_forward(block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        block_input = next((x for x in tensors if x.is_floating_point()), None)
        if block_input is None or not _can_offload(block_input, block):
            return _make_checkpointed(contexts)(block, *args, **kwargs)
        offload: Any = block._offload_input
        with offload(block_input) as offloaded:
            # The graph must not hold the tensor, or its memory on the device would not be freed.
            args = tuple(offloaded if x is block_input else x for x in args)
            kwargs = {key: offloaded if x is block_input else x for key, x in kwargs.items()}
            options: Any = {"use_reentrant": False, "preserve_rng_state": bool(block._is_random)}
            run = partial(checkpoint, _forward_with_offloaded, **options)
            context_fn = partial(_with_recomputation, lambda: offloaded, contexts)
            # Checkpointing saves the random state of the devices of its tensor arguments, but
            # `offloaded` is not a tensor.
            device_probe = torch.empty(0, device=block_input.device)
            return run(device_probe, block, *args, context_fn=context_fn, **kwargs)

    return offloaded_forward


def _can_offload(tensor: Tensor, block: nn.Module) -> bool:
    """Return whether backward may need an input, and a copy of it would have the same strides."""
    if not torch.is_grad_enabled() or tensor.is_inference() or not tensor.is_contiguous():
        return False
    return tensor.requires_grad or any(each.requires_grad for each in block.parameters())


def _forward_with_offloaded(_probe: Tensor, block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    named = {name: _value(each) for name, each in kwargs.items()}
    return block._plain_forward(*map(_value, args), **named)  # type: ignore[operator]  # not a submodule


def _value(value: object) -> object:
    return value.tensor if isinstance(value, OffloadedInput) else value


def checkpoint_block(
    block: nn.Module,
    mode: str,
    offload: Callable[[Tensor], OffloadedInput] | None = None,
    *,
    restores_buffers: bool = False,
    is_random: bool = True,
) -> None:
    """Make `block` recompute its activations in backward; `mode` is full or selective.

    The block's forward is replaced, not the block, so that names, hooks and units stay. The choice
    of experts is saved: with other rounding, recomputation could route a token to another expert.
    `offload` copies the block's input to the host. With `restores_buffers`, recomputation
    does not change module buffers. With `is_random`, it draws the forward's random numbers.
    """
    vars(block)["_is_random"] = is_random
    block._plain_forward = block.forward  # type: ignore[assignment]  # a method, not a submodule
    contexts = _CONTEXTS[mode][_has_experts(block)]
    if restores_buffers and any(each._buffers for each in block.modules()):
        contexts = partial(_with_recomputation, partial(_SavedModuleBuffers, block), contexts)
        vars(block)["_compiles_plain_forward"] = True
    if offload is not None:
        vars(block).update(_offload_input=offload, _compiles_plain_forward=True)
    forward = _make_checkpointed(contexts) if offload is None else _make_offloaded(contexts)
    # The block then refers to itself, so only the garbage collector frees it.
    block.forward = MethodType(forward, block)


def checkpoint_blocks(
    blocks: Sequence[nn.Module], checkpointing: Sequence[BlockCheckpointing], **options: bool
) -> HostInputs:
    """Make `blocks`, in the order of forward, recompute their activations in backward.

    Blocks that offload their inputs come first. The input of the last block stays on the device,
    since backward needs it at once. `options` are those of `checkpoint_block`. Returns the inputs.
    """
    num_offloaded = sum(each.offloads_input for each in checkpointing)
    inputs = HostInputs(min(num_offloaded + 1, len(blocks)))
    num_contexts = num_offloaded if len(blocks) > 1 else 0
    # The block after the offloading blocks also gets an `OffloadedInput`, which stays on the
    # device: its recomputation starts to fetch the input of the block before.
    if 0 < num_contexts < len(blocks):
        num_contexts += checkpointing[num_offloaded].mode == checkpointing[num_offloaded - 1].mode

    for index, (block, (mode, _)) in enumerate(zip(blocks, checkpointing, strict=True)):
        if mode != "none":
            offload = partial(inputs.offload, index) if index < num_contexts else None
            checkpoint_block(block, mode, offload, **options)
    return inputs


def prepare_blocks(module: nn.Module, config: Config) -> None:
    """Chunk, checkpoint and compile the blocks of `module` as configured."""
    chunk_feed_forward(module, config.train.mlp_chunk_tokens or 0)
    blocks = list(map(module.get_submodule, block_names(module)))
    recompute = config.activation_checkpointing
    if recompute.is_on:
        # torch.utils.checkpoint imports it in its first call, which would keep the arguments alive.
        import_module("torch._dynamo")
        is_random = config.model.lora.dropout > 0 or getattr(module, "draws_random_numbers", True)
        by_block = recompute.per_block(len(blocks))
        restores = config.model.is_script_module  # may update buffers, as batch norm does
        checkpoint_blocks(blocks, by_block, restores_buffers=restores, is_random=is_random)
    for block in blocks if config.train.compile else ():
        compile_block(block)


def chunk_feed_forward(module: nn.Module, chunk_tokens: int) -> None:
    """Make feed-forward layers process `chunk_tokens` tokens at a time; 0: all tokens.

    Backward recomputes a chunk at a time. UsageError if a block has no feed-forward layer, or has
    experts, whose tokens come from a router.
    """
    for block_name in block_names(module) if chunk_tokens else ():
        block = module.get_submodule(block_name)
        layer = getattr(block, "feed_forward", None) or getattr(block, "mlp", None)
        # A layer with more inputs may need all tokens.
        has_one_input = layer is not None and len(inspect.signature(layer.forward).parameters) == 1
        if layer is None or not has_one_input or _has_experts(layer):
            raise UsageError(
                f"train.mlp_chunk_tokens={chunk_tokens}: {block_name} has no feed-forward layer "
                "that runs token by token"
            )
        layer.forward = partial(_in_chunks, layer.forward, chunk_tokens)


def _in_chunks(forward: Callable[[Tensor], Tensor], chunk_tokens: int, x: Tensor) -> Tensor:
    flat = x.flatten(0, -2)
    if len(flat) <= chunk_tokens:
        return forward(x)
    chunks = [checkpoint(forward, part, use_reentrant=False) for part in flat.split(chunk_tokens)]
    return torch.cat(chunks).view_as(x)


def _has_experts(block: nn.Module) -> bool:
    return any("expert" in name for name, _ in block.named_parameters())


def compile_block(block: nn.Module) -> None:
    """Compile the forward of `block` with torch.compile; equal blocks share the result."""
    if not hasattr(block, "_compiles_plain_forward"):
        block.forward = torch.compile(block.forward)
        return
    if _has_experts(block):
        offloads = hasattr(block, "_offload_input")
        reason = "offloaded inputs" if offloads else "buffers that recomputation keeps"
        raise UsageError(
            "train.compile=true: conflicts with activation checkpointing of experts with "
            f"{reason}; set train.compile=false"
        )
    block._plain_forward = torch.compile(block._plain_forward)  # type: ignore[assignment,arg-type]  # a method


def missing_compiler(device: str) -> str | None:
    """Return the reason why torch.compile cannot work on this machine, or None.

    For the CPU, torch.compile generates C++. For CUDA, Triton needs a C compiler.
    """
    variable, names = ("CC", ["gcc", "clang"]) if device == "cuda" else ("CXX", ["g++"])
    configured = os.environ.get(variable)
    compilers = [configured] if configured else names
    return None if any(map(which, compilers)) else f"compiler {' or '.join(compilers)} not found"
