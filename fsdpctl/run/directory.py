"""The directory of a run: which run it belongs to, the progress of that run, and its files."""

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
    describe_incomplete,
    find_checkpoint,
    newest_checkpoint,
    older_checkpoint_hint,
    remove_interrupted_saves,
    replace_link,
    restore_links,
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

# Settings of a start that do not belong to the run.
_PROCESS_SETTINGS = ("train.run_dir", "launch.node_rank", "launch.rdzv_endpoint")
# Settings that change the initial weights or the kernel, but not the meaning of a checkpoint.
_NOT_ARCHITECTURE = (
    "model.path", "model.init", "model.lora.path", "model.attention", "model.overrides",
)  # fmt: skip
# Settings that affect the losses, but may change in a resumed run: states are read into any dtype.
_CHANGEABLE = ("optimizer.state_dtype",)
_NOT_SET = "not set"
_RESTART = "restart-"  # and a number: a directory in LOGS


class StartKind(Enum):
    """The effect of a start on a run directory: a new run, a resumed one, or nothing."""

    NEW = auto()
    RESUME = auto()
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class RunDirState:
    """The state of a run directory, and how a start would continue it."""

    config: Filled  # includes the run directory
    start_kind: StartKind
    step: int  # step of the checkpoint to start from
    previous_settings: Mapping[str, str] = field(default_factory=dict)  # at the last manual start
    # The configuration of this run's last manual start. Another run has only `previous_settings`.
    stored_config: Config | None = None
    source: CheckpointReader | None = None  # checkpoint of another run, or of this run's store
    notes: tuple[str, ...] = ()  # warnings, one line each
    data_fingerprint: str = ""  # data of the resumed run; empty: any data is accepted

    @property
    def run_dir(self) -> Path:
        return Path(str(self.config.train.run_dir))

    @property
    def stored_in(self) -> object:
        """The location of the stored configuration."""
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
    """Return what `--resume RESUME` means for `config` and its run directory; writes nothing.

    `config` may contain `auto`. `new_run_dir`: the name that an earlier call chose. With
    `ignores_remote`, checkpoints in the run's object store do not count. UsageError if the
    directory belongs to another run, or the checkpoint to another model. CheckpointError if the
    checkpoint is corrupted.
    """
    remote = None if ignores_remote else remote_checkpoints_of(config)
    if resume == "auto":
        return _inspect_for_resume(config, remote)
    new_run_dir = new_run_dir or _new_run_dir(Path(str(config.train.run_dir)), remote)
    config = config.changed({"train.run_dir": str(new_run_dir)})
    if resume == "never":
        return RunDirState(config, StartKind.NEW, step=0)
    source = open_checkpoint(resume)
    previous, current = source.manifest.config, to_settings(config)
    if changes := _changed_architecture(previous, current):
        raise UsageError(f"--resume {resume}: checkpoint of another model ({', '.join(changes)})")
    saved_optimizer, name = previous.get("optimizer"), config.optimizer.name
    # Without momentum, no states are loaded: those of any optimizer fit.
    has_moments = config.optimizer.momentum > 0 or not get_optimizer(name).needs_momentum
    if saved_optimizer not in (None, name) and has_moments and state_kinds(source):
        raise UsageError(
            f"--resume {resume}: has states of optimizer={saved_optimizer}, got {name}; to use "
            f"only the weights, set model=hf model.path={shlex.quote(resume)}"
        )
    step = source.manifest.progress.step
    return RunDirState(config, StartKind.RESUME, step, previous, source=source)


