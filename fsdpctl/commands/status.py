"""`fsdpctl status` shows the state of a run.

It reads the run directory only, so it works on any machine, and without torch.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from fsdpctl.checkpoint.manifest import read_manifest
from fsdpctl.checkpoint.run_checkpoints import complete_checkpoints, describe_incomplete, step_of
from fsdpctl.checkpoint.training_progress import Progress
from fsdpctl.commands.printing import AsJson, show_json, show_table
from fsdpctl.config.schema import KEYS
from fsdpctl.errors import UsageError
from fsdpctl.io.files import last_line, latest_run
from fsdpctl.io.run_files import CHECKPOINTS, LOGS, MANIFEST, METRICS, RUN_CONFIG, RUNS
from fsdpctl.io.texts import MIB, format_bytes
from fsdpctl.run.environment import StartEvents, read_settings, read_start_events
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
_METRICS_BYTES = 16 * MIB  # read from the end of metrics.jsonl: about 30,000 steps
_RECENT = 50  # steps
_MOST_WARNINGS = 5
_MOST_LOGS = 64
_STARTS_WITHIN = 120.0  # seconds until the first heartbeat
_LONGEST_CAUSE = 100  # characters


@dataclass(frozen=True, slots=True)
class CheckpointStatus:
    """The newest complete checkpoint."""

    path: str
    step: int
    age_seconds: float
    num_bytes: int
    problem: str  # a difference from the manifest; empty if complete


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a run; None for unknown values."""

    run: str
    state: str  # starting, running, finished, stopped, failed, killed, not started
    message: str  # why the run ended before its last step
    step: int
    total_steps: int | None
    eta_seconds: float | None  # while the run is running
    loss: float | None
    tokens_per_second: float | None  # median over recent steps
    samples_per_second: float | None  # median over recent steps of a script's module
    checkpoint: CheckpointStatus | None
    warnings: list[str]


