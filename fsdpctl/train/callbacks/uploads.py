"""Upload of each checkpoint to an object store, while training continues."""

import time
from collections.abc import Callable
from pathlib import Path

from fsdpctl.checkpoint.remote_run import KEY, RemoteCheckpoints
from fsdpctl.config.training import CheckpointConfig
from fsdpctl.errors import CheckpointError, FsdpctlError
from fsdpctl.train.callbacks.background import HookMessage, OnEachSave


class Uploads(OnEachSave):
    """The uploads of a run, which delete old checkpoints there."""

    name, key = "upload", KEY

    def __init__(
        self,
        remote: RemoteCheckpoints | None,
        keep: CheckpointConfig,
        report: Callable[[HookMessage], None],
    ) -> None:
        """Prepare to upload; `keep` says which checkpoints stay in the store. None: do nothing."""
        super().__init__(report)
        self._remote, self._keep = remote, keep
        self._share = 0.0
        self.seconds = 0.0  # of the newest upload

    @property
    def is_on(self) -> bool:
        """Whether there is a store."""
        return self._remote is not None

    def is_superseded(self, step: int) -> bool:
        """Return whether a newer checkpoint waits: a slow store gets the newest."""
        every = self._keep.keep_every
        is_kept = not self._keep.keep_last or (every and step % every == 0)
        return step < self.latest and not is_kept

    def run(self, folder: Path, step: int) -> HookMessage:
        """Upload a checkpoint."""
        assert self._remote is not None
        began = time.monotonic()
        try:
            self._remote.upload(folder, self._advance)
        except Exception as error:  # training continues, whatever it is
            why = f"not uploaded: {error}; the checkpoint is in {folder}"
            return self.failed(step, "failed", time.monotonic() - began, why)
        finally:
            self.seconds = time.monotonic() - began
        try:
            self._remote.remove_old(self._keep, folder.name)
        except FsdpctlError as error:
            why = f"uploaded, but old checkpoints remain: {error}"
            return self.failed(step, "done", self.seconds, why)
        return HookMessage(step, self.name, "done", self.seconds)

    def _advance(self, share: float) -> None:
        self._share = share

    def how_far(self) -> str:
        """Return the part of the upload in progress that is done."""
        return f", {self._share:.0%}"

    def check_uploaded(self) -> None:
        """Check that the newest checkpoint is in the store.

        Raises:
            CheckpointError: If it isn't.
        """
        newest = self.newest
        if newest is not None and newest.outcome == "failed":
            raise CheckpointError(f"step {newest.step}: {newest.message}; to retry, run it again")
