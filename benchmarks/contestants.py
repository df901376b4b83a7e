"""The engines to compare: each returns a function that trains an equal model by one step.

All engines have the same units (blocks, embedding, head), reduction dtype and fused AdamW. No
engine clips gradients or recomputes activations.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import fsdpctl
from fsdpctl.engine.build import Sharding

LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
Step = Callable[[Tensor, Tensor], Tensor]  # takes inputs and targets; returns the loss


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy, in float32."""
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _groups(params: Iterable[nn.Parameter]) -> list[dict[str, object]]:
    """Return the parameter groups of fsdpctl: vectors do not decay."""
    every = list(params)
    return [
        {"params": [param for param in every if param.ndim > 1]},
        {"params": [param for param in every if param.ndim <= 1], "weight_decay": 0.0},
    ]


def _adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        _groups(params), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True
    )


def stepping(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    context: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Step:
    """Return a step: forward, backward and optimizer, nothing else."""

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with context():
            loss = loss_of(model, tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def floor(model: nn.Module, dtype: torch.dtype, device: torch.device) -> Step:
    """Return a step without sharding and communication, a lower bound for all engines.

    In bf16, the module has bf16 parameters, into which fp32 master weights are cast once per step.
    """
    if dtype == torch.float32:
        return stepping(model, _adamw(model.parameters()))
    masters = [nn.Parameter(param.detach().clone()) for param in model.parameters()]
    model.to(dtype)
    optimizer = _adamw(masters)
    params: list[Tensor] = list(model.parameters())
    sources: list[Tensor] = list(masters)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(model, tokens, targets)
        loss.backward()
        for master, param in zip(masters, params, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
            param.grad = None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, sources)
        return loss.detach()

    return step


def ddp(model: nn.Module, dtype: torch.dtype, device: torch.device) -> Step:
    """Return a step of PyTorch's DistributedDataParallel; bf16 is by autocast."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return stepping(wrapped, _adamw(wrapped.parameters()), _autocast(dtype, device.type))


def zero_redundancy(model: nn.Module, dtype: torch.dtype, device: torch.device) -> Step:
    """Return a step of DistributedDataParallel with PyTorch's ZeroRedundancyOptimizer."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    settings: dict[str, Any] = {"betas": BETAS, "eps": EPS, "weight_decay": DECAY, "fused": True}
    groups = _groups(wrapped.parameters())
    optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=LR, **settings)
    return stepping(wrapped, optimizer, _autocast(dtype, device.type))


def _autocast(dtype: torch.dtype, kind: str) -> Callable[[], AbstractContextManager[object]]:
    if dtype == torch.float32:
        return nullcontext
    return lambda: torch.autocast(kind, dtype)


def fsdp2(*, reshards: bool, tuned: bool) -> Callable[..., Step]:
    """Return a function that makes a step of PyTorch's fully_shard.

    `tuned` adds forward prefetch of the next block. If torch supports it, reductions get a separate
    process group and two buffers.
    """

    def make(model: nn.Module, dtype: torch.dtype, device: torch.device) -> Step:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
        )
        inner = model.get_submodule("model")
        units = [inner.get_submodule("embed_tokens"), *_blocks(model)]
        units.append(model.get_submodule("lm_head"))
        for unit in units:
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)
        if tuned:
            blocks = [block for block in _blocks(model) if isinstance(block, FSDPModule)]
            for block, following in zip(blocks, blocks[1:], strict=False):
                block.set_modules_to_forward_prefetch([following])
            tuning = {
                "set_separate_reduce_scatter_group": True,
                "set_reduce_scatter_max_input_buffers": 2,
            }
            for name in filter(lambda name: hasattr(model, name), tuning):
                getattr(model, name)(tuning[name])
        return stepping(model, _adamw(model.parameters()))

    return make


def _blocks(model: nn.Module) -> list[nn.Module]:
    layers = model.get_submodule("model").get_submodule("layers")
    return list(layers.children())


def ours(strategy: str, *, shares_memory: bool = False) -> Callable[..., Step]:
    """Return a function that makes a step of fsdpctl's engine with a strategy.

    If ranks share memory, all strategies run alike.
    """

    def make(model: nn.Module, dtype: torch.dtype, device: torch.device) -> Step:
        precision = fsdpctl.Precision(param_dtype=None if dtype == torch.float32 else dtype)
        sharding = Sharding(strategy, precision=precision, share_memory=shares_memory)
        sharded = fsdpctl.shard_model(model, sharding)
        optimizer = fsdpctl.ShardedAdamW(sharded, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
        return stepping(sharded, optimizer)

    return make


CONTESTANTS: dict[str, Callable[..., Step]] = {
    "floor": floor,
    "ddp": ddp,
    "zero_redundancy_optimizer": zero_redundancy,
    "fsdp2": fsdp2(reshards=True, tuned=False),
    "fsdp2_tuned": fsdp2(reshards=True, tuned=True),
    "fsdp2_keeps": fsdp2(reshards=False, tuned=False),
    "full_shard": ours("full_shard"),
    "shard_grad_op": ours("shard_grad_op"),
    "shard_optimizer": ours("shard_optimizer"),
    "no_shard": ours("no_shard"),
    "shared_memory": ours("full_shard", shares_memory=True),
}
