"""`fsdpctl inspect-checkpoint` and `verify-checkpoint`."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdpctl.checkpoint.checksums import ExportedDirectory
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.commands.checkpoint import Source, opened_checkpoint, verify_base
from fsdpctl.commands.console import AsJson, say, show_json, show_table
from fsdpctl.io.activity import BYTES, doing
from fsdpctl.io.run_files import CHECKSUMS
from fsdpctl.io.texts import one_line

_PARAMETER, _REMAINDER = "model", "remainder"  # the kinds of weights
_SHOWN_FILES = 16


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
    counts = Counter(
        part.file.path.name for key in reader.manifest.tensors for part in reader.parts(key)
    )
    rows = [
        [name, f"{info.size:,}", str(counts[name])] for name, info in reader.manifest.files.items()
    ]
    left = len(rows) - _SHOWN_FILES
    return rows if left <= 0 else [*rows[:_SHOWN_FILES], [f"and {left} more", "", ""]]


def _rows_of_tensors(reader: CheckpointReader) -> list[list[str]]:
    return [
        [key, "x".join(map(str, info.shape)) or "scalar", info.dtype, f"{info.nbytes:,}"]
        for key, info in sorted(
            reader.manifest.tensors.items(), key=lambda each: (not _is_weight(each[0]), each[0])
        )
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
