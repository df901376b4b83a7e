"""Gradient accumulation over micro-batches."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

from fsdpctl.comm.shards import scale_gradients, trainable_shards
from fsdpctl.engine.model import ShardedModel
from fsdpctl.errors import EngineError, nearest

_REDUCE = ("every", "last")


class GradAccumulator:
    """Makes the gradient the mean over the micro-steps of a window, even of a partial one.

    With `reduce="every"` each micro-step reduces into the shards. With `"last"` unsharded gradients
    are held until the window ends, and reduced once.
    """

    def __init__(
        self, model: ShardedModel, steps: int, reduce: Literal["every", "last"] = "every"
    ) -> None:
        """Accumulate over windows of `steps` micro-steps.

        Raises:
            EngineError: If `steps` is below 1, or `reduce` is neither value.
        """
        if steps < 1:
            raise EngineError(f"GradAccumulator: steps={steps}: expected at least 1")
        if reduce not in _REDUCE:
            raise EngineError(
                f"GradAccumulator: reduce={reduce!r}{nearest(reduce, _REDUCE)}: expected every, "
                "last"
            )
        self.model = model
        self.steps = steps
        self.ready = False  # the window is complete and its gradient is reduced
        self._reduce = reduce
        self._count = 0

    @contextmanager
    def micro_step(self) -> Iterator[None]:
        """Run one backward in the block; the last one ends the window, an exception drops it."""
        self.ready = False
        holds = self._reduce == "last" and self._count + 1 < self.steps
        try:
            with self.model.no_sync() if holds else nullcontext():
                yield
        except BaseException:
            self.reset()
            raise
        self._count += 1
        if self._count == self.steps:
            self.sync()

    def sync(self) -> None:
        """End the window, also a partial one. Does nothing between windows."""
        if self._count == 0:
            return
        self.model.sync_gradients()
        if self._count > 1:
            scale_gradients(trainable_shards(self.model), 1 / self._count)
        self._count = 0
        self.ready = True

    def reset(self) -> None:
        """Drop the window and its gradients."""
        self.model.drop_gradients()
        self._count = 0
        self.ready = False
