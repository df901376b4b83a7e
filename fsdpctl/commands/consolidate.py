"""`fsdpctl consolidate-checkpoint`, which exports a checkpoint, and `verify-checkpoint`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fsdpctl.checkpoint.checksums import ExportedDirectory
from fsdpctl.checkpoint.consolidate import consolidate
from fsdpctl.checkpoint.findings import Finding
from fsdpctl.checkpoint.gguf_export import write_gguf
from fsdpctl.checkpoint.publish import CARD, check_destination
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.tensor_file import EXPORT_DTYPES, write_synced
from fsdpctl.commands.checkpoint import SourceArg, open_source, verify_base
from fsdpctl.commands.config_args import check_choice
from fsdpctl.commands.printing import AsJson, say, show_json
from fsdpctl.config.hub import has_weights, model_directory
from fsdpctl.config.keys import parse_bytes
from fsdpctl.config.model_path import is_foreign_model
from fsdpctl.config.peft import has_adapters
from fsdpctl.errors import CheckpointError, IncompleteExportError, UsageError
from fsdpctl.io.activity import BYTES, doing
from fsdpctl.io.files import nearest_path_hint
from fsdpctl.io.hub_upload import UploadTarget
from fsdpctl.io.run_files import CHECKSUMS

_FORMATS = ("hf", "gguf", "peft")
_DTYPES = ("float32", "bfloat16", "float16")


def consolidate_checkpoint(  # noqa: PLR0913  # each is an option
    source: SourceArg,
    destination: Annotated[
        str,
        typer.Argument(
            metavar="DST",
            help="A new directory; for gguf, a new file. hf://ORG/NAME: the directory NAME, which "
            "is uploaded to a private repository.",
        ),
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
        typer.Option(metavar="SIZE", help="hf: size at which another file starts; default: 5GB."),
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
        bool, typer.Option("--best", help="Export the checkpoint with the lowest validation loss.")
    ] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="hf, gguf: merge adapters into the weights.")
    ] = False,
) -> None:
    """Export a checkpoint to Hugging Face, GGUF or PEFT."""
    check_choice("--dtype", dtype, _DTYPES)
    check_choice("--format", format, _FORMATS)
    target = UploadTarget(destination, overwrite) if ":/" in destination else None  # hf://
    path = Path(destination if target is None else target.name.partition("/")[2])
    format = format or ("gguf" if path.suffix == ".gguf" else "hf")
    if format != "hf" and max_file_size is not None:
        raise UsageError("--max-file-size: only valid with --format hf")
    if format == "gguf" and target is not None:
        raise UsageError(f"{destination}: only valid with --format hf or peft")
    if format == "peft" and (merge or dtype is not None):
        option = "--merge" if merge else "--dtype"
        raise UsageError(f"{option}: only valid with --format hf or gguf")
    limit = parse_bytes(max_file_size or "5GB", "--max-file-size")
    if format != "gguf":
        check_destination(path.resolve(), overwrite=overwrite)
    if target is not None:
        target.check()
    reader = open_source(source, best=best)
    options: dict[str, Any] = {"overwrite": overwrite}
    step = f"of step {reader.manifest.progress.step}"
    if format == "peft":
        from fsdpctl.checkpoint.peft import write_peft

        count = write_peft(reader, path, names_base=target is None, **options)
        say(f"{path}: {count:,} bytes of adapters, {step}")
    else:
        verify_base(reader)
        options["merge"] = merge
        if format == "gguf":
            exported = write_gguf(reader, path, dtype=EXPORT_DTYPES[dtype or "float32"], **options)
        else:
            exported = consolidate(reader, path, dtype=dtype, max_file_bytes=limit, **options)
        size = f"{exported.num_tensors} tensors, {exported.num_bytes:,} bytes"
        say(f"{exported.path}: {size}, {step}", *exported.notes)
    _finish(reader, path.resolve(), is_peft=format == "peft")
    if target is not None:
        say(f"{target.upload(path)}: uploaded, private")


def _finish(reader: CheckpointReader, exported_path: Path, *, is_peft: bool) -> None:
    """Add a model card if the export is a directory; verify the export."""
    from fsdpctl.checkpoint.verify_export import verify_export  # imports torch
    from fsdpctl.run.card import base_model_path, model_card

    path = base_model_path(reader)
    base = Path(path) if path and Path(path).exists() else None
    if path and base is None:
        say(f"{path}: base model not found, so the export is not compared with it")
    if exported_path.is_dir():
        write_synced(exported_path / CARD, model_card(reader, is_peft=is_peft))
        exported = ExportedDirectory(exported_path)
        _read_all(exported, exported.counts()["bytes"])
    findings = verify_export(exported_path, base, is_trained=reader.manifest.progress.step > 0)
    say(*map(str, findings), f"{exported_path}: verified")
    _raise_if_lost(exported_path, findings)


def verify_checkpoint(
    source: SourceArg,
    base: Annotated[
        str | None,
        typer.Option(metavar="NAME|DIR", help="Base model of an export: a name, directory or run."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify a checkpoint, or an export and its base.

    The exit code is 4 if a checksum does not match, and 3 if something is lost.
    """
    folder, findings = Path(source), list[Finding]()
    if base is not None and not (is_foreign_model(folder) or has_adapters(folder)):
        raise UsageError(f"--base: only valid with an export; {source} is not one")
    if base is not None or (folder / CHECKSUMS).exists():
        location, (counts, findings) = str(folder), _verify_export(folder, base)
        lines = list(map(str, findings))
    else:
        reader = open_source(source)
        location, lines = str(reader), []
        counts = {"tensors": len(reader.manifest.tensors), "bytes": reader.num_bytes}
        _read_all(reader, reader.num_bytes)
        if reader.manifest.base is not None:
            verify_base(reader)
            lines = [f"{reader.manifest.base.path}: base model verified"]
    if as_json:
        comparison = {"base": base, "findings": list(map(asdict, findings))} if base else {}
        is_complete = not any(each.is_lost for each in findings)
        show_json({"path": location, **counts, "verified": is_complete, **comparison})
    else:
        noun = next(iter(counts))  # files or tensors
        say(f"{location}: {counts[noun]} {noun}, {counts['bytes']:,} bytes verified", *lines)
    _raise_if_lost(folder, findings)