def status(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="Run directory (default: runs/latest).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the state and progress of a run."""
    if run is None and (run := latest_run(Path(RUNS))) is None:
        raise UsageError(f"{RUNS}/latest: not found; pass a run directory")
    run_status = read_status(run)
    if as_json:
        show_json(asdict(run_status))
        return
    show_table(("", ""), _rows(run_status))


def _rows(status: Status) -> Iterator[tuple[str, str]]:
    yield "run", status.run
    state = status.message
    if not state.startswith(status.state):
        state = f"{status.state}: {state}" if state else status.state
    yield "state", _shorten(state)
    if len(state) > _LONGEST_CAUSE:
        yield "log", str(Path(status.run, LOGS))
    yield "step", _step_line(status)
    if status.loss is not None:
        yield "loss", f"{status.loss:.4f}"
    saved = "none yet"
    if (newest := status.checkpoint) is not None:
        saved = f"step {newest.step}, {format_seconds(newest.age_seconds)} ago, "
        saved += f"{format_bytes(newest.num_bytes)}, {newest.problem or 'complete'}"
    yield "checkpoint", saved
    for rate, unit in ((status.tokens_per_second, "tok"), (status.samples_per_second, "samples")):
        if rate is not None:
            yield "speed", f"{rate:,.0f} {unit}/s (median of recent steps)"
    for text in status.warnings:
        yield "warning", text


def _shorten(text: str) -> str:
    """Return the first sentences, clauses or words of a text."""
    if len(text) <= _LONGEST_CAUSE:
        return text
    ends = [text.rfind(end, len(text) // 9, _LONGEST_CAUSE) for end in (". ", "; ", ": ")]
    return text[: max(ends)] if max(ends) > 0 else f"{text[:_LONGEST_CAUSE].rpartition(' ')[0]} …"


def _step_line(status: Status) -> str:
    text = str(status.step)
    if status.total_steps:
        text += f" of {status.total_steps} ({status.step / status.total_steps:.1%})"
    if status.eta_seconds is not None:
        text += f", {format_seconds(status.eta_seconds)} left"
    return text


def read_status(run_dir: Path) -> Status:
    """Return the state of the run in `run_dir`; UsageError if a file is corrupted."""
    settings = read_settings(run_dir)
    total, patience = (_number(run_dir, key, settings.get(key)) for key in (_STEPS, _PATIENCE))
    record, lines, starts = read_heartbeat(run_dir), _lines(run_dir), read_start_events(run_dir)
    newest, progress = _newest_checkpoint(run_dir)
    step_lines = [line for line in lines if line.is_step]
    recent, last = _of_newest_start(step_lines, starts), step_lines[-1] if step_lines else None
    step = max(last.step if last else 0, newest.step if newest else 0)
    validated = max((line.step for line in lines if isinstance(line.val_loss, float)), default=0)
    is_done = progress is not None and total is not None and progress.is_finished(total, patience)
    if is_done and progress and progress.owes_validation:
        # Only metrics.jsonl has the validation after the last checkpoint.
        is_done = validated >= progress.step
    state, message = _state(run_dir, record, is_done=is_done)
    if state == FINISHED and progress and progress.best and progress.step < (total or 0):
        best = progress.best.step
        message = f"no lower validation loss since step {best} ({_PATIENCE}={patience})"
    warnings = [text for each in starts for text in each.warnings][-_MOST_WARNINGS:]
    # The mean since the start includes saves and validations.
    seconds = record.seconds_per_step if record and state == RUNNING else None
    return Status(
        run=str(run_dir),
        state=state,
        message=message,
        step=step,
        total_steps=total,
        eta_seconds=None if seconds is None or total is None else seconds * max(0, total - step),
        loss=last.loss if last and isinstance(last.loss, float) else None,
        tokens_per_second=_median([x.tokens_per_second for x in recent]),
        samples_per_second=_median([x.samples_per_second for x in recent]),
        checkpoint=newest,
        warnings=[*warnings, *describe_incomplete(run_dir / CHECKPOINTS)],
    )


def _of_newest_start(steps: list[MetricsLine], starts: list[StartEvents]) -> list[MetricsLine]:
    """Return the last steps of the newest start: earlier starts may have had other ranks."""
    first = next((each.step for each in reversed(starts) if each.step is not None), 0)
    return [line for line in steps[-_RECENT:] if line.step > first]


def _lines(run_dir: Path) -> list[MetricsLine]:
    path = run_dir / METRICS
    return [*read_metrics(path, last_bytes=_METRICS_BYTES)] if os.path.lexists(path) else []


def _median(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return median(present) if present else None


def _number(run_dir: Path, key: str, text: str | None) -> int | None:
    """Parse one setting. The whole configuration is not parsed, since that needs torch."""
    try:
        value = None if text is None else KEYS[key].parse(text)
        return None if value is None else int(str(value))
    except UsageError as error:
        raise UsageError(f"{run_dir / RUN_CONFIG}: corrupted: {error}") from None


def _state(run_dir: Path, record: HeartbeatRecord | None, *, is_done: bool) -> tuple[str, str]:
    """Return the state and its reason. A failure precedes FINISHED, which needs no heartbeat."""
    is_killed = record is not None and was_killed(run_dir, record)
    is_alive = record is not None and record.is_alive and not is_killed
    if is_done and not is_alive and (record is None or record.state != FAILED):
        return FINISHED, ""
    if record is None:  # no heartbeat yet: a running start has just written RUN_CONFIG
        is_recent = time.time() - (run_dir / RUN_CONFIG).stat().st_mtime < _STARTS_WITHIN
        return (STARTING if is_recent else NOT_STARTED), ""
    if record.state == STOPPED:
        return STOPPED, record.message
    if record.state == FAILED:
        return FAILED, record.cause or _first_error(run_dir) or record.message
    if is_alive:
        return (STARTING if record.step is None else RUNNING), ""
    message, error = f"process {record.pid} on {record.host}", _first_error(run_dir)
    if not is_killed:  # otherwise, `_rows` prefixes the message with the state
        message += " was killed or is unreachable"
    return (KILLED if is_killed else FAILED), f"{message}; {error}" if error else message


def _first_error(run_dir: Path) -> str:
    errors = []
    for log in sorted(islice((run_dir / LOGS).glob("rank-*.log"), _MOST_LOGS)):
        with contextlib.suppress(OSError):  # a restart may move the file meanwhile
            stat = log.stat()
            if log.is_file() and stat.st_size:
                errors.append((stat.st_mtime, f"{log.name}: {last_line(log)}"))
    return min(errors)[1] if errors else ""


def _newest_checkpoint(run_dir: Path) -> tuple[CheckpointStatus, Progress] | tuple[None, None]:
    checkpoints = complete_checkpoints(run_dir / CHECKPOINTS)
    if not checkpoints:
        return None, None
    folder = checkpoints[-1]
    manifest = read_manifest(folder)
    sizes = {name: info.size for name, info in (manifest.files | manifest.attachments).items()}
    files = ((name, folder / name, size) for name, size in sizes.items())
    wrong = next((n for n, x, size in files if not x.is_file() or x.stat().st_size != size), "")
    problem = f"{wrong}: missing or of the wrong size" if wrong else ""
    age = max(0.0, time.time() - (folder / MANIFEST).stat().st_mtime)
    newest = CheckpointStatus(str(folder), step_of(folder), age, sum(sizes.values()), problem)
    return newest, replace(manifest.progress, step=newest.step)
