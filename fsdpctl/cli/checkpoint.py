"""`fsdpctl consolidate-checkpoint` and `shard-checkpoint`."""

from pathlib import Path
from typing import Annotated

import typer

from fsdpctl.cli.console import bytes_bar, note, say
from fsdpctl.config.keys import parse_bytes
from fsdpctl.errors import UsageError, nearest

_MOST_FILES = 1 << 16
_FORMATS = ("hf", "gguf", "peft")
_DTYPES = ("float32", "bfloat16", "float16")

Source = Annotated[
    Path,
    typer.Argument(
        metavar="SRC",
        help="A run directory (its newest checkpoint), a checkpoints directory, or a checkpoint.",
    ),
]


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
            help="hf: a directory that transformers opens. gguf: a file that llama.cpp opens. "
            "peft: a directory of adapters alone, that peft opens.",
        ),
    ] = "hf",
    merge: Annotated[
        bool, typer.Option("--merge", help="hf, gguf: add adapters to the weights they are of.")
    ] = False,
) -> None:
    """Write whole tensors for the rest of the world."""
    for name, given, known in (("dtype", dtype, _DTYPES), ("format", format, _FORMATS)):
        if given is not None and given not in known:
            allowed = ", ".join(known)
            raise UsageError(f"--{name} {given}: allowed is {allowed}{nearest(given, known)}")
    how = {"overwrite": overwrite, "merges": merge}
    if format == "hf":
        limit = parse_bytes(max_file_size or "5GB", "--max-file-size")
        _write_hugging_face(source, destination, dtype, limit, **how)
    elif max_file_size is not None:
        raise UsageError("--max-file-size: only with --format hf; others take one file")
    elif format == "gguf":
        _write_gguf(source, destination, dtype, **how)
    elif merge or dtype is not None:
        option = "--merge" if merge else "--dtype"
        raise UsageError(f"{option}: not with --format peft, which writes adapters as they are")
    else:
        _write_peft(source, destination, overwrite=overwrite)


def _write_peft(source: Path, destination: Path, *, overwrite: bool) -> None:
    from fsdpctl.checkpoint.peft import write_peft
    from fsdpctl.checkpoint.reader import CheckpointReader

    reader = CheckpointReader(found_checkpoint(source))
    count = write_peft(reader, destination, overwrite=overwrite)
    say(f"{destination}: adapters, {count:,} bytes, of step {reader.manifest.progress.step}")


def _write_gguf(
    source: Path, destination: Path, dtype: str | None, *, overwrite: bool, merges: bool
) -> None:
    from fsdpctl.checkpoint.cast import EXPORT_DTYPES
    from fsdpctl.checkpoint.gguf_file import write_gguf
    from fsdpctl.checkpoint.pretrained import whole_weights
    from fsdpctl.checkpoint.reader import CheckpointReader
    from fsdpctl.checkpoint.source import weight_bytes

    reader = CheckpointReader(found_checkpoint(source))
    with bytes_bar(weight_bytes(whole_weights(reader))) as advance:
        exported = write_gguf(
            reader,
            destination,
            dtype=EXPORT_DTYPES[dtype or "float32"],
            overwrite=overwrite,
            merges=merges,
            on_bytes=advance,
        )
    say(
        f"{exported.path}: {exported.num_tensors} tensors, {exported.num_bytes:,} bytes, of step "
        f"{reader.manifest.progress.step}"
    )
    for line in exported.notes:
        say(line)


def _write_hugging_face(
    source: Path,
    destination: Path,
    dtype: str | None,
    limit: int,
    *,
    overwrite: bool,
    merges: bool,
) -> None:
    from fsdpctl.checkpoint.consolidate import consolidate
    from fsdpctl.checkpoint.destination import refuse_existing
    from fsdpctl.checkpoint.pretrained import whole_weights
    from fsdpctl.checkpoint.reader import CheckpointReader
    from fsdpctl.checkpoint.source import weight_bytes

    refuse_existing(destination.resolve(), overwrite=overwrite)
    reader = CheckpointReader(found_checkpoint(source))
    with bytes_bar(weight_bytes(whole_weights(reader))) as advance:
        exported = consolidate(
            reader,
            destination,
            dtype=dtype,
            max_file_bytes=limit,
            overwrite=overwrite,
            merges=merges,
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
