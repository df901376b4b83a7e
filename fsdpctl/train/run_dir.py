"""The directory of a run: whose it is, how far it has come, and who may write to it."""

import fcntl
import itertools
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path

import psutil

from fsdpctl.checkpoint.folders import (
    LATEST,
    complete_checkpoints,
    copy_checkpoint,
    find_checkpoint,
    newest_checkpoint,
    passed_over,
    point_to,
    remove_unfinished,
    step_folder,
    way_on,
)
from fsdpctl.checkpoint.pretrained import RUN_ASSETS
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.config.compose import config_from_words, config_to_yaml, config_words
from fsdpctl.config.model_path import CHECKPOINTS, RUN_CONFIG
from fsdpctl.config.recipe import read_recipe
from fsdpctl.config.schema import Config
from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.train.assets import write_assets
from fsdpctl.train.resolve import decides_losses

RUNS = "runs"  # the folder of runs whose directory was not given
OVERRIDES, METRICS, LOGS, LOCK = (
    "overrides.txt",
    "metrics.jsonl",
    "logs",
    "lock",
)
_NOT_THE_MODELS = ("model.path", "model.init", "model.init_std")  # but of its first weights
_NOT_SET = "not set"
_WIND_DOWN_SECONDS = 60.0  # a killed launcher's workers save and go within it


class Standing(Enum):
    """How a run directory stands to the run that is asked for."""

    NEW = auto()
    RESUMES = auto()
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run goes and from where it begins."""

    config: Config  # with its run directory
    standing: Standing
    step: int  # of the checkpoint that it begins from
    differences: tuple[str, ...] = ()  # from the last start, of what may differ, a line each
    source: Path | None = None  # a checkpoint of another run, to begin from
    notes: tuple[str, ...] = ()  # what is not as it should be, a line each

    @property
    def run_dir(self) -> Path:
        """The run's directory."""
        return Path(str(self.config.train.run_dir))


def read_config(run_dir: Path) -> Config:
    """The configuration that the run in `run_dir` was last started with.

    Raises:
        UsageError: it is damaged, or of another version of fsdpctl.
    """
    try:
        return config_from_words(dict(read_recipe(run_dir / RUN_CONFIG)))
    except UsageError as error:
        raise UsageError(
            f"{run_dir / RUN_CONFIG}: damaged, or of another version: {error}"
        ) from None


def plan_start(config: Config, resume: str) -> Start:
    """What `--resume RESUME` means for `config` and its run directory. Writes nothing.

    Raises:
        UsageError: the directory belongs to something else, or the checkpoint to another model.
        CheckpointError: the checkpoint is damaged.
    """
    if resume == "auto":
        return _go_on(config)
    fresh = _fresh_run_dir(Path(str(config.train.run_dir)))
    config = replace(config, train=replace(config.train, run_dir=str(fresh)))
    if resume == "never":
        return Start(config, Standing.NEW, 0)
    source = find_checkpoint(Path(resume).expanduser())
    manifest = CheckpointReader(source).manifest
    before, now = manifest.config, config_words(config)
    changed = [name for name in _changed(before, now) if name in before]
    of_model = [
        f"{name} {before[name]} -> {now.get(name, _NOT_SET)}"
        for name in changed
        if name.startswith("model.") and name not in _NOT_THE_MODELS
    ]
    if of_model:
        raise UsageError(f"--resume {resume}: is of another model ({', '.join(of_model)})")
    lines = _lines([name for name in changed if name not in _NOT_THE_MODELS], before, now)
    return Start(config, Standing.RESUMES, manifest.progress.step, lines, source=source)


def _fresh_run_dir(run_dir: Path) -> Path:
    """The first of NAME, NAME-2, NAME-3 … that is not there."""
    names = (run_dir.with_name(f"{run_dir.name}-{number}") for number in itertools.count(2))
    return next(each for each in itertools.chain([run_dir], names) if not each.exists())


def _go_on(config: Config) -> Start:
    run_dir = Path(str(config.train.run_dir))
    if run_dir.exists() and not run_dir.is_dir():
        raise UsageError(f"train.run_dir={run_dir}: is a file")
    nearest_folder = next(each for each in (run_dir, *run_dir.parents) if each.exists())
    if not (nearest_folder.is_dir() and os.access(nearest_folder, os.W_OK)):
        raise UsageError(f"train.run_dir={run_dir}: {nearest_folder} cannot be written to")
    if not (run_dir / RUN_CONFIG).is_file():
        if run_dir.is_dir() and not all(map(_is_of_a_start, run_dir.iterdir())):
            raise UsageError(
                f"train.run_dir={run_dir}: not empty, and not a run of fsdpctl; choose another"
            )
        return Start(config, Standing.NEW, 0)
    differences = _differences(run_dir, config)
    incomplete = passed_over(run_dir / CHECKPOINTS)
    newest = newest_checkpoint(run_dir / CHECKPOINTS)
    if newest is None and incomplete:
        raise CheckpointError(incomplete[0])
    if newest is None:
        if (run_dir / METRICS).is_file():
            differences += (f"{METRICS} is kept as {METRICS}.old: there is no checkpoint to it",)
        return Start(config, Standing.NEW, 0, differences)
    try:
        step = CheckpointReader(newest).manifest.progress.step
    except CheckpointError as error:
        raise CheckpointError(f"{error}{way_on(newest)}") from None
    assert config.train.steps is not None
    standing = Standing.FINISHED if step >= config.train.steps else Standing.RESUMES
    return Start(config, standing, step, differences, notes=tuple(incomplete))


