"""The end of a training: its report, and the exit code."""

import os
import shlex
import signal
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import typer

from fsdpctl.commands.console import fail, say, show_panel
from fsdpctl.errors import FINAL, LOST, ExitCode, FsdpctlError, UsageError, first_of
from fsdpctl.io.run_files import CHECKPOINTS
from fsdpctl.io.units import format_bytes
from fsdpctl.launch.outcome import COMPILE_FAILED, Failure, Outcome
from fsdpctl.run.heartbeat import record_cause

TOO_EARLY = "stopped before there was anything to save"
AGAIN = "run the same command to resume from the last checkpoint"
_LAST_LINES = 12


def report_exit(outcome: Outcome, run_dir: Path) -> None:
    """Print how the training ended, and exit with the code for it."""
    cause = outcome.cause
    is_interrupt = outcome.stop_signal == signal.SIGINT
    stopped = ExitCode.INTERRUPT if is_interrupt else ExitCode.STOPPED
    if outcome.was_stopped_at_start:
        _end(TOO_EARLY, stopped)
    if not outcome.has_failed:
        say(f"done: {run_dir}", _next(run_dir))
        return
    if cause is not None and not outcome.hang:
        if cause.exit_code == ExitCode.STOPPED:
            _end(f"{cause.message}; run the same command to resume", stopped)
        if cause.exit_code in FINAL:
            _end(cause.message, cause.exit_code)
        if outcome.stop_signal is not None and cause.exit_code == -signal.SIGKILL:
            _end(f"killed; {AGAIN}", stopped)
    _show_failure(cause, run_dir, outcome)
    raise typer.Exit(ExitCode.FAILED)


def _end(message: str, code: int) -> NoReturn:
    fail(message)
    raise typer.Exit(code)


def _next(run_dir: Path) -> str:
    from fsdpctl.checkpoint.folders import newest_checkpoint
    from fsdpctl.run.directory import best_checkpoint, read_config

    chat = merge = best = ""
    with suppress(FsdpctlError):
        config = read_config(run_dir)
        chat = " --chat" * (config.data.name == "chat")
        merge = " --merge" * (config.model.lora.rank is not None)
        newest = newest_checkpoint(run_dir / CHECKPOINTS) if config.checkpoint.keep_best else None
        best = " --best" * (newest is not None and best_checkpoint(newest) is not None)
    run = shlex.quote(str(run_dir))
    folder = f"fsdpctl consolidate-checkpoint {run} DIR{merge}{best}"
    return f"next: fsdpctl sample {run}{chat}, or {folder}"


def _show_failure(cause: Failure | None, run_dir: Path, outcome: Outcome) -> None:
    record_cause(run_dir, outcome.reason)
    if cause is not None and not outcome.lost and not outcome.hang:
        title = f"rank {cause.rank} on {cause.host} failed"
        if cause.waited_in_vain:
            title = "ranks timed out waiting for others"
        silent = first_of(list(map(str, outcome.silent)))
        lines = [f"detail node {silent} is unreachable too"] if silent else []
        show_panel(title, [f"cause  {cause.cause}", *lines, *_about(cause, run_dir)])
        return
    title, why = "ranks hang" if outcome.hang else outcome.stopped, outcome.reason
    if outcome.lost:
        title = f"{outcome.lost}; {outcome.stopped}"
        why = outcome.hang or "a launcher was killed, or a host is down or disconnected"
    logs = f"{run_dir / 'logs'}/rank-*.log (stack of each rank)"
    show_panel(title, [f"cause  {why}", f"hint   {AGAIN}", f"log    {logs}"])


def _about(cause: Failure, run_dir: Path) -> list[str]:
    log, lines = run_dir / "logs" / f"rank-{cause.rank:05d}.log", []
    if cause.was_killed and log.is_file():  # else the cause is its message
        lines += ["", *log.read_text(errors="replace").splitlines()[-_LAST_LINES:], ""]
    lacked_memory = cause.out_of_memory or "out of memory" in cause.message.lower()
    if cause.exit_code == -signal.SIGKILL or lacked_memory:
        lines += [*_memory_report(run_dir, lacked_memory=lacked_memory), ""]
    log = log if log.is_file() else run_dir / "logs" / "node-00000.log"
    if LOST in cause.message and not (run_dir / "config.yaml").is_file():
        return [*lines, f"hint   restore {run_dir}; without it, the same command begins again"]
    return [*lines, f"hint   {_hint(cause)}", f"log    {log}"]


def _memory_report(run_dir: Path, *, lacked_memory: bool) -> list[str]:
    """Return the estimate and the available memory; if that was too little, changes that fit."""
    from fsdpctl.estimate.advice import advice
    from fsdpctl.estimate.estimator import Estimator
    from fsdpctl.launch.begin import change_lines
    from fsdpctl.resolve.settle import plan_of
    from fsdpctl.run.directory import read_config

    estimator = Estimator()
    try:
        found = estimator.estimate(plan_of(read_config(run_dir)))
    except UsageError:
        return []  # the configuration is corrupted; report the failure alone
    lacks = lacked_memory or not found.fits
    changes = change_lines(advice(estimator, found.plan, more_ranks=False)) if lacks else []
    return [
        f"memory {format_bytes(found.allocated)} estimated, {format_bytes(found.peak_reserved)} "
        f"reserved; {format_bytes(found.memory_bytes)} available per rank",
        f"peak   {found.step.peak.when}",
        *changes,
    ]


def _hint(cause: Failure) -> str:
    if cause.out_of_memory:
        return f"use fewer ranks per node, or a smaller micro-batch; {AGAIN}"
    if cause.exit_code == -signal.SIGKILL:
        few = "use fewer ranks per node, or a smaller micro-batch"
        return f"often the kernel, out of memory: {few}; {AGAIN}"
    if "could not be written" in cause.message:
        return f"free disk space, or set another train.run_dir; {AGAIN}"
    if cause.cause.startswith(COMPILE_FAILED):
        return "set another compiler in CXX, or train.compile=false"
    if "out of memory" in cause.message.lower():
        return "use more ranks: each holds a smaller shard of the model"
    if "timed out" in cause.message.lower():
        return f"a rank hangs or exited: see {os.path.join('logs', 'rank-*.log')}; {AGAIN}"
    return AGAIN
