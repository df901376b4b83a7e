"""Conversion of a checkpoint to a Hugging Face directory and back, chunk by chunk."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdpctl.checkpoint import manifest, publish
from fsdpctl.checkpoint.checksums import ChecksumWriter
from fsdpctl.checkpoint.merge import MODEL_KEY, exported_weights, notes_on_merge
from fsdpctl.checkpoint.pretrained import read_attachments
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.tensor_file import (
    EXPORT_DTYPES,
    FLOATS,
    TensorEntry,
    cast,
    rank_file,
    write_synced,
)
from fsdpctl.checkpoint.tensor_source import TensorSource, tensor_keys, weight_bytes
from fsdpctl.config.decoder_config import exported_config
from fsdpctl.config.serialize import config_of_checkpoint
from fsdpctl.data.tokenizer_files import TOKENIZER_FILES
from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.io.activity import BYTES, Advance, doing
from fsdpctl.io.files import os_errors_as
from fsdpctl.io.run_files import CONFIG_JSON
from fsdpctl.io.untrusted import parse_json
from fsdpctl.plan.layout import Span, aligned_chunk


def consolidate(
    reader: CheckpointReader,
    destination: Path,
    *,
    dtype: str | None = None,
    max_file_bytes: int = 5 * 10**9,
    overwrite: bool = False,
    merge: bool = False,
) -> publish.ExportResult:
    """Export to the Hugging Face directory `destination`, which appears complete or not at all.

    `dtype` is float32, bfloat16 or float16; None keeps the dtype of the master weights. Files have
    at most `max_file_bytes`, except for a larger tensor. Adapters are merged in float32.
    """
    destination = destination.resolve()  # the target of a symbolic link, not the link
    with publish.export_directory(destination, reader.folder, overwrite=overwrite) as folder:
        # Merged weights stay in float32 here, so that `cast` below rounds them only once.
        weights = exported_weights(reader, None if dtype is None else "F32", merge=merge)
        in_float32: Collection[str] = ()
        if MODEL_KEY in reader.manifest.config:
            from fsdpctl.checkpoint.hub_weights import float32_names  # imports torch

            config = config_of_checkpoint(reader.manifest.config, str(reader))
            in_float32 = float32_names(config.model)
        entries = _exported_entries(weights, dtype, in_float32)
        total = sum(entry.nbytes for entry in entries.values())
        publish.check_space(destination, total)
        files = _split_into_files(entries.values(), max_file_bytes)
        keys = {entry.name: key for key, entry in entries.items()}
        floats = (entry for key, entry in entries.items() if weights.info(key).dtype in FLOATS)
        dtypes = {entry.dtype for entry in floats if entry.name not in in_float32}
        with doing("exporting", BYTES, weight_bytes(weights)) as advance:

            def read(entry: TensorEntry) -> Iterator[memoryview]:
                stored_dtype = weights.info(keys[entry.name]).dtype
                for _, data in weights.read(keys[entry.name]):
                    yield cast(data, stored_dtype, entry.dtype, entry.name)
                    advance(len(data))

            notes = _write_folder(reader, folder, files, read, dtypes)
    notes += notes_on_merge(reader, merge=merge)
    return publish.ExportResult(destination, total, len(entries), notes, len(files))


def _exported_entries(
    weights: TensorSource, dtype: str | None, in_float32: Collection[str]
) -> dict[str, TensorEntry]:
    entries = {}
    for key in tensor_keys(weights):
        info, name = weights.info(key), key.partition("/")[2]
        exported_dtype = info.dtype
        if dtype is not None and info.dtype in FLOATS:
            exported_dtype = EXPORT_DTYPES["float32" if name in in_float32 else dtype]
        entries[key] = TensorEntry(name, exported_dtype, tuple(info.shape))
    return entries


def _split_into_files(entries: Iterable[TensorEntry], max_bytes: int) -> list[list[TensorEntry]]:
    files: list[list[TensorEntry]] = [[]]
    size = 0
    for entry in entries:
        if files[-1] and size + entry.nbytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(entry)
        size += entry.nbytes
    return files


def _write_folder(
    reader: CheckpointReader,
    folder: Path,
    files: Sequence[Sequence[TensorEntry]],
    read: Callable[[TensorEntry], Iterator[memoryview]],
    dtypes: Collection[str],
) -> tuple[str, ...]:
    """Write the files; return notes on missing ones. config.json names the only one of `dtypes`."""
    weight_map: dict[str, str] = {}
    checksums = ChecksumWriter()
    for number, entries in enumerate(files, start=1):
        name = "model.safetensors"
        if len(files) > 1:
            name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        metadata = {"format": "pt", **publish.EXPORT_METADATA}
        checksums.write_tensors(folder / name, entries, metadata, read)
        weight_map.update({entry.name: name for entry in entries})
    if len(files) > 1:
        total = sum(entry.nbytes for entries in files for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / manifest.INDEX_JSON, index)
    attached = read_attachments(reader)
    location = str(reader.folder / CONFIG_JSON)
    source = parse_json(attached.pop(CONFIG_JSON, b"{}"), dict[str, Any], location, CheckpointError)
    notes: tuple[str, ...] = ()
    if MODEL_KEY not in reader.manifest.config:  # a custom training loop saves no settings
        notes = ("no config.json: the checkpoint does not name its model",)
    else:
        if not attached.keys() & set(TOKENIZER_FILES):
            notes = ("no tokenizer files: the run's tokenizer is unknown",)
        names = (name for name, short in EXPORT_DTYPES.items() if dtypes == {short})
        model = config_of_checkpoint(reader.manifest.config, str(reader)).model
        _write_json(folder / CONFIG_JSON, exported_config(model, next(names, "float32"), source))
    publish.write_assets(folder, attached)
    checksums.write(folder)
    return notes


def _write_json(path: Path, content: object) -> None:
    write_synced(path, (json.dumps(content, indent=2) + "\n").encode())


def write_sharded_weights(
    source: TensorSource, destination: Path, *, num_files: int, metadata: publish.CheckpointMetadata
) -> int:
    """Write a new checkpoint of `num_files` equal files; return the bytes of the weights."""
    destination = destination.resolve()
    if destination.exists():
        raise UsageError(f"{destination}: already exists")
    tensors = {key: source.info(key) for key in tensor_keys(source)}
    total = sum(info.nbytes for info in tensors.values())
    publish.check_space(destination, total)
    with (
        os_errors_as(destination),
        publish.atomic_directory(destination) as scratch,
        doing("writing", BYTES, total) as advance,
    ):
        files = {}
        for index in range(num_files):
            if spans := _file_spans(tensors, index, num_files):
                name = rank_file(index)
                files[name] = _write_file(source, scratch / name, spans, advance)
        publish.write_manifest(scratch, metadata, files, tensors, world_size=num_files)
    return total


def _file_spans(
    tensors: Mapping[str, manifest.TensorInfo], index: int, num_files: int
) -> dict[str, Span]:
    """Return an equal part of each tensor; file 0 has the tensors without elements."""
    spans = {key: aligned_chunk(Span(0, x.numel), index, num_files) for key, x in tensors.items()}
    is_first = index == 0
    return {k: x for k, x in spans.items() if x.numel or (is_first and not tensors[k].numel)}


def _write_file(
    source: TensorSource, path: Path, spans: Mapping[str, Span], advance: Advance
) -> manifest.FileInfo:
    """Write a file of spans. The header has the checksums, so each tensor is read twice."""
    stored = {}
    for key, span in spans.items():
        digests = manifest.chunk_digests(data for _, data in source.read(key, span))
        stored[key] = source.info(key).dtype, manifest.StoredSpan(span, digests)

    def chunks() -> Iterator[memoryview]:
        for key, span in spans.items():
            for _, data in source.read(key, span):
                yield data
                advance(len(data))

    return manifest.write_span_file(path, stored, chunks())
