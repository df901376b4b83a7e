"""The commands on checkpoints: `consolidate-checkpoint`, `shard-`, `inspect-` and `verify-`."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from fsdpctl.checkpoint.checksums import ExportedDirectory
from fsdpctl.checkpoint.consolidate import consolidate, shard_weights
from fsdpctl.checkpoint.folders import find_checkpoint, passed_over_in
from fsdpctl.checkpoint.gguf_file import write_gguf
from fsdpctl.checkpoint.pretrained import assets_beside, open_base, open_weights
from fsdpctl.checkpoint.publish import About, check_destination
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.remote_run import open_checkpoint
from fsdpctl.checkpoint.tensor_file import EXPORT_DTYPES
from fsdpctl.commands.config_args import check_choice
from fsdpctl.commands.console import AsJson, note, say, show_json, show_table
from fsdpctl.config.compose import compose_config
from fsdpctl.config.hub import cached_model
from fsdpctl.config.keys import parse_bytes
from fsdpctl.config.model_path import is_hugging_face
from fsdpctl.config.serialize import config_words, model_words_only
from fsdpctl.errors import UsageError
from fsdpctl.io.activity import BYTES, doing
from fsdpctl.io.run_files import CHECKSUMS
from fsdpctl.io.stores import is_remote
from fsdpctl.io.texts import one_line

_MOST_FILES = 1 << 16
_FORMATS = ("hf", "gguf", "peft")
_DTYPES = ("float32", "bfloat16", "float16")
_PARAMETER, _REMAINDER = "model", "remainder"  # the kinds of weights
_SHOWN_FILES = 16

Source = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="A run directory (its newest checkpoint), a checkpoints directory, or a checkpoint; "
        "also in an object store.",
    ),
]


def found_checkpoint(source: Path) -> Path:
    """Return the checkpoint in SRC, and print which incomplete ones were skipped."""
    found = find_checkpoint(source)
    note(*passed_over_in(source))
    return found


def opened_checkpoint(source: str, *, best: bool = False) -> CheckpointReader:
    """Open the newest or the best checkpoint in SRC, which may be in an object store."""
    if best:
        from fsdpctl.run.directory import open_best  # imports torch

        return open_best(source)
    return open_checkpoint(source if is_remote(source) else str(found_checkpoint(Path(source))))


def verify_base(reader: CheckpointReader) -> None:
    """Verify the model that has the untrained weights of a checkpoint, if there is one."""
    info = reader.manifest.base
    if info is None:
        return
    from fsdpctl.checkpoint.base import Base
    from fsdpctl.comm.base import Collectives

    with doing("verifying the base model"):
        Base(info, open_base(info, reader), str(reader)).verified(Collectives())


def consolidate_checkpoint(  # noqa: PLR0913  # each is an option
    source: Source,
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="A new directory; for gguf, a new file.")
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(_DTYPES),
            help="Dtype of the exported weights; default: as saved, for gguf float32.",
        ),
    ] = None,
    max_file_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="hf: size beyond which another file starts; default: 5GB."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier export in DST.")
    ] = False,
    format: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(_FORMATS),
            help="hf: a directory for transformers. gguf: a file for llama.cpp. peft: a directory "
            "of adapters only, for peft. Default: gguf if DST ends with it, else hf.",
        ),
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Export the one with the lowest validation loss.")
    ] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="hf, gguf: merge adapters into the weights.")
    ] = False,
) -> None:
    """Export a checkpoint to Hugging Face, GGUF or PEFT."""
    check_choice("--dtype", dtype, _DTYPES)
    check_choice("--format", format, _FORMATS)
    format = format or ("gguf" if destination.suffix == ".gguf" else "hf")
    if format != "hf" and max_file_size is not None:
        raise UsageError("--max-file-size: only valid with --format hf")
    if format == "peft":
        if merge or dtype is not None:
            option = "--merge" if merge else "--dtype"
            raise UsageError(f"{option}: not valid with --format peft, which keeps adapters as is")
        from fsdpctl.checkpoint.peft import write_peft

        reader = opened_checkpoint(source, best=best)
        count = write_peft(reader, destination, overwrite=overwrite)
        say(f"{destination}: {count:,} bytes of adapters, of step {reader.manifest.progress.step}")
        return
    limit = parse_bytes(max_file_size or "5GB", "--max-file-size")
    if format == "hf":
        check_destination(destination.resolve(), overwrite=overwrite)
    reader = opened_checkpoint(source, best=best)
    verify_base(reader)
    about: dict[str, Any] = {"overwrite": overwrite, "merges": merge}
    if format == "gguf":
        dtype = EXPORT_DTYPES[dtype or "float32"]
        exported = write_gguf(reader, destination, dtype=dtype, **about)
    else:
        exported = consolidate(reader, destination, dtype=dtype, max_file_bytes=limit, **about)
    size = f"{exported.num_tensors} tensors, {exported.num_bytes:,} bytes"
    say(f"{exported.path}: {size}, of step {reader.manifest.progress.step}", *exported.notes)


def shard_checkpoint(
    source: Annotated[Path, typer.Argument(metavar="HF_DIR", help="A Hugging Face directory.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="A new directory.")],
    world_size: Annotated[
        int, typer.Option(min=1, max=_MOST_FILES, help="Number of files to share the weights.")
    ] = 1,
) -> None:
    """Convert a Hugging Face model to a checkpoint."""
    from fsdpctl.checkpoint.load import check_weights
    from fsdpctl.models.registry import build_model

    source = cached_model(source)
    if source.is_dir() and not is_hugging_face(source):
        raise UsageError(f"{source}: not a Hugging Face directory: config.json not found")
    config = compose_config(["model=hf", f"model.path={source}"]).config
    weights = open_weights(config.model)
    check_weights(weights, build_model(config.model))
    about = About(config=model_words_only(config_words(config)), attachments=assets_beside(source))
    total = shard_weights(weights, destination, num_files=world_size, about=about)
    say(f"{destination}: {total:,} bytes of weights; train with model=hf model.path={destination}")


def inspect_checkpoint(source: Source, as_json: AsJson = False) -> None:
    """Show a checkpoint's run, files and tensors."""
    reader = opened_checkpoint(source)
    if as_json:
        show_json(_described(reader))
        return
    manifest = reader.manifest
    say(*map(one_line, _summary(reader)))
    if manifest.attachments:
        say(f"attached files: {', '.join(manifest.attachments)}")
    _show(("file", "bytes", "tensors"), _rows_of_files(reader))
    _show(("tensor", "shape", "dtype", "bytes"), _rows_of_tensors(reader))
    _show(("configuration", ""), [[name, text] for name, text in manifest.config.items()])


