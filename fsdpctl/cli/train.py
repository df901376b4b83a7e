"""`fsdpctl train`."""

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdpctl.cli.console import bytes_bar, fail, say, show_panel
from fsdpctl.cli.words import (
    Asked,
    ConfigDir,
    RanksPerNode,
    Recipe,
    Words,
    composed_from,
    settled,
)
from fsdpctl.errors import FsdpctlError, StoppedError, UsageError

if TYPE_CHECKING:
    from fsdpctl.config.compose import Composed
    from fsdpctl.config.placement import LaunchConfig
    from fsdpctl.launch.meeting import Meeting
    from fsdpctl.launch.outcome import Failure, Outcome
    from fsdpctl.resolve.run import ResolvedRun
    from fsdpctl.train.run_lock import RunLock

_SAVED = 75
_TOO_EARLY = "stopped before there was anything to save"
_SAID = (2, 4, 76)  # the message says it all
_LAST_LINES = 12


def train(
    words: Words = None,
    recipe: Recipe = None,
    config_dir: ConfigDir = None,
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|never|PATH",
            help="auto: go on where the run was. never: start a new run beside it. PATH: start a "
            "new run from the full state of that run or checkpoint.",
        ),
    ] = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check that it would run, show units; train nothing.")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the configuration and end.")
    ] = False,
    nproc_per_node: RanksPerNode = None,
) -> None:
    """Train a model. The same command again resumes where the last one ended."""
    words, recipe, config_dir = settled(Asked(words, recipe, config_dir), nproc_per_node)
    composed = composed_from(words, recipe, config_dir, quiet=print_config)
    if print_config:
        from fsdpctl.config.serialize import config_to_yaml

        say(config_to_yaml(composed.config).rstrip())
    elif dry_run:
        _dry_run(composed, resume)
    else:
        options = [f"--recipe {recipe}"] if recipe else []
        try:
            _run(composed, [*options, *(words or [])], resume)
        except StoppedError:
            raise StoppedError(_TOO_EARLY) from None


def _dry_run(composed: "Composed", resume: str) -> None:
    from fsdpctl.estimate.kept import estimate_here
    from fsdpctl.resolve.run import resolve
    from fsdpctl.train.describe import describe_run, describe_units
    from fsdpctl.train.run_dir import plan_start

    run = resolve(composed)
    start = plan_start(run.config, resume)
    estimate = estimate_here(run)
    for line in [*describe_run(run, start, estimate), "", *describe_units(run)]:
        say(line)
    _check_large_token_files(run)
    would = "it would run" if estimate.verdict == "fits" else "it would run out of memory"
    say(f"\n{would}; nothing was trained")


def _check_large_token_files(run: "ResolvedRun") -> None:
    """Those that are not read before every run."""
    from fsdpctl.data.tokens import check_tokens
    from fsdpctl.resolve.run import CHECKED_BYTES

    large = [file for file in run.data.token_files if file.num_bytes > CHECKED_BYTES]
    with bytes_bar(sum(file.num_bytes for file in large)) as advance:
        for file in large:
            check_tokens(file, advance)


def _run(composed: "Composed", typed: list[str], resume: str) -> None:
    if composed.config.launch.nnodes > 1:
        _silence_torch_of_lost_peers()
    from fsdpctl.resolve.machine import placed_here

    launch = placed_here(composed.config).launch
    if launch.nnodes == 1:
        _begin(composed, typed, resume, None)
        return
    from fsdpctl.launch.meeting import Meeting, difference

    say(f"node {launch.node_rank} of {launch.nnodes}: meeting at {launch.rdzv_endpoint}")
    meeting = Meeting(launch)
    if meeting.node == 0:
        try:
            _begin(composed, typed, resume, meeting)
        except FsdpctlError as error:
            meeting.call_off(str(error))
            raise
        return
    plan = meeting.accept(lambda plan: difference(plan, launch))
    if plan.is_finished:
        say(plan.refusal)
    else:
        say(f"run     {plan.run_dir}: {launch.nproc_per_node} ranks here")
        _launch(Path(plan.run_dir), launch, meeting)


def _silence_torch_of_lost_peers() -> None:
    """What becomes of other launchers is said in a line; torch writes stacks of C++ beside that.

    It looks once, when it is imported; the workers' own logs have them.
    """
    name = "TORCH_CPP_LOG_LEVEL"
    if name not in os.environ:
        os.environ[name] = "ERROR"
        import torch  # noqa: F401  # for what it looks at

        del os.environ[name]


def _begin(composed: "Composed", typed: list[str], resume: str, meeting: "Meeting | None") -> None:
    """Prepare the run directory, and train."""
    from fsdpctl.estimate.kept import estimate_here, write_estimate
    from fsdpctl.resolve.run import resolve
    from fsdpctl.train.assets import collect_assets
    from fsdpctl.train.describe import describe_run
    from fsdpctl.train.run_dir import Standing, plan_start, prepare_run_dir
    from fsdpctl.train.run_lock import lock_run_dir

    run = resolve(composed)
    start = plan_start(run.config, resume)
    if start.standing is Standing.FINISHED:
        finished = f"{start.run_dir}: finished at step {start.step}; nothing to do"
        say(finished)
        say("a larger train.steps goes on from there; --resume never begins anew beside it")
        if meeting is not None:
            meeting.call_off(finished, is_finished=True)
        return
    lock = lock_run_dir(
        start.run_dir, lambda: say(f"waiting for the workers of the last start of {start.run_dir}")
    )
    if resume == "auto":  # it may have moved on until it was locked
        start = plan_start(run.config, resume)
    estimate = estimate_here(run)
    for line in describe_run(run, start, estimate):
        say(line)
    run_dir = start.run_dir
    prepare_run_dir(start, typed, collect_assets(run.config, run.data))
    write_estimate(run_dir, run, estimate)
    launch = run.config.launch
    del run, estimate  # the workers read their own data
    if meeting is not None:
        assert launch.nproc_per_node is not None
        say(f"waiting for the other {launch.nnodes - 1} of {launch.nnodes} nodes")
        meeting.invite(run_dir, launch.nproc_per_node)
    _launch(run_dir, launch, meeting, lock)


