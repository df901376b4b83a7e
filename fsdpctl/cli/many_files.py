"""`estimate-memory --from` with several files or a directory: a verdict for each."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fsdpctl.cli.config_args import ConfigArguments
from fsdpctl.cli.console import add_row, new_table, say, show_table
from fsdpctl.cli.from_others import asked_from, typed_beside
from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.io.activity import doing
from fsdpctl.io.units import format_bytes

_SUFFIXES = (".yaml", ".yml")
NOT_ESTIMATED = "not estimated"


@dataclass(frozen=True, slots=True)
class FileVerdict:
    """The verdict on a file, or the reason why it has none."""

    file: str
    tool: str = ""
    verdict: str = NOT_ESTIMATED  # else as `StepEstimate.verdict`
    peak_reserved_bytes: int | None = None
    available_bytes: int | None = None
    left_out: tuple[str, ...] = ()  # keys that may change the estimate
    seconds: float = 0.0
    reason: str = ""


def files_of(sources: Sequence[Path]) -> list[Path]:
    """Return the files that `--from` names; of a directory, all YAML files in it and below.

    Links within a directory are not followed.

    Raises:
        UsageError: If a directory has none, or one of several files does not exist.
    """
    found: list[Path] = []
    for source in sources:
        if not source.is_dir():
            if len(sources) > 1 and not source.exists():
                raise UsageError(f"--from {source}: not found")
            found.append(source)
            continue
        below = (each for each in source.rglob("*") if each.suffix in _SUFFIXES)
        inside = sorted(each for each in below if each.is_file() and not each.is_symlink())
        if not inside:
            raise UsageError(f"--from {source}: contains no YAML file")
        found += inside
    return found


def verdicts_of(files: Sequence[Path], asked: ConfigArguments) -> Iterator[FileVerdict]:
    """Estimate each file with the settings of the command line.

    Raises:
        UsageError: If these settings are invalid whatever the file.
    """
    from fsdpctl.config.compose import compose_config

    compose_config(typed_beside(files[0], asked))
    from fsdpctl.estimate.estimator import Estimator
    from fsdpctl.estimate.search import estimates_of

    for number, file in enumerate(files, start=1):
        begun = time.monotonic()
        try:
            with doing(f"estimating {file} ({number} of {len(files)})"):
                others = asked_from(file, asked)
                ((estimate, _),) = estimates_of(Estimator(), others.composed, every=False)
        except (UsageError, CheckpointError) as error:
            text = str(error)
            reason = text if text.startswith(str(file)) else f"{file}: {text}"
            found = FileVerdict(str(file), reason=reason)
        else:
            translation = others.translation
            left_out = (*(row.key for row in translation.excluded), *translation.unrecognized)
            found = FileVerdict(
                str(file),
                translation.tool,
                estimate.verdict,
                estimate.peak_reserved,
                estimate.available,
                left_out,
            )
        yield replace(found, seconds=round(time.monotonic() - begun, 2))


def show_verdicts(found: Sequence[FileVerdict], *, as_json: bool) -> None:
    """Print a row for each file, then the reasons of those that were not estimated."""
    if as_json:
        say(json.dumps([asdict(each) for each in found], indent=2))
        return
    table = new_table("file", "tool", "verdict", "reserved", "available", "left out", "s")
    for each in found:
        sizes = (each.peak_reserved_bytes, each.available_bytes)
        shown = ("" if size is None else format_bytes(max(0, size)) for size in sizes)
        keys = ", ".join(each.left_out)
        add_row(table, each.file, each.tool, each.verdict, *shown, keys, f"{each.seconds:.1f}")
    show_table(table)
    for each in found:
        if each.reason:
            say(each.reason)
