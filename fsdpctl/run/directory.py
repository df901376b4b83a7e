"""The directory of a run: which run it belongs to, how far that has come, and its files."""

import itertools
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from fsdpctl.checkpoint.load import state_kinds
from fsdpctl.checkpoint.manifest import read_manifest
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.remote_checkpoints import (
    RemoteCheckpoints,
    open_checkpoint,
    remote_checkpoints_of,
)
from fsdpctl.checkpoint.run_checkpoints import (
    complete_checkpoints,
    copy_checkpoint,
    find_checkpoint,
    incomplete_checkpoints,
    newest_checkpoint,
    remove_interrupted_saves,
    replace_link,
    restore_links,
    resume_hint,
    step_folder,
    step_of,
)
from fsdpctl.checkpoint.training_progress import Progress
from fsdpctl.config.model import SCRIPT_PREFIX
from fsdpctl.config.model_path import CONFIG_JSON_KEY
from fsdpctl.config.overrides import read_run_config
from fsdpctl.config.schema import Config, Filled, Resolved
from fsdpctl.config.serialize import (
    config_from_settings,
    config_of_checkpoint,
    config_to_yaml,
    to_settings,
)
from fsdpctl.errors import CheckpointError, FsdpctlError, UsageError
from fsdpctl.io import files
from fsdpctl.io.run_files import (
    CACHE,
    CHECKPOINTS,
    DATA,
    HEARTBEAT,
    LATEST,
    LOCK,
    LOGS,
    METRICS,
    OVERRIDES_FILE,
    RUN_ASSETS,
    RUN_CONFIG,
    RUNS,
    check_run_dir,
    check_run_files,
)
from fsdpctl.io.stores import is_remote
from fsdpctl.plan.optimizers import get_optimizer
from fsdpctl.resolve.auto_values import decides_losses
from fsdpctl.run.assets import write_assets
from fsdpctl.run.data_record import recorded_fingerprint
from fsdpctl.run.metrics import validation_loss_at

_PROCESS_SETTINGS = (
    "train.run_dir",
    "launch.node_rank",
    "launch.rdzv_endpoint",
)  # of a start, not the run
# They change the first weights, or the kernel, but not what a checkpoint means.
_NOT_ARCHITECTURE = (
    "model.path", "model.init", "model.lora.path", "model.attention", "model.overrides",
)  # fmt: skip
_MAY_CHANGE = ("optimizer.state_dtype",)  # on resume: checkpoints are read into any dtype
_NOT_SET = "not set"
_RESTART = "restart-"  # with a number: a directory in that of the logs


class ResumeState(Enum):
    """The state of a run directory for a start."""

    NEW = auto()
    RESUMES = auto()
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class RunDirState:
    """A run directory as it is: what a start of a run would do there."""

    config: Filled  # with the run directory
    resume_state: ResumeState
    step: int  # of the checkpoint to start from
    previous_settings: Mapping[str, str] = field(
        default_factory=dict
    )  # settings of the last start by hand
    stored_config: Config | None = (
        None  # the configuration of that start, if it was in this directory
    )
    source: CheckpointReader | None = None  # in another place, to start from
    notes: tuple[str, ...] = ()  # warnings, a line each
    data_fingerprint: str = ""  # of the run that resumes; empty: any

    @property
    def run_dir(self) -> Path:
        return Path(str(self.config.train.run_dir))

    @property
    def stored_config_location(self) -> object:
        """The location of the `kept` configuration."""
        return self.source or self.run_dir / RUN_CONFIG


def read_config(run_dir: Path) -> Config:
    """Return the configuration of the last start in `run_dir`, or of the last restart."""
    check_run_files(run_dir)
    file = run_dir / RUN_CONFIG
    try:
        return config_from_settings(read_run_config(file))
    except UsageError as error:
        problem = str(error).removeprefix(f"{file}: ")
        raise UsageError(f"{file}: corrupted, or written by another version: {problem}") from None


