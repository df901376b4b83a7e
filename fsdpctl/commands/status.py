"""`fsdpctl status` and `compare-runs`."""

import os
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from fsdpctl.commands.compare_runs import TwoRuns
from fsdpctl.commands.compare_runs import compare_runs as compare
from fsdpctl.commands.console import AsJson, say, show_json, show_table
from fsdpctl.commands.run_status import Newest, Status, read_status
from fsdpctl.errors import FsdpctlError, UsageError
from fsdpctl.io.run_files import LATEST, RUNS
from fsdpctl.io.units import format_bytes
from fsdpctl.run.progress import format_seconds

_MOST_NAMED = 5  # runs
_NOT_SET = "not set"


def status(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="Run directory (default: runs/latest).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the state and progress of a run."""
    found = read_status(_newest_run() if run is None else run)
    if as_json:
        show_json(asdict(found))
        return
    show_table(("", ""), _rows(found))


def _newest_run() -> Path:
    """Return the directory that runs/latest links to; UsageError if the link does not exist."""
    latest = Path(RUNS, LATEST)
    if latest.is_dir():
        return Path(RUNS, Path(os.path.realpath(latest)).name)
    found = Path(RUNS).iterdir() if Path(RUNS).is_dir() else iter(())
    names = sorted(str(each) for each in islice(found, _MOST_NAMED) if each.is_dir())
    known = f", such as {', '.join(names)}" if names else ""
    raise UsageError(f"{latest}: not found; pass a run directory{known}")


def _rows(found: Status) -> Iterator[tuple[str, str]]:
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
    yield from _estimated(found)
    if found.starts > 1 or found.restarts:
        words = "restart" if found.restarts == 1 else "restarts"
        since = f"; {found.restarts} {words} since step {found.since_step}"
        yield "starts", f"{found.starts}{since if found.restarts else ''}"
    if found.skipped_steps:
        yield (
            "skipped",
            f"{found.skipped_steps} steps since step {found.since_step} (non-finite or spiking)",
        )
    for text in found.warnings:
        yield "warning", text


def _estimated(found: Status) -> Iterator[tuple[str, str]]:
    known = found.estimate
    if known is None:
        return
    predicted, measured = known.predicted_step_seconds, found.step_seconds
    if predicted is not None and measured:
        about = "; ".join(
            filter(None, [f"{predicted / measured - 1:+.0%}", known.prediction_source])
        )
        yield "predicted", f"{predicted:.3g} s per step, {measured:.3g} s measured ({about})"
    if found.peak_allocated_bytes is not None:
        of = f", {format_bytes(known.peak_allocated_bytes)} allocated by tensors"
        yield "estimated", f"{format_bytes(known.peak_reserved_bytes)} peak on the fullest rank{of}"


def _speed(found: Status) -> str:
    each = found.tokens_per_second_per_rank
    shared = each is not None and each != found.tokens_per_second
    ranks = f", {each:,.0f} per rank" if shared else ""
    mfu = "" if found.mfu is None else f", {found.mfu:.1%} MFU"
    return f"{found.tokens_per_second:,.0f} tok/s{ranks}{mfu} (median of recent steps)"


def _state(found: Status) -> str:
    if found.state in ("running", "starting") and found.heartbeat_age_seconds is not None:
        age = format_seconds(found.heartbeat_age_seconds)
        return f"{found.state} on {found.host}, process {found.pid}, heartbeat {age} ago"
    if found.message.startswith(found.state):
        return found.message
    return f"{found.state}: {found.message}" if found.message else found.state


def _step(found: Status) -> str:
    text = str(found.step)
    if found.total_steps:
        text += f" of {found.total_steps} ({found.step / found.total_steps:.1%})"
    if found.eta_seconds is not None:
        text += f", {format_seconds(found.eta_seconds)} left"
    if found.seconds_since_step is not None:
        text += f"; last update {format_seconds(found.seconds_since_step)} ago"
    return text


def _checkpoint(newest: Newest) -> str:
    return (
        f"step {newest.step}, {format_seconds(newest.age_seconds)} ago, "
        f"{format_bytes(newest.num_bytes)}, {newest.problem or 'complete'}"
    )


def compare_runs(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="Run directory.")],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="Run directory to compare with.")],
    assert_equal: Annotated[
        bool,
        typer.Option(
            "--assert-equal", help="Exit with code 1 unless losses and validation losses are equal."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show how two existing runs differ.

    Compares losses, settings, and the environments of the newest starts.
    """
    found = compare(run_a, run_b)
    if as_json:
        show_json(found.to_dict())
    else:
        _show(found)
    if assert_equal and found.differences:
        raise FsdpctlError(f"{run_a} and {run_b} differ: {'; '.join(found.differences)}")


def _show(found: TwoRuns) -> None:
    say(f"A       {found.a}")
    say(f"B       {found.b}")
    say()
    _show_losses(found)
    loss = found.series["loss"]
    for name, count in (("A", loss.only_a), ("B", loss.only_b)):
        if count:
            say(f"{count:,} steps only in {name}")
    say()
    for name, keys in (("configuration", found.configuration), ("environment", found.environment)):
        if keys:
            rows = [[x.key, x.a or _NOT_SET, x.b or _NOT_SET] for x in keys]
            show_table((name, "A", "B"), rows)
        else:
            say(f"{name}s are equal")
        say()
    differ = "; ".join(found.differences)
    say(f"differ  {differ}" if differ else "equal   everything compared")


def _show_losses(found: TwoRuns) -> None:
    rows = []
    for each in found.series.values():
        if not each.compared:
            rows.append([each.name, "0", "-", "-", "-"])
        elif each.first is None or each.largest is None:
            rows.append([each.name, f"{each.compared:,}", "equal", "-", "-"])
        else:
            largest = f"{each.largest.difference:.3g} at step {each.largest.step}"
            at = f"step {each.first.step}: {each.first}"
            rows.append(
                [each.name, f"{each.compared:,}", f"{each.num_different:,} differ", at, largest]
            )
    head = ("metric", "steps", "", "first difference", "largest difference")
    show_table(head, rows, right=("steps",))
