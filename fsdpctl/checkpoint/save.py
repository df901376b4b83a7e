"""Writes a checkpoint: every rank its spans, then rank 0 the manifest, then one rename."""

import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import torch
import xxhash

from fsdpctl.checkpoint.manifest import (
    BUFFER,
    MANIFEST,
    PARAMETER,
    FileInfo,
    Manifest,
    Progress,
    TensorInfo,
    tensor_key,
)
from fsdpctl.checkpoint.spans import SPANS, StoredSpan, spans_to_json
from fsdpctl.checkpoint.state import (
    ShardedOptimizer,
    StatePiece,
    model_pieces,
    optimizer_pieces,
    optimizer_steps,
)
from fsdpctl.checkpoint.tensor_file import (
    DTYPE_NAMES,
    TensorEntry,
    make_header,
    sync_folder,
    tensor_bytes,
    write_tensor_file,
)
from fsdpctl.errors import FsdpctlError
from fsdpctl.plan.layout import ParamSpec, Piece, Span
from fsdpctl.shards import Sharded


class Ranks(Protocol):
    """What saving needs of the ranks."""

    rank: int
    size: int

    def gather_objects(self, value: object) -> list[object]:
        """Every rank's value, in rank order."""
        ...


@dataclass(frozen=True, slots=True)
class _Written:
    """What one rank has written, or why it could not."""

    file: str
    info: FileInfo | None
    tensors: dict[str, TensorInfo]
    steps: dict[str, int]
    error: str = ""


def write_checkpoint(
    folder: Path,
    model: Sharded,
    optimizer: ShardedOptimizer | None,
    ranks: Ranks,
    *,
    progress: Progress,
    config: Mapping[str, str],
) -> None:
    """Write a new checkpoint to `folder`, which appears complete or not at all. Collective.

    Raises:
        FsdpctlError: a rank could not write; nothing is left behind.
    """
    ids = ranks.gather_objects(uuid.uuid4().hex[:8])
    scratch = folder.with_name(f"{folder.name}.tmp-{ids[0]}")
    written = _write_rank(scratch, model, optimizer, ranks.rank)
    everything = [each for each in ranks.gather_objects(written) if isinstance(each, _Written)]
    failure = next((each for each in everything if each.error), None)
    error = f"{failure.file}: {failure.error}" if failure else ""
    if ranks.rank == 0:
        error = error or _publish(scratch, folder, lambda: _manifest(everything, progress, config))
        if error:
            shutil.rmtree(scratch, ignore_errors=True)
    error = str(ranks.gather_objects(error)[0])
    if error:
        raise FsdpctlError(f"the checkpoint {folder.name} could not be written: {error}")


def _write_rank(
    scratch: Path, model: Sharded, optimizer: ShardedOptimizer | None, rank: int
) -> _Written:
    name = f"rank-{rank:05d}.safetensors"
    try:  # whatever goes wrong, the other ranks wait to hear of it
        pieces = list(_rank_pieces(model, optimizer, rank))
        steps = optimizer_steps(optimizer) if optimizer else {}
        tensors = {
            each.key: TensorInfo(list(each.piece.param.shape), DTYPE_NAMES[each.values.dtype])
            for each in pieces
        }
        scratch.mkdir(parents=True, exist_ok=True)
        info = _write_pieces(scratch / name, pieces) if pieces else None
        sync_folder(scratch)
    except Exception as error:
        return _Written(name, None, {}, {}, str(getattr(error, "strerror", None) or repr(error)))
    return _Written(name, info, tensors, steps)


def _rank_pieces(
    model: Sharded, optimizer: ShardedOptimizer | None, rank: int
) -> Iterator[StatePiece]:
    yield from model_pieces(model, written=True)
    if rank == 0:
        yield from _empty_pieces(model)
    if optimizer is not None:
        yield from optimizer_pieces(optimizer, written=True)
    if rank == 0:
        for name, buffer in model.persistent_buffers().items():
            spec = ParamSpec(name, tuple(buffer.shape))
            everything = Span(0, buffer.numel())
            piece = Piece(spec, everything, everything)
            yield StatePiece(tensor_key(BUFFER, name), piece, buffer.detach().reshape(-1))


def _empty_pieces(model: Sharded) -> Iterator[StatePiece]:
    """Parameters without elements, which lie in nobody's part."""
    nothing = Span(0, 0)
    for shard in model.flat_shards():
        for param in shard.layout.params:
            if param.numel == 0:
                key = tensor_key(PARAMETER, param.name)
                yield StatePiece(key, Piece(param, nothing, nothing), shard.master[:0])


def _write_pieces(path: Path, pieces: list[StatePiece]) -> FileInfo:
    on_cpu = [replace(each, values=each.values.detach().cpu()) for each in pieces]
    stored = {
        each.key: StoredSpan(
            each.piece.in_param, xxhash.xxh3_128_hexdigest(tensor_bytes(each.values))
        )
        for each in on_cpu
    }
    entries = [TensorEntry(each.key, each.values.dtype, (each.values.numel(),)) for each in on_cpu]
    header = make_header(entries, {SPANS: spans_to_json(stored)})
    size = write_tensor_file(path, header, (tensor_bytes(each.values) for each in on_cpu))
    return FileInfo(size, xxhash.xxh3_128_hexdigest(header))


def _manifest(written: list[_Written], progress: Progress, config: Mapping[str, str]) -> Manifest:
    steps: dict[str, int] = {}
    tensors: dict[str, TensorInfo] = {}
    for each in written:
        steps.update(each.steps)
        tensors.update(each.tensors)
    usual = max(steps.values(), default=0)
    unusual = {name: step for name, step in steps.items() if step != usual}
    return Manifest(
        files={each.file: each.info for each in written if each.info is not None},
        tensors=dict(sorted(tensors.items())),
        progress=replace(progress, optimizer_step=usual, optimizer_steps=unusual),
        config=dict(config),
        versions={
            "fsdpctl": version("fsdpctl"),
            "torch": torch.__version__,
            "python": sys.version.split()[0],
        },
        world_size=len(written),
    )


def _publish(scratch: Path, folder: Path, manifest: Callable[[], Manifest]) -> str:
    """Make the checkpoint appear; returns what went wrong, or an empty string."""
    try:
        with (scratch / MANIFEST).open("x", encoding="utf-8") as file:
            file.write(manifest().to_json())
            file.flush()
            os.fsync(file.fileno())
        sync_folder(scratch)
        if folder.is_dir() and not (folder / MANIFEST).exists():
            shutil.rmtree(folder)  # what a removal that was cut short left behind
        scratch.rename(folder)
        sync_folder(folder.parent)
    except Exception as error:
        return str(getattr(error, "strerror", None) or repr(error))
    return ""
