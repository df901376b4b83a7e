"""`fsdpctl consolidate-checkpoint`, `inspect-checkpoint` and `verify-checkpoint`."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from fsdpctl.cli.console import bytes_bar, emit, note, say, show_table
from fsdpctl.config.sizes import parse_bytes
from fsdpctl.errors import UsageError, nearest
from fsdpctl.train.console import printable

if TYPE_CHECKING:
    from fsdpctl.checkpoint.manifest import TensorInfo
    from fsdpctl.checkpoint.reader import CheckpointReader

_PARAMETER = "model"  # the kind of tensor that weights are
_MOST_FILES = 1 << 16
_SHOWN_FILES = 16
_FORMATS = ("hf", "gguf")
_DTYPES = ("float32", "bfloat16", "float16")

Source = Annotated[
    Path,
    typer.Argument(
        metavar="SRC",
        help="A run directory (its newest checkpoint), a checkpoints directory, or a checkpoint.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def found_checkpoint(source: Path) -> Path:
    """The checkpoint that SRC means; says what was passed over."""
    from fsdpctl.checkpoint.folders import find_checkpoint, passed_over_in

    found = find_checkpoint(source)
    for line in passed_over_in(source):
        note(line)
    return found


def consolidate_checkpoint(
    source: Source,
    destination: Annotated[
        Path,
        typer.Argument(metavar="DST", help="A directory that does not exist yet; gguf: a file."),
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(_DTYPES), help="Cast; by default as saved, and gguf to float32."
        ),
    ] = None,
    max_file_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="hf: start another file beyond; by default 5GB."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace DST if it exists.")
    ] = False,
    format: Annotated[
        str,
        typer.Option(
            metavar="|".join(_FORMATS),
            help="hf: a directory that transformers opens. gguf: a file that llama.cpp opens.",
        ),
    ] = "hf",
) -> None:
    """Write whole tensors for the rest of the world."""
    for name, given, known in (("dtype", dtype, _DTYPES), ("format", format, _FORMATS)):
        if given is not None and given not in known:
            allowed = ", ".join(known)
            raise UsageError(f"--{name} {given}: allowed is {allowed}{nearest(given, known)}")
    if format == "hf":
        limit = parse_bytes(max_file_size or "5GB", "--max-file-size")
        _write_hugging_face(source, destination, dtype, limit, overwrite=overwrite)
    elif max_file_size is not None:
        raise UsageError("--max-file-size: only with --format hf; llama.cpp takes one file")
    else:
        _write_gguf(source, destination, dtype, overwrite=overwrite)


def _write_gguf(source: Path, destination: Path, dtype: str | None, *, overwrite: bool) -> None:
    from fsdpctl.checkpoint.consolidate import EXPORT_DTYPES
    from fsdpctl.checkpoint.gguf_file import write_gguf
    from fsdpctl.checkpoint.reader import CheckpointReader
    from fsdpctl.checkpoint.source import weight_bytes

    reader = CheckpointReader(found_checkpoint(source))
    with bytes_bar(weight_bytes(reader)) as advance:
        exported = write_gguf(
            reader,
            destination,
            dtype=EXPORT_DTYPES[dtype or "float32"],
            overwrite=overwrite,
            on_bytes=advance,
        )
    say(
        f"{exported.path}: {exported.num_tensors} tensors, {exported.num_bytes:,} bytes, of step "
        f"{reader.manifest.progress.step}"
    )
    for line in exported.notes:
        say(line)


def _write_hugging_face(
    source: Path, destination: Path, dtype: str | None, limit: int, *, overwrite: bool
) -> None:
    from fsdpctl.checkpoint.consolidate import consolidate, refuse_existing
    from fsdpctl.checkpoint.reader import CheckpointReader
    from fsdpctl.checkpoint.source import weight_bytes

    refuse_existing(destination.resolve(), overwrite=overwrite)
    reader = CheckpointReader(found_checkpoint(source))
    with bytes_bar(weight_bytes(reader)) as advance:
        exported = consolidate(
            reader,
            destination,
            dtype=dtype,
            max_file_bytes=limit,
            overwrite=overwrite,
            on_bytes=advance,
        )
    say(
        f"{destination}: {exported.num_tensors} tensors, {exported.num_bytes:,} bytes, of step "
        f"{reader.manifest.progress.step}"
    )
    if not exported.has_config:
        say("no config.json: the checkpoint does not say what model it is of")
    elif not exported.has_tokenizer:
        say("no tokenizer files: the run's data did not say which tokenizer made its tokens")


def shard_checkpoint(
    source: Annotated[Path, typer.Argument(metavar="HF_DIR", help="A Hugging Face directory.")],
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="A directory that does not exist yet.")
    ],
    world_size: Annotated[
        int, typer.Option(min=1, max=_MOST_FILES, help="Files to share the weights among.")
    ] = 1,
) -> None:
    """Write a sharded checkpoint of a model's weights, without training."""
    from fsdpctl.checkpoint.load import check_weights
    from fsdpctl.checkpoint.pretrained import assets_beside, open_weights
    from fsdpctl.checkpoint.publish import About
    from fsdpctl.checkpoint.shard import shard_weights
    from fsdpctl.checkpoint.source import weight_bytes
    from fsdpctl.config.compose import compose_config
    from fsdpctl.config.hub_cache import cached_model
    from fsdpctl.config.model_path import is_hugging_face
    from fsdpctl.config.serialize import config_words, model_words_only
    from fsdpctl.models.registry import build_model

    source = cached_model(source)
    if source.is_dir() and not is_hugging_face(source):
        raise UsageError(f"{source}: no Hugging Face directory: there is no config.json in it")
    config = compose_config(["model=hf", f"model.path={source}"]).config
    weights = open_weights(config.model)
    check_weights(weights, build_model(config.model))
    about = About(config=model_words_only(config_words(config)), attachments=assets_beside(source))
    with bytes_bar(weight_bytes(weights)) as advance:
        total = shard_weights(
            weights,
            destination,
            num_files=world_size,
            about=about,
            on_bytes=advance,
        )
    say(f"{destination}: {total:,} bytes of weights; train with model=hf model.path={destination}")


