"""Beside a run's training: its sign of life, other tools, the user's command, a kept snapshot."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from fsdpctl.comm.collectives import ObjectExchange
from fsdpctl.comm.pulse import FINISHING, PULSE
from fsdpctl.config.schema import Config
from fsdpctl.errors import FsdpctlError, NonFiniteError, StoppedError
from fsdpctl.resolve.besides import command_words
from fsdpctl.run.environment import add_start, describe_start, place_of
from fsdpctl.run.files import LOGS
from fsdpctl.run.heartbeat import ENDED, FAILED, STOPPED, Heartbeat
from fsdpctl.train.after_save import AfterSave, Told
from fsdpctl.train.loggers import Loggers
from fsdpctl.train.memory_snapshot import keep_snapshot, watch_allocations


class Record(Protocol):
    """The run's metrics.jsonl."""

    def write(self, line: dict[str, Any]) -> None:
        """Append a line; FsdpctlError if that fails."""
        ...


class RunWatch:
    """What goes on beside the training of a run: on every rank, though rank 0 does most of it."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        ranks: ObjectExchange,
        device: torch.device,
        *,
        is_on: bool,
    ) -> None:
        """Give signs of life from now on, and write down what this start runs on. Collective.

        Args:
            config: resolved.
            run_dir: of the run.
            ranks: all of them, talking apart from training.
            device: this rank's.
            is_on: False where only steps are measured: nobody is told, nothing is run.
        """
        self.ranks = ranks
        self.run_dir, self._config = run_dir, config
        self._is_main = is_on and ranks.rank == 0
        self._heartbeat = Heartbeat(run_dir) if self._is_main else None
        checkpoint = config.checkpoint
        given = checkpoint.after_save if self._is_main else None
        words = [] if given is None else command_words(given)
        self.after_save = AfterSave(words, checkpoint.after_save_timeout, run_dir / LOGS)
        self._loggers: Loggers | None = None
        self._record: Record | None = None
        self._say: Callable[[str], None] = lambda line: None
        self._step = 0
        if config.log.memory_snapshot:
            watch_allocations(device)
        places = ranks.gather_objects(place_of(device)) if is_on else []
        if self._is_main:
            add_start(run_dir, describe_start(run_dir, places))

    def line(self, line: Mapping[str, Any]) -> None:
        """A line was written to metrics.jsonl."""
        if "loss" in line:
            self._step = line["step"]
            if self._heartbeat is not None:
                self._heartbeat.step(self._step)
        if self._loggers is not None:
            self._loggers.line(line)

    def cut_back(self, step: int) -> None:
        """The run goes on from `step`, and comes once more to the steps after it."""
        if self._heartbeat is not None:
            self._heartbeat.go_back(step)
        if self._loggers is not None:
            self._loggers.cut_back(step)

    @contextmanager
    def over(self, step: int, say: Callable[[str], None], record: Record | None) -> Iterator[None]:
        """While the block trains; ends what was begun, and waits for it where ranks end together.

        Args:
            step: steps done before.
            say: shows a line; of any thread.
            record: rank 0's.
        """
        self._say, self._record, self._step = say, record, step
        self.after_save.tell = self._tell
        if self._is_main:
            self._loggers = Loggers(self._config, self.run_dir, step, self._warn)
        try:
            with self.keeping_snapshot():
                yield
        except (StoppedError, NonFiniteError) as error:  # raised on all ranks at the same step
            self._finish()
            self._end(STOPPED, str(error))
            raise
        except BaseException as error:
            self._end(FAILED, f"{type(error).__name__}: {error}")
            raise
        self._finish()
        self._end(ENDED)

    @contextmanager
    def keeping_snapshot(self) -> Iterator[None]:
        """Write down what the device holds if the block fails for want of its memory."""
        try:
            yield
        except Exception as error:
            keep_snapshot(error, self.run_dir, self.ranks.rank)
            raise

    def _finish(self) -> None:
        """Wait for the command and the other tools, all ranks together: collectives time out."""
        PULSE.at(FINISHING)
        if self._is_main:
            self.after_save.wait(self._say)
        self._let_loggers_go(well=True)
        self.ranks.gather_objects(0)

    def _end(self, state: str, message: str = "") -> None:
        if self._heartbeat is not None:
            self._heartbeat.end(state, message)
        self._let_loggers_go(well=False)  # unless they are gone: it failed

    def _let_loggers_go(self, *, well: bool) -> None:
        loggers, self._loggers = self._loggers, None
        if loggers is not None:
            loggers.close(well=well)

    def _tell(self, told: Told) -> None:
        if told.message:
            self._say(f"step {told.step}: {told.message}")
        self._write(told.to_line())

    def _warn(self, message: str) -> None:
        self._say(message)
        self._write({"step": self._step, "warning": message})

    def _write(self, line: dict[str, Any]) -> None:
        """What the disk has no room for fails where training writes."""
        if self._record is not None:
            with suppress(FsdpctlError, ValueError):  # ValueError: it was closed
                self._record.write(line)
