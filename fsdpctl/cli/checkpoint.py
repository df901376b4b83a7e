"""`fsdpctl consolidate-checkpoint`, `inspect-checkpoint` and `verify-checkpoint`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn
from rich.table import Table

from fsdpctl.cli.console import err, note, out, say
from fsdpctl.config.sizes import parse_bytes
from fsdpctl.errors import UsageError, nearest

_MOST_FILES = 1 << 16
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


def _progress() -> Progress:
    return Progress(
        BarColumn(bar_width=24),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )


def consolidate_checkpoint(
    source: Source,
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="A directory that does not exist yet.")
    ],
    dtype: Annotated[
        str | None, typer.Option(metavar="|".join(_DTYPES), help="Cast; by default as saved.")
    ] = None,
    max_file_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Start another file beyond, as in 5GB.")
    ] = "5GB",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace DST if it exists.")
    ] = False,
) -> None:
    """Write a directory that transformers opens."""
    from fsdpctl.checkpoint.consolidate import consolidate, refuse_existing
    from fsdpctl.checkpoint.reader import CheckpointReader

    if dtype is not None and dtype not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise UsageError(f"--dtype {dtype}: allowed is {known}{nearest(dtype, _DTYPES)}")
    limit = parse_bytes(max_file_size, "--max-file-size")
    refuse_existing(destination.resolve(), overwrite=overwrite)
    reader = CheckpointReader(found_checkpoint(source))
    with _progress() as progress:
        task = progress.add_task("", total=None)
        exported = consolidate(
            reader,
            destination,
            dtype=dtype,
            max_file_bytes=limit,
            overwrite=overwrite,
            on_bytes=lambda count: progress.update(task, advance=count),
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
    from fsdpctl.checkpoint.pretrained import assets_beside, is_hugging_face, open_weights
    from fsdpctl.checkpoint.publish import About
    from fsdpctl.checkpoint.shard import shard_weights
    from fsdpctl.config.compose import compose_config, config_words, model_words_only
    from fsdpctl.models.registry import build_model

    if source.is_dir() and not is_hugging_face(source):
        raise UsageError(f"{source}: no Hugging Face directory: there is no config.json in it")
    config = compose_config(["model=hf", f"model.path={source}"]).config
    weights = open_weights(config.model)
    check_weights(weights, build_model(config.model))
    about = About(config=model_words_only(config_words(config)), attachments=assets_beside(source))
    with _progress() as progress:
        task = progress.add_task("", total=None)
        total = shard_weights(
            weights,
            destination,
            num_files=world_size,
            about=about,
            on_bytes=lambda count: progress.update(task, advance=count),
        )
    say(f"{destination}: {total:,} bytes of weights; train with model=hf model.path={destination}")


def inspect_checkpoint(source: Source, as_json: AsJson = False) -> None:
    """Show what is in a checkpoint."""
    from fsdpctl.checkpoint.reader import CheckpointReader

    reader = CheckpointReader(found_checkpoint(source))
    manifest = reader.manifest
    if as_json:
        content = json.loads(manifest.to_json()) | {"path": str(reader.folder)}
        typer.echo(json.dumps(content, indent=2, ensure_ascii=False))
        return
    say(
        f"{reader.folder}: step {manifest.progress.step}, {manifest.progress.samples} samples, "
        f"written by {manifest.world_size} ranks, {reader.num_bytes:,} bytes, "
        f"torch {manifest.versions['torch']}"
    )
    table = Table("tensor", "shape", "dtype", box=None, pad_edge=False, header_style="bold")
    for key, info in manifest.tensors.items():
        table.add_row(key, "x".join(map(str, info.shape)) or "scalar", info.dtype)
    out.print(table)


def verify_checkpoint(source: Source, as_json: AsJson = False) -> None:
    """Check every byte; exit code 4 if one is wrong."""
    from fsdpctl.checkpoint.reader import CheckpointReader

    reader = CheckpointReader(found_checkpoint(source))
    with _progress() as progress:
        task = progress.add_task("", total=reader.num_bytes)
        for done in reader.verify():
            progress.update(task, completed=done)
    tensors = len(reader.manifest.tensors)
    if as_json:
        about = {"path": str(reader.folder), "tensors": tensors, "bytes": reader.num_bytes}
        typer.echo(json.dumps(about | {"verified": True}, indent=2))
    else:
        say(f"{reader.folder}: {tensors} tensors, {reader.num_bytes:,} bytes, all as written")
