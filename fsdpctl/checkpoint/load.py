"""The pieces of tensors that ranks store, and loading them into a model with any sharding."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from fsdpctl.checkpoint.manifest import BUFFER, PARAMETER, REMAINDER, tensor_key
from fsdpctl.checkpoint.quantized import quantized_like
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.staging import TORCH_DTYPES, tensor_from_bytes
from fsdpctl.checkpoint.tensor_source import TensorSource
from fsdpctl.checkpoint.training_progress import Progress
from fsdpctl.comm.flat_shard import (
    FlatShard,
    ShardedModelProtocol,
    persistent_buffers,
    trainable_shards,
)
from fsdpctl.comm.quantized_states import CODES, SCALES, Moment, get_moment, moment_names
from fsdpctl.comm.rank_status import READING, STATUS_PAGE
from fsdpctl.errors import CheckpointError
from fsdpctl.plan.layout import ParamSlice, ParamSpec, Span, round_up
from fsdpctl.plan.optimizers import SCALE_BLOCK, TILE, scale_blocks


class SteppedPart(Protocol):
    """A part of a shard that the optimizer steps as one tensor."""

    @property
    def shard(self) -> FlatShard: ...
    @property
    def span(self) -> Span:
        """The part's elements in the flat buffer."""


class ShardedOptimizer(Protocol):
    """The part of an optimizer's interface that checkpoints need."""

    def separate_params(self, names: Collection[str]) -> None:
        """Step each of the named parameters as a separate tensor with a separate step count."""

    def create_states(self) -> None:
        """Create the states that the first optimizer step creates."""

    def span_states(self) -> Iterator[tuple[SteppedPart, dict[str, Tensor]]]:
        """Yield each part with its states: the scalar `step`, and moments (quantized_states)."""


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A part of one parameter or of one of its optimizer states, in this rank's memory."""

    key: str
    param_slice: ParamSlice
    values: Tensor  # 1-D, the elements `param_slice.in_param`


def model_pieces(model: ShardedModelProtocol, *, trained_only: bool) -> Iterator[TensorPiece]:
    """Yield the pieces that this rank writes: masters, and the remainders of 24-bit masters."""
    for shard in trainable_shards(model) if trained_only else model.flat_shards():
        for param_slice in shard.layout.param_slices(shard.saved_span):
            for kind, values in ((PARAMETER, shard.master), (REMAINDER, shard.remainder)):
                if values is not None:
                    key = tensor_key(kind, param_slice.param.name)
                    yield TensorPiece(key, param_slice, shard.view(values, param_slice.in_flat))


def optimizer_pieces(optimizer: ShardedOptimizer) -> Iterator[TensorPiece]:
    """Yield the pieces of optimizer states that this rank writes; none before the first step."""
    for stepped, states in optimizer.span_states():
        saved_span = stepped.span.intersect(stepped.shard.saved_span)
        for param_slice in stepped.shard.layout.param_slices(saved_span) if saved_span else ():
            local_span = param_slice.in_flat.shift(-stepped.span.start)
            param = param_slice.param.name
            for name in moment_names(states):
                moment = get_moment(states, name).window(local_span)
                kind = name if moment.scales is None else name + CODES
                yield TensorPiece(tensor_key(kind, param), param_slice, moment.values)
                if moment.scales is not None:
                    key = tensor_key(name + SCALES, param)
                    yield TensorPiece(key, _scales_slice(param_slice), moment.scales)


def _scales_slice(piece: ParamSlice) -> ParamSlice:
    spec = ParamSpec(piece.param.name, (scale_blocks(Span(0, piece.param.numel)).stop,))
    return ParamSlice(spec, scale_blocks(piece.in_param), scale_blocks(piece.in_flat))


def optimizer_steps(optimizer: ShardedOptimizer) -> dict[str, int]:
    return {
        param_slice.param.name: int(states["step"])
        for stepped, states in optimizer.span_states()
        if "step" in states
        for param_slice in stepped.shard.layout.param_slices(stepped.span)
    }


@torch.no_grad()
def load_into(
    reader: CheckpointReader,
    model: ShardedModelProtocol,
    optimizer: ShardedOptimizer | None,
    weights: TensorSource | None = None,
) -> Progress:
    """Load this rank's shards and states; read only their elements. Collective.

    `weights`: the checkpoint's tensors with those of its base. Without an optimizer, optimizer
    states are not read. Return the progress of the run.
    """
    _load_model(weights or reader, model)
    progress = reader.manifest.progress
    if optimizer is not None and (progress.optimizer_step or state_kinds(reader)):
        optimizer.separate_params(progress.optimizer_steps)
        optimizer.create_states()
        _load_moments(reader, optimizer)
        _set_steps(optimizer, progress)
    model.broadcast_updated_params()
    return progress


def state_kinds(reader: CheckpointReader) -> set[str]:
    """Return the names of the optimizer states in a checkpoint, without `step`."""
    kinds = {key.split("/")[0] for key in reader.manifest.tensors}
    return set(moment_names(kinds - {PARAMETER, BUFFER, REMAINDER}))


@torch.no_grad()
def load_weights(source: TensorSource, model: ShardedModelProtocol) -> None:
    """Load this rank's shards; read only their elements. Collective."""
    _load_model(source, model)
    model.broadcast_updated_params()


