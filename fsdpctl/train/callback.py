"""The protocol between the training loop and everything that a run does besides its steps."""

from typing import TYPE_CHECKING

from fsdpctl.errors import NonFiniteError, SelfCheckError, StoppedError
from fsdpctl.run.step_metrics import StepMetrics
from fsdpctl.train.requests import RequestFlags

if TYPE_CHECKING:
    from fsdpctl.train.trainer import Trainer


class Callback:
    """Hooks of a run, complete when constructed. Each hook does nothing unless overridden.

    The loop calls the hooks of all callbacks in the order of their list. Collective means that
    all ranks call the hook at the same point, so that it may communicate.
    """

    def begin(self, run: "Trainer") -> None:
        """Prepare for the first step of this start. Collective."""

    def launched(self, run: "Trainer") -> None:
        """React to a launched step, without waiting for the device. Collective."""

    def has_gradients(self, run: "Trainer") -> None:
        """Look at the reduced gradients of a step before they are applied. Not collective."""

    def is_due(self, step: int) -> bool:
        """Return whether `act` has work after `step`: the same on all ranks."""
        return False

    def step(self, run: "Trainer", done: StepMetrics) -> None:
        """Handle the metrics of a completed step; steps come in order. Not collective."""

    def act(self, run: "Trainer", requested: RequestFlags) -> RequestFlags:
        """Do what is due or requested; return what has been requested by its end. Collective."""
        return requested

    def idle(self, run: "Trainer") -> None:
        """Do cheap work between pieces of long work. Not collective."""

    def end(self, run: "Trainer", error: BaseException | None) -> None:
        """Finish, even after a failure. Collective if `is_joint(error)`."""


def is_joint(error: BaseException | None) -> bool:
    """Return whether a run that ends with `error` ends on all ranks at the same step."""
    return error is None or isinstance(error, StoppedError | NonFiniteError | SelfCheckError)
