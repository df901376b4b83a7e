"""Saving a checkpoint: every rank writes its spans, then rank 0 writes the manifest and renames."""

import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from fsdpctl.checkpoint.initial_weights import HasAllGather, OnBytes
from fsdpctl.checkpoint.load import (
    ShardedOptimizer,
    TensorPiece,
    model_pieces,
    optimizer_pieces,
    optimizer_steps,
)
from fsdpctl.checkpoint.manifest import (
    BUFFER,
    PARAMETER,
    FileInfo,
    StoredSpan,
    TensorInfo,
    chunk_digests,
    tensor_key,
    write_span_file,
)
from fsdpctl.checkpoint.publish import (
    CheckpointMetadata,
    publish_directory,
    space_problem,
    write_manifest,
)
from fsdpctl.checkpoint.staging import DTYPE_NAMES, StagingMemory, tensor_bytes
from fsdpctl.checkpoint.tensor_file import CHUNK_BYTES, fsync, rank_file
from fsdpctl.comm.flat_shard import ShardedModelProtocol, trainable_shards
from fsdpctl.errors import FsdpctlError
from fsdpctl.io.run_files import MANIFEST
from fsdpctl.plan.layout import ParamSlice, ParamSpec, Span


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A rank's part of a checkpoint, in host memory."""

    pieces: list[TensorPiece]
    steps: dict[str, int]  # optimizer steps by parameter
    metadata: CheckpointMetadata

    @property
    def num_bytes(self) -> int:
        return sum(each.values.nbytes for each in self.pieces)


@dataclass(frozen=True, slots=True)
class _RankResult:
    """The result of writing a rank's file, or the error."""

    location: str  # the name of the file, or a directory without space
    info: FileInfo | None = None
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    error: str = ""


def take_snapshot(
    model: ShardedModelProtocol,
    optimizer: ShardedOptimizer | None,
    rank: int,
    metadata: CheckpointMetadata,
    staging: StagingMemory | None = None,
) -> Snapshot:
    """Capture this rank's part of the checkpoint.

    With `staging`, the snapshot is a copy in staging memory, which the next snapshot overwrites.
    Without `staging`, it may alias the model's memory and is valid until the model changes.
    """
    # Untrained weights are not written if `metadata.base` records where they are stored.
    pieces = list(rank_pieces(model, optimizer, rank, trained_only=metadata.base is not None))
    values = [each.values.detach() for each in pieces]
    copies = [each.cpu() for each in values] if staging is None else staging.copy(values)
    pieces = [replace(each, values=copy) for each, copy in zip(pieces, copies, strict=True)]
    return Snapshot(pieces, optimizer_steps(optimizer) if optimizer else {}, metadata)


def write_checkpoint(
    folder: Path,
    snapshot: Snapshot,
    collectives: HasAllGather,
    on_bytes: OnBytes = lambda count: None,
) -> None:
    """Write a new checkpoint to `folder`, which appears complete or not at all. Collective.

    All ranks share its file system. `on_bytes` is called with the number of bytes that this rank
    has written since the last call. FsdpctlError on all ranks if a rank cannot write.
    """
    values = collectives.all_gather_values((uuid.uuid4().hex[:8], snapshot.num_bytes))
    suffixes, sizes = zip(*values, strict=True)
    scratch = folder.with_name(f"{folder.name}.tmp-{suffixes[0]}")  # rank 0's
    if problem := space_problem(folder.parent, sum(sizes)):
        local_result = _RankResult(str(folder.parent), error=problem)
    else:
        local_result = _write_rank(scratch, snapshot, collectives.rank, on_bytes)
    results = collectives.all_gather_values(local_result)
    failure = next((each for each in results if each.error), None)
    error = f"{failure.location}: {failure.error}" if failure else ""
    if collectives.rank == 0:
        error = error or _publish(scratch, folder, results, snapshot.metadata)
        if error:
            shutil.rmtree(scratch, ignore_errors=True)
    if error := collectives.all_gather_values(error)[0]:  # rank 0's
        raise FsdpctlError(f"checkpoint {folder.name}: could not be written: {error}")


