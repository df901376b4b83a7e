"""Keeps a run's state: checkpoints, and a directory that may go while the run uses it."""

import time

from fsdpctl.checkpoint.manifest import Progress
from fsdpctl.errors import FsdpctlError
from fsdpctl.run.progress import format_seconds
from fsdpctl.train.kept import KeptFiles
from fsdpctl.train.parts import TrainingParts
from fsdpctl.train.requests import SAVE, Requests
from fsdpctl.train.saver import Saver
from fsdpctl.train.telling import Teller

_WORTH_A_LINE = 5.0  # seconds that a checkpoint takes


class Keeper:
    """Saves when it is told to, and tells of it when that is done."""

    def __init__(
        self,
        parts: TrainingParts,
        step: int,
        files: KeptFiles,
        requests: Requests,
        teller: Teller,
    ) -> None:
        """Of a run whose newest checkpoint is of `step`. Collective."""
        self.saved_step = step if step else -1
        self._parts = parts
        self._files = files
        self._requests = requests
        self._teller = teller
        self._is_awaited = False
        watch = parts.watch
        self._saver = Saver(parts.config, parts.run_dir, watch.ranks, watch.after_save, parts.base)

    @property
    def share_written(self) -> float | None:
        """Of this rank's part of the checkpoint on its way; None where there is none."""
        return self._saver.share_written

    def prepare(self) -> None:
        """Have what the first save needs made while training continues."""
        self._saver.prepare(self._parts.model, self._parts.optimizer)

    def save(self, done: Progress, *, was_asked: bool = False) -> None:
        """Save the state as it is now, unless that was done. Collective.

        `was_asked`: by somebody who waits for his request to go.
        """
        if self.saved_step != done.step:
            began = time.perf_counter()
            self.finish()
            self._saver.save(self._parts.model, self._parts.optimizer, done, began)
            self.saved_step = done.step
        self._is_awaited |= was_asked

    def save_what_is_lost(self, done: Progress) -> None:
        """See that the run directory is still there; what is not is saved again. Collective.

        Raises:
            FsdpctlError: it was not there.
        """
        lost = self._parts.model.collectives.gather_objects(self._files.look(now=True))
        if any(lost):
            self._files.put_back()
            self.saved_step = -1
            self.save(done)
            self.finish()
            raise self._files.as_error(done.step)

    def finish(self) -> None:
        """Let the checkpoint on its way be completed, and tell of it."""
        self._saver.wait(self._teller.shown.saving)
        self.tell()

    def tell(self) -> None:
        """Of a checkpoint that has become complete; who asked for one sees that it is there."""
        try:
            saved = self._saver.take_saved()
        except FsdpctlError:
            if not self._files.look(now=True):
                raise
            saved = None  # it is saved again, where all ranks know of it
        if saved is not None:
            if self._requests.limit is not None:
                self._requests.limit.save_took(saved.write)
            self._teller.write(saved.to_line())
            if saved.note:
                self._teller.say(f"step {saved.step}: saved; but {saved.note}")
            if saved.write > _WORTH_A_LINE:
                self._teller.say(f"step {saved.step}: saved in {format_seconds(saved.write)}")
        if self._is_awaited and self.share_written is None:
            self._is_awaited = False
            self._requests.done(SAVE)

    def leave(self) -> None:
        """After an exception: let the checkpoint on its way be completed, as far as that goes."""
        self._saver.close()
