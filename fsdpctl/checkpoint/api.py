"""Saving and loading for training loops of one's own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from fsdpctl.checkpoint.load import load_checkpoint as load_into
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
    optimizer: ShardedOptimizer | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint to the new directory `path`, complete or not at all. Collective.

    Args:
        path: a directory that does not exist yet, on a file system that all ranks share.
        model: a sharded model.
        optimizer: its optimizer; None saves the weights alone.
        extra: what JSON can hold; `load_checkpoint` returns it. Rank 0's is saved.

    Raises:
        UsageError: `path` exists.
        FsdpctlError: a rank could not write.
    """
    path = Path(path)
    if any(model.collectives.gather_objects(path.exists())):
        raise UsageError(f"{path}: exists already")
    ranks = model.collectives
    about = About(Progress(extra=dict(extra or {})))
    write_checkpoint(path, take_snapshot(model, optimizer, ranks.rank, about), ranks)


def load_checkpoint(
    path: str | Path, model: Sharded, optimizer: ShardedOptimizer | None = None
) -> dict[str, Any]:
    """Fill `model` (and `optimizer`) from `path`, saved at any number of ranks. Collective.

    Returns what was saved as `extra`.

    Raises:
        CheckpointError: it is damaged, incomplete or of another model.
    """
    return load_into(CheckpointReader(Path(path)), model, optimizer).extra
