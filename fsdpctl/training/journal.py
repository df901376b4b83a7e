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
    """The messages and metrics of a run. Any thread may call it; only rank 0 writes."""

    def __init__(
        self, config: Config, run_dir: Path, step: int, *, is_rank_0: bool, shows: bool
    ) -> None:
        """Continue the files of a run, and remove metrics after `step`.

        If `shows`, rank 0 shows the progress and writes to trackers.
        """
        steps, log_every = config.train.steps, config.train.log_every
        assert steps is not None
        self.run_dir, self._step, self._writing_events = run_dir, step, Lock()
        self._events: dict[str, Any] = {"warnings": []}
        self.longest_save_seconds = 0.0  # the longest time that a checkpoint of this run has taken
        self._metrics = MetricsFile(run_dir / METRICS, step) if is_rank_0 else None
        is_shown, log = is_rank_0 and shows, run_dir / LOG
        self.display = ProgressDisplay(steps, step, log_every=log_every, shows=is_shown, log=log)
        self.trackers = None
        if is_shown and self._metrics is not None:
            self.trackers = Trackers(config, run_dir, step, self.warn, self._metrics.unsent)
        if is_rank_0:
            with suppress(UsageError):  # environment.json is corrupted
                save_seconds = [each.longest_save_seconds for each in read_start_events(run_dir)]
                self.longest_save_seconds = max(save_seconds, default=0.0)
            self.update_start_record({"step": step})

    def say(self, line: str) -> None:
        self.display.say(line)

    def remark(self, line: str) -> None:
        """Print a line that `-q` hides."""
        self.display.say(line, is_remark=True)

    def write_metrics(self, line: dict[str, Any]) -> None:
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

    def update_start_record(self, values: dict[str, Any]) -> None:
        """Set fields of this start in environment.json; failures to write them are ignored."""
        if self._metrics is not None:
            with self._writing_events:
                warnings = [*self._events["warnings"], *values.get("warnings", ())]
                self._events |= values | {"warnings": warnings[-_MOST_WARNINGS:]}
                write_start_events(self.run_dir, self._events)

    def record_save(self, line: dict[str, Any], seconds: float) -> None:
        """Send the times of a checkpoint to the trackers, and record the longest."""
        self.track(line)
        if seconds > self.longest_save_seconds:
            self.longest_save_seconds = seconds
            self.update_start_record({"longest_save_seconds": round(seconds, 6)})

    def warn(self, message: str, step: int | None = None) -> None:
        """Print a warning and record it with `step`, by default the last completed step."""
        self.say(message if step is None else f"step {step}: {message}")
        step = self._step if step is None else step
        self.update_start_record({"warnings": [f"step {step}: {message}"]})

    def check_not_removed(self) -> None:
        """Raise FsdpctlError on rank 0 if the run directory or metrics.jsonl has been removed."""
        if self._metrics is not None and not self._metrics.is_in_place:
            is_there = (self.run_dir / RUN_CONFIG).is_file()
            missing = self.run_dir / METRICS if is_there else self.run_dir
            raise FsdpctlError(f"{missing}: {REMOVED_DURING_RUN}; training stopped without saving")

    def close_trackers(self, *, succeeded: bool) -> None:
        if self.trackers is not None:
            self.trackers.close(succeeded=succeeded)

    def close_metrics(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
