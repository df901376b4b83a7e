"""`fsdpctl train`, and the report at its end."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdpctl.cli.config_args import (
    ConfigArguments,
    ConfigDir,
    RanksPerNode,
    Recipe,
    Settings,
    composed_from,
    normalized,
)
from fsdpctl.cli.console import CONVERSATIONS, bytes_bar, count_of, fail, note, out, say, show_panel
from fsdpctl.errors import LOST, StoppedError, UsageError
from fsdpctl.launch.outcome import listed

if TYPE_CHECKING:
    from fsdpctl.config.compose import Composed
    from fsdpctl.launch.outcome import Failure, Outcome
    from fsdpctl.resolve.run import Opened
    from fsdpctl.run.directory import Look
    from fsdpctl.start.begin import Decision

TOO_EARLY = "stopped before there was anything to save"
AGAIN = "run the same command to resume from the last checkpoint"
_SAVED = 75
_SELF_EXPLANATORY = (2, 4, 76, 77)  # exit codes whose message needs no panel
_LAST_LINES = 12


def train(
    settings: Settings = None,
    recipe: Recipe = None,
    config_dir: ConfigDir = None,
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|never|PATH",
            help="auto: resume the run if it exists. never: start a new run in a new directory. "
            "PATH: start a new run from the full state of that run or checkpoint.",
        ),
    ] = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the run and show its units; train nothing.")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the configuration and exit.")
    ] = False,
    nproc_per_node: RanksPerNode = None,
) -> None:
    """Train a model, or resume a run."""
    config = normalized(ConfigArguments(settings, recipe, config_dir), nproc_per_node)
    composed = composed_from(config, quiet=print_config)
    if print_config:
        _print_config(composed, resume)
    elif dry_run:
        _dry_run(composed, resume)
    else:
        options = [f"--recipe {config.recipe}"] if config.recipe else []
        _train(composed, [*options, *(config.settings or [])], resume)


def _train(composed: "Composed", settings: list[str], resume: str) -> None:
    from fsdpctl.start.run import Talk, run

    try:
        found = run(composed, settings, resume, Talk(say, note, partial(count_of, CONVERSATIONS)))
        if found is not None:
            report_exit(*found)
    except StoppedError:
        raise StoppedError(TOO_EARLY) from None


def _print_config(composed: "Composed", resume: str) -> None:
    """Print the configuration; lines about the selection go to standard error."""
    from fsdpctl.config.auto import Selection, filled, left_open
    from fsdpctl.config.serialize import config_to_yaml

    config = composed.config
    if left_open(config):
        from fsdpctl.resolve.machine import LOCAL
        from fsdpctl.resolve.run import settle
        from fsdpctl.start.begin import decide_on_cluster

        if config.cluster.name != LOCAL:
            decision = decide_on_cluster(config, note)
            selection = decision.selection
        else:
            _, seen, decision = _opened(composed, resume)
            selection = Selection.of(settle(seen.config, decision.selection).config)
        for line in decision.lines:
            note(line)
        assert selection is not None
        config = filled(config, selection)
    say(config_to_yaml(config).rstrip())


def _opened(composed: "Composed", resume: str) -> "tuple[Opened, Look, Decision]":
    """Open a run without the launcher's variables: it may be shown where no launcher runs."""
    from fsdpctl.config.auto import left_open
    from fsdpctl.resolve.machine import LOCAL
    from fsdpctl.resolve.run import open_run
    from fsdpctl.run.directory import look
    from fsdpctl.start.begin import decide, decide_on_cluster

    config = composed.config
    with count_of(CONVERSATIONS) as advance:
        opened = open_run(composed, (config.launch, None), advance)
    seen = look(opened.config, resume)
    if config.cluster.name != LOCAL and seen.kept is None and left_open(config):
        return opened, seen, decide_on_cluster(config, note)
    return opened, seen, decide(opened, seen, note)


def _dry_run(composed: "Composed", resume: str) -> None:
    from fsdpctl.estimate.estimator import Estimator
    from fsdpctl.resolve.machine import placed_on_cluster
    from fsdpctl.resolve.run import settle
    from fsdpctl.start.describe import describe_run, describe_units

    opened, seen, decision = _opened(composed, resume)
    settled = settle(seen.config, decision.selection)
    estimate = Estimator().estimate(placed_on_cluster(settled.config))
    described = describe_run(opened, settled, seen, estimate)
    for line in (*decision.lines, *described):
        say(line)
    say()
    for line in describe_units(settled.config, opened.module):
        say(line)
    _show_samples(opened)
    _check_large_token_files(opened)
    would = "it would run" if estimate.verdict == "fits" else "it would run out of memory"
    if (launcher := settled.config.launch.name) != "local":
        would += f" within a job of launch={launcher}"
    say(f"\n{would}; nothing was trained")


def _show_samples(opened: "Opened") -> None:
    """Print the first conversations as they are trained, and the lengths of all."""
    from fsdpctl.data.chats.open import ChatSet
    from fsdpctl.data.chats.preview import histogram, preview

    if not isinstance(opened.data, ChatSet):
        return
    chats = opened.data.train
    marked = "in color" if out.is_terminal and not out.no_color else "in brackets"
    for number, text in enumerate(
        preview(chats, opened.data.tokenizer, color=marked == "in color"), start=1
    ):
        say(f"\nsample {number}, trained text {marked}:")
        out.print(text)
    say("\nlengths of samples:")
    for line in histogram(chats):
        say(line)


