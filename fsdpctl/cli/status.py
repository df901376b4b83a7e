"""`fsdpctl status`."""

import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from fsdpctl.cli.console import emit, show_table
from fsdpctl.errors import UsageError
from fsdpctl.io.console import printable

if TYPE_CHECKING:
    from fsdpctl.tools.status import Newest, Status

_MOST_NAMED = 5  # runs


def status(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", help="Run directory (default: runs/latest)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the state and progress of a run."""
    from fsdpctl.tools.status import read_status

    found = read_status(_newest_run() if run is None else run)
    if as_json:
        emit(json.dumps(found.to_dict(), indent=2))
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, text in _rows(found):
        table.add_row(Text(name, style="bold"), Text(printable(text)))
    show_table(table)


def _newest_run() -> Path:
    """Return the directory that runs/latest links to.

    Raises:
        UsageError: If the link does not exist.
    """
    from fsdpctl.checkpoint.folders import LATEST
    from fsdpctl.run.files import RUNS

    latest = Path(RUNS, LATEST)
    if latest.is_dir():
        return Path(RUNS, Path(os.path.realpath(latest)).name)
    found = Path(RUNS).iterdir() if Path(RUNS).is_dir() else iter(())
    names = sorted(str(each) for each in islice(found, _MOST_NAMED) if each.is_dir())
    known = f", such as {', '.join(names)}" if names else ""
    raise UsageError(f"{latest}: not found; pass a run directory{known}")


def _rows(found: "Status") -> Iterator[tuple[str, str]]:
    from fsdpctl.run.progress import format_bytes

    yield "run", found.run
    yield "state", _state(found)
    yield "step", _step(found)
    if found.loss is not None:
        yield "loss", f"{found.loss:.4f}"
    if found.val_loss is not None:
        yield "validation", f"loss {found.val_loss:.4f} at step {found.val_step}"
    yield "checkpoint", _checkpoint(found.checkpoint) if found.checkpoint else "none yet"
    if found.tokens_per_second is not None:
        yield "speed", _speed(found)
    if found.peak_reserved_bytes is not None:
        of = "" if found.peak_allocated_bytes is None else (
            f", {format_bytes(found.peak_allocated_bytes)} allocated by tensors"
        )  # fmt: skip
        yield "memory", f"{format_bytes(found.peak_reserved_bytes)} peak on rank 0{of}"
    if found.starts > 1 or found.restarts:
        yield "starts", f"{found.starts}; {found.restarts} restarts since step {found.since_step}"
    if found.skipped_steps:
        yield (
            "skipped",
            f"{found.skipped_steps} steps since step {found.since_step} (non-finite or spiking)",
        )
    for text in found.warnings:
        yield "warning", text


def _speed(found: "Status") -> str:
    each = found.tokens_per_second_per_rank
    shared = each is not None and each != found.tokens_per_second
    ranks = f", {each:,.0f} per rank" if shared else ""
    mfu = "" if found.mfu is None else f", {found.mfu:.1%} MFU"
    return f"{found.tokens_per_second:,.0f} tok/s{ranks}{mfu} (median of recent steps)"


def _state(found: "Status") -> str:
    from fsdpctl.run.progress import format_seconds

    where = ""
    if found.liveness_source != "nothing":
        where = f" on {found.host or 'this machine'}, process {found.pid}"
    if found.liveness_source == "heartbeat" and found.heartbeat_age_seconds is not None:
        where += f", heartbeat {format_seconds(found.heartbeat_age_seconds)} ago"
    if found.message.startswith(found.state):
        return found.message
    why = f": {found.message}" if found.message else ""
    return f"{found.state}{where if found.state in ('running', 'starting') else ''}{why}"


def _step(found: "Status") -> str:
    from fsdpctl.run.progress import format_seconds

    text = str(found.step)
    if found.total_steps:
        text += f" of {found.total_steps} ({found.step / found.total_steps:.1%})"
    if found.eta_seconds is not None:
        text += f", {format_seconds(found.eta_seconds)} left"
    if found.seconds_since_step is not None:
        text += f"; last update {format_seconds(found.seconds_since_step)} ago"
    return text


def _checkpoint(newest: "Newest") -> str:
    from fsdpctl.run.progress import format_bytes, format_seconds

    return (
        f"step {newest.step}, {format_seconds(newest.age_seconds)} ago, "
        f"{format_bytes(newest.num_bytes)}, {newest.problem or 'complete'}"
    )
