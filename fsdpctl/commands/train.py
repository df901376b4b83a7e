"""`fsdpctl train`, and its report when the training has ended."""

import shlex
import signal
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from fsdpctl.commands.config_args import (
    ConfigArguments,
    RanksPerNode,
    Recipe,
    SettingArgs,
    config_as_recipe,
    normalize,
    note_changes,
)
from fsdpctl.commands.convert import convert_files, describe_omissions, settings_without_recipe
from fsdpctl.commands.early_checks import check_paths
from fsdpctl.commands.printing import REPORTER, emit, note, out, print_error, say, show_panel
from fsdpctl.config.compose import Composed, compose_config
from fsdpctl.config.schema import Config
from fsdpctl.config.selection import Selection, auto_names, unset_names, with_selection
from fsdpctl.errors import (
    NO_RESTART,
    REMOVED_DURING_RUN,
    ExitCode,
    FsdpctlError,
    SignalError,
    StoppedError,
    UsageError,
    shorten_list,
)
from fsdpctl.io.activity import is_first_process
from fsdpctl.io.run_files import CHECKPOINTS, LOG, LOGS, RUN_CONFIG
from fsdpctl.io.texts import format_bytes
from fsdpctl.launch.outcome import COMPILE_FAILED, Failure, RoundOutcome
from fsdpctl.launch.run import train_on_node
from fsdpctl.run.heartbeat import record_cause

if TYPE_CHECKING:
    from fsdpctl.resolve.prepare import Prepared
    from fsdpctl.run.directory import RunDirState

STOPPED_EARLY = "stopped before there was anything to save"
RESUME_HINT = "run the same command to resume from the last checkpoint"
_LAST_LINES = 12


def train(
    settings: SettingArgs = None,
    recipe: Recipe = None,
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|never|PATH",
            help="auto: resume the run if it exists. never: start a new run in a new directory. "
            "PATH: start a new run from the full state of that run or checkpoint.",
        ),
    ] = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the run and its memory; train nothing.")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the configuration and exit.")
    ] = False,
    nproc_per_node: RanksPerNode = None,
    source: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Another tool's file, as `convert` reads it; a second: accelerate's.",
        ),
    ] = None,
) -> None:
    """Train a model, or resume a run."""
    arguments = normalize(settings, recipe, nproc_per_node)
    composed = _compose(arguments, source or [], resume, quiet=print_config)
    if print_config:
        _print_config(composed, resume)
        return
    note_changes(composed)
    if dry_run:
        _dry_run(composed, resume)
    else:
        options = [f"--from {each}" for each in source or []]
        options += [f"--recipe {arguments.recipe}"] if arguments.recipe else []
        _train(composed, [*options, *arguments.settings], resume)


def _compose(args: ConfigArguments, files: list[Path], resume: str, *, quiet: bool) -> Composed:
    """Compose the configuration from the arguments, or from other tools' `files`, if any.

    Unless `quiet`, print omitted settings, and check the paths before the model is read.
    """
    (settings, recipe), pairs = args, None
    if files:
        settings, recipe = settings_without_recipe(files[0], args), str(files[0])
        translation = convert_files(files, settings)
        for problem in translation.required:
            raise UsageError(f"{recipe}: {problem}")
        names, pairs = " and ".join(each.name for each in files), translation.settings
        note(*(f"{names}: {line}" for line in describe_omissions(translation) if not quiet))
    check = None if quiet else partial(_check_early, resume)
    return compose_config(settings, recipe, converted=pairs, on_checked=check, for_training=True)


def _check_early(resume: str, config: Config, recipe: str | None) -> None:
    """Run the checks that need no torch, whose import takes seconds."""
    check_paths(config, recipe, resume)
    if is_first_process() and not config.launch.node_rank:
        REPORTER.info("opening the model and the data")


def _train(composed: Composed, settings: list[str], resume: str) -> None:
    try:
        outcome = train_on_node(composed, settings, resume, REPORTER)
        if outcome is not None:
            report_exit(*outcome)
    except SignalError as error:
        if error.exit_code != StoppedError.exit_code:
            raise
        raise StoppedError(STOPPED_EARLY) from None


