"""From spans to whole tensors in a Hugging Face model directory, one piece in memory at a time."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdpctl.checkpoint.manifest import BUFFER, PARAMETER, tensor_key
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.tensor_file import (
    DTYPE_NAMES,
    DTYPES,
    TensorEntry,
    make_header,
    sync_folder,
    tensor_bytes,
    write_tensor_file,
)
from fsdpctl.config.compose import config_from_words
from fsdpctl.data.tokenizer import BYTES, Tokenizer, open_tokenizer
from fsdpctl.errors import UsageError
from fsdpctl.models.registry import hugging_face_config

TOKENIZER = "tokenizer"  # the run directory's folder of tokenizer files
EXPORT_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
OnBytes = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Exported:
    """What a consolidation wrote."""

    files: int
    num_bytes: int
    num_tensors: int
    has_tokenizer: bool


def consolidate(
    reader: CheckpointReader,
    destination: Path,
    *,
    dtype: str | None = None,
    max_file_bytes: int = 5 * 10**9,
    overwrite: bool = False,
    on_bytes: OnBytes = lambda count: None,
) -> Exported:
    """Write `destination`, which appears complete or not at all.

    Args:
        reader: the checkpoint.
        destination: a directory that does not exist yet.
        dtype: float32, bfloat16 or float16; None keeps the masters' dtype.
        max_file_bytes: a file gets no further tensor beyond this size.
        overwrite: replace the directory if it exists.
        on_bytes: called with the number of bytes after each piece.

    Raises:
        UsageError: the destination exists.
        CheckpointError: a checksum does not match.
    """
    destination = destination.resolve()  # what a symbolic link points to, not the link
    refuse_existing(destination, overwrite=overwrite)
    _refuse_source(reader.folder.resolve(), destination)
    scratch = destination.with_name(f"{destination.name}.tmp-{os.getpid()}")
    try:
        scratch.mkdir(parents=True)
        exported = _write_folder(reader, scratch, dtype, max_file_bytes, on_bytes)
        sync_folder(scratch)
        _put_in_place(scratch, destination)
    except OSError as error:
        raise UsageError(f"{destination}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return exported


def refuse_existing(destination: Path, *, overwrite: bool) -> None:
    """Raise UsageError unless `destination` may be written: it is not there, or an old export."""
    if destination.exists() and not destination.is_dir():
        raise UsageError(f"{destination}: is a file; give a directory")
    if not destination.is_dir() or not any(destination.iterdir()):
        return
    if not overwrite:
        raise UsageError(f"{destination}: exists already; --overwrite replaces an earlier export")
    is_export = (destination / "config.json").is_file() and any(
        destination.glob("model*.safetensors")
    )
    if not is_export or any(each.is_dir() for each in destination.iterdir()):
        raise UsageError(f"{destination}: is no earlier export; --overwrite replaces only those")


def _refuse_source(folder: Path, destination: Path) -> None:
    if destination == folder or destination in folder.parents or folder in destination.parents:
        raise UsageError(f"{destination}: is where the checkpoint {folder} lies; give another")


def _put_in_place(scratch: Path, destination: Path) -> None:
    if destination.exists():
        aside = destination.with_name(f"{destination.name}.old-{os.getpid()}")
        destination.rename(aside)
        scratch.rename(destination)
        shutil.rmtree(aside)
    else:
        scratch.rename(destination)
    sync_folder(destination.parent)


def _entries(reader: CheckpointReader, dtype: str | None) -> list[tuple[str, TensorEntry]]:
    """Every tensor's key, and the entry it gets."""
    found = []
    for kind in (PARAMETER, BUFFER):
        for name in reader.names(kind):
            info = reader.info(tensor_key(kind, name))
            stored = DTYPES[info.dtype]
            cast = dtype is not None and stored.is_floating_point
            chosen = DTYPES[EXPORT_DTYPES[str(dtype)]] if cast else stored
            found.append((tensor_key(kind, name), TensorEntry(name, chosen, tuple(info.shape))))
    return found


def _split(
    entries: Sequence[tuple[str, TensorEntry]], max_file_bytes: int
) -> list[list[tuple[str, TensorEntry]]]:
    files: list[list[tuple[str, TensorEntry]]] = [[]]
    size = 0
    for key, entry in entries:
        if files[-1] and size + entry.nbytes > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append((key, entry))
        size += entry.nbytes
    return files


def _write_folder(
    reader: CheckpointReader,
    folder: Path,
    dtype: str | None,
    max_file_bytes: int,
    on_bytes: OnBytes,
) -> Exported:
    files = _split(_entries(reader, dtype), max_file_bytes)
    weight_map: dict[str, str] = {}
    total = 0
    for number, entries in enumerate(files, start=1):
        name = "model.safetensors"
        if len(files) > 1:
            name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        header = make_header([entry for _, entry in entries], {"format": "pt"})
        write_tensor_file(folder / name, header, _chunks(reader, entries, on_bytes))
        weight_map.update({entry.name: name for _, entry in entries})
        total += sum(entry.nbytes for _, entry in entries)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)
    dtypes = {DTYPE_NAMES[entry.dtype] for entries in files for _, entry in entries}
    saved = next((name for name, short in EXPORT_DTYPES.items() if dtypes == {short}), "float32")
    config = config_from_words(reader.manifest.config)
    _write_json(folder / "config.json", hugging_face_config(config.model, saved))
    tokenizer = run_tokenizer(reader, config.data.tokenizer)
    if tokenizer is not None:
        tokenizer.save(folder)
    return Exported(len(files), total, len(weight_map), tokenizer is not None)


def _chunks(
    reader: CheckpointReader, entries: Sequence[tuple[str, TensorEntry]], on_bytes: OnBytes
) -> Iterator[memoryview]:
    for key, entry in entries:
        for _, values in reader.read_parts(key):
            data = tensor_bytes(values.to(entry.dtype))
            yield data
            on_bytes(len(data))


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def run_tokenizer(reader: CheckpointReader, name: str | None) -> Tokenizer | None:
    """The tokenizer of the checkpoint's run: its copy there, else where the run had it from."""
    beside = reader.folder.resolve().parent.parent / TOKENIZER
    source = str(beside) if (beside / "tokenizer.json").is_file() else str(name)
    if source != BYTES and not (Path(source) / "tokenizer.json").is_file():
        return None
    return open_tokenizer(source)