def _is_of_a_start(file: Path) -> bool:
    """Whether a start that was cut short may have left it; a checkpoint is of more than that."""
    if file.name == CHECKPOINTS:
        return not complete_checkpoints(file)
    return file.name in (LOCK, LOGS, OVERRIDES, RUN_ASSETS) or ".tmp-" in file.name


def _differences(run_dir: Path, config: Config) -> tuple[str, ...]:
    before, now = config_words(read_config(run_dir)), config_words(config)
    changed = _changed(before, now)
    deciding = [
        f"{name} {before.get(name, _NOT_SET)} -> {now.get(name, _NOT_SET)}"
        for name in changed
        if decides_losses(name)
    ]
    if deciding:
        raise UsageError(
            f"train.run_dir={run_dir}: holds a run with another configuration "
            f"({', '.join(deciding)}); choose another train.run_dir=, or --resume never; "
            f"--resume {run_dir} goes on from its state in a new run"
        )
    return _lines(changed, before, now)


def _changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The words that differ, but for where the run lies."""
    names = sorted({*before, *now} - {"train.run_dir"})
    return [name for name in names if before.get(name) != now.get(name)]


def _lines(
    names: Sequence[str], before: Mapping[str, str], now: Mapping[str, str]
) -> tuple[str, ...]:
    return tuple(
        f"{name} was {before.get(name, _NOT_SET)}, is {now.get(name, _NOT_SET)}"
        f"{', which changes the losses' if decides_losses(name) else ''}"
        for name in names
    )


class RunLock:
    """Held by a launcher and its workers; gone when the last of them is."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LOCK
        self._file = self._path.open("a+")

    def acquire(self, on_wait: Callable[[], None]) -> None:
        """Become the only launcher of the run.

        Workers of a launcher that was killed may still be saving; they are waited for, after
        `on_wait()` was called.

        Raises:
            UsageError: another launcher is alive.
        """
        deadline = time.monotonic() + _WIND_DOWN_SECONDS
        said = False
        while not self._try(fcntl.LOCK_EX):
            self._file.seek(0)
            text = self._file.read().strip()
            alive = text.isdigit() and psutil.pid_exists(int(text))
            if alive or time.monotonic() > deadline:
                raise UsageError(
                    f"train.run_dir={self._path.parent}: in use by a living run (process {text})"
                )
            if not said:
                on_wait()
                said = True
            time.sleep(0.2)
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()
        if not self._try(fcntl.LOCK_SH):
            raise UsageError(f"train.run_dir={self._path.parent}: in use by a living run")

    def join(self) -> None:
        """Hold the lock together with the launcher, as one of its workers."""
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def release(self) -> None:
        """Let go; the file stays."""
        self._file.close()

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def lock_run_dir(run_dir: Path, on_wait: Callable[[], None]) -> RunLock:
    """Make the directory if need be, and lock it; `on_wait()` is called before a wait.

    Raises:
        UsageError: it cannot be written, or a living run uses it.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = RunLock(run_dir)
        lock.acquire(on_wait)
    except OSError as error:
        raise UsageError(f"train.run_dir={run_dir}: {error.strerror}") from None
    return lock


def prepare_run_dir(start: Start, words: Sequence[str], assets: Mapping[str, bytes]) -> None:
    """Write down what will run, with the files beside its weights. The lock must be held.

    Raises:
        UsageError: the directory cannot be written.
    """
    run_dir = start.run_dir
    checkpoints = run_dir / CHECKPOINTS
    try:
        _replace_text(run_dir / OVERRIDES, "".join(f"{word}\n" for word in words))
        shutil.rmtree(run_dir / LOGS, ignore_errors=True)
        (run_dir / LOGS).mkdir(exist_ok=True)
        checkpoints.mkdir(exist_ok=True)
        if start.standing is Standing.NEW and (run_dir / METRICS).is_file():
            (run_dir / METRICS).replace(run_dir / f"{METRICS}.old")
        remove_unfinished(checkpoints)
        write_assets(run_dir, assets)
        if start.source is not None:
            copy_checkpoint(start.source, step_folder(checkpoints, start.step))
        # Last: without it a start that is cut short here is none.
        _replace_text(run_dir / RUN_CONFIG, config_to_yaml(start.config))
        if run_dir.parent.name == RUNS:
            point_to(run_dir.parent / LATEST, run_dir)
    except OSError as error:
        raise UsageError(f"train.run_dir={run_dir}: {error.strerror or error}") from None


def _replace_text(path: Path, text: str) -> None:
    scratch = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
