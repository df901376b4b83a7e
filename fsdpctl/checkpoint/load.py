"""Brings a checkpoint into a model and its optimizer, however either is sharded."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fsdpctl.checkpoint.manifest import BUFFER, PARAMETER, Progress, TensorInfo, tensor_key
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.source import Tensors
from fsdpctl.checkpoint.state import ShardedOptimizer, model_pieces, optimizer_pieces
from fsdpctl.checkpoint.tensors import DTYPES, tensor_of
from fsdpctl.comm.rank_status import RANK_STATUS, READING
from fsdpctl.errors import CheckpointError
from fsdpctl.plan.layout import Span
from fsdpctl.shards import Sharded


@torch.no_grad()
def load_checkpoint(
    reader: CheckpointReader,
    model: Sharded,
    optimizer: ShardedOptimizer | None,
    weights: Tensors | None = None,
) -> Progress:
    """Fill this rank's shards and states, reading only what it holds; returns how far it was.

    `weights` are those of the checkpoint and of its base, where it has one.

    Raises:
        CheckpointError: a byte was changed, or the checkpoint is of another model.
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
    """The names of the optimizer states in a checkpoint; `step` is not among them."""
    return {key.split("/")[0] for key in reader.manifest.tensors} - {PARAMETER, BUFFER}


@torch.no_grad()
def load_weights(source: Tensors, model: Sharded) -> None:
    """Fill this rank's shards from whole weights, reading only what it holds. Collective.

    Raises:
        CheckpointError: they are damaged, or of another model.
    """
    _load_model(source, model)
    model.broadcast_updated_params()


def _load_model(source: Tensors, model: Sharded) -> None:
    _check_model(source, model)
    for each in model_pieces(model, written=False):
        _read_into(source, each.key, each.piece.in_param, each.values)
    for name, buffer in model.persistent_buffers().items():
        key = tensor_key(BUFFER, name)
        whole = empty_like(source.info(key))
        _read_into(source, key, Span(0, whole.numel()), whole.view(-1))
        buffer.copy_(whole)


def _read_into(source: Tensors, key: str, span: Span, target: Tensor) -> None:
    """Copy the elements `span` of a flattened tensor into `target`, cast to its dtype."""
    dtype = source.info(key).dtype
    for part, data in source.read(key, span):
        RANK_STATUS.at(READING)
        within = part.shift(-span.start)
        target[within.start : within.stop].copy_(tensor_of(data, dtype))


def empty_like(info: TensorInfo) -> Tensor:
    """A whole tensor to read into."""
    return torch.empty(info.shape, dtype=DTYPES[info.dtype])


def _check_model(source: Tensors, model: Sharded) -> None:
    params = {p.name: p.shape for shard in model.flat_shards() for p in shard.layout.params}
    _check_shapes(source, PARAMETER, params)
    buffers = model.persistent_buffers()
    _check_shapes(source, BUFFER, {name: tuple(each.shape) for name, each in buffers.items()})


def check_weights(source: Tensors, module: nn.Module) -> None:
    """See that `source` has the parameters of `module`, which may be on the meta device.

    Raises:
        CheckpointError: one is missing, too much, or of another shape.
    """
    shapes = {name: tuple(param.shape) for name, param in module.named_parameters()}
    _check_shapes(source, PARAMETER, shapes)


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
        if "step" not in states:  # as SGD, which does not count
            continue
        names = [piece.param.name for piece in run.shard.layout.pieces(run.span)]
        counts = {progress.optimizer_steps.get(name, progress.optimizer_step) for name in names}
        if len(counts) != 1:
            raise CheckpointError(f"{names[0]} and its neighbours were stepped unequally often")
        states["step"].fill_(counts.pop())
