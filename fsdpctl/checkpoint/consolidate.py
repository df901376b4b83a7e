"""Conversion of a checkpoint to a Hugging Face directory and back, chunk by chunk."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    """Write the new directory `destination`, which appears complete or not at all.

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

            in_float32 = float32_names(
                config_of_checkpoint(reader.manifest.config, str(reader)).model
            )
        exports = _exported_tensors(weights, dtype, in_float32)
        publish.check_space(destination, sum(each.entry.nbytes for each in exports))
        files = _split_into_files(exports, max_file_bytes)
        exports_by_name = {each.entry.name: each for each in exports}

        def read(entry: TensorEntry) -> Iterator[memoryview]:
            for _, data in weights.read(exports_by_name[entry.name].key):
                yield cast(data, exports_by_name[entry.name].stored_dtype, entry.dtype, entry.name)
                advance(len(data))

        with doing("exporting", BYTES, weight_bytes(weights)) as advance:
            floats = (
                x for x in exports if x.stored_dtype in FLOATS and x.entry.name not in in_float32
            )
            notes = _write_folder(reader, folder, files, read, {x.entry.dtype for x in floats})
    total = sum(each.entry.nbytes for each in exports)
    notes += notes_on_merge(reader, merge=merge)
    return publish.ExportResult(destination, total, len(exports), notes, len(files))


@dataclass(frozen=True, slots=True)
class _ExportedTensor:
    key: str
    stored_dtype: str  # in the checkpoint
    entry: TensorEntry  # in the exported file


def _exported_tensors(
    reader: TensorSource, dtype: str | None, in_float32: Collection[str]
) -> list[_ExportedTensor]:
    exports = []
    for key in tensor_keys(reader):
        info, name = reader.info(key), key.partition("/")[2]
        casts = dtype is not None and info.dtype in FLOATS
        target = "float32" if name in in_float32 else str(dtype)
        to_dtype = EXPORT_DTYPES[target] if casts else info.dtype
        exports.append(
            _ExportedTensor(key, info.dtype, TensorEntry(name, to_dtype, tuple(info.shape)))
        )
    return exports


def _split_into_files(
    exports: Sequence[_ExportedTensor], max_file_bytes: int
) -> list[list[_ExportedTensor]]:
    files: list[list[_ExportedTensor]] = [[]]
    size = 0
    for each in exports:
        if files[-1] and size + each.entry.nbytes > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(each)
        size += each.entry.nbytes
    return files


def _write_folder(
    reader: CheckpointReader,
    folder: Path,
    files: Sequence[Sequence[_ExportedTensor]],
    read: Callable[[TensorEntry], Iterator[memoryview]],
    dtypes: Collection[str],
) -> tuple[str, ...]:
    """Write the files; return notes on missing files. `dtypes` are the model's dtypes."""
    weight_map: dict[str, str] = {}
    checksums = ChecksumWriter()
    for number, tensors in enumerate(files, start=1):
        name = "model.safetensors"
        if len(files) > 1:
            name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        metadata = {"format": "pt", **publish.EXPORT_METADATA}
        checksums.write_tensors(folder / name, [each.entry for each in tensors], metadata, read)
        weight_map.update({each.entry.name: name for each in tensors})
    entries = [each.entry for tensors in files for each in tensors]
    if len(files) > 1:
        total = sum(each.nbytes for each in entries)
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
        for rank in range(num_files):
            if spans := _file_spans(tensors, rank, num_files):
                name = rank_file(rank)
                files[name] = _write_file(source, scratch / name, spans, advance)
        publish.write_manifest(scratch, metadata, files, tensors, num_files)
    return total


def _file_spans(
    tensors: Mapping[str, manifest.TensorInfo], rank: int, num_files: int
) -> dict[str, Span]:
    spans = {key: aligned_chunk(Span(0, x.numel), rank, num_files) for key, x in tensors.items()}
    empty = {key for key, info in tensors.items() if rank == 0 and not info.numel}
    return {key: span for key, span in spans.items() if span.numel or key in empty}


def _write_file(
    source: TensorSource, path: Path, spans: Mapping[str, Span], advance: Advance
) -> manifest.FileInfo:
    """Write a file of spans. The header precedes the tensors, so they are read twice."""
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