def _load_model(source: TensorSource, model: ShardedModelProtocol) -> None:
    source = quantized_like(source, model.module)
    params = {p.name: p.shape for shard in model.flat_shards() for p in shard.layout.params}
    _check_shapes(source, PARAMETER, params)
    buffers = model.persistent_buffers()
    _check_shapes(source, BUFFER, {name: tuple(each.shape) for name, each in buffers.items()})
    model.mesh.shard.wait_for_readers()  # with shared memory, ranks may still gather these shards
    for shard in model.flat_shards():
        for param_slice in shard.param_slices():
            offset = param_slice.in_flat.start - param_slice.in_param.start
            key = tensor_key(PARAMETER, param_slice.param.name)
            for part, values in _read(source, key, param_slice.in_param):
                shard.write_span(part.shift(offset), values)
    for name, buffer in buffers.items():
        key = tensor_key(BUFFER, name)
        info = source.info(key)
        # Not read into buffer.view(-1): a buffer may not be contiguous.
        stored = torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype])
        _read_into(source, key, Span(0, stored.numel()), stored.view(-1))
        buffer.copy_(stored)


def _read(source: TensorSource, key: str, span: Span) -> Iterator[tuple[Span, Tensor]]:
    """Yield the elements `span` of a flattened tensor in chunks, in their stored dtype."""
    dtype = source.info(key).dtype
    for part, data in source.read(key, span):
        STATUS_PAGE.at(READING)
        yield part, tensor_from_bytes(data, dtype)


def _read_into(source: TensorSource, key: str, span: Span, target: Tensor) -> None:
    """Copy the elements `span` of a flattened tensor into `target`, cast to target's dtype."""
    for part, values in _read(source, key, span):
        local_span = part.shift(-span.start)
        target[local_span.start : local_span.stop].copy_(values)


def _load_moments(reader: CheckpointReader, optimizer: ShardedOptimizer) -> None:
    """Read the optimizer's moments, and quantize or dequantize them if its dtype differs."""
    for stepped, states in optimizer.span_states():
        for param_slice in stepped.shard.layout.param_slices(stepped.span):
            local_span = param_slice.in_flat.shift(-stepped.span.start)
            for name in moment_names(states):
                # Whole blocks: the zeros after a parameter belong to its last block.
                blocks = Span(local_span.start, round_up(local_span.stop, SCALE_BLOCK))
                _load(reader, name, param_slice, get_moment(states, name).window(blocks))


def _load(reader: CheckpointReader, name: str, param_slice: ParamSlice, moment: Moment) -> None:
    # Tiles of any multiple of SCALE_BLOCK bound the float32 workspace.
    for part in Span(0, param_slice.in_flat.numel).split(TILE["cuda"]):
        padded_span = Span(part.start, round_up(part.stop, SCALE_BLOCK))
        span, target = part.shift(param_slice.in_param.start), moment.window(padded_span)
        stored = _read_moment(reader, name, param_slice.param.name, span, target.values.device)
        if stored.scales is None and target.scales is not None:
            stored = stored.quantized_like(target)
        elif stored.scales is not None and target.scales is None:
            stored = stored.dequantized()
        target.values[: part.numel].copy_(stored.values[: part.numel])
        if target.scales is not None and stored.scales is not None:
            target.scales.copy_(stored.scales)


def _read_moment(
    reader: CheckpointReader, name: str, param: str, span: Span, device: torch.device
) -> Moment:
    """Read the elements `span` of a parameter's moment in their stored form, in whole blocks."""
    key = tensor_key(name + CODES, param)
    is_quantized = key in reader.manifest.tensors
    key = key if is_quantized else tensor_key(name, param)
    dtype = TORCH_DTYPES[reader.info(key).dtype]
    values = torch.zeros(round_up(span.numel, SCALE_BLOCK), dtype=dtype, device=device)
    _read_into(reader, key, span, values)
    if not is_quantized:
        return Moment(values)
    scales = torch.zeros(values.numel() // SCALE_BLOCK, dtype=torch.bfloat16, device=device)
    _read_into(reader, tensor_key(name + SCALES, param), scale_blocks(span), scales)
    return Moment(values, scales)


def check_weights(source: TensorSource, module: nn.Module) -> None:
    """Check the names and shapes of weights; CheckpointError if they do not match `module`."""
    shapes = {name: tuple(param.shape) for name, param in module.named_parameters()}
    _check_shapes(quantized_like(source, module), PARAMETER, shapes)
    buffers = persistent_buffers(module)
    _check_shapes(source, BUFFER, {name: tuple(each.shape) for name, each in buffers.items()})


def _check_shapes(source: TensorSource, kind: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        stored = source.info(tensor_key(kind, name)).shape
        if stored != list(shape):
            raise CheckpointError(f"{source}: {name}: expected shape {list(shape)}, got {stored}")
    for name in source.names(kind):
        if name not in shapes:
            raise CheckpointError(f"{source}: the model has no {name}")


def _set_steps(optimizer: ShardedOptimizer, progress: Progress) -> None:
    for stepped, states in optimizer.span_states():
        if "step" not in states:  # SGD, for example, has no counter
            continue
        names = [x.param.name for x in stepped.shard.layout.param_slices(stepped.span)]
        counts = {progress.optimizer_steps.get(name, progress.optimizer_step) for name in names}
        if len(counts) != 1:
            problem = "adjacent parameters have other steps; this optimizer has one per shard"
            raise CheckpointError(f"{names[0]}: {problem}")
        states["step"].fill_(counts.pop())