def _print_config(composed: Composed, resume: str) -> None:
    """Print the configuration with the origins of values; print the selection to stderr.

    Settings that are selected only if their defaults do not fit are omitted.
    """
    config, names = composed.config, auto_names(composed.config)
    if names:
        from fsdpctl.estimate.estimator import Estimator
        from fsdpctl.estimate.resolve_auto import resolve_auto_of_run

        state = _open(composed, resume)[1]
        plan, _, lines = resolve_auto_of_run(
            Estimator(), state.config, state.stored_config, state.stored_in, note
        )
        note(*lines)
        config = with_selection(config, Selection.of(plan.config))
    emit(config_as_recipe(config, unset_names(composed.config)))


def _open(composed: Composed, resume: str) -> "tuple[Prepared, RunDirState]":
    """Open a run as a dry run does: without the variables of a launcher."""
    from fsdpctl.resolve.machine import role_of_dry_run, without_other_cluster
    from fsdpctl.resolve.prepare import prepare
    from fsdpctl.run.directory import inspect_run_dir

    if (role := role_of_dry_run(composed)).is_here:
        composed = without_other_cluster(composed)
        role = replace(role, launch=composed.config.launch)
    opened = prepare(composed, role, resume=resume)
    return opened, inspect_run_dir(opened.config, resume)


def _dry_run(composed: Composed, resume: str) -> None:
    opened, state = _open(composed, resume)
    from fsdpctl.estimate.estimator import Estimator
    from fsdpctl.estimate.resolve_auto import resolve_auto_of_run
    from fsdpctl.launch.prepare_run import check_dry_run, check_fits, report_if_finished
    from fsdpctl.launch.run_summary import describe_run

    estimator = Estimator()
    plan, estimate, lines = resolve_auto_of_run(
        estimator, state.config, state.stored_config, state.stored_in, note
    )
    say(*lines, *describe_run(opened, plan, state, estimate))
    _show_samples(opened)
    _check_large_token_files(opened)
    check_fits(estimate, estimator, say)
    if report_if_finished(state, say):
        return
    unverified = check_dry_run(opened, state)
    verdict, launch = "it would run", plan.config.launch
    if launch.name != "local":
        verdict += f" within a job of launch={launch.name}"
    elif launch.nnodes > 1:
        verdict += " on each node, with its launch.node_rank and the same launch.rdzv_endpoint"
    say("; ".join(filter(None, (verdict, unverified, "nothing was trained"))))


def _show_samples(opened: "Prepared") -> None:
    from fsdpctl.commands.chat_preview import histogram, preview
    from fsdpctl.data.data_set import contents_of
    from fsdpctl.data.packing import DocumentSet
    from fsdpctl.data.tokenizer import FileTokenizer

    contents, tokenizer = contents_of(opened.data.train), opened.data.tokenizer
    chats = [each for each in contents if isinstance(each, DocumentSet)]
    if not chats or not isinstance(tokenizer, FileTokenizer):
        return
    marking = "in color" if out.is_terminal and not out.no_color else "in brackets"
    texts = [x for each in chats for x in preview(each, tokenizer, color=marking == "in color")]
    for number, text in enumerate(texts, start=1):
        say(f"\nsample {number}, trained text {marking}:")
        out.print(text)
    say("\nlengths of samples:")
    say(*histogram(chats))


def _check_large_token_files(opened: "Prepared") -> None:
    from fsdpctl.data.token_formats import check_tokens
    from fsdpctl.resolve.run_data import are_small

    for file in () if are_small(opened.data.token_files) else opened.data.token_files:
        if file.xxh3 is not None and file.is_local:
            check_tokens(file, opened.config.model.vocab_size)


def report_exit(outcome: RoundOutcome, run_dir: Path) -> None:
    """Print how the training ended, and exit with the matching code."""
    cause = outcome.cause
    is_interrupt = outcome.stop_signal == signal.SIGINT
    stopped = ExitCode.INTERRUPT if is_interrupt else ExitCode.STOPPED
    if outcome.was_stopped_at_start:
        _exit_with(STOPPED_EARLY, stopped)
    if not outcome.has_failed:
        say(f"done: {run_dir}", _next_commands(run_dir))
        return
    if cause is not None and not outcome.hang:  # causes with their own exit codes
        if cause.exit_code == ExitCode.STOPPED:
            _exit_with(f"{cause.message}; run the same command to resume", stopped)
        if cause.exit_code in NO_RESTART:
            _exit_with(cause.message, cause.exit_code)
        if outcome.stop_signal is not None and cause.exit_code == -signal.SIGKILL:
            _exit_with(f"killed; {RESUME_HINT}", stopped)
    _show_failure(cause, run_dir, outcome)
    raise typer.Exit(ExitCode.FAILED)


