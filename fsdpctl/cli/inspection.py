"""`fsdpctl inspect-checkpoint` and `verify-checkpoint`."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from fsdpctl.cli.checkpoint import Source, found_checkpoint
from fsdpctl.cli.console import bytes_bar, emit, say, show_table
from fsdpctl.io.console import printable

if TYPE_CHECKING:
    from fsdpctl.checkpoint.manifest import TensorInfo
    from fsdpctl.checkpoint.reader import CheckpointReader

_PARAMETER = "model"  # the kind of tensor that weights are
_SHOWN_FILES = 16

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


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
    if manifest.base is not None:
        yield f"what was not trained is in {manifest.base.path}"
    yield (
        f"{reader.num_bytes:,} bytes in {len(manifest.files)} files, written by "
        f"{manifest.world_size} ranks with torch {manifest.versions.get('torch', 'unknown')}"
    )


def verify_checkpoint(source: Source, as_json: AsJson = False) -> None:
    """Check every byte, and that the base is what it was; exit code 4 if something is wrong."""
    from fsdpctl.checkpoint.base import check_base
    from fsdpctl.checkpoint.pretrained import open_base
    from fsdpctl.checkpoint.reader import CheckpointReader
    from fsdpctl.comm.base import LocalCollectives

    reader = CheckpointReader(found_checkpoint(source))
    with bytes_bar(reader.num_bytes) as advance:
        for count in reader.verify():
            advance(count)
    base = reader.manifest.base
    if base is not None:
        check_base(base, open_base(base, reader), LocalCollectives(), str(reader))
    tensors = len(reader.manifest.tensors)
    if as_json:
        about = {"path": str(reader.folder), "tensors": tensors, "bytes": reader.num_bytes}
        emit(json.dumps(about | {"verified": True}, indent=2))
    else:
        say(f"{reader.folder}: {tensors} tensors, {reader.num_bytes:,} bytes, all as written")
        if base is not None:
            say(f"{base.path}: what was not trained, as it was")
