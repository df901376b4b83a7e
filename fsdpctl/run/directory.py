"""The directory of a run: whose it is, how far it has come, and who may write to it."""

import itertools
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path

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
from fsdpctl.config.model_path import CHECKPOINTS, RUN_CONFIG
from fsdpctl.config.recipe import read_recipe
from fsdpctl.config.schema import Config
from fsdpctl.config.serialize import config_from_words, config_to_yaml, config_words
from fsdpctl.errors import NO_ROOM, CheckpointError, FsdpctlError, UsageError
from fsdpctl.resolve.attention import with_kept_kernel
from fsdpctl.resolve.run import decides_losses
from fsdpctl.run.assets import write_assets
from fsdpctl.run.files import ALIVE, LOCK, OVERRIDES, RUNS
from fsdpctl.run.files import LOG as LOG
from fsdpctl.run.files import LOGS as LOGS
from fsdpctl.run.files import METRICS as METRICS
from fsdpctl.run.metrics import was_validated

_WHERE = ("train.run_dir", "launch.node_rank", "launch.rdzv_endpoint")  # of a start, not the run
# But of its first weights, and of what computes with them.
_NOT_THE_MODELS = (
    "model.path", "model.init", "model.init_std", "model.lora.path", "model.attention"
)  # fmt: skip
_NOT_SET = "not set"


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


def plan_start(config: Config, resume: str, fresh: Path | None = None) -> Start:
    """What `--resume RESUME` means for `config` and its run directory. Writes nothing.

    Args:
        config: resolved.
        resume: auto, never, or a run or checkpoint.
        fresh: the directory of a new run, where this was found before.

    Raises:
        UsageError: the directory belongs to something else, or the checkpoint to another model.
        CheckpointError: the checkpoint is damaged.
    """
    if resume == "auto":
        return _go_on(config)
    fresh = fresh or _fresh_run_dir(Path(str(config.train.run_dir)))
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
        return Start(config, Standing.NEW, 0, notes=_beside(run_dir, config))
    config = with_kept_kernel(config, read_config(run_dir).model.attention)
    differences = _differences(run_dir, config)
    incomplete = passed_over(run_dir / CHECKPOINTS)
    newest = newest_checkpoint(run_dir / CHECKPOINTS)
    if newest is None and incomplete:
        raise CheckpointError(f"{incomplete[0]}; move it away to begin anew")
    if newest is None:
        if (run_dir / METRICS).is_file():
            differences += (f"{METRICS} is kept as {METRICS}.old: there is no checkpoint to it",)
        return Start(config, Standing.NEW, 0, differences)
    try:
        done = CheckpointReader(newest).manifest.progress
    except CheckpointError as error:
        raise CheckpointError(f"{error}{way_on(newest)}") from None
    assert config.train.steps is not None
    owes = done.owes_validation and not was_validated(run_dir / METRICS, done.step)
    standing = Standing.RESUMES
    if done.step >= config.train.steps and not owes:
        standing = Standing.FINISHED
    return Start(config, standing, done.step, differences, notes=tuple(incomplete))


def _beside(run_dir: Path, config: Config) -> tuple[str, ...]:
    """That the newest run is of the same name and another configuration, and how to go on from it.

    A person who changes a value does not always mean to begin anew.
    """
    last = (run_dir.parent / LATEST).resolve()
    name = run_dir.name.rpartition("-")[0]
    if run_dir.parent.name != RUNS or not name or last.name.rpartition("-")[0] != name:
        return ()
    if newest_checkpoint(last / CHECKPOINTS) is None:
        return ()
    before, now = config_words(read_config(last)), config_words(config)
    changed = [key for key in _changed(before, now) if decides_losses(key)]
    if any(key.startswith("data") for key in changed):  # nobody goes on with that one
        return ()
    shown = ", ".join(f"{key} {before.get(key, _NOT_SET)}" for key in changed[:3])
    there = run_dir.parent / last.name
    return (f"{there} has {shown}: this is a new run; --resume {there} goes on from that one",)


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
    """The words that differ, but for where the run lies and its machines meet."""
    names = sorted({*before, *now} - {*_WHERE})
    return [name for name in names if before.get(name) != now.get(name)]


def _lines(
    names: Sequence[str], before: Mapping[str, str], now: Mapping[str, str]
) -> tuple[str, ...]:
    return tuple(
        f"{name} was {before.get(name, _NOT_SET)}, is {now.get(name, _NOT_SET)}"
        f"{', which changes the losses' if decides_losses(name) else ''}"
        for name in names
    )


def prepare_run_dir(start: Start, words: Sequence[str], assets: Mapping[str, bytes]) -> None:
    """Write down what will run, with the files beside its weights. The lock must be held.

    Raises:
        UsageError: the directory cannot be written.
    """
    run_dir = start.run_dir
    checkpoints = run_dir / CHECKPOINTS
    try:
        _replace_text(run_dir / OVERRIDES, "".join(f"{word}\n" for word in words))
        (run_dir / ALIVE).unlink(missing_ok=True)  # of the start before
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


def rewrite_config(config: Config) -> None:
    """Write down what rank 0 has selected of a configuration that is in use.

    Raises:
        FsdpctlError: If the file cannot be written.
    """
    path = Path(str(config.train.run_dir)) / RUN_CONFIG
    try:
        _replace_text(path, config_to_yaml(config))
    except OSError as error:
        raise FsdpctlError(f"{path}: {error.strerror or error}") from None


def prepare_restart(start: Start, number: int) -> None:
    """Let ranks begin again in a directory that is in use; what they said of a failure is kept.

    Raises:
        UsageError: the directory cannot be written.
    """
    logs = start.run_dir / LOGS
    try:
        kept = logs / f"restart-{number}"
        kept.mkdir(parents=True, exist_ok=True)
        for each in logs.glob("rank-*.log"):
            each.replace(kept / each.name)
        (start.run_dir / ALIVE).unlink(missing_ok=True)  # of the ranks that failed
        if start.standing is Standing.NEW and (start.run_dir / METRICS).is_file():
            with (start.run_dir / f"{METRICS}.old").open("ab") as old:
                old.write((start.run_dir / METRICS).read_bytes())
            (start.run_dir / METRICS).unlink()
        remove_unfinished(start.run_dir / CHECKPOINTS)
        _replace_text(start.run_dir / RUN_CONFIG, config_to_yaml(start.config))
    except OSError as error:
        refusal = FsdpctlError if error.errno in NO_ROOM else UsageError
        raise refusal(f"train.run_dir={start.run_dir}: {error.strerror or error}") from None


def _replace_text(path: Path, text: str) -> None:
    scratch = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