def _launch(
    run_dir: Path,
    launch: "LaunchConfig",
    meeting: "Meeting | None",
    lock: "RunLock | None" = None,
) -> None:
    from fsdpctl.launch.local import launch_workers
    from fsdpctl.train.run_dir import LOGS
    from fsdpctl.train.worker import MODULE

    logs = run_dir / LOGS
    outcome = launch_workers(
        MODULE, [str(run_dir)], launch, logs=logs, is_last=True, meeting=meeting
    )
    if lock is not None:
        lock.release()
    _end(outcome, run_dir)


def _end(outcome: "Outcome", run_dir: Path) -> None:
    """Say how it ended, and exit with the code for it."""
    cause = outcome.cause
    stopped = 130 if outcome.stop_signal == signal.SIGINT else _SAVED
    asked = outcome.stop_signal is not None
    if outcome.stopped_early or (asked and cause and cause.exit_code == -signal.SIGTERM):
        fail(_TOO_EARLY)
        raise typer.Exit(stopped)
    if cause is None:
        say(f"done: {run_dir}")
    elif cause.exit_code == _SAVED:
        fail(f"{cause.message}; the same command goes on from there")
        raise typer.Exit(stopped)
    elif cause.exit_code in _SAID:
        fail(cause.message)
        raise typer.Exit(cause.exit_code)
    elif asked and cause.exit_code == -signal.SIGKILL:
        fail("killed; the same command goes on from the last checkpoint")
        raise typer.Exit(stopped)
    else:
        _show_failure(cause, run_dir, outcome)
        raise typer.Exit(1)


def _show_failure(cause: "Failure", run_dir: Path, outcome: "Outcome") -> None:
    log = run_dir / "logs" / f"rank-{cause.rank:05d}.log"
    title, lines = f"rank {cause.rank} on {cause.host} failed", [f"cause  {cause.cause}"]
    if cause.waited_in_vain:
        title = "ranks waited in vain for others"
        silent = ", ".join(map(str, outcome.silent_ranks))
        lines.append(f"seen   rank {cause.rank} waited; it need not be the one that stood still")
        lines += [f"       nothing was heard of rank {silent}"] if silent else []
    if outcome.silent_nodes:
        nodes = ", ".join(map(str, outcome.silent_nodes))
        lines.append(f"seen   nothing was heard of the launcher of node {nodes}: gone, or cut off")
    last = log.read_text(errors="replace").splitlines()[-_LAST_LINES:] if log.is_file() else []
    if len(last) > 1:
        lines += ["", *last, ""]
    if cause.exit_code == -signal.SIGKILL or "out of memory" in cause.message.lower():
        lines += [*_memory_report(run_dir), ""]
    log = log if log.is_file() else run_dir / "logs" / "node-00000.log"
    lines += [f"hint   {_hint(cause)}", f"log    {log}"]
    show_panel(title, lines)


def _memory_report(run_dir: Path) -> list[str]:
    """What was estimated, what there was, and the cheapest changes that fit."""
    from fsdpctl.cli.estimate import change_lines
    from fsdpctl.estimate.advice import advice
    from fsdpctl.estimate.estimator import Estimator
    from fsdpctl.resolve.machine import placed_on_cluster
    from fsdpctl.train.progress import format_bytes
    from fsdpctl.train.run_dir import read_config

    estimator = Estimator()
    try:
        found = estimator.estimate(placed_on_cluster(read_config(run_dir)))
    except UsageError:
        return []  # its configuration is damaged; the failure itself is what matters
    return [
        f"memory {format_bytes(found.allocated)} estimated, {format_bytes(found.peak_reserved)} "
        f"with what the allocator keeps; a rank had {format_bytes(found.memory_bytes)}",
        f"where  the most is held in: {found.step.peak.when}",
        *change_lines(advice(estimator, found.config, more_ranks=False)),
    ]


def _hint(cause: "Failure") -> str:
    again = "the same command goes on from the last checkpoint"
    if cause.exit_code == -signal.SIGKILL:
        return f"often the kernel, out of memory: fewer ranks or a smaller micro-batch; {again}"
    if "could not be written" in cause.message:
        return f"make room, or give another train.run_dir; then {again}"
    if "inductor" in cause.message.lower() or "dynamo" in cause.message.lower():
        return "torch.compile failed: another compiler in CXX, or train.compile=false"
    if "out of memory" in cause.message.lower():
        return "a smaller train.micro_batch_size, or a strategy that shards more"
    if "timed out" in cause.message.lower():
        return f"a rank hung or died: see {os.path.join('logs', 'rank-*.log')}; {again}"
    return again
