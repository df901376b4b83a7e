"""The tensors that checkpoints store, and loading them into a model with any sharding."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from fsdpctl.checkpoint.manifest import BUFFER, PARAMETER, Progress, TensorInfo, tensor_key
from fsdpctl.checkpoint.quantized import quantized_as
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.source import Tensors
from fsdpctl.checkpoint.tensors import DTYPES, tensor_of
from fsdpctl.comm.rank_status import RANK_STATUS, READING
from fsdpctl.errors import CheckpointError
from fsdpctl.plan.layout import Piece, Span
from fsdpctl.shards import FlatShard, Sharded, trainable_shards


class OptimizerRun(Protocol):
    """A part of a shard that the optimizer steps as one tensor."""

    @property
    def shard(self) -> FlatShard:
        """The shard that contains it."""
        ...

    @property
    def span(self) -> Span:
        """Its elements in the flat buffer."""
        ...


class ShardedOptimizer(Protocol):
    """The interface of an optimizer that checkpoints need."""

    def isolate(self, names: Collection[str]) -> None:
        """Step each of the named parameters separately from others."""
        ...

    def create_states(self) -> None:
        """Create the states that the first step would create."""
        ...

    def run_states(self) -> Iterator[tuple[OptimizerRun, dict[str, Tensor]]]:
        """Yield each run with its states: the scalar `step`, and tensors of the run's shape."""
        ...


@dataclass(frozen=True, slots=True)
class StatePiece:
    """A part of one parameter or of one of its optimizer states, in this rank's memory."""

    key: str
    piece: Piece
    values: Tensor  # 1-D, the elements `piece.in_param`


def model_pieces(
    model: Sharded, *, written: bool, trained_only: bool = False
) -> Iterator[StatePiece]:
    """Yield the parts of parameters that this rank writes, or all that it holds."""
    for shard in trainable_shards(model) if trained_only else model.flat_shards():
        for piece in shard.written_pieces() if written else shard.held_pieces():
            values = shard.view(shard.master, piece.in_flat)
            yield StatePiece(tensor_key(PARAMETER, piece.param.name), piece, values)


def optimizer_pieces(optimizer: ShardedOptimizer, *, written: bool) -> Iterator[StatePiece]:
    """Yield the same for the optimizer's states; nothing before the first step."""
    for run, states in optimizer.run_states():
        within = run.span.intersect(run.shard.written) if written else run.span
        if within is None:
            continue
        for piece in run.shard.layout.pieces(within):
            for kind, values in states.items():
                if kind != "step":
                    start = piece.in_flat.start - run.span.start
                    part = values[start : start + piece.in_flat.numel]
                    yield StatePiece(tensor_key(kind, piece.param.name), piece, part)


def optimizer_steps(optimizer: ShardedOptimizer) -> dict[str, int]:
    """Return the step counter of each parameter that this rank steps."""
    steps = {}
    for run, states in optimizer.run_states():
        if "step" in states:
            count = int(states["step"])
            for piece in run.shard.layout.pieces(run.span):
                steps[piece.param.name] = count
    return steps


@torch.no_grad()
def load_checkpoint(
    reader: CheckpointReader,
    model: Sharded,
    optimizer: ShardedOptimizer | None,
    weights: Tensors | None = None,
) -> Progress:
    """Load this rank's shards and states, reading only the elements that it holds. Collective.

    `weights` are those of the checkpoint and of its base, if it has one. Without an optimizer, its
    states stay unread.

    Returns:
        The progress of the run.

    Raises:
        CheckpointError: If the checkpoint is corrupted or of a different model.
    """
    _load_model(weights or reader, model)
    progress = reader.manifest.progress
    if optimizer is not None and (progress.optimizer_step or state_kinds(reader)):
        optimizer.isolate(progress.optimizer_steps)
        optimizer.create_states()
        for each in optimizer_pieces(optimizer, written=False):
            _read_into(reader, each.key, each.piece.in_param, each.values)
        _set_steps(optimizer, progress)
    model.broadcast_updated_params()
    return progress


def state_kinds(reader: CheckpointReader) -> set[str]:
    """Return the names of the optimizer states in a checkpoint, without `step`."""
    return {key.split("/")[0] for key in reader.manifest.tensors} - {PARAMETER, BUFFER}


@torch.no_grad()
def load_weights(source: Tensors, model: Sharded) -> None:
    """Load this rank's shards from full weights, reading only what it holds. Collective.

    Raises:
        CheckpointError: If the weights are corrupted or of a different model.
    """
    _load_model(source, model)
    model.broadcast_updated_params()


def _load_model(source: Tensors, model: Sharded) -> None:
    source = quantized_as(source, model.module)
    params = {p.name: p.shape for shard in model.flat_shards() for p in shard.layout.params}
    _check_shapes(source, PARAMETER, params)
    buffers = model.persistent_buffers()
    _check_shapes(source, BUFFER, {name: tuple(each.shape) for name, each in buffers.items()})
    for each in model_pieces(model, written=False):
        _read_into(source, each.key, each.piece.in_param, each.values)
    for name, buffer in buffers.items():
        key = tensor_key(BUFFER, name)
        stored = empty_like(source.info(key))
        _read_into(source, key, Span(0, stored.numel()), stored.view(-1))
        buffer.copy_(stored)


def _read_into(source: Tensors, key: str, span: Span, target: Tensor) -> None:
    """Copy the elements `span` of a flattened tensor into `target`, cast to its dtype."""
    dtype = source.info(key).dtype
    for part, data in source.read(key, span):
        RANK_STATUS.at(READING)
        within = part.shift(-span.start)
        target[within.start : within.stop].copy_(tensor_of(data, dtype))


def empty_like(info: TensorInfo) -> Tensor:
    """Allocate a full tensor to read into."""
    return torch.empty(info.shape, dtype=DTYPES[info.dtype])


def check_weights(source: Tensors, module: nn.Module) -> None:
    """Check that `source` has the parameters of `module`, which may be on the meta device.

    Raises:
        CheckpointError: If one is missing, unexpected, or of a different shape.
    """
    shapes = {name: tuple(param.shape) for name, param in module.named_parameters()}
    _check_shapes(quantized_as(source, module), PARAMETER, shapes)


def _check_shapes(source: Tensors, kind: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        stored = tuple(source.info(tensor_key(kind, name)).shape)
        if stored != shape:
            raise CheckpointError(
                f"{source}: {name} has shape {list(stored)}, the model's is {list(shape)}"
            )
    for name in source.names(kind):
        if name not in shapes:
            raise CheckpointError(f"{source}: the model has no {name}")


def _set_steps(optimizer: ShardedOptimizer, progress: Progress) -> None:
    for run, states in optimizer.run_states():
        if "step" not in states:  # SGD, for example, has no counter
            continue
        names = [piece.param.name for piece in run.shard.layout.pieces(run.span)]
        counts = {progress.optimizer_steps.get(name, progress.optimizer_step) for name in names}
        if len(counts) != 1:
            raise CheckpointError(
                f"{names[0]}: its optimizer step differs from that of adjacent parameters"
            )
        states["step"].fill_(counts.pop())
