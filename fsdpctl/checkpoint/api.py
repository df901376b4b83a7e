"""Saving and loading for training loops of one's own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor
from torch.optim import Optimizer

from fsdpctl.checkpoint.flat_optimizer import FlatOptimizer
from fsdpctl.checkpoint.load import load_checkpoint as load_into
from fsdpctl.checkpoint.load import state_kinds
from fsdpctl.checkpoint.manifest import Progress
from fsdpctl.checkpoint.publish import About
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.save import Ranks, take_snapshot, write_checkpoint
from fsdpctl.checkpoint.state import ShardedOptimizer
from fsdpctl.errors import UsageError
from fsdpctl.shards import Sharded


class _WithRanks(Sharded, Protocol):
    @property
    def collectives(self) -> Ranks: ...


def save_checkpoint(
    path: str | Path,
    model: _WithRanks,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint to the new directory `path`, complete or not at all. Collective.

    Args:
        path: a directory that does not exist yet, on a file system that all ranks share.
        model: a sharded model.
        optimizer: ShardedAdamW, or an elementwise one on `model.flat_parameters()`, with the
            options of its groups, such as lr; None saves the weights alone.
        extra: what JSON can hold; `load_checkpoint` returns it. Rank 0's is saved.

    Raises:
        UsageError: `path` exists.
        FsdpctlError: a rank could not write.
    """
    path = Path(path)
    if any(model.collectives.gather_objects(path.exists())):
        raise UsageError(f"{path}: exists already")
    ranks = model.collectives
    groups = [] if optimizer is None else [_options(each) for each in optimizer.param_groups]
    about = About(Progress(extra=dict(extra or {}), param_groups=groups))
    states = None if optimizer is None else _with_states(model, optimizer)
    write_checkpoint(path, take_snapshot(model, states, ranks.rank, about), ranks)


def load_checkpoint(
    path: str | Path, model: Sharded, optimizer: Optimizer | None = None
) -> dict[str, Any]:
    """Fill `model` (and `optimizer`) from `path`, saved at any number of ranks. Collective.

    Returns what was saved as `extra`. The optimizer's groups get the options that they had, which
    schedulers read, if they are as many.

    Raises:
        CheckpointError: it is damaged, incomplete or of another model.
    """
    reader = CheckpointReader(Path(path))
    states = None if optimizer is None else _with_states(model, optimizer, reader)
    progress = load_into(reader, model, states)
    groups = [] if optimizer is None else optimizer.param_groups
    if len(groups) == len(progress.param_groups):
        for group, saved in zip(groups, progress.param_groups, strict=True):
            for name, value in saved.items():
                group[name] = tuple(value) if isinstance(value, list) else value
    return progress.extra


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of a group of parameters, what JSON can hold."""
    found = {name: float(v) if isinstance(v, Tensor) else v for name, v in group.items()}
    kinds = (bool, int, float, str, tuple, list, type(None))
    return {name: v for name, v in found.items() if name != "params" and isinstance(v, kinds)}


def _with_states(
    model: Sharded, optimizer: Optimizer, reader: CheckpointReader | None = None
) -> ShardedOptimizer:
    """The optimizer as checkpoints see it."""
    if hasattr(optimizer, "run_states"):
        return cast("ShardedOptimizer", optimizer)
    if reader is None:
        return FlatOptimizer(model, optimizer, counts=False)
    counts = reader.manifest.progress.optimizer_step > 0
    return FlatOptimizer(model, optimizer, state_kinds(reader), counts=counts)