def _write_rank(scratch: Path, snapshot: Snapshot, rank: int, on_bytes: OnBytes) -> _RankResult:
    name = rank_file(rank)
    try:  # return every error: the other ranks wait for the result in a collective
        tensors = {
            each.key: TensorInfo(list(each.param_slice.param.shape), DTYPE_NAMES[each.values.dtype])
            for each in snapshot.pieces
        }
        scratch.mkdir(parents=True, exist_ok=True)
        info = _write_pieces(scratch / name, snapshot.pieces, on_bytes) if tensors else None
        fsync(scratch)
    except Exception as error:
        return _RankResult(name, error=_error_text(error))
    return _RankResult(name, info, tensors, snapshot.steps)


def _error_text(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or repr(error))


def rank_pieces(
    model: ShardedModelProtocol,
    optimizer: ShardedOptimizer | None,
    rank: int,
    *,
    trained_only: bool,
) -> Iterator[TensorPiece]:
    """Yield this rank's pieces in the model's memory; rank 0 adds buffers and empty parameters."""
    yield from model_pieces(model, trained_only=trained_only)
    if optimizer is not None:
        yield from optimizer_pieces(optimizer)
    if rank == 0:
        yield from _empty_pieces(model, trained_only=trained_only)
        for name, buffer in model.persistent_buffers().items():
            full = Span(0, buffer.numel())
            buffer_slice = ParamSlice(ParamSpec(name, tuple(buffer.shape)), full, full)
            yield TensorPiece(tensor_key(BUFFER, name), buffer_slice, buffer.detach().reshape(-1))


def _empty_pieces(model: ShardedModelProtocol, *, trained_only: bool) -> Iterator[TensorPiece]:
    """Yield the parameters without elements, which no shard contains."""
    empty = Span(0, 0)
    for shard in trainable_shards(model) if trained_only else model.flat_shards():
        for param in shard.layout.params:
            if param.numel == 0:
                key = tensor_key(PARAMETER, param.name)
                # Not `master`, which lacks the remainder: the lower 8 bits of 24-bit weights.
                yield TensorPiece(key, ParamSlice(param, empty, empty), shard.weights()[:0])


def _write_pieces(path: Path, pieces: list[TensorPiece], on_bytes: OnBytes) -> FileInfo:
    stored = {}
    for each in pieces:
        span = StoredSpan(each.param_slice.in_param, chunk_digests([tensor_bytes(each.values)]))
        stored[each.key] = DTYPE_NAMES[each.values.dtype], span
    return write_span_file(path, stored, _chunks(pieces, on_bytes))


def _chunks(pieces: list[TensorPiece], on_bytes: OnBytes) -> Iterator[memoryview]:
    for each in pieces:
        data = tensor_bytes(each.values)
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            yield chunk
            on_bytes(len(chunk))


def _publish(
    scratch: Path, folder: Path, results: list[_RankResult], metadata: CheckpointMetadata
) -> str:
    """Write the manifest and rename the directory; return the error, or ""."""
    steps = {name: step for each in results for name, step in each.steps.items()}
    tensors = {key: info for each in results for key, info in each.tensors.items()}
    latest_step = max(steps.values(), default=0)  # a parameter without a gradient isn't stepped
    other_steps = {name: step for name, step in steps.items() if step != latest_step}
    progress = replace(metadata.progress, optimizer_step=latest_step, optimizer_steps=other_steps)
    metadata = replace(metadata, progress=progress)
    files = {each.location: each.info for each in results if each.info is not None}
    try:
        if folder.is_dir() and not (folder / MANIFEST).exists():  # from an interrupted copy
            folder.rename(scratch.with_name(scratch.name.replace(".tmp-", ".incomplete-")))
        write_manifest(scratch, metadata, files, tensors, world_size=len(results))
        publish_directory(scratch, folder)
    except Exception as error:
        return _error_text(error)
    return ""
