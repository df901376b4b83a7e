"""From a model of others to a sharded checkpoint, one piece in memory at a time."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdpctl.checkpoint.manifest import PARAMETER, FileInfo, TensorInfo, tensor_key
from fsdpctl.checkpoint.publish import About, lack_of_space, publish
from fsdpctl.checkpoint.source import Tensors
from fsdpctl.checkpoint.spans import (
    SPANS,
    Digests,
    StoredSpan,
    checksum,
    spans_to_json,
    unknown_digests,
)
from fsdpctl.checkpoint.tensor_file import (
    TensorEntry,
    check_by_reference,
    make_header,
    new_file,
    rank_file,
)
from fsdpctl.errors import UsageError
from fsdpctl.plan.layout import Span, share_of

OnBytes = Callable[[int], None]


def shard_weights(
    source: Tensors,
    destination: Path,
    *,
    num_files: int,
    about: About,
    on_bytes: OnBytes = lambda count: None,
) -> int:
    """Write the checkpoint `destination`, which appears complete or not at all; returns its bytes.

    Args:
        source: the weights; their dtypes are kept.
        destination: a directory that does not exist yet.
        num_files: each gets an equal share of every tensor.
        about: what else the checkpoint says.
        on_bytes: called with the bytes written since the last call.

    Raises:
        UsageError: the destination exists, or cannot be written.
        CheckpointError: the source is damaged.
    """
    destination = destination.resolve()
    if destination.exists():
        raise UsageError(f"{destination}: exists already")
    tensors = {
        tensor_key(PARAMETER, name): source.info(tensor_key(PARAMETER, name))
        for name in source.names(PARAMETER)
    }
    total = sum(info.nbytes for info in tensors.values())
    lack = lack_of_space(destination.parent, total)
    if lack:
        raise UsageError(f"{destination}: {lack}")
    scratch = destination.with_name(f"{destination.name}.tmp-{os.getpid()}")
    try:
        scratch.mkdir(parents=True)
        files = {}
        for rank in range(num_files):
            spans = _spans_of(tensors, rank, num_files)
            if spans:
                name = rank_file(rank)
                files[name] = _write_file(source, scratch / name, spans, on_bytes)
        publish(scratch, destination, about, files, tensors, num_files)
    except OSError as error:
        raise UsageError(f"{destination}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return total


@dataclass(frozen=True, slots=True)
class _Share:
    """What a file gets of a tensor."""

    key: str
    span: Span
    dtype: str

    @property
    def entry(self) -> TensorEntry:
        return TensorEntry(self.key, self.dtype, (self.span.numel,))


def _spans_of(tensors: Mapping[str, TensorInfo], rank: int, num_files: int) -> list[_Share]:
    shares = []
    for key, info in tensors.items():
        span = share_of(Span(0, info.numel), rank, num_files)
        if span.numel or (rank == 0 and not info.numel):
            shares.append(_Share(key, span, info.dtype))
    return shares


def _write_file(
    source: Tensors, path: Path, shares: Sequence[_Share], on_bytes: OnBytes
) -> FileInfo:
    """Write the tensors behind a header whose checksums are filled in at the end."""
    entries = [share.entry for share in shares]
    blank = {
        share.key: StoredSpan(share.span, unknown_digests(share.entry.nbytes)) for share in shares
    }
    with new_file(path) as file:
        file.write(memoryview(make_header(entries, {SPANS: spans_to_json(blank)})))
        known = {}
        for share in shares:
            digests = Digests()
            for _, data in source.read(share.key, share.span):
                file.write(data)
                digests.update(data)
                on_bytes(len(data))
            known[share.key] = StoredSpan(share.span, digests.of_chunks())
        header = make_header(entries, {SPANS: spans_to_json(known)})
        file.overwrite_start(memoryview(header))
    check_by_reference(path)
    return FileInfo(file.size, checksum(header))
