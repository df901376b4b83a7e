"""Brings a checkpoint into a model and its optimizer, however either is sharded."""

import torch

from fsdpctl.checkpoint.manifest import BUFFER, PARAMETER, Progress, tensor_key
from fsdpctl.checkpoint.reader import CheckpointReader, empty_like
from fsdpctl.checkpoint.state import (
    ShardedOptimizer,
    model_pieces,
    optimizer_pieces,
)
from fsdpctl.errors import CheckpointError
from fsdpctl.plan.layout import Span
from fsdpctl.shards import Sharded


@torch.no_grad()
def load_checkpoint(
    reader: CheckpointReader, model: Sharded, optimizer: ShardedOptimizer | None
) -> Progress:
    """Fill this rank's shards and states, reading only what it holds; returns how far it was.

    Raises:
        CheckpointError: a byte was changed, or the checkpoint is of another model.
    """
    _check_model(reader, model)
    for each in model_pieces(model, written=False):
        reader.read_into(each.key, each.piece.in_param, each.values)
    for name, buffer in model.persistent_buffers().items():
        key = tensor_key(BUFFER, name)
        whole = empty_like(reader.info(key))
        reader.read_into(key, Span(0, whole.numel()), whole.view(-1))
        buffer.copy_(whole)
    progress = reader.manifest.progress
    if optimizer is not None and progress.optimizer_step:
        optimizer.isolate(progress.optimizer_steps)
        optimizer.create_states()
        for each in optimizer_pieces(optimizer, written=False):
            reader.read_into(each.key, each.piece.in_param, each.values)
        _set_steps(optimizer, progress)
    model.broadcast_updated_params()
    return progress


def _check_model(reader: CheckpointReader, model: Sharded) -> None:
    params = {p.name: p for shard in model.flat_shards() for p in shard.layout.params}
    for name, param in params.items():
        _check_shape(reader, PARAMETER, name, param.shape)
    buffers = model.persistent_buffers()
    for name, buffer in buffers.items():
        _check_shape(reader, BUFFER, name, tuple(buffer.shape))
    for kind, known in ((PARAMETER, params.keys()), (BUFFER, buffers.keys())):
        for name in reader.names(kind):
            if name not in known:
                raise CheckpointError(f"{reader.folder}: the model has no {name}")


def _check_shape(reader: CheckpointReader, kind: str, name: str, shape: tuple[int, ...]) -> None:
    stored = tuple(reader.info(tensor_key(kind, name)).shape)
    if stored != shape:
        raise CheckpointError(
            f"{reader.folder}: {name} has shape {list(stored)}, the model's is {list(shape)}"
        )


def _set_steps(optimizer: ShardedOptimizer, progress: Progress) -> None:
    for run, states in optimizer.run_states():
        names = [piece.param.name for piece in run.shard.layout.pieces(run.span)]
        counts = {progress.optimizer_steps.get(name, progress.optimizer_step) for name in names}
        if len(counts) != 1:
            raise CheckpointError(f"{names[0]} and its neighbours were stepped unequally often")
        states["step"].fill_(counts.pop())
