"""Conversion of full weights to a sharded checkpoint, one chunk in memory at a time."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fsdpctl.checkpoint.manifest import PARAMETER, FileInfo, TensorInfo, tensor_key
from fsdpctl.checkpoint.publish import (
    About,
    check_space,
    new_directory,
    usage_errors,
    write_manifest,
)
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
    """Write the checkpoint `destination`, which appears complete or not at all.

    Each of `num_files` files gets an equal share of every tensor, in its dtype. `on_bytes` is
    called with the bytes written since the last call.

    Returns:
        The bytes of the weights.

    Raises:
        UsageError: If the destination exists or cannot be written.
        CheckpointError: If the source is corrupted.
    """
    destination = destination.resolve()
    if destination.exists():
        raise UsageError(f"{destination}: already exists")
    keys = [tensor_key(PARAMETER, name) for name in source.names(PARAMETER)]
    tensors = {key: source.info(key) for key in keys}
    total = sum(info.nbytes for info in tensors.values())
    check_space(destination, total)
    with usage_errors(destination), new_directory(destination) as scratch:
        files = {}
        for rank in range(num_files):
            if entries := _entries(tensors, rank, num_files):
                name = rank_file(rank)
                files[name] = _write_file(source, scratch / name, entries, on_bytes)
        write_manifest(scratch, about, files, tensors, num_files)
    return total


def _entries(
    tensors: Mapping[str, TensorInfo], rank: int, num_files: int
) -> list[tuple[TensorEntry, Span]]:
    """Return the entries of a file, each with its span of the tensor of that name."""
    found = []
    for key, info in tensors.items():
        span = share_of(Span(0, info.numel), rank, num_files)
        if span.numel or (rank == 0 and not info.numel):
            found.append((TensorEntry(key, info.dtype, (span.numel,)), span))
    return found


def _write_file(
    source: Tensors, path: Path, shares: Sequence[tuple[TensorEntry, Span]], on_bytes: OnBytes
) -> FileInfo:
    """Write the tensors after a header whose checksums are filled in at the end."""
    entries = [entry for entry, _ in shares]
    stored = {each.name: StoredSpan(span, unknown_digests(each.nbytes)) for each, span in shares}
    with new_file(path) as file:
        file.write(memoryview(make_header(entries, {SPANS: spans_to_json(stored)})))
        for entry, span in shares:
            digests = Digests()
            for _, data in source.read(entry.name, span):
                file.write(data)
                digests.update(data)
                on_bytes(len(data))
            stored[entry.name] = StoredSpan(span, digests.of_chunks())
        header = make_header(entries, {SPANS: spans_to_json(stored)})
        file.overwrite_start(memoryview(header))
    check_by_reference(path)
    return FileInfo(file.size, checksum(header))
