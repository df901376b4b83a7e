"""The record of a run: messages, and values in metrics.jsonl and for experiment loggers."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdpctl.config.model_path import RUN_CONFIG
from fsdpctl.config.schema import Config
from fsdpctl.errors import LOST, FsdpctlError
from fsdpctl.io.run_files import LOG, METRICS
from fsdpctl.run.metrics import MetricsFile
from fsdpctl.run.progress import RunProgress
from fsdpctl.training.loggers import Loggers


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

    def record(self, line: dict[str, Any], message: str = "") -> None:
        """Print a message and append an object; a full disk fails the run where training writes."""
        if message:
            self.say(message)
        with suppress(FsdpctlError, ValueError):  # ValueError: the file is closed
            self.write(line)

    def warn(self, message: str) -> None:
        """Print a warning, and record it with the last completed step."""
        self.progress.say(message)
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
        if self._metrics is not None:
            self._metrics.close()