def inspect_run_dir(
    config: Filled, resume: str, new_run_dir: Path | None = None, *, ignores_remote: bool = False
) -> RunDirState:
    """Find out what `--resume RESUME` means for `config` and its run directory. Writes nothing.

    `config` may have `auto` left; `fresh` is the new directory, if an earlier look has named it.
    With `only_here`, checkpoints in the run's object store do not count. UsageError if the
    directory is not of this run, or the checkpoint of another model; CheckpointError if corrupted.
    """
    if resume == "auto":
        return _inspect_for_resume(
            config, None if ignores_remote else remote_checkpoints_of(config)
        )
    new_run_dir = new_run_dir or _new_run_dir(
        Path(str(config.train.run_dir)), remote_checkpoints_of(config)
    )
    config = config.changed({"train.run_dir": str(new_run_dir)})
    if resume == "never":
        return RunDirState(config, ResumeState.NEW, 0)
    source = open_checkpoint(resume)
    manifest = source.manifest
    before, now = manifest.config, to_settings(config)
    if of_model := _changed_architecture(before, now):
        raise UsageError(f"--resume {resume}: checkpoint of another model ({', '.join(of_model)})")
    first, name = before.get("optimizer"), config.optimizer.name
    has_moments = config.optimizer.momentum > 0 or not get_optimizer(name).needs_momentum
    if first not in (None, name) and has_moments and state_kinds(source):
        raise UsageError(
            f"--resume {resume}: expected optimizer={first}, whose state it has, got {name}; to "
            f"start from its weights only, set model=hf model.path={shlex.quote(resume)}"
        )
    return RunDirState(config, ResumeState.RESUMES, manifest.progress.step, before, source=source)


def changed_settings(state: RunDirState, config: Filled) -> list[str]:
    """Return the settings of a settled configuration that the last start by hand had otherwise.

    They do not decide the losses, unless the run starts from the state of another run.
    """
    now = to_settings(config)
    names = _differing_names(state.previous_settings, now) if state.previous_settings else []
    if state.source is not None:
        names = [
            each
            for each in names
            if each in state.previous_settings and each not in _NOT_ARCHITECTURE
        ]
    return [
        f"{name} was {state.previous_settings.get(name, _NOT_SET)}, is {now.get(name, _NOT_SET)}"
        f"{', which changes the losses' if decides_losses(name) else ''}"
        for name in names
    ]


def _new_run_dir(run_dir: Path, remote: RemoteCheckpoints | None) -> Path:
    """Return the first of NAME, NAME-2, NAME-3 … that exists neither here nor in the store."""
    names = (run_dir.with_name(f"{run_dir.name}-{number}") for number in itertools.count(2))
    return next(
        each
        for each in itertools.chain([run_dir], names)
        if not each.exists() and (remote is None or not remote.of_run(each.name).complete())
    )


def _inspect_for_resume(config: Filled, remote: RemoteCheckpoints | None) -> RunDirState:
    run_dir = Path(str(config.train.run_dir))
    is_here = _is_run(run_dir)
    newest = newest_checkpoint(run_dir / CHECKPOINTS) if is_here else None
    stored = None if remote is None else remote.newest()
    if is_here:
        first = run_dir / LOGS / f"{_RESTART}1"  # restarts may have had fewer ranks
        kept = read_config(first if (first / RUN_CONFIG).is_file() else run_dir)
    elif stored is not None:
        kept = config_of_checkpoint(stored.manifest.config, stored.url, is_decoder=False)
    else:
        notes = _note_on_latest(run_dir, config)
        return RunDirState(config, ResumeState.NEW, 0, notes=notes)
    before = to_settings(kept)
    now = to_settings(config)
    if is_here:
        _check_same_run(f"train.run_dir={run_dir}", run_dir, before, now)
    if stored is not None:  # else its checkpoints would be overwritten
        _check_same_run(stored.url, stored.url, stored.manifest.config, now)
    here = -1 if newest is None else step_of(newest)
    there = stored.open() if stored is not None and stored.step > here else None
    incomplete = incomplete_checkpoints(run_dir / CHECKPOINTS)
    if newest is None and incomplete and there is None:
        raise CheckpointError(f"{incomplete[0]}; move it away to start the run again")
    done = there.manifest.progress if there is not None else _progress_at(newest)
    if done is None:
        unused = f"{METRICS} is renamed to {METRICS}.old: no checkpoint belongs to it"
        notes = (unused,) if (run_dir / METRICS).is_file() else ()
        return RunDirState(config, ResumeState.NEW, 0, before, kept, notes=notes)
    assert config.train.steps is not None
    done = _validated(done, run_dir)
    train, known = config.train, recorded_fingerprint(run_dir, done.data_fingerprint)
    is_over = not done.owes_validation and done.is_finished(config.train.steps, train.patience)
    standing = ResumeState.FINISHED if is_over else ResumeState.RESUMES
    return RunDirState(config, standing, done.step, before, kept, there, tuple(incomplete), known)