def _exit_with(message: str, code: int) -> NoReturn:
    print_error(message)
    raise typer.Exit(code)


def _next_commands(run_dir: Path) -> str:
    from fsdpctl.checkpoint.run_checkpoints import newest_checkpoint
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


def _show_failure(cause: Failure | None, run_dir: Path, outcome: RoundOutcome) -> None:
    record_cause(run_dir, outcome.reason)
    if cause is not None and not outcome.unreachable_text and not outcome.hang:
        title = f"rank {cause.rank} on {cause.host} failed"
        if cause.timed_out_waiting:
            title = "ranks timed out waiting for others"
        unreachable = shorten_list(list(map(str, outcome.unreachable_nodes)))
        lines = [f"detail unreachable too: node {unreachable}"] if unreachable else []
        lines += _failure_details(cause, run_dir)
        show_panel(title, [f"cause  {cause.description}", *lines])
        return
    title, reason = "ranks hang" if outcome.hang else outcome.exited_ranks_text, outcome.reason
    if outcome.unreachable_text:
        title = f"{outcome.unreachable_text}; {outcome.exited_ranks_text}"
        reason = outcome.hang or "a launcher was killed, or a host is down or disconnected"
    logs = f"{run_dir / LOGS}/rank-*.log (stack of each rank)"
    show_panel(title, [f"cause  {reason}", f"hint   {RESUME_HINT}", f"log    {logs}"])


def _failure_details(cause: Failure, run_dir: Path) -> list[str]:
    log, lines = run_dir / LOGS / f"rank-{cause.rank:05d}.log", []
    if cause.was_killed and log.is_file():  # otherwise, the panel shows the rank's message
        lines += ["", *log.read_text(errors="replace").splitlines()[-_LAST_LINES:], ""]
    lacked_memory = cause.oom_killed or "out of memory" in cause.message.lower()
    if cause.exit_code == -signal.SIGKILL or lacked_memory:
        lines += [*_memory_report(run_dir, lacked_memory=lacked_memory), ""]
    log = log if log.is_file() else run_dir / LOG
    if REMOVED_DURING_RUN in cause.message and not (run_dir / RUN_CONFIG).is_file():
        return [*lines, f"hint   restore {run_dir}; without it, the same command begins again"]
    return [*lines, f"hint   {_hint(cause)}", f"log    {log}"]


def _memory_report(run_dir: Path, *, lacked_memory: bool) -> list[str]:
    """Return the estimate and the available memory; if memory was lacking, changes that fit."""
    from fsdpctl.estimate.estimator import Estimator
    from fsdpctl.estimate.suggestions import suggest
    from fsdpctl.estimate.summary import describe_suggestions
    from fsdpctl.resolve.run_plan import stored_plan
    from fsdpctl.run.directory import read_config

    estimator = Estimator()
    try:
        estimate = estimator.estimate(stored_plan(read_config(run_dir)))
    except UsageError:
        return []  # the configuration is corrupted; report the failure alone
    changes = []
    if lacked_memory or not estimate.fits:
        changes = describe_suggestions(suggest(estimator, estimate.plan, more_ranks=False))
    return [
        f"memory {format_bytes(estimate.allocated)} estimated, "
        f"{format_bytes(estimate.peak_reserved)} reserved; "
        f"{format_bytes(estimate.memory_bytes)} available per rank",
        f"peak   {estimate.step.peak.phase}",
        *changes,
    ]


def _hint(cause: Failure) -> str:
    if cause.oom_killed:
        return f"use fewer ranks per node, or a smaller micro-batch; {RESUME_HINT}"
    if cause.exit_code == -signal.SIGKILL:
        fewer_ranks = "use fewer ranks per node, or a smaller micro-batch"
        return f"often the kernel, out of memory: {fewer_ranks}; {RESUME_HINT}"
    if "could not be written" in cause.message:
        return f"free disk space, or set another train.run_dir; {RESUME_HINT}"
    if cause.description.startswith(COMPILE_FAILED):
        return "set another compiler in CXX, or train.compile=false"
    if "out of memory" in cause.message.lower():
        return "use more ranks: each holds a smaller shard of the model"
    if "timed out" in cause.message.lower():
        return f"a rank hangs or exited: see {LOGS}/rank-*.log; {RESUME_HINT}"
    return RESUME_HINT
