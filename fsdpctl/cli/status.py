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
        typer.Argument(metavar="[RUN]", help="A run directory; by default runs/latest."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell how a run stands, from any machine that sees its directory."""
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
    """The directory that runs/latest leads to.

    Raises:
        UsageError: there is none.
    """
    from fsdpctl.checkpoint.folders import LATEST
    from fsdpctl.run.files import RUNS

    latest = Path(RUNS, LATEST)
    if latest.is_dir():
        return Path(RUNS, Path(os.path.realpath(latest)).name)
    there = Path(RUNS).iterdir() if Path(RUNS).is_dir() else iter(())
    names = sorted(str(each) for each in islice(there, _MOST_NAMED) if each.is_dir())
    known = f", as {', '.join(names)}" if names else ""
    raise UsageError(f"{latest}: there is none here; say which run{known}")


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
            f", {format_bytes(found.peak_allocated_bytes)} of it in tensors"
        )  # fmt: skip
        yield "memory", f"at most {format_bytes(found.peak_reserved_bytes)} on rank 0{of}"
    if found.starts > 1 or found.restarts:
        yield "starts", f"{found.starts}; {found.restarts} restarts since step {found.since_step}"
    if found.skipped_steps:
        yield (
            "skipped",
            f"{found.skipped_steps} steps since step {found.since_step}, for their numbers",
        )
    for text in found.warnings:
        yield "warning", text


def _speed(found: "Status") -> str:
    each = found.tokens_per_second_per_rank
    shared = each is not None and each != found.tokens_per_second
    ranks = f", {each:,.0f} per rank" if shared else ""
    mfu = "" if found.mfu is None else f", {found.mfu:.1%} MFU"
    return f"{found.tokens_per_second:,.0f} tok/s{ranks}{mfu} (the median of recent steps)"


def _state(found: "Status") -> str:
    from fsdpctl.run.progress import format_seconds

    where = ""
    if found.seen != "nothing":
        where = f" on {found.host or 'this machine'}, process {found.pid}"
    if found.seen == "sign of life" and found.heard_seconds_ago is not None:
        where += f", heard of {format_seconds(found.heard_seconds_ago)} ago"
    if found.message.startswith(found.state):
        return found.message
    said = f": {found.message}" if found.message else ""
    return f"{found.state}{where if found.state in ('running', 'starting') else ''}{said}"


def _step(found: "Status") -> str:
    from fsdpctl.run.progress import format_seconds

    text = str(found.step)
    if found.total_steps:
        text += f" of {found.total_steps} ({found.step / found.total_steps:.1%})"
    if found.eta_seconds is not None:
        text += f", {format_seconds(found.eta_seconds)} left"
    if found.seconds_since_step is not None:
        text += f"; the last one {format_seconds(found.seconds_since_step)} ago"
    return text


def _checkpoint(newest: "Newest") -> str:
    from fsdpctl.run.progress import format_bytes, format_seconds

    return (
        f"step {newest.step}, {format_seconds(newest.age_seconds)} ago, "
        f"{format_bytes(newest.num_bytes)}, {newest.problem or 'complete'}"
    )