def _described(reader: CheckpointReader) -> dict[str, Any]:
    """Return the manifest, and the file and span of each part of a tensor."""
    content: dict[str, Any] = json.loads(reader.manifest.to_json())
    for key, about in content["tensors"].items():
        about["bytes"] = reader.manifest.tensors[key].nbytes
        about["spans"] = [
            {"file": part.file.path.name, "start": part.stored.span.start,
             "stop": part.stored.span.stop}
            for part in reader.parts(key)
        ]  # fmt: skip
    return {"path": str(reader), "bytes": reader.num_bytes, **content}


def _show(columns: tuple[str, ...], rows: list[list[str]]) -> None:
    if rows:
        say("")
        show_table(columns, rows, right=("bytes", "tensors"))


def _rows_of_files(reader: CheckpointReader) -> list[list[str]]:
    manifest = reader.manifest
    counts = Counter(x.file.path.name for key in manifest.tensors for x in reader.parts(key))
    rows = [[name, f"{x.size:,}", str(counts[name])] for name, x in manifest.files.items()]
    left = len(rows) - _SHOWN_FILES
    return rows if left <= 0 else [*rows[:_SHOWN_FILES], [f"and {left} more", "", ""]]


def _rows_of_tensors(reader: CheckpointReader) -> list[list[str]]:
    tensors = sorted(reader.manifest.tensors.items(), key=lambda x: (not _is_weight(x[0]), x[0]))
    return [
        [key, "x".join(map(str, info.shape)) or "scalar", info.dtype, f"{info.nbytes:,}"]
        for key, info in tensors
    ]


def _is_weight(key: str) -> bool:
    return key.startswith(f"{_PARAMETER}/")


def _summary(reader: CheckpointReader) -> Iterator[str]:
    manifest = reader.manifest
    progress, tensors = manifest.progress, manifest.tensors
    kinds = Counter(key.split("/")[0] for key in tensors)
    weights = [info for key, info in tensors.items() if _is_weight(key)]
    dtypes = ", ".join(sorted({info.dtype for info in weights}))
    dtypes += " with 8 more bits each" if _REMAINDER in kinds else ""
    model = manifest.config.get("model", "a custom model")
    at = f", step {progress.step}, {progress.samples:,} samples"
    if not manifest.config:  # of a custom training loop, of which only the optimizer may count
        at = f", optimizer step {steps}" if (steps := progress.optimizer_step) else ""
    yield f"{reader}: {model}{at}"
    numel = sum(info.numel for info in weights)
    yield f"{numel:,} parameters in {len(weights)} tensors of {dtypes}"
    states = [kind for kind in kinds if kind not in (_PARAMETER, "buffer", _REMAINDER)]
    yield f"optimizer states: {', '.join(states) or 'none'}"
    if manifest.base is not None:
        yield f"base model (untrained weights): {manifest.base.path}"
    yield (
        f"{reader.num_bytes:,} bytes in {len(manifest.files)} files, written by "
        f"{manifest.world_size} ranks with torch {manifest.versions.get('torch', 'unknown')}"
    )


def verify_checkpoint(source: Source, as_json: AsJson = False) -> None:
    """Verify the checksums of a checkpoint or an export.

    The exit code is 4 if one does not match.
    """
    found: CheckpointReader | ExportedDirectory
    if (Path(source) / CHECKSUMS).exists():
        found = ExportedDirectory(Path(source))
        where, counts = str(found.folder), found.counts()
    else:
        found = opened_checkpoint(source)
        where = str(found)
        counts = {"tensors": len(found.manifest.tensors), "bytes": found.num_bytes}
    with doing("verifying", BYTES, counts["bytes"]) as advance:
        for count in found.verify():
            advance(count)
    (what, number), (_, size) = counts.items()
    lines = [f"{where}: {number} {what}, {size:,} bytes verified"]
    if isinstance(found, CheckpointReader) and found.manifest.base is not None:
        verify_base(found)
        lines.append(f"{found.manifest.base.path}: base model verified")
    if as_json:
        show_json({"path": where, **counts, "verified": True})
        return
    say(*lines)