def inspect_checkpoint(source: Source, as_json: AsJson = False) -> None:
    """Show what is in a checkpoint: its run, its files, its tensors."""
    from fsdpctl.checkpoint.reader import CheckpointReader

    reader = CheckpointReader(found_checkpoint(source))
    if as_json:
        emit(json.dumps(_described(reader), indent=2, ensure_ascii=False))
        return
    manifest = reader.manifest
    for line in _summary(reader):
        say(line)
    if manifest.attachments:
        say(f"beside them: {', '.join(manifest.attachments)}")
    _show("file", ("bytes", "tensors"), _rows_of_files(reader))
    _show("tensor", ("shape", "dtype", "bytes", "files"), _rows_of_tensors(reader))
    _show("configuration", ("",), [[name, text] for name, text in manifest.config.items()])


def _described(reader: "CheckpointReader") -> dict[str, Any]:
    """The manifest, and where each tensor's elements lie."""
    content: dict[str, Any] = json.loads(reader.manifest.to_json())
    for key, about in content["tensors"].items():
        about["bytes"] = reader.info(key).nbytes
        about["spans"] = [
            {"file": part.file.path.name, "start": part.stored.span.start,
             "stop": part.stored.span.stop}
            for part in reader.parts(key)
        ]  # fmt: skip
    return {"path": str(reader.folder), "bytes": reader.num_bytes, **content}


def _show(first: str, others: tuple[str, ...], rows: list[list[str]]) -> None:
    if not rows:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right" if name in ("bytes", "tensors") else "left")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    say()
    show_table(table)


def _rows_of_files(reader: "CheckpointReader") -> list[list[str]]:
    counts = Counter(
        part.file.path.name for key in reader.manifest.tensors for part in reader.parts(key)
    )
    rows = [
        [name, f"{info.size:,}", str(counts[name])] for name, info in reader.manifest.files.items()
    ]
    left = len(rows) - _SHOWN_FILES
    return rows if left <= 0 else [*rows[:_SHOWN_FILES], [f"and {left} more", "", ""]]


def _rows_of_tensors(reader: "CheckpointReader") -> list[list[str]]:
    rows = []
    for key, info in sorted(reader.manifest.tensors.items(), key=_parameters_first):
        names = [part.file.path.stem.removeprefix("rank-") for part in reader.parts(key)]
        shown = ", ".join(str(int(name)) for name in names[:_SHOWN_FILES])
        shown += f" and {len(names) - _SHOWN_FILES} more" if len(names) > _SHOWN_FILES else ""
        shape = "x".join(map(str, info.shape)) or "scalar"
        rows.append([key, shape, info.dtype, f"{info.nbytes:,}", shown])
    return rows


def _parameters_first(entry: tuple[str, "TensorInfo"]) -> tuple[bool, str]:
    return not entry[0].startswith(f"{_PARAMETER}/"), entry[0]


def _summary(reader: "CheckpointReader") -> Iterator[str]:
    manifest = reader.manifest
    progress, tensors = manifest.progress, manifest.tensors
    kinds = Counter(key.split("/")[0] for key in tensors)
    weights = [info for key, info in tensors.items() if key.startswith(f"{_PARAMETER}/")]
    dtypes = ", ".join(sorted({info.dtype for info in weights}))
    model = manifest.config.get("model", "a model of one's own")
    yield f"{reader.folder}: {model}, step {progress.step}, {progress.samples:,} samples"
    numel = sum(info.numel for info in weights)
    yield f"{numel:,} parameters in {len(weights)} tensors of {dtypes}"
    states = [kind for kind in kinds if kind not in (_PARAMETER, "buffer")]
    yield f"optimizer states: {', '.join(states) or 'none'}"
    yield (
        f"{reader.num_bytes:,} bytes in {len(manifest.files)} files, written by "
        f"{manifest.world_size} ranks with torch {manifest.versions.get('torch', 'unknown')}"
    )


def verify_checkpoint(source: Source, as_json: AsJson = False) -> None:
    """Check every byte; exit code 4 if one is wrong."""
    from fsdpctl.checkpoint.reader import CheckpointReader

    reader = CheckpointReader(found_checkpoint(source))
    with bytes_bar(reader.num_bytes) as advance:
        for count in reader.verify():
            advance(count)
    tensors = len(reader.manifest.tensors)
    if as_json:
        about = {"path": str(reader.folder), "tensors": tensors, "bytes": reader.num_bytes}
        emit(json.dumps(about | {"verified": True}, indent=2))
    else:
        say(f"{reader.folder}: {tensors} tensors, {reader.num_bytes:,} bytes, all as written")
