"""`fsdpctl status`: the state of a run, from its directory alone: on any machine, without torch."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from fsdpctl.checkpoint.folders import complete_checkpoints, passed_over, step_of
from fsdpctl.checkpoint.manifest import BestValidation, read_manifest
from fsdpctl.commands.console import AsJson, show_json, show_table
from fsdpctl.config.schema import KEYS
from fsdpctl.errors import UsageError
from fsdpctl.io.files import last_line, latest_run
from fsdpctl.io.run_files import CHECKPOINTS, LOGS, MANIFEST, METRICS, RUN_CONFIG, RUNS
from fsdpctl.io.units import format_bytes
from fsdpctl.io.untrusted import MIB
from fsdpctl.run.environment import StartRecord, read_records, read_settings
from fsdpctl.run.heartbeat import (
    FAILED,
    RUNNING,
    STOPPED,
    HeartbeatRecord,
    read_heartbeat,
    was_killed,
)
from fsdpctl.run.metrics import MetricsLine, read_metrics
from fsdpctl.run.progress import format_seconds

STARTING, FINISHED, NOT_STARTED, KILLED = "starting", "finished", "not started", "killed"
_STEPS, _PATIENCE = "train.steps", "train.patience"
_METRICS_BYTES = 16 * MIB  # of the end of metrics.jsonl: some thirty thousand steps
_RECENT, _MOST_WARNINGS = 50, 5
_MOST_LOGS = 64
_STARTS_WITHIN = 120.0  # seconds
_BRIEF = 100  # characters of a cause


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest complete checkpoint."""

    path: str
    step: int
    age_seconds: float
    num_bytes: int
    problem: str  # how it differs from its manifest; empty if it does not
    owes_validation: bool  # whether the run stopped before the validation of this step
    best: BestValidation | None  # the validation with the lowest loss so far


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a run; None for unknown values."""

    run: str
    state: str  # starting, running, finished, stopped, failed, killed, not started
    message: str  # why it ended, unless it is complete
    host: str | None
    pid: int | None  # of rank 0
    heartbeat_age_seconds: float | None
    step: int
    total_steps: int | None
    seconds_since_step: float | None
    eta_seconds: float | None  # while it runs
    loss: float | None
    val_loss: float | None
    val_step: int | None
    best_val_loss: float | None  # the lowest one
    best_val_step: int | None
    tokens_per_second: float | None  # this and the next two: median over recent steps
    samples_per_second: float | None  # in place of tokens, of a module of a script
    mfu: float | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    checkpoint: Newest | None
    starts: int
    restarts: int  # of these starts
    since_step: int  # the following are counted from this step on
    skipped_steps: int
    warnings: list[str]


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
    if (found := latest_run(Path(RUNS))) is not None:
        return found
    raise UsageError(f"{RUNS}/latest: not found; pass a run directory")


def _rows(found: Status) -> Iterator[tuple[str, str]]:
    yield "run", found.run
    state = _state_line(found)
    yield "state", _brief(state)
    if len(state) > _BRIEF:
        yield "log", str(Path(found.run, LOGS))
    yield "step", _step_line(found)
    if found.loss is not None:
        yield "loss", f"{found.loss:.4f}"
    if found.val_loss is not None:
        is_lowest = found.val_step == found.best_val_step
        lowest = f"; lowest {found.best_val_loss:.4f} at step {found.best_val_step}"
        yield (
            "validation",
            f"loss {found.val_loss:.4f} at step {found.val_step}{'' if is_lowest else lowest}",
        )
    saved = "none yet"
    if (newest := found.checkpoint) is not None:
        saved = f"step {newest.step}, {format_seconds(newest.age_seconds)} ago, "
        saved += f"{format_bytes(newest.num_bytes)}, {newest.problem or 'complete'}"
    yield "checkpoint", saved
    if found.tokens_per_second is not None:
        mfu = "" if found.mfu is None else f", {found.mfu:.1%} MFU"
        yield "speed", f"{found.tokens_per_second:,.0f} tok/s{mfu} (median of recent steps)"
    if found.samples_per_second is not None:
        yield "speed", f"{found.samples_per_second:,.0f} samples/s (median of recent steps)"
    if found.peak_reserved_bytes is not None:
        yield "memory", f"{format_bytes(found.peak_reserved_bytes)} peak on rank 0"
    if found.starts > 1 or found.restarts:
        words = "restart" if found.restarts == 1 else "restarts"
        yield "starts", f"{found.starts}{f', {found.restarts} {words}' if found.restarts else ''}"
    if found.skipped_steps:
        yield (
            "skipped",
            f"{found.skipped_steps} steps since step {found.since_step} (non-finite or spiking)",
        )
    for text in found.warnings:
        yield "warning", text


def _state_line(found: Status) -> str:
    if found.state in ("running", "starting") and found.heartbeat_age_seconds is not None:
        age = format_seconds(found.heartbeat_age_seconds)
        return f"{found.state} on {found.host}, process {found.pid}, heartbeat {age} ago"
    if found.message.startswith(found.state):
        return found.message
    return f"{found.state}: {found.message}" if found.message else found.state


def _brief(text: str) -> str:
    """Return at most the first sentences, clauses or words of a text."""
    if len(text) <= _BRIEF:
        return text
    ends = [text.rfind(end, len(text) // 9, _BRIEF) for end in (". ", "; ", ": ")]
    return text[: max(ends)] if max(ends) > 0 else f"{text[:_BRIEF].rpartition(' ')[0]} …"


def _step_line(found: Status) -> str:
    text = str(found.step)
    if found.total_steps:
        text += f" of {found.total_steps} ({found.step / found.total_steps:.1%})"
    if found.eta_seconds is not None:
        text += f", {format_seconds(found.eta_seconds)} left"
    if found.seconds_since_step is not None:
        text += f"; last update {format_seconds(found.seconds_since_step)} ago"
    return text


def read_status(run_dir: Path) -> Status:
    """Return the state of the run in `run_dir`; an error names a file that is corrupted."""
    total, patience = (_setting(run_dir, key) for key in (_STEPS, _PATIENCE))
    now = time.time()
    record, lines, starts = read_heartbeat(run_dir), _lines(run_dir), read_records(run_dir)
    newest = _newest(run_dir, now)
    steps = [line for line in lines if line.is_step]
    recent, last = _of_newest(steps, starts), steps[-1] if steps else None
    validation = next((x for x in reversed(lines) if isinstance(x.val_loss, float)), None)
    best = _best(lines, newest)
    step = max(last.step if last else 0, newest.step if newest else 0)
    state, message = _state(run_dir, record, is_done=_is_done(newest, validation, total, patience))
    if state == FINISHED and newest and newest.best and newest.step < (total or 0):
        message = f"no lower validation loss since step {newest.best.step} ({_PATIENCE}={patience})"
    return Status(
        run=str(run_dir),
        state=state,
        message=message,
        host=record.host if record else None,
        pid=record.pid if record else None,
        heartbeat_age_seconds=record.age if record else None,
        step=step,
        total_steps=total,
        seconds_since_step=_age(run_dir / METRICS, now),
        eta_seconds=_eta(record, recent, step, total) if state == RUNNING else None,
        loss=_number(last.loss) if last else None,
        val_loss=_number(validation.val_loss) if validation else None,
        val_step=validation.step if validation else None,
        best_val_loss=best[0],
        best_val_step=best[1],
        tokens_per_second=_recent([x.tokens_per_second for x in recent]),
        samples_per_second=_recent([x.samples_per_second for x in recent]),
        mfu=_recent([x.mfu for x in recent]),
        peak_allocated_bytes=last.peak_allocated_bytes if last else None,
        peak_reserved_bytes=last.peak_reserved_bytes if last else None,
        checkpoint=newest,
        starts=len(starts),
        restarts=sum(each.restart is not None for each in starts),
        since_step=lines[0].step if lines else 0,
        skipped_steps=_skipped(lines),
        warnings=_warnings(run_dir, starts),
    )


def _best(
    lines: Sequence[MetricsLine], newest: Newest | None
) -> tuple[float, int] | tuple[None, None]:
    """Return the lowest validation loss, and its step."""
    losses = [(x.val_loss, x.step) for x in lines if isinstance(x.val_loss, float)]
    losses += [(newest.best.loss, newest.best.step)] if newest and newest.best else []
    return min(losses, default=(None, None))


def _of_newest(steps: Sequence[MetricsLine], starts: Sequence[StartRecord]) -> list[MetricsLine]:
    """Return the last steps of the newest start: those before may have had other ranks."""
    begun = next((each.step for each in reversed(starts) if each.step is not None), 0)
    return [line for line in steps[-_RECENT:] if line.step > begun]


def _lines(run_dir: Path) -> list[MetricsLine]:
    path = run_dir / METRICS
    return [*read_metrics(path, last_bytes=_METRICS_BYTES)] if os.path.lexists(path) else []


def _age(path: Path, now: float) -> float | None:
    try:
        return max(0.0, now - path.stat().st_mtime)
    except OSError:
        return None


def _number(value: object) -> float | None:
    return value if isinstance(value, float) else None


def _recent(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _skipped(lines: Sequence[MetricsLine]) -> int:
    """Count rejected steps; a step that the run came to again has only one of the two records."""
    return max(
        sum(None in (line.loss, line.grad_norm) for line in lines),
        sum(line.rejected_step is not None for line in lines),
    )


def _setting(run_dir: Path, key: str) -> int | None:
    """Read one setting alone, which needs no torch."""
    text = read_settings(run_dir).get(key)
    try:
        value = None if text is None else KEYS[key].parse(text)
        return None if value is None else int(str(value))
    except UsageError as error:
        raise UsageError(f"{run_dir / RUN_CONFIG}: corrupted: {error}") from None


def _is_done(
    newest: Newest | None, validation: MetricsLine | None, total: int | None, patience: int | None
) -> bool:
    if newest is None or total is None:
        return False
    unimproved = 0 if newest.best is None else newest.best.unimproved
    if newest.step < total and (patience is None or unimproved < patience):
        return False
    validated = 0 if validation is None else validation.step
    return not newest.owes_validation or validated >= newest.step


def _state(run_dir: Path, record: HeartbeatRecord | None, *, is_done: bool) -> tuple[str, str]:
    """Return the state, and why the run ended unless it is complete."""
    is_killed = record is not None and was_killed(run_dir, record)
    is_alive = record is not None and record.is_alive and not is_killed
    if is_done and not is_alive and (record is None or record.state != FAILED):
        return FINISHED, ""
    if record is None:  # before the first heartbeat, a start has just written the configuration
        is_recent = time.time() - (run_dir / RUN_CONFIG).stat().st_mtime < _STARTS_WITHIN
        return (STARTING if is_recent else NOT_STARTED), ""
    if record.state == STOPPED:
        return STOPPED, record.message
    if record.state == FAILED:
        return FAILED, record.cause or _first_error(run_dir) or record.message
    if is_alive:
        return (STARTING if record.step is None else RUNNING), ""
    about, last = f"process {record.pid} on {record.host}", _first_error(run_dir)
    if not is_killed:
        about += " was killed or is unreachable"
    return (KILLED if is_killed else FAILED), f"{about}; {last}" if last else about


def _first_error(run_dir: Path) -> str:
    """Return the last line of the rank log that was written first; empty without logs."""
    logs = sorted(islice((run_dir / LOGS).glob("rank-*.log"), _MOST_LOGS))
    found = []
    for each in logs:
        with contextlib.suppress(OSError):  # a restart may move it meanwhile
            about = each.stat()
            if each.is_file() and about.st_size:
                found.append((about.st_mtime, f"{each.name}: {last_line(each)}"))
    return min(found)[1] if found else ""


def _eta(
    record: HeartbeatRecord | None, recent: Sequence[MetricsLine], step: int, total: int | None
) -> float | None:
    """Return the time left at the pace since the start, including saves and validations."""
    each = record.seconds_per_step if record else None
    if each is None:
        each = _recent([line.seconds for line in recent])
    return None if each is None or total is None else each * max(0, total - step)


def _newest(run_dir: Path, now: float) -> Newest | None:
    found = complete_checkpoints(run_dir / CHECKPOINTS)
    if not found:
        return None
    folder = found[-1]
    manifest = read_manifest(folder)
    expected = {
        name: info.size for name, info in (*manifest.files.items(), *manifest.attachments.items())
    }
    files = ((name, folder / name, size) for name, size in expected.items())
    wrong = next((n for n, x, size in files if not x.is_file() or x.stat().st_size != size), "")
    return Newest(
        path=str(folder),
        step=step_of(folder),
        age_seconds=max(0.0, now - (folder / MANIFEST).stat().st_mtime),
        num_bytes=sum(expected.values()),
        owes_validation=manifest.progress.owes_validation,
        best=manifest.progress.best,
        problem=f"{wrong}: missing or of the wrong size" if wrong else "",
    )


def _warnings(run_dir: Path, starts: Sequence[StartRecord]) -> list[str]:
    found = [text for each in starts for text in each.warnings]
    return [*found[-_MOST_WARNINGS:], *passed_over(run_dir / CHECKPOINTS)]
