"""Export of a checkpoint to a Hugging Face model directory, one chunk in memory at a time."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fsdpctl.checkpoint.cast import EXPORT_DTYPES, FLOATS, cast
from fsdpctl.checkpoint.destination import WRITTEN, new_export
from fsdpctl.checkpoint.manifest import BUFFER, PARAMETER, tensor_key
from fsdpctl.checkpoint.merge import MODEL, exported_weights
from fsdpctl.checkpoint.pretrained import INDEX_JSON, attached_files
from fsdpctl.checkpoint.publish import check_space
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.source import Tensors
from fsdpctl.checkpoint.tensor_file import (
    TensorEntry,
    make_header,
    write_synced,
    write_tensor_file,
)
from fsdpctl.config.hugging_face import CONFIG_JSON, config_json
from fsdpctl.config.serialize import config_of_checkpoint
from fsdpctl.data.tokenizer import TOKENIZER_JSON
from fsdpctl.errors import CheckpointError
from fsdpctl.io.documents import parse_json

OnBytes = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of a consolidation."""

    files: int
    num_bytes: int
    num_tensors: int
    has_config: bool
    has_tokenizer: bool


def consolidate(
    reader: CheckpointReader,
    destination: Path,
    *,
    dtype: str | None = None,
    max_file_bytes: int = 5 * 10**9,
    overwrite: bool = False,
    merges: bool = False,
    on_bytes: OnBytes = lambda count: None,
) -> Exported:
    """Write `destination`, which appears complete or not at all.

    Args:
        reader: The checkpoint.
        destination: A directory that does not exist yet.
        dtype: float32, bfloat16 or float16; None keeps the dtype of the master weights.
        max_file_bytes: Size beyond which a file gets no further tensor.
        overwrite: Whether to replace an earlier export.
        merges: Whether to merge adapters into the weights, in float32.
        on_bytes: Called with the bytes read since the last call.

    Raises:
        UsageError: If the destination exists, or there are adapters that are not to be merged.
        CheckpointError: If a checksum does not match.
    """
    destination = destination.resolve()  # the target of a symbolic link, not the link
    with new_export(destination, reader.folder, overwrite=overwrite) as folder:
        weights = exported_weights(reader, EXPORT_DTYPES.get(dtype or ""), merges=merges)
        exports = _exports(weights, dtype)
        check_space(destination, sum(each.entry.nbytes for each in exports))
        chunks = partial(_chunks, weights, on_bytes)
        return _write_folder(reader, folder, _split(exports, max_file_bytes), chunks)


@dataclass(frozen=True, slots=True)
class _Export:
    """A tensor to export."""

    key: str
    stored: str  # its dtype in the checkpoint
    entry: TensorEntry  # its entry in the exported file


def _exports(reader: Tensors, dtype: str | None) -> list[_Export]:
    found = []
    for kind in (PARAMETER, BUFFER):
        for name in reader.names(kind):
            key = tensor_key(kind, name)
            info = reader.info(key)
            casts = dtype is not None and info.dtype in FLOATS
            written = EXPORT_DTYPES[str(dtype)] if casts else info.dtype
            found.append(_Export(key, info.dtype, TensorEntry(name, written, tuple(info.shape))))
    return found


def _split(exports: Sequence[_Export], max_file_bytes: int) -> list[list[_Export]]:
    files: list[list[_Export]] = [[]]
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
    files: Sequence[Sequence[_Export]],
    chunks: Callable[[Sequence[_Export]], Iterator[memoryview]],
) -> Exported:
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(files, start=1):
        name = "model.safetensors"
        if len(files) > 1:
            name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        header = make_header([each.entry for each in tensors], {"format": "pt", **WRITTEN})
        write_tensor_file(folder / name, header, chunks(tensors))
        weight_map.update({each.entry.name: name for each in tensors})
    entries = [each.entry for tensors in files for each in tensors]
    total = sum(each.nbytes for each in entries)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / INDEX_JSON, index)
    attached = attached_files(reader)
    where = str(reader.folder / CONFIG_JSON)
    source = parse_json(attached.pop(CONFIG_JSON, b"{}"), dict[str, Any], where, CheckpointError)
    has_config = MODEL in reader.manifest.config
    if has_config:
        written = {each.dtype for each in entries}
        names = (name for name, short in EXPORT_DTYPES.items() if written == {short})
        model = config_of_checkpoint(reader.manifest.config, str(reader)).model
        _write_json(folder / CONFIG_JSON, config_json(model, next(names, "float32"), source))
    for name, content in attached.items():
        write_synced(folder / name, content)
    return Exported(len(files), total, len(weight_map), has_config, TOKENIZER_JSON in attached)


def _chunks(
    weights: Tensors, on_bytes: OnBytes, exports: Sequence[_Export]
) -> Iterator[memoryview]:
    for each in exports:
        for _, data in weights.read(each.key):
            yield cast(data, each.stored, each.entry.dtype, each.entry.name)
            on_bytes(len(data))


def _write_json(path: Path, content: object) -> None:
    write_synced(path, (json.dumps(content, indent=2) + "\n").encode())