def changed_settings(state: RunDirState, config: Filled) -> list[str]:
    """Describe the settings of a settled configuration that differ from the last manual start.

    These settings change the losses only if the run starts from the state of another run.
    """
    previous, current = state.previous_settings, to_settings(config)
    names = _differing_names(previous, current) if previous else []
    if state.source is not None:
        names = [name for name in names if name in previous and name not in _NOT_ARCHITECTURE]
    return [
        f"{name} was {previous.get(name, _NOT_SET)}, is {current.get(name, _NOT_SET)}"
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
    is_run = _check_run_dir(run_dir)
    newest = newest_checkpoint(run_dir / CHECKPOINTS) if is_run else None
    uploaded = None if remote is None else remote.newest()
    if is_run:
        # Restarts may have had fewer ranks. `prepare_restart` saved the configuration before them.
        first = run_dir / LOGS / f"{_RESTART}1"
        stored_config = read_config(first if (first / RUN_CONFIG).is_file() else run_dir)
    elif uploaded is not None:
        settings = uploaded.manifest.config
        stored_config = config_of_checkpoint(settings, uploaded.url, is_decoder=False)
    else:
        return RunDirState(config, StartKind.NEW, step=0, notes=_note_on_latest(run_dir, config))
    previous, current = to_settings(stored_config), to_settings(config)
    if is_run:
        _check_same_run(f"train.run_dir={run_dir}", run_dir, previous, current)
    if uploaded is not None:  # a different run must not overwrite the store's checkpoints
        _check_same_run(uploaded.url, uploaded.url, uploaded.manifest.config, current)
    local_step = -1 if newest is None else step_of(newest)
    source = uploaded.open() if uploaded is not None and uploaded.step > local_step else None
    incomplete = describe_incomplete(run_dir / CHECKPOINTS)
    if newest is None and incomplete and source is None:
        raise CheckpointError(f"{incomplete[0]}; move it away to start the run again")
    progress = source.manifest.progress if source is not None else _progress_at(newest)
    if progress is None:
        unused = f"{METRICS} is renamed to {METRICS}.old: no checkpoint belongs to it"
        notes = (unused,) if (run_dir / METRICS).is_file() else ()
        return RunDirState(config, StartKind.NEW, 0, previous, stored_config, notes=notes)
    assert config.train.steps is not None
    progress = _add_pending_validation(progress, run_dir)
    is_over = progress.is_finished(config.train.steps, config.train.patience)
    is_finished = is_over and not progress.owes_validation
    start_kind = StartKind.FINISHED if is_finished else StartKind.RESUME
    fingerprint = recorded_fingerprint(run_dir, progress.data_fingerprint)
    return RunDirState(
        config, start_kind, progress.step, previous, stored_config, source,
        notes=tuple(incomplete), data_fingerprint=fingerprint,
    )  # fmt: skip


def _check_run_dir(run_dir: Path) -> bool:
    """Return whether a run has started in a directory; UsageError if no run may start there."""
    check_run_dir(run_dir)
    nearest_folder = next(each for each in (run_dir, *run_dir.parents) if each.exists())
    if not nearest_folder.is_dir():
        raise UsageError(f"train.run_dir={run_dir}: {nearest_folder} is a file")
    if not os.access(nearest_folder, os.W_OK):
        raise UsageError(f"train.run_dir={run_dir}: {nearest_folder} is not writable")
    is_run = (run_dir / RUN_CONFIG).is_file()
    if not is_run and run_dir.is_dir() and not all(map(_may_be_left_by_start, run_dir.iterdir())):
        problem = "not empty, and not a run of fsdpctl; choose another"
        raise UsageError(f"train.run_dir={run_dir}: {problem}")
    return is_run


def _progress_at(newest: Path | None) -> Progress | None:
    try:
        return None if newest is None else CheckpointReader(newest).manifest.progress
    except CheckpointError as error:
        assert newest is not None
        raise CheckpointError(f"{error}{older_checkpoint_hint(newest)}") from None


def _add_pending_validation(progress: Progress, run_dir: Path) -> Progress:
    """Add the loss of a validation that was pending at the checkpoint, if it has ended since."""
    file = run_dir / METRICS
    loss = validation_loss_at(file, progress.step) if progress.owes_validation else None
    return progress if loss is None else progress.after_validation(loss)


def best_checkpoint(newest: Path) -> Path | None:
    """Return the checkpoint with the lowest validation loss of the run of the `newest` one."""
    best = _add_pending_validation(read_manifest(newest).progress, newest.parent.parent).best
    folder = None if best is None else step_folder(newest.parent, best.step)
    return folder if folder in complete_checkpoints(newest.parent) else None


def open_best(source: str) -> CheckpointReader:
    """Open the checkpoint with the lowest validation loss of a run, given its path or URL."""
    if is_remote(source):
        best = open_checkpoint(source).manifest.progress.best
        if best is not None:
            return RemoteCheckpoints(source).open(step_folder(Path(), best.step).name)
    else:
        checkpoint = find_checkpoint(Path(source).expanduser())
        folder = best_checkpoint(newest_checkpoint(checkpoint.parent) or checkpoint)
        if folder is not None:
            return CheckpointReader(folder)
    problem = "no best checkpoint found; a run has one with checkpoint.keep_best=true"
    raise UsageError(f"{source}: {problem}")


def _note_on_latest(run_dir: Path, config: Config) -> tuple[str, ...]:
    """Name the newest run if it has the same name and a different configuration.

    The setting may be changed by mistake: that run could be continued.
    """
    latest = files.latest_run(run_dir.parent)
    name = run_dir.name.rpartition("-")[0]
    if config.model.is_script_module or run_dir.parent.name != RUNS or latest is None:
        return ()
    has_other_name = not name or latest.name.rpartition("-")[0] != name
    if has_other_name or newest_checkpoint(latest / CHECKPOINTS) is None:
        return ()
    try:
        previous, current = to_settings(read_config(latest)), to_settings(config)
    except UsageError:  # another version has written it
        return ()
    changed = [key for key in _differing_names(previous, current) if decides_losses(key)]
    # Other data or another model are probably no mistake.
    if any(key.startswith("data") for key in changed) or _changed_architecture(previous, current):
        return ()
    shown = ", ".join(f"{key} {previous.get(key, _NOT_SET)}" for key in changed[:3])
    shown = shown or "the same settings, but its name is from another version"
    return (f"new run: {latest} has {shown}; to continue from its state, pass --resume {latest}",)


def _may_be_left_by_start(file: Path) -> bool:
    """Return whether an interrupted start may have left the file."""
    if file.name == CHECKPOINTS:  # a complete checkpoint belongs to a run
        return not complete_checkpoints(file)
    names = LOCK, LOGS, OVERRIDES_FILE, RUN_ASSETS, DATA, CACHE
    return file.name in names or ".tmp-" in file.name


def _check_same_run(
    location: object, source: object, previous: Mapping[str, str], current: Mapping[str, str]
) -> None:
    deciding = [
        f"{name} {previous.get(name, _NOT_SET)} -> {current.get(name, _NOT_SET)}"
        for name in _differing_names(previous, current)
        if decides_losses(name) and name not in _CHANGEABLE
    ]
    if deciding:
        resume = f"--resume {shlex.quote(str(source))}"
        hint = f", pass --resume never, or pass {resume} to start a new run from its state"
        if _changed_architecture(previous, current):
            hint = ", or pass --resume never"
        if current["model"].startswith(SCRIPT_PREFIX):
            hint = ""
        raise UsageError(
            f"{location}: contains a run with a different configuration "
            f"({', '.join(deciding)}); set another train.run_dir{hint}"
        )


def _changed_architecture(previous: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    return [
        f"{name} {previous[name]} -> {current.get(name, _NOT_SET)}"
        for name in _differing_names(previous, current)
        if name in previous and name.startswith("model.") and name not in _NOT_ARCHITECTURE
    ]


def _differing_names(previous: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """Return the names of settings that differ, except for the run directory and the rendezvous.

    `model.config_json` counts only if no other setting of the model differs: it has them all.
    """
    names = sorted({*previous, *current} - {*_PROCESS_SETTINGS})
    differing = [name for name in names if previous.get(name) != current.get(name)]
    others = [name for name in differing if name.startswith("model.") and name != CONFIG_JSON_KEY]
    return [name for name in differing if name != CONFIG_JSON_KEY or not others]


def prepare_run_dir(
    state: RunDirState, config: Resolved, settings: Sequence[str], assets: Mapping[str, bytes]
) -> str:
    """Write the files that the workers read. The caller must hold the lock.

    Return why the link runs/latest could not be set to the run, or an empty string.
    """
    run_dir = state.run_dir
    checkpoints = run_dir / CHECKPOINTS
    with files.os_errors_as(f"train.run_dir={run_dir}"):
        files.write_atomic(run_dir / OVERRIDES_FILE, "".join(f"{each}\n" for each in settings))
        (run_dir / HEARTBEAT).unlink(missing_ok=True)  # it describes the last start
        shutil.rmtree(run_dir / LOGS, ignore_errors=True)
        (run_dir / LOGS).mkdir(exist_ok=True)
        checkpoints.mkdir(exist_ok=True)
        if state.start_kind is StartKind.NEW and (run_dir / METRICS).is_file():
            (run_dir / METRICS).replace(run_dir / f"{METRICS}.old")
        remove_interrupted_saves(checkpoints)
        write_assets(run_dir, assets)
        if state.source is not None:
            copy_checkpoint(state.source, step_folder(checkpoints, state.step))
        restore_links(checkpoints)
        # Written last: a start that is interrupted before this line leaves no run.
        files.write_atomic(run_dir / RUN_CONFIG, config_to_yaml(config), durable=True)
    return replace_link(run_dir.parent / LATEST, run_dir) if run_dir.parent.name == RUNS else ""


def prepare_restart(state: RunDirState, number: int) -> None:
    """Prepare the directory of a running run for restart `number`.

    Keeps the logs and the configuration of the failed ranks in a directory of LOGS.
    """
    logs, run_dir = state.run_dir / LOGS, state.run_dir
    with files.os_errors_as(f"train.run_dir={run_dir}", full_disk=FsdpctlError):
        folder = logs / f"{_RESTART}{number}"
        folder.mkdir(parents=True, exist_ok=True)
        for log in logs.glob("rank-*.log"):
            log.replace(folder / log.name)
        files.write_atomic(folder / RUN_CONFIG, (run_dir / RUN_CONFIG).read_bytes())
        (run_dir / HEARTBEAT).unlink(missing_ok=True)  # it describes the failed ranks
        if state.start_kind is StartKind.NEW and (run_dir / METRICS).is_file():
            with files.open_nofollow(run_dir / f"{METRICS}.old", "ab") as old:
                old.write((run_dir / METRICS).read_bytes())
            (run_dir / METRICS).unlink()
        remove_interrupted_saves(run_dir / CHECKPOINTS)
        files.write_atomic(run_dir / RUN_CONFIG, config_to_yaml(state.config), durable=True)
