"""The record of a run: messages, metrics.jsonl, experiment loggers, events in environment.json."""

import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any

from fsdpctl.config.schema import Config
from fsdpctl.config.serialize import config_words
from fsdpctl.errors import LOST, FsdpctlError, UsageError
from fsdpctl.io import files
from fsdpctl.io.files import plain_name, read_text_file
from fsdpctl.io.packages import lacking
from fsdpctl.io.run_files import LOG, METRICS, RUN_CONFIG, TENSORBOARD, WANDB_ID
from fsdpctl.run.environment import read_records, write_record
from fsdpctl.run.metrics import MetricsFile
from fsdpctl.run.progress import RunProgress

_MOST_WARNINGS = 100  # of a start, in its record
_LEAVING_SECONDS, _FAILING_SECONDS = 60.0, 5.0  # to send the remaining values
_FLUSH_SECONDS = 10  # a killed run may lose the values of this time
_ID = r"[a-z0-9]{1,64}"
_LONGEST = 300  # characters of a message


class Journal:
    """The record of a run, for any thread. On ranks other than 0 it does nothing."""

    def __init__(
        self, config: Config, run_dir: Path, step: int, *, is_main: bool, shows: bool
    ) -> None:
        """Continue the record of a run, and remove entries after `step`.

        With `shows`, rank 0 (`is_main`) shows the progress and writes to experiment loggers.
        """
        steps, every = config.train.steps, config.train.log_every
        assert steps is not None
        self.run_dir, self._step, self._recording = run_dir, step, Lock()
        self._record: dict[str, Any] = {"warnings": []}
        self.seconds_to_save = 0.0  # the longest time that a checkpoint of this run took so far
        self._metrics = MetricsFile(run_dir / METRICS, step) if is_main else None
        is_shown, log = is_main and shows, run_dir / LOG
        self.progress = RunProgress(steps, step, log_every=every, shows=is_shown, log=log)
        self.loggers = Loggers(config, run_dir, step, self.warn, is_on=is_shown)
        if is_main:
            with suppress(UsageError):  # a file that others refuse to read
                known = [each.longest_save_seconds for each in read_records(run_dir)]
                self.seconds_to_save = max(known, default=0.0)
            self.record({"step": step})

    def say(self, line: str) -> None:
        self.progress.say(line)

    def remark(self, line: str) -> None:
        """Print a line that `-q` hides."""
        self.progress.say(line, is_remark=True)

    def write(self, line: dict[str, Any]) -> None:
        """Append an object to metrics.jsonl, and send its numbers to the experiment loggers."""
        if self._metrics is not None:
            self._metrics.write(line)
            if "loss" in line:
                self._step = line["step"]
            self.loggers.line(line)

    def record(self, about: dict[str, Any]) -> None:
        """Set values in the record of this start; a full disk fails the run where it trains."""
        if self._metrics is not None:
            with self._recording:
                warnings = [*self._record["warnings"], *about.get("warnings", ())]
                self._record |= about | {"warnings": warnings[-_MOST_WARNINGS:]}
                write_record(self.run_dir, self._record)

    def saved(self, line: dict[str, Any], seconds: float) -> None:
        """Send the times of a checkpoint to the loggers, and record the longest."""
        self.loggers.line(line)
        if seconds > self.seconds_to_save:
            self.seconds_to_save = seconds
            self.record({"longest_save_seconds": round(seconds, 6)})

    def warn(self, message: str, step: int | None = None) -> None:
        """Print a warning about `step`, and record it; None: with the last completed step."""
        self.say(message if step is None else f"step {step}: {message}")
        self.record({"warnings": [f"step {self._step if step is None else step}: {message}"]})

    def check_in_place(self) -> None:
        """Raise FsdpctlError on rank 0 if the run directory or metrics.jsonl has been removed."""
        if self._metrics is not None and not self._metrics.is_in_place:
            is_there = (self.run_dir / RUN_CONFIG).is_file()
            lost = self.run_dir / METRICS if is_there else self.run_dir
            raise FsdpctlError(f"{lost}: {LOST}; training stopped without saving")

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()


class _TensorBoard:
    """An experiment logger that writes event files into the run directory."""

    def __init__(self, run_dir: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = str(run_dir / TENSORBOARD)
        self._writer = SummaryWriter(folder, purge_step=step + 1, flush_secs=_FLUSH_SECONDS)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, well: bool) -> None:
        """Write the remaining values, which may take long; `well`: the run did not fail."""
        self._writer.close()


class _Wandb:
    """An experiment logger with one W&B run for all starts, by an id in the run directory."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        import wandb

        project = config.log.wandb_project or os.environ.get("WANDB_PROJECT") or "fsdpctl"
        self._run = wandb.init(
            id=_wandb_id(run_dir),
            resume="allow",
            project=project,
            name=run_dir.name,
            dir=str(run_dir),
            config=config_words(config),
            settings=wandb.Settings(console="off", silent=True),
        )
        # Not in order of arrival: after a resume, steps come a second time.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({"step": step, **figures})

    def close(self, *, well: bool) -> None:
        self._run.finish(exit_code=0 if well else 1)


Logger = _TensorBoard | _Wandb


class Loggers:
    """The configured experiment loggers. One that fails is dropped, and the run continues."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        step: int,
        warn: Callable[[str], None],
        *,
        is_on: bool = True,
    ) -> None:
        """Start the loggers after `step`; `warn` gets a message about each that fails."""
        self._warn = warn
        self._loggers: dict[str, Logger] = {}
        if is_on and config.log.tensorboard:
            with self._dropping("tensorboard"):
                self._loggers["tensorboard"] = _TensorBoard(run_dir, step)
        if is_on and config.log.wandb:
            with self._dropping("wandb"):
                self._loggers["wandb"] = _Wandb(config, run_dir)

    def line(self, line: Mapping[str, Any]) -> None:
        figures = {
            name: value
            for name, value in line.items()
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
        }
        if figures:
            for name, each in list(self._loggers.items()):
                with self._dropping(name):
                    each.log(line["step"], figures)

    def close(self, *, well: bool) -> None:
        """Send the remaining values for a limited time, shorter if an error is to be reported."""
        patience = _LEAVING_SECONDS if well else _FAILING_SECONDS
        for name, each in list(self._loggers.items()):
            thread = threading.Thread(target=self._close, args=(name, each, well), daemon=True)
            thread.start()
            thread.join(patience)
            if thread.is_alive():
                self._warn(f"log.{name}: not closed within {patience:g} s, values may be missing")
        self._loggers.clear()

    def _close(self, name: str, logger: Logger, well: bool) -> None:
        with self._dropping(name):
            logger.close(well=well)

    @contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._loggers.pop(name, None)
            text = lacking(name, error) if isinstance(error, ImportError) else str(error)
            cause = " ".join(text.split())[:_LONGEST] or type(error).__name__
            self._warn(f"log.{name}: {cause}; the run continues without it")


def _wandb_id(run_dir: Path) -> str:
    path = run_dir / WANDB_ID
    if not path.exists():
        files.replace(path, f"{secrets.token_hex(4)}\n")
    return plain_name(read_text_file(path).strip(), _ID, str(path), UsageError)
