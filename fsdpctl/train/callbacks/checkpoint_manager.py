"""Checkpoints at intervals, on request and at the end, and the user's command after each."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from fsdpctl.checkpoint.folders import complete_checkpoints, step_of
from fsdpctl.checkpoint.manifest import BaseInfo
from fsdpctl.checkpoint.remote_run import remote_of
from fsdpctl.comm.collectives import ObjectExchange
from fsdpctl.comm.rank_status import FINISHING, RANK_STATUS
from fsdpctl.config.schema import Config
from fsdpctl.errors import FsdpctlError
from fsdpctl.io.run_files import CHECKPOINTS, LOGS
from fsdpctl.resolve.preflight import command_words
from fsdpctl.run.progress import format_seconds
from fsdpctl.train.callback import Callback, is_joint
from fsdpctl.train.callbacks.after_save import AfterSave
from fsdpctl.train.callbacks.background import HookMessage
from fsdpctl.train.callbacks.saver import Saver
from fsdpctl.train.callbacks.uploads import Uploads
from fsdpctl.train.journal import Journal
from fsdpctl.train.requests import SAVE, RequestFlags

if TYPE_CHECKING:
    from fsdpctl.train.trainer import Trainer

_REPORTED = 5.0  # seconds; a faster save is not worth a line


class CheckpointManager(Callback):
    """The checkpoints of a run: when to save, and reports about complete ones."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        ranks: ObjectExchange,
        journal: Journal,
        base: BaseInfo | None,
        *,
        runs_command: bool,
    ) -> None:
        """Save as configured, without the weights that `base` has; report to `journal`.

        `runs_command`: whether this rank uploads, and runs `checkpoint.after_save`.
        """
        about, self._journal = config.checkpoint, journal
        assert config.train.steps is not None
        self._every, self._last = about.every, config.train.steps
        self._saved_step = -1
        self._is_awaited = False  # a SAVE file is there until the checkpoint is complete

        def report(done: HookMessage) -> None:
            journal.record(done.to_line(), done.line)

        words = command_words(about.after_save) if runs_command and about.after_save else []
        command = AfterSave(words, about.after_save_timeout, run_dir / LOGS, report)
        remote = remote_of(config) if runs_command else None
        self._uploads = Uploads(remote, about, report)
        self._on_each_save = (self._uploads, command)
        self._saver = Saver(config, run_dir, ranks, self._on_each_save, base)

    @property
    def share_written(self) -> float | None:
        """The fraction written of this rank's part of the checkpoint in progress, if any."""
        return self._saver.share_written

    def begin(self, run: "Trainer") -> None:
        """Begin with the checkpoint that the run resumes from, if any."""
        self._saved_step = run.step if run.step else -1
        for folder in complete_checkpoints(run.parts.run_dir / CHECKPOINTS):
            self._uploads.add(folder, step_of(folder), lambda: None)  # if it was interrupted

    def prepare(self, run: "Trainer") -> None:
        """Allocate what the first save needs while training continues."""
        self._saver.prepare(run.parts.model, run.parts.optimizer)

    def is_due(self, step: int) -> bool:
        """Return whether there is a checkpoint after `step`."""
        return step == self._last or (self._every > 0 and step % self._every == 0)

    def act(self, run: "Trainer", requested: RequestFlags) -> RequestFlags:
        """Save if due or requested; before the run ends, wait until the checkpoint is complete."""
        if requested.ends or requested.save or run.is_due(self):
            self.save(run, was_requested=requested.save)
        if requested.ends or run.step == self._last:
            self.finish(run)
        return requested

    def save(self, run: "Trainer", *, was_requested: bool = False) -> None:
        """Save the current state, unless this step is saved. Collective."""
        if self._saved_step != run.step:
            began = time.perf_counter()
            self.finish(run)
            self._saver.save(run.parts.model, run.parts.optimizer, run.progress(), began)
            self._saved_step = run.step
        self._is_awaited |= was_requested

    def finish(self, run: "Trainer") -> None:
        """Wait until the checkpoint in progress is complete, and report it."""
        self._saver.wait()
        self.idle(run)

    def idle(self, run: "Trainer") -> None:
        """Report a checkpoint that has become complete, and remove the request for it."""
        try:
            saved = self._saver.take_saved()
        except FsdpctlError:
            self._journal.check_in_place()  # a missing run directory is the cause
            raise
        if saved is not None:
            # A run that stops waits for the upload, too.
            run.requests.limit.save_took(saved.seconds + self._uploads.seconds)
            run.write(saved.to_line())
            if saved.note:
                run.say(f"step {saved.step}: saved, but {saved.note}")
            if saved.seconds > _REPORTED:
                run.say(f"step {saved.step}: saved in {format_seconds(saved.seconds)}")
        if self._is_awaited and self.share_written is None:
            self._is_awaited = False
            run.requests.done(SAVE)

    def end(self, run: "Trainer", error: BaseException | None) -> None:
        """Wait for uploads and the user's command, on ranks that end together.

        Raises:
            CheckpointError: If training is complete and its checkpoint could not be uploaded.
        """
        if is_joint(error):
            self._journal.check_in_place()
            RANK_STATUS.at(FINISHING)
            for each in self._on_each_save:
                each.wait(self._journal.say)
            if error is None:  # else it is the more important one; a warning was printed
                self._uploads.check_uploaded()

    def leave(self) -> None:
        """After a failure, let the checkpoint in progress complete as far as possible."""
        self._saver.close()
