"""Preparation of a run: its lock, the values of `auto`, and the files that workers read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdpctl.checkpoint.initial_weights import open_with_base
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.remote_checkpoints import remote_checkpoints_of
from fsdpctl.checkpoint.run_checkpoints import complete_checkpoints, newest_checkpoint
from fsdpctl.comm.collectives import Collectives
from fsdpctl.config.compose import Composed
from fsdpctl.config.launch import LaunchConfig
from fsdpctl.config.schema import Resolved
from fsdpctl.errors import DoesNotFitError
from fsdpctl.estimate.estimator import Estimator, write_estimate
from fsdpctl.estimate.resolve_auto import resolve_auto_of_run
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.estimate.suggestions import suggest
from fsdpctl.estimate.summary import describe_suggestions, note_on_local_cpu
from fsdpctl.io.activity import Reporter, doing
from fsdpctl.io.run_files import CHECKPOINTS
from fsdpctl.launch.run_summary import describe_run
from fsdpctl.resolve.launchers import LaunchRole
from fsdpctl.resolve.prepare import Prepared, prepare
from fsdpctl.resolve.run_plan import RunPlan, make_run_plan
from fsdpctl.resolve.script_module import ScriptTask
from fsdpctl.run.assets import collect_assets
from fsdpctl.run.data_record import check_same_data, write_data_record
from fsdpctl.run.directory import RunDirState, StartKind, inspect_run_dir, prepare_run_dir
from fsdpctl.run.heartbeat import RunLock, check_not_running, locked_unless_error

_MOST_VERIFIED = 16 << 30  # bytes of a checkpoint that a dry run verifies


@dataclass(slots=True)
class PreparedRun:
    """A locked and prepared run; it lives until the run ends, so it does not hold the data."""

    run_dir: Path
    lock: RunLock
    first_plan: RunPlan
    config: Resolved  # settled for the ranks of the current round
    step: int  # step of the checkpoint from which the current round starts

    @property
    def launch(self) -> LaunchConfig:
        return self.config.launch


def prepare_run(
    composed: Composed,
    settings: Sequence[str],
    resume: str,
    reporter: Reporter,
    role: LaunchRole | None = None,
    *,
    task: ScriptTask | None = None,
) -> PreparedRun | None:
    """Lock and prepare the run directory; return None if the run is finished.

    `settings` are recorded; `resume` is the value of `--resume`. A script has a `task`, and no
    estimate. UsageError if the run is invalid, DoesNotFitError if memory does not suffice. After an
    error, nothing remains of a directory that this function created.
    """
    opened = prepare(composed, role, task=task, resume=resume)
    state = inspect_run_dir(opened.config, resume)
    # A finished run may have checkpoints left to upload, which needs the lock.
    may_upload = state.source is None and remote_checkpoints_of(state.config) is not None
    if not may_upload and report_if_finished(state, reporter.result):
        return None
    waiting = f"waiting for the workers of the last start of {state.run_dir}"
    with locked_unless_error(state.run_dir, lambda: reporter.result(waiting)) as lock:
        # Another process may have advanced or finished the run before the lock was acquired.
        state = inspect_run_dir(opened.config, resume, state.run_dir)
        if state.start_kind is StartKind.FINISHED:
            _upload_remaining(state)
        if report_if_finished(state, reporter.result):
            lock.release()
            return None
        assets = check_start(opened, state)
        estimator = Estimator()
        estimate, lines = None, tuple[str, ...]()
        if task is None:
            plan, estimate, lines = resolve_auto_of_run(
                estimator, state.config, state.stored_config, state.stored_in, reporter.note
            )
        else:
            plan = make_run_plan(state.config)
        described = describe_run(opened, plan, state, estimate)
        for line in (*lines, *described):
            (reporter.result if line.startswith("note ") else reporter.info)(line)
        if estimate is not None:
            check_fits(estimate, estimator, reporter.result)
        write_data_record(state.run_dir, opened.data)
        if link_problem := prepare_run_dir(state, plan.config, settings, assets):
            reporter.result(f"note    {link_problem}")
        if estimate is not None:
            write_estimate(state.run_dir, estimate, estimator)
    return PreparedRun(state.run_dir, lock, plan, plan.config, state.step)


def check_start(opened: Prepared, state: RunDirState) -> dict[str, bytes]:
    """Check the data and the object store; return the files to write next to the weights."""
    check_same_data(state.run_dir, opened.data, state.data_fingerprint)
    if (remote := remote_checkpoints_of(state.config)) is not None:
        remote.check_writable()
    return collect_assets(state.config, opened.data)


def check_dry_run(opened: Prepared, state: RunDirState) -> str:
    """Run the checks of a start and of its ranks; return how to verify what they left out."""
    check_start(opened, state)
    check_not_running(state.run_dir)
    newest = newest_checkpoint(state.run_dir / CHECKPOINTS) if state.source is None else None
    reader = state.source if newest is None else CheckpointReader(newest)
    if reader is not None and reader.num_bytes > _MOST_VERIFIED:
        return f"`fsdpctl verify-checkpoint {reader}` verifies the state"
    if reader is not None:
        with doing(f"verifying {reader}"):
            for _ in reader.verify():
                pass
            open_with_base(reader, Collectives())  # the checks of a rank, as the only rank
    return ""


def report_if_finished(state: RunDirState, say: Callable[[str], None]) -> bool:
    """Return whether the run is finished, and print how to continue it."""
    if state.start_kind is not StartKind.FINISHED:
        return False
    say(f"{state.source or state.run_dir}: finished at step {state.step}; nothing to do")
    train = state.config.train
    lengths = {"train.epochs": train.epochs, "train.tokens": train.tokens}
    key = next((each for each, value in lengths.items() if value is not None), "train.steps")
    if train.steps is not None and state.step < train.steps:
        key = "train.patience"
    is_script = state.config.model.is_script_module
    new = "set another train.run_dir" if is_script else "pass --resume never"
    say(f"set a larger {key} to continue, or {new} to start a new run")
    return True


def _upload_remaining(state: RunDirState) -> None:
    remote = remote_checkpoints_of(state.config)
    if remote is None or state.source is not None:  # the object store has newer ones
        return
    for folder in complete_checkpoints(state.run_dir / CHECKPOINTS):
        with doing(f"uploading {folder}"):
            remote.upload(folder)
            remote.remove_expired(state.config.checkpoint, folder)


def check_fits(estimate: RunEstimate, estimator: Estimator, say: Callable[[str], None]) -> None:
    """If a run does not fit, print changes that make it fit; DoesNotFitError if it must fit."""
    if not (shortages := estimate.shortages):
        return
    say(f"{'memory':<8}does not suffice; searching for changes that fit")
    changes = suggest(estimator, estimate.plan, more_ranks=False)
    for line in (*describe_suggestions(changes), *(() if changes else note_on_local_cpu(estimate))):
        say(line)
    if estimate.config.train.require_fit:
        hint = "change the settings, or set train.require_fit=false to start nevertheless"
        raise DoesNotFitError(f"{'; '.join(shortages)}; {hint}")