def _check_large_token_files(opened: "Opened") -> None:
    """Check the files that are too large to be read before every run."""
    from fsdpctl.data.tokens import check_tokens
    from fsdpctl.resolve.data import CHECKED_BYTES

    large = [file for file in opened.data.token_files if file.num_bytes > CHECKED_BYTES]
    with bytes_bar(sum(file.num_bytes for file in large)) as advance:
        for file in large:
            check_tokens(file, advance)


def report_exit(outcome: "Outcome", run_dir: Path) -> None:
    """Print how the training ended, and exit with the code for it."""
    cause = outcome.cause
    stopped = 130 if outcome.stop_signal == signal.SIGINT else _SAVED
    if outcome.was_stopped_at_start:
        fail(TOO_EARLY)
        raise typer.Exit(stopped)
    if not outcome.has_failed:
        say(f"done: {run_dir}")
        return
    if cause is None or outcome.hang:
        _show_failure(cause, run_dir, outcome)
        raise typer.Exit(1)
    if cause.exit_code == _SAVED:
        fail(f"{cause.message}; run the same command to resume")
        raise typer.Exit(stopped)
    if cause.exit_code in _SELF_EXPLANATORY:
        fail(cause.message)
        raise typer.Exit(cause.exit_code)
    if outcome.stop_signal is not None and cause.exit_code == -signal.SIGKILL:
        fail(f"killed; {AGAIN}")
        raise typer.Exit(stopped)
    _show_failure(cause, run_dir, outcome)
    raise typer.Exit(1)


def _show_failure(cause: "Failure | None", run_dir: Path, outcome: "Outcome") -> None:
    from fsdpctl.run.heartbeat import record_cause

    record_cause(run_dir, outcome.reason)
    title, lines = "ranks hang", [f"cause  {outcome.reason}"]
    if cause is None:
        title = "other nodes are unreachable"
    elif not outcome.hang:
        waited = "ranks timed out waiting for others"
        title = waited if cause.waited_in_vain else f"rank {cause.rank} on {cause.host} failed"
        lines = [f"cause  {cause.cause}"]
    if outcome.silent_nodes:
        nodes = listed(outcome.silent_nodes)
        lines.append(f"detail launcher of node {nodes} unreachable: exited, or disconnected")
    if outcome.hang or cause is None:
        lines += [f"hint   {AGAIN}", f"log    {run_dir / 'logs'}/rank-*.log (stack of each rank)"]
    else:
        lines += _about(cause, run_dir, outcome)
    show_panel(title, lines)


def _about(cause: "Failure", run_dir: Path, outcome: "Outcome") -> list[str]:
    """Return the lines about a failed rank."""
    log, lines = run_dir / "logs" / f"rank-{cause.rank:05d}.log", []
    if cause.waited_in_vain:
        silent = listed(outcome.silent_ranks)
        lines.append(f"detail rank {cause.rank} waited; another rank may be the one that hangs")
        lines += [f"       no message from rank {silent}"] if silent else []
    last = log.read_text(errors="replace").splitlines()[-_LAST_LINES:] if log.is_file() else []
    if len(last) > 1:
        lines += ["", *last, ""]
    lacked_memory = cause.out_of_memory or "out of memory" in cause.message.lower()
    if cause.exit_code == -signal.SIGKILL or lacked_memory:
        lines += [*_memory_report(run_dir, lacked_memory=lacked_memory), ""]
    log = log if log.is_file() else run_dir / "logs" / "node-00000.log"
    if LOST in cause.message and not (run_dir / "config.yaml").is_file():
        return [*lines, f"hint   restore {run_dir}; without it, the same command begins again"]
    return [*lines, f"hint   {_hint(cause)}", f"log    {log}"]


def _memory_report(run_dir: Path, *, lacked_memory: bool) -> list[str]:
    """Return the estimate and the available memory; if that was too little, changes that fit."""
    from fsdpctl.cli.estimate_text import change_lines
    from fsdpctl.estimate.advice import advice
    from fsdpctl.estimate.estimator import Estimator
    from fsdpctl.resolve.machine import placed_on_cluster
    from fsdpctl.run.directory import read_config
    from fsdpctl.run.progress import format_bytes

    estimator = Estimator()
    try:
        found = estimator.estimate(placed_on_cluster(read_config(run_dir)))
    except UsageError:
        return []  # the configuration is corrupted; report the failure alone
    lacks = lacked_memory or found.verdict != "fits"
    changes = change_lines(advice(estimator, found.config, more_ranks=False)) if lacks else []
    return [
        f"memory {format_bytes(found.allocated)} estimated, {format_bytes(found.peak_reserved)} "
        f"reserved; {format_bytes(found.memory_bytes)} available per rank",
        f"peak   {found.step.peak.when}",
        *changes,
    ]


def _hint(cause: "Failure") -> str:
    if cause.out_of_memory:
        return f"use fewer ranks per node, or a smaller micro-batch; {AGAIN}"
    if cause.exit_code == -signal.SIGKILL:
        return (
            "often the kernel, out of memory: use fewer ranks per node, or a smaller micro-batch; "
            f"{AGAIN}"
        )
    if "could not be written" in cause.message:
        return f"free disk space, or set another train.run_dir; {AGAIN}"
    if "inductor" in cause.message.lower() or "dynamo" in cause.message.lower():
        return "torch.compile failed: set another compiler in CXX, or train.compile=false"
    if "out of memory" in cause.message.lower():
        return "use more ranks: each holds a smaller shard of the model"
    if "timed out" in cause.message.lower():
        return f"a rank hangs or exited: see {os.path.join('logs', 'rank-*.log')}; {AGAIN}"
    return AGAIN
