"""How a run stands, read from its directory alone: on any machine, and without torch."""

import contextlib
import os
import time
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from fsdpctl.checkpoint.folders import complete_checkpoints, passed_over, step_of
from fsdpctl.checkpoint.manifest import read_manifest
from fsdpctl.config.model_path import CHECKPOINTS, RUN_CONFIG
from fsdpctl.config.recipe import read_recipe
from fsdpctl.config.schema import KEYS
from fsdpctl.config.sealed import MANIFEST
from fsdpctl.errors import UsageError
from fsdpctl.io.files import open_regular
from fsdpctl.run.files import LOGS
from fsdpctl.run.heartbeat import FAILED, RUNNING, STOPPED, Sign, read_sign
from fsdpctl.run.liveness import Liveness, liveness
from fsdpctl.run.starts import read_starts
from fsdpctl.run.tail import Tail, read_tail

STARTING, FINISHED, NOT_STARTED = "starting", "finished", "not started"
_STEPS = "train.steps"
_MOST_LOGS, _LAST_BYTES, _LONGEST = 64, 4096, 300
_STARTS_WITHIN = 120.0  # seconds


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest complete checkpoint."""

    path: str
    step: int
    age_seconds: float
    num_bytes: int
    problem: str  # why it is not what its manifest says; empty where it is
    owes_validation: bool  # whether the run was stopped before the validation of this step


@dataclass(frozen=True, slots=True)
class Status:
    """How a run stands; None for what is not known."""

    run: str
    state: str  # starting, running, finished, stopped, failed, not started
    message: str  # how it ended, if not well
    seen: str  # how it is known to be alive: as a process, by its sign of life; or nothing
    host: str | None
    pid: int | None
    heard_seconds_ago: float | None
    step: int
    total_steps: int | None
    seconds_since_step: float | None
    eta_seconds: float | None  # while it runs
    loss: float | None
    val_loss: float | None
    val_step: int | None
    tokens_per_second: float | None  # this and the next two: the median over recent steps
    tokens_per_second_per_rank: float | None
    mfu: float | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    checkpoint: Newest | None
    starts: int
    since_step: int  # from it on, the following are counted
    skipped_steps: int
    restarts: int
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        """What `status --json` prints."""
        return asdict(self)


def read_status(run_dir: Path) -> Status:
    """How the run in `run_dir` stands.

    Raises:
        UsageError: it is no run, or a file of it is damaged.
        CheckpointError: the manifest of its newest checkpoint is damaged.
    """
    if not (run_dir / RUN_CONFIG).is_file():
        raise UsageError(f"{run_dir}: not a run of fsdpctl: it has no {RUN_CONFIG}")
    now = time.time()
    total = _total_steps(run_dir)
    sign, tail, starts = read_sign(run_dir), read_tail(run_dir), read_starts(run_dir)
    found = liveness(run_dir, sign, now)
    newest = _newest(run_dir, now)
    step = max(tail.steps[-1].step if tail.steps else 0, newest.step if newest else 0)
    state, message = _state(run_dir, found, sign, is_done=_is_done(newest, tail, total))
    last = tail.steps[-1] if tail.steps else None
    runs = state == RUNNING
    return Status(
        run=str(run_dir),
        state=state,
        message=message,
        seen=found.seen,
        host=sign.host if sign else None,
        pid=found.pid,
        heard_seconds_ago=found.heard_seconds_ago,
        step=step,
        total_steps=total,
        seconds_since_step=None if tail.written is None else max(0.0, now - tail.written),
        eta_seconds=_eta(sign, tail, step, total) if runs else None,
        loss=last.loss if last else None,
        val_loss=tail.validation.val_loss if tail.validation else None,
        val_step=tail.validation.step if tail.validation else None,
        tokens_per_second=tail.recent(lambda line: line.tokens_per_second),
        tokens_per_second_per_rank=tail.recent(lambda line: line.tokens_per_second_per_rank),
        mfu=tail.recent(lambda line: line.mfu),
        peak_allocated_bytes=last.peak_allocated_bytes if last else None,
        peak_reserved_bytes=last.peak_reserved_bytes if last else None,
        checkpoint=newest,
        starts=len(starts),
        since_step=tail.since_step,
        skipped_steps=tail.skipped_steps,
        restarts=tail.restarts,
        warnings=_warnings(run_dir, tail),
    )


def _total_steps(run_dir: Path) -> int | None:
    """Nothing else is looked at: another version may have written the configuration."""
    text = dict(read_recipe(run_dir / RUN_CONFIG)).get(_STEPS)
    try:
        return None if text is None else int(str(KEYS[_STEPS].parse(text)))
    except UsageError as error:
        raise UsageError(f"{run_dir / RUN_CONFIG}: damaged: {error}") from None


def _is_done(newest: Newest | None, tail: Tail, total: int | None) -> bool:
    if newest is None or total is None or newest.step < total:
        return False
    validated = 0 if tail.validation is None else tail.validation.step
    return not newest.owes_validation or validated >= newest.step


def _state(run_dir: Path, found: Liveness, sign: Sign | None, *, is_done: bool) -> tuple[str, str]:
    """The word for it, and how it ended if not well."""
    is_at_work = found.is_alive and sign is not None and sign.state == RUNNING
    if is_done and not is_at_work and (sign is None or sign.state != FAILED):
        return FINISHED, ""
    if sign is not None and sign.state == STOPPED:
        return STOPPED, sign.message
    if sign is not None and sign.state == FAILED:
        return FAILED, _first_error(run_dir) or sign.message
    if found.is_alive:
        return (STARTING if sign is None or sign.step is None else RUNNING), ""
    if sign is None:
        return (STARTING if _is_just_written(run_dir / RUN_CONFIG) else NOT_STARTED), ""
    last = _first_error(run_dir)
    quiet = f"process {sign.pid} on {sign.host} is gone, or cut off, without a word"
    return FAILED, f"{quiet}; {last}" if last else quiet


def _is_just_written(file: Path) -> bool:
    """As every start does, some time before its first sign of life."""
    return time.time() - file.stat().st_mtime < _STARTS_WITHIN


def _first_error(run_dir: Path) -> str:
    """The last line of the rank that was the first to write of an error; empty if none did."""
    logs = sorted(islice((run_dir / LOGS).glob("rank-*.log"), _MOST_LOGS))
    said = []
    for each in logs:
        with contextlib.suppress(OSError):  # a restart may take it away meanwhile
            about = each.stat()
            if each.is_file() and about.st_size:
                said.append((about.st_mtime, f"{each.name}: {_last_line(each)}"))
    return min(said)[1] if said else ""


def _last_line(path: Path) -> str:
    with open(open_regular(path), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
        lines = file.read(_LAST_BYTES).decode("utf-8", "replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:_LONGEST]


def _eta(sign: Sign | None, tail: Tail, step: int, total: int | None) -> float | None:
    """As its pace has been since it started, saves and validations included."""
    each = sign.seconds_per_step if sign else None
    if each is None:
        each = tail.recent(lambda line: line.seconds)
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
    with os.scandir(folder) as files:
        sizes = {each.name: each.stat().st_size for each in files}
    wrong = next((name for name, size in expected.items() if sizes.get(name) != size), None)
    return Newest(
        path=str(folder),
        step=step_of(folder),
        age_seconds=max(0.0, now - (folder / MANIFEST).stat().st_mtime),
        num_bytes=sum(expected.values()),
        owes_validation=manifest.progress.owes_validation,
        problem="" if wrong is None else f"{wrong} is missing, or not of its size",
    )


def _warnings(run_dir: Path, tail: Tail) -> list[str]:
    said = [f"step {line.step}: {line.warning}" for line in tail.warnings]
    return [*said, *passed_over(run_dir / CHECKPOINTS)]
