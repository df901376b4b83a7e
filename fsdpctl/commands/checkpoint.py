"""`fsdpctl shard-checkpoint` and `inspect-checkpoint`, and helpers of commands on checkpoints."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from fsdpctl.checkpoint.consolidate import write_sharded_weights
from fsdpctl.checkpoint.pretrained import open_base, open_weights, read_model_assets
from fsdpctl.checkpoint.publish import CheckpointMetadata
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.remote_checkpoints import open_checkpoint
from fsdpctl.checkpoint.run_checkpoints import describe_incomplete_in, find_checkpoint
from fsdpctl.commands.printing import AsJson, note, say, show_json, show_table
from fsdpctl.config.compose import compose_config
from fsdpctl.config.hub import model_directory
from fsdpctl.config.model_path import is_foreign_model
from fsdpctl.config.serialize import only_model_settings, to_settings
from fsdpctl.errors import UsageError
from fsdpctl.io.activity import doing
from fsdpctl.io.stores import is_remote
from fsdpctl.io.texts import one_line

_MOST_FILES = 1 << 16
_PARAMETER, _REMAINDER = "model", "remainder"  # the kinds of weights
_SHOWN_FILES = 16

SourceArg = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="A run directory (its newest checkpoint), a checkpoints directory, or a checkpoint; "
        "also in an object store.",
    ),
]


def resolve_checkpoint(source: Path) -> Path:
    """Return the checkpoint in SRC, and print which incomplete ones were skipped."""
    checkpoint = find_checkpoint(source)
    note(*describe_incomplete_in(source))
    return checkpoint


def open_source(source: str, *, best: bool = False) -> CheckpointReader:
    """Open the newest or the best checkpoint in SRC, which may be in an object store."""
    if best:
        from fsdpctl.run.directory import open_best  # imports torch

        return open_best(source)
    return open_checkpoint(source if is_remote(source) else str(resolve_checkpoint(Path(source))))


def verify_base(reader: CheckpointReader) -> None:
    """Verify the base model, which has the untrained weights of a checkpoint, if it has one."""
    info = reader.manifest.base
    if info is None:
        return
    from fsdpctl.checkpoint.initial_weights import BaseWeights
    from fsdpctl.comm.collectives import Collectives

    with doing("verifying the base model"):
        BaseWeights(info, open_base(info, reader), str(reader)).verify(Collectives())


def shard_checkpoint(
    source: Annotated[Path, typer.Argument(metavar="HF_DIR", help="A Hugging Face directory.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="A new directory.")],
    world_size: Annotated[
        int, typer.Option(min=1, max=_MOST_FILES, help="Number of files to split the weights into.")
    ] = 1,
) -> None:
    """Convert a Hugging Face model to a checkpoint."""
    from fsdpctl.checkpoint.load import check_weights
    from fsdpctl.models.build_model import build_model

    source = model_directory(source)
    if source.is_dir() and not is_foreign_model(source):
        raise UsageError(f"{source}: not a Hugging Face directory: config.json not found")
    config = compose_config(["model=hf", f"model.path={source}"]).config
    weights = open_weights(config.model)
    check_weights(weights, build_model(config.model))
    metadata = CheckpointMetadata(
        config=only_model_settings(to_settings(config)), attachments=read_model_assets(source)
    )
    total = write_sharded_weights(weights, destination, num_files=world_size, metadata=metadata)
    say(f"{destination}: {total:,} bytes of weights; train with model=hf model.path={destination}")


def inspect_checkpoint(source: SourceArg, as_json: AsJson = False) -> None:
    """Show a checkpoint's run, files and tensors."""
    reader = open_source(source)
    if as_json:
        show_json(_to_json(reader))
        return
    manifest = reader.manifest
    say(*map(one_line, _summary(reader)))
    if manifest.attachments:
        say(f"attached files: {', '.join(manifest.attachments)}")
    _show(("file", "bytes", "tensors"), _rows_of_files(reader))
    _show(("tensor", "shape", "dtype", "bytes"), _rows_of_tensors(reader))
    _show(("configuration", ""), list(map(list, manifest.config.items())))


def _to_json(reader: CheckpointReader) -> dict[str, Any]:
    """Return the manifest, and the file and span of each part of a tensor."""
    content: dict[str, Any] = json.loads(reader.manifest.to_json())
    for key, info in content["tensors"].items():
        info["bytes"] = reader.manifest.tensors[key].nbytes
        info["spans"] = [
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
    dtypes += " with 8-bit remainders" if _REMAINDER in kinds else ""
    model = manifest.config.get("model", "a custom model")
    at = f", step {progress.step}, {progress.samples:,} samples"
    if not manifest.config:  # from a custom training loop: only the optimizer counts steps
        at = f", optimizer step {progress.optimizer_step}" * (progress.optimizer_step > 0)
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
