"""Trains any PyTorch module with fully sharded data parallelism.

The names below are loaded when they are first used: `import fsdpctl` imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdpctl.engine.model import ShardedModel, shard_model
    from fsdpctl.engine.precision import Precision
    from fsdpctl.optim.adamw import ShardedAdamW
    from fsdpctl.plan.schedule import Prefetch
    from fsdpctl.plan.strategy import Strategy

__all__ = ["Precision", "Prefetch", "ShardedAdamW", "ShardedModel", "Strategy", "shard_model"]

_HOMES = {
    "Precision": "fsdpctl.engine.precision",
    "Prefetch": "fsdpctl.plan.schedule",
    "ShardedAdamW": "fsdpctl.optim.adamw",
    "ShardedModel": "fsdpctl.engine.model",
    "Strategy": "fsdpctl.plan.strategy",
    "shard_model": "fsdpctl.engine.model",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'fsdpctl' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
