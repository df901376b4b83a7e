"""The record of a run: messages, metrics.jsonl, trackers, and events in environment.json."""

from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from fsdpctl.config.schema import Config
from fsdpctl.errors import REMOVED_DURING_RUN, FsdpctlError, UsageError
from fsdpctl.io.run_files import LOG, METRICS, RUN_CONFIG
from fsdpctl.run.environment import read_start_events, write_start_events
from fsdpctl.run.metrics import MetricsFile
from fsdpctl.run.progress import ProgressDisplay
from fsdpctl.training.trackers import Trackers

_MOST_WARNINGS = 100  # warnings in the events of a start


class Journal:
    """The messages and metrics of a run; any thread may record them. Only rank 0 writes."""

    def __init__(
        self, config: Config, run_dir: Path, step: int, *, is_main: bool, shows: bool
    ) -> None:
        """Continue the record of a run, and remove entries after `step`.

        If `shows`, rank 0 (`is_main`) shows the progress and writes to trackers.
        """
        steps, log_every = config.train.steps, config.train.log_every
        assert steps is not None
        self.run_dir, self._step, self._recording = run_dir, step, Lock()
        self._events: dict[str, Any] = {"warnings": []}
        self.seconds_to_save = 0.0  # the longest time that a checkpoint of this run has taken
        self._metrics = MetricsFile(run_dir / METRICS, step) if is_main else None
        is_shown, log = is_main and shows, run_dir / LOG
        self.display = ProgressDisplay(steps, step, log_every=log_every, shows=is_shown, log=log)
        self.trackers = None
        if is_shown and self._metrics is not None:
            self.trackers = Trackers(config, run_dir, step, self.warn, self._metrics.unsent)
        if is_main:
            with suppress(UsageError):  # environment.json is corrupted
                save_seconds = [each.longest_save_seconds for each in read_start_events(run_dir)]
                self.seconds_to_save = max(save_seconds, default=0.0)
            self.record({"step": step})

    def say(self, line: str) -> None:
        self.display.say(line)

    def remark(self, line: str) -> None:
        """Print a line that `-q` hides."""
        self.display.say(line, is_remark=True)

    def write(self, line: dict[str, Any]) -> None:
        """Append an object to metrics.jsonl, and send its numbers to the trackers."""
        if self._metrics is not None:
            self._metrics.write(line)
            if "loss" in line:
                self._step = line["step"]
            self.track(line)

    def track(self, line: dict[str, Any]) -> None:
        """Send the numbers of an object to the trackers only."""
        if self.trackers is not None:
            self.trackers.log_line(line)

    def record(self, values: dict[str, Any]) -> None:
        """Set values in the record of this start; failures to write it are ignored."""
        if self._metrics is not None:
            with self._recording:
                warnings = [*self._events["warnings"], *values.get("warnings", ())]
                self._events |= values | {"warnings": warnings[-_MOST_WARNINGS:]}
                write_start_events(self.run_dir, self._events)

    def record_save(self, line: dict[str, Any], seconds: float) -> None:
        """Send the times of a checkpoint to the trackers, and record the longest."""
        self.track(line)
        if seconds > self.seconds_to_save:
            self.seconds_to_save = seconds
            self.record({"longest_save_seconds": round(seconds, 6)})

    def warn(self, message: str, step: int | None = None) -> None:
        """Print a warning and record it with `step`, by default the last completed step."""
        self.say(message if step is None else f"step {step}: {message}")
        self.record({"warnings": [f"step {self._step if step is None else step}: {message}"]})

    def check_in_place(self) -> None:
        """Raise FsdpctlError on rank 0 if the run directory or metrics.jsonl has been removed."""
        if self._metrics is not None and not self._metrics.is_in_place:
            is_there = (self.run_dir / RUN_CONFIG).is_file()
            missing = self.run_dir / METRICS if is_there else self.run_dir
            raise FsdpctlError(f"{missing}: {REMOVED_DURING_RUN}; training stopped without saving")

    def end(self, *, well: bool) -> None:
        """Close the trackers; `well` is False if the run failed."""
        if self.trackers is not None:
            self.trackers.close(succeeded=well)

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