def _verify_export(folder: Path, base: str | None) -> tuple[dict[str, int], list[Finding]]:
    """Verify the checksums of an export, and compare the export with its `base`, if any."""
    counts, findings = {"files": 0, "bytes": 0}, list[Finding]()
    try:
        if (folder / CHECKSUMS).exists():
            exported = ExportedDirectory(folder)
            _read_all(exported, exported.counts()["bytes"])
            counts = exported.counts()
    except CheckpointError as error:
        if base is None:
            raise
        findings.append(Finding("files", str(error), is_lost=True))
    if base is not None:
        from fsdpctl.checkpoint.verify_export import verify_export  # imports torch

        adapters = not is_foreign_model(folder)
        path = model_directory(Path(base), "config" if adapters else "weights")
        if not path.exists():
            raise UsageError(f"--base {base}: not found{nearest_path_hint(base)}")
        findings += verify_export(folder, path, base_has_weights=has_weights(path))
    return counts, findings


def _read_all(files: CheckpointReader | ExportedDirectory, size: int) -> None:
    with doing("verifying", BYTES, size) as advance:
        for count in files.verify():
            advance(count)


def _raise_if_lost(folder: Path, findings: list[Finding]) -> None:
    lost = [each for each in findings if each.is_lost]
    problem = f"{folder}: {len(lost)} of {len(findings)} findings are losses"
    if any(each.subject == "files" for each in lost):  # a checksum does not match
        raise CheckpointError(problem)
    if lost:
        raise IncompleteExportError(problem)