def _is_run(run_dir: Path) -> bool:
    """Return whether a run has started in a directory; UsageError if none may start there."""
    check_run_dir(run_dir)
    nearest_folder = next(each for each in (run_dir, *run_dir.parents) if each.exists())
    if not nearest_folder.is_dir():
        raise UsageError(f"train.run_dir={run_dir}: {nearest_folder} is a file")
    if not os.access(nearest_folder, os.W_OK):
        raise UsageError(f"train.run_dir={run_dir}: {nearest_folder} is not writable")
    is_run = (run_dir / RUN_CONFIG).is_file()
    if not is_run and run_dir.is_dir() and not all(map(_may_be_from_start, run_dir.iterdir())):
        problem = "not empty, and not a run of fsdpctl; choose another"
        raise UsageError(f"train.run_dir={run_dir}: {problem}")
    return is_run


def _progress_at(newest: Path | None) -> Progress | None:
    try:
        return None if newest is None else CheckpointReader(newest).manifest.progress
    except CheckpointError as error:
        assert newest is not None
        raise CheckpointError(f"{error}{resume_hint(newest)}") from None


def _validated(done: Progress, run_dir: Path) -> Progress:
    """Return the progress with a validation that was complete only after the save."""
    loss = validation_loss_at(run_dir / METRICS, done.step) if done.owes_validation else None
    return done if loss is None else done.after_validation(loss)


def best_checkpoint(newest: Path) -> Path | None:
    """Return the checkpoint with the lowest validation loss of a run, given the newest one."""
    best = _validated(read_manifest(newest).progress, newest.parent.parent).best
    folder = None if best is None else step_folder(newest.parent, best.step)
    return folder if folder in complete_checkpoints(newest.parent) else None


def open_best(source: str) -> CheckpointReader:
    """Open the checkpoint of a run with the lowest validation loss: of a path here or a URL."""
    if is_remote(source):
        best = open_checkpoint(source).manifest.progress.best
        if best is not None:
            return RemoteCheckpoints(source).open(step_folder(Path(), best.step).name)
    else:
        found = find_checkpoint(Path(source).expanduser())
        folder = best_checkpoint(newest_checkpoint(found.parent) or found)
        if folder is not None:
            return CheckpointReader(folder)
    problem = "no best checkpoint found; a run has one with checkpoint.keep_best=true"
    raise UsageError(f"{source}: {problem}")


def _note_on_latest(run_dir: Path, config: Config) -> tuple[str, ...]:
    """Name the newest run if it has the same name and a different configuration.

    If you change a setting, you do not always mean to start from the beginning.
    """
    last = files.latest_run(run_dir.parent)
    name = run_dir.name.rpartition("-")[0]
    if config.model.is_script_module or run_dir.parent.name != RUNS or last is None:
        return ()
    if not name or last.name.rpartition("-")[0] != name:
        return ()
    if newest_checkpoint(last / CHECKPOINTS) is None:
        return ()
    try:
        before, now = to_settings(read_config(last)), to_settings(config)
    except UsageError:  # of another version, which a new run does not need
        return ()
    changed = [key for key in _differing_names(before, now) if decides_losses(key)]
    if any(key.startswith("data") for key in changed) or _changed_architecture(before, now):
        return ()  # hardly meant to continue that run
    shown = ", ".join(f"{key} {before.get(key, _NOT_SET)}" for key in changed[:3])
    shown = shown or "the same settings, and a name of another version"
    return (f"new run: {last} has {shown}; to continue from its state, pass --resume {last}",)


def _may_be_from_start(file: Path) -> bool:
    """Return whether an interrupted start may have left the file; a complete checkpoint is more."""
    if file.name == CHECKPOINTS:
        return not complete_checkpoints(file)
    return (
        file.name in (LOCK, LOGS, OVERRIDES_FILE, RUN_ASSETS, DATA, CACHE) or ".tmp-" in file.name
    )


