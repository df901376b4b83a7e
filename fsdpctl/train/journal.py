"""The record of a run: messages, values in metrics.jsonl, and TensorBoard and Weights & Biases."""

import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdpctl.config.model_path import RUN_CONFIG
from fsdpctl.config.schema import Config
from fsdpctl.config.serialize import words_for_others
from fsdpctl.errors import LOST, FsdpctlError, UsageError
from fsdpctl.io.files import plain_name, read_text_file, replace
from fsdpctl.io.run_files import LOG, METRICS, TENSORBOARD, WANDB_ID
from fsdpctl.run.metrics import MetricsFile
from fsdpctl.run.progress import RunProgress
from fsdpctl.train.callback import Callback, is_joint

if TYPE_CHECKING:
    from fsdpctl.train.trainer import Trainer

_LEAVING_SECONDS, _FAILING_SECONDS = 60.0, 5.0  # to send the remaining values
_FLUSH_SECONDS = 10  # a killed run may lose the values of this time
_ID = r"[a-z0-9]{1,64}"
_LONGEST = 300  # characters of a message


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
            config=words_for_others(config),
            settings=wandb.Settings(console="off", silent=True),
        )
        # Not in order of arrival: after a resume, steps come a second time.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({"step": step, **figures})

    def close(self, *, well: bool) -> None:
        self._run.finish(exit_code=0 if well else 1)


Logger = _TensorBoard | _Wandb


class Loggers(Callback):
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
        if not is_on:
            return
        if config.log.tensorboard:
            self._begin("tensorboard", lambda: _TensorBoard(run_dir, step))
        if config.log.wandb:
            self._begin("wandb", lambda: _Wandb(config, run_dir))

    def _begin(self, name: str, make: Callable[[], Logger]) -> None:
        with self._dropping(name):
            self._loggers[name] = make()

    def line(self, line: Mapping[str, Any]) -> None:
        """Log the numbers in a line of metrics.jsonl."""
        figures = {
            name: value
            for name, value in line.items()
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
        }
        if figures:
            for name, each in list(self._loggers.items()):
                with self._dropping(name):
                    each.log(line["step"], figures)

    def end(self, run: "Trainer", error: BaseException | None) -> None:
        """Send the remaining values for a limited time, shorter if an error is to be reported."""
        well = is_joint(error)
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
            cause = " ".join(str(error).split())[:_LONGEST] or type(error).__name__
            self._warn(f"log.{name}: {cause}; the run continues without it")


def _wandb_id(run_dir: Path) -> str:
    path = run_dir / WANDB_ID
    if not path.exists():
        replace(path, f"{secrets.token_hex(4)}\n")
    return plain_name(read_text_file(path).strip(), _ID, str(path), UsageError)


class Journal:
    """The record of a run, for any thread. On ranks other than 0 it does nothing."""

    def __init__(
        self, config: Config, run_dir: Path, step: int, *, is_main: bool, shows: bool
    ) -> None:
        """Continue the record of a run, and remove entries after `step`.

        With `shows`, rank 0 (`is_main`) shows the progress and writes to experiment loggers.
        """
        assert config.train.steps is not None
        self.run_dir, self._step = run_dir, step
        self._metrics = MetricsFile(run_dir / METRICS, step) if is_main else None
        self.progress = RunProgress(
            config.train.steps,
            step,
            log_every=config.train.log_every,
            shows=is_main and shows,
            log=run_dir / LOG,
        )
        self.loggers = Loggers(config, run_dir, step, self.warn, is_on=is_main and shows)

    @property
    def seconds_to_save(self) -> float:
        """The longest time that a checkpoint of this run took so far."""
        return 0.0 if self._metrics is None else self._metrics.seconds_to_save

    def say(self, line: str) -> None:
        """Print a message."""
        self.progress.say(line)

    def write(self, line: dict[str, Any]) -> None:
        """Append an object to metrics.jsonl, and send its numbers to the experiment loggers."""
        if self._metrics is not None:
            self._metrics.write(line)
            if "loss" in line:
                self._step = line["step"]
            self.loggers.line(line)

    def record(self, line: dict[str, Any], message: str = "") -> None:
        """Print a message and append an object; a full disk fails the run where training writes."""
        if message:
            self.say(message)
        with suppress(FsdpctlError, ValueError):  # ValueError: the file is closed
            self.write(line)

    def warn(self, message: str) -> None:
        """Print a warning, and record it with the last completed step."""
        self.progress.say(message, is_warning=True)
        with suppress(FsdpctlError, ValueError):  # as in `record`; loggers take numbers only
            if self._metrics is not None:
                self._metrics.write({"step": self._step, "warning": message})

    def check_in_place(self) -> None:
        """Raise FsdpctlError on rank 0 if the run directory or metrics.jsonl has been removed."""
        if self._metrics is not None and not self._metrics.is_in_place:
            is_there = (self.run_dir / RUN_CONFIG).is_file()
            lost = self.run_dir / METRICS if is_there else self.run_dir
            raise FsdpctlError(f"{lost}: {LOST}; training stopped without saving")

    def close(self) -> None:
        """Close metrics.jsonl."""
        if self._metrics is not None:
            self._metrics.close()
