"""Saving and loading in custom training loops."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsdpctl.checkpoint.initial_weights import HasAllGather
from fsdpctl.checkpoint.load import ShardedOptimizer, load_into, state_kinds
from fsdpctl.checkpoint.publish import CheckpointMetadata
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.save import take_snapshot, write_checkpoint
from fsdpctl.checkpoint.training_progress import Progress
from fsdpctl.comm.flat_shard import FlatShard, ShardedModelProtocol, trainable_shards
from fsdpctl.errors import UsageError
from fsdpctl.plan.layout import Span

_STEP = "step"


class _ModelWithCollectives(ShardedModelProtocol, Protocol):
    @property
    def collectives(self) -> HasAllGather: ...


def save_checkpoint(
    path: str | Path,
    model: _ModelWithCollectives,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint to the new directory `path`, complete or not at all. Collective.

    Args:
        path: A directory that does not exist, on a file system that all ranks share.
        model: A sharded model.
        optimizer: ShardedAdamW, or an elementwise optimizer of `model.flat_parameters()`. The
            options of its groups, such as lr, are saved too. None saves only the weights.
        extra: JSON-compatible values that `load_checkpoint` returns. Rank 0's values are saved.

    Raises:
        UsageError: If `path` exists.
        FsdpctlError: If a rank cannot write.
    """
    path, collectives = Path(path), model.collectives
    if any(collectives.all_gather_values(path.exists())):
        raise UsageError(f"{path}: already exists")
    groups = [] if optimizer is None else [_json_options(each) for each in optimizer.param_groups]
    metadata = CheckpointMetadata(Progress(extra=dict(extra or {}), param_groups=groups))
    sharded = None if optimizer is None else _as_sharded_optimizer(model, optimizer)
    write_checkpoint(path, take_snapshot(model, sharded, collectives.rank, metadata), collectives)


def load_checkpoint(
    path: str | Path, model: ShardedModelProtocol, optimizer: Optimizer | None = None
) -> dict[str, Any]:
    """Load `model` and `optimizer` from `path`, saved by any number of ranks. Collective.

    If the checkpoint has as many parameter groups as the optimizer, the groups get saved options.

    Returns:
        The `extra` values that were saved.

    Raises:
        UsageError: If the model is not sharded.
        CheckpointError: If the checkpoint is corrupted, incomplete or of a different model.
    """
    if not hasattr(model, "flat_shards"):
        raise UsageError(
            f"load_checkpoint: expected a sharded model, got {type(model).__name__}; pass "
            'fsdpctl.shard_model(module, strategy="no_shard"), whose unwrap() returns the module'
        )
    reader = CheckpointReader(Path(path))
    sharded = None if optimizer is None else _as_sharded_optimizer(model, optimizer, reader)
    progress = load_into(reader, model, sharded)
    groups = [] if optimizer is None else optimizer.param_groups
    if len(groups) == len(progress.param_groups):
        for group, saved in zip(groups, progress.param_groups, strict=True):
            for name, value in saved.items():  # JSON has no tuples, such as betas
                group[name] = tuple(value) if isinstance(value, list) else value
    return progress.extra


def _json_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group that JSON can represent."""
    options = {name: float(v) if isinstance(v, Tensor) else v for name, v in group.items()}
    kinds = (bool, int, float, str, tuple, list, type(None))
    return {name: v for name, v in options.items() if name != "params" and isinstance(v, kinds)}


def _as_sharded_optimizer(
    model: ShardedModelProtocol, optimizer: Optimizer, reader: CheckpointReader | None = None
) -> ShardedOptimizer:
    if hasattr(optimizer, "span_states"):
        return cast("ShardedOptimizer", optimizer)
    if reader is None:
        return _ElementwiseOptimizer(model, optimizer, has_steps=False)
    has_steps = reader.manifest.progress.optimizer_step > 0
    return _ElementwiseOptimizer(model, optimizer, state_kinds(reader), has_steps=has_steps)


class _ShardSpan(NamedTuple):
    """A shard that the optimizer steps as one tensor."""

    shard: FlatShard
    span: Span


class _ElementwiseOptimizer:
    """Adapts an elementwise torch optimizer of flat parameters to `ShardedOptimizer`."""

    def __init__(
        self,
        model: ShardedModelProtocol,
        optimizer: Optimizer,
        kinds: Collection[str] = (),
        *,
        has_steps: bool,
    ) -> None:
        """Wrap `optimizer`, created with `model.flat_parameters()`.

        `create_states` creates the states `kinds`, and step counters if `has_steps`.
        """
        self._optimizer, self._kinds, self._has_steps = optimizer, kinds, has_steps
        param_ids = {id(param) for group in optimizer.param_groups for param in group["params"]}
        self._shards = [each for each in trainable_shards(model) if id(each.param) in param_ids]
        if param_ids - {id(each.param) for each in self._shards}:
            raise UsageError(
                f"{type(optimizer).__name__}: expected ShardedAdamW(model) or an optimizer of "
                "model.flat_parameters(); other optimizers cannot be saved or loaded"
            )

    def separate_params(self, names: Collection[str]) -> None:
        """Do nothing: torch optimizers step whole shards."""

    def create_states(self) -> None:
        for shard in self._shards:
            state = self._optimizer.state[shard.param]
            state.update({kind: torch.zeros_like(shard.param) for kind in self._kinds})
            if self._has_steps:
                state[_STEP] = torch.zeros((), dtype=torch.float32)

    def span_states(self) -> Iterator[tuple[_ShardSpan, dict[str, Tensor]]]:
        """Yield each shard with its states; UsageError if a state has another shape."""
        for shard in self._shards:
            state = self._optimizer.state[shard.param]
            tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
            for name, value in tensors.items():
                if name != _STEP and value.shape != shard.param.shape:
                    raise UsageError(
                        f"{type(self._optimizer).__name__}: state {name} is not elementwise, so "
                        "it cannot be saved in parts"
                    )
            yield _ShardSpan(shard, shard.span), tensors