def _check_same_run(
    where: object, source: object, before: Mapping[str, str], now: Mapping[str, str]
) -> None:
    deciding = [
        f"{name} {before.get(name, _NOT_SET)} -> {now.get(name, _NOT_SET)}"
        for name in _differing_names(before, now)
        if decides_losses(name) and name not in _MAY_CHANGE
    ]
    if deciding:
        more = f", or pass --resume {shlex.quote(str(source))} to start a new run from its state"
        more = (
            ", or pass --resume never" * bool(_changed_architecture(before, now))
            or f", pass --resume never{more}"
        )
        more = "" if now["model"].startswith(SCRIPT_PREFIX) else more
        raise UsageError(
            f"{where}: contains a run with a different configuration "
            f"({', '.join(deciding)}); set another train.run_dir{more}"
        )


def _changed_architecture(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [
        f"{name} {before[name]} -> {now.get(name, _NOT_SET)}"
        for name in _differing_names(before, now)
        if name in before and name.startswith("model.") and name not in _NOT_ARCHITECTURE
    ]


def _differing_names(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the settings that differ, except for the run's directory and its rendezvous.

    A config.json counts if no other setting of the model differs.
    """
    names = sorted({*before, *now} - {*_PROCESS_SETTINGS})
    found = [name for name in names if before.get(name) != now.get(name)]
    others = [name for name in found if name.startswith("model.") and name != CONFIG_JSON_KEY]
    return [name for name in found if name != CONFIG_JSON_KEY or not others]


def prepare_run_dir(
    state: RunDirState, config: Resolved, settings: Sequence[str], assets: Mapping[str, bytes]
) -> str:
    """Write the files that the workers read, for a settled configuration. The lock must be held.

    Return why runs/latest does not lead to the run, or an empty string.
    """
    run_dir = state.run_dir
    checkpoints = run_dir / CHECKPOINTS
    with files.os_errors_as(f"train.run_dir={run_dir}"):
        files.write_atomic(run_dir / OVERRIDES_FILE, "".join(f"{each}\n" for each in settings))
        (run_dir / HEARTBEAT).unlink(missing_ok=True)  # of the last start
        shutil.rmtree(run_dir / LOGS, ignore_errors=True)
        (run_dir / LOGS).mkdir(exist_ok=True)
        checkpoints.mkdir(exist_ok=True)
        if state.resume_state is ResumeState.NEW and (run_dir / METRICS).is_file():
            (run_dir / METRICS).replace(run_dir / f"{METRICS}.old")
        remove_interrupted_saves(checkpoints)
        write_assets(run_dir, assets)
        if state.source is not None:
            copy_checkpoint(state.source, step_folder(checkpoints, state.step))
        restore_links(checkpoints)
        # Last: a start that is interrupted before this line does not count.
        files.write_atomic(run_dir / RUN_CONFIG, config_to_yaml(config), durable=True)
    return replace_link(run_dir.parent / LATEST, run_dir) if run_dir.parent.name == RUNS else ""


def prepare_restart(state: RunDirState, number: int) -> None:
    """Prepare a directory in use for restart `number`; keep logs and settings of the failure."""
    logs, run_dir = state.run_dir / LOGS, state.run_dir
    with files.os_errors_as(f"train.run_dir={run_dir}", full_disk=FsdpctlError):
        kept = logs / f"{_RESTART}{number}"
        kept.mkdir(parents=True, exist_ok=True)
        for each in logs.glob("rank-*.log"):
            each.replace(kept / each.name)
        files.write_atomic(kept / RUN_CONFIG, (run_dir / RUN_CONFIG).read_bytes())
        (run_dir / HEARTBEAT).unlink(missing_ok=True)  # of the failed ranks
        if state.resume_state is ResumeState.NEW and (run_dir / METRICS).is_file():
            with files.open_nofollow(run_dir / f"{METRICS}.old", "ab") as old:
                old.write((run_dir / METRICS).read_bytes())
            (run_dir / METRICS).unlink()
        remove_interrupted_saves(run_dir / CHECKPOINTS)
        files.write_atomic(run_dir / RUN_CONFIG, config_to_yaml(state.config), durable=True)
