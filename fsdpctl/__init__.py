"""Trains any PyTorch module with fully sharded data parallelism.

The public names are loaded when they are first used: `import fsdpctl` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdpctl.checkpoint.api import load_checkpoint, save_checkpoint
    from fsdpctl.commands.script import train
    from fsdpctl.engine.build import Sharding
    from fsdpctl.engine.shard_model import shard_model
    from fsdpctl.engine.sharded_model import GradAccumulator, ShardedModel
    from fsdpctl.estimate.user_module import Assumed, MemoryEstimate, estimate_memory
    from fsdpctl.optim.adamw import ShardedAdamW
    from fsdpctl.optim.muon import ShardedMuon
    from fsdpctl.optim.record import clip_grad_norm_
    from fsdpctl.optim.sgd import ShardedSGD
    from fsdpctl.plan.owner_map import OwnerMap
    from fsdpctl.plan.precision import Precision
    from fsdpctl.plan.step_plan import Prefetch
    from fsdpctl.plan.strategy import Strategy

# Not read from the installed metadata, which a checkout may lack.
__version__ = "0.1.0"

__all__ = [
    "Assumed", "GradAccumulator", "MemoryEstimate", "OwnerMap", "Precision", "Prefetch",
    "ShardedAdamW", "ShardedModel", "ShardedMuon", "ShardedSGD", "Sharding", "Strategy",
    "clip_grad_norm_", "estimate_memory", "load_checkpoint", "save_checkpoint", "shard_model",
    "train",
]  # fmt: skip

_MODULES = {
    "Assumed": "estimate.user_module", "GradAccumulator": "engine.sharded_model",
    "MemoryEstimate": "estimate.user_module", "OwnerMap": "plan.owner_map",
    "Precision": "plan.precision", "Prefetch": "plan.step_plan", "ShardedAdamW": "optim.adamw",
    "ShardedModel": "engine.sharded_model", "ShardedMuon": "optim.muon", "ShardedSGD": "optim.sgd",
    "Sharding": "engine.build", "Strategy": "plan.strategy", "clip_grad_norm_": "optim.record",
    "estimate_memory": "estimate.user_module", "load_checkpoint": "checkpoint.api",
    "save_checkpoint": "checkpoint.api", "shard_model": "engine.shard_model",
    "train": "commands.script",
}  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'fsdpctl' has no attribute {name!r}")
    return getattr(import_module(f"fsdpctl.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
