"""The protocol between the training loop and everything that a run does besides its steps."""

from typing import Protocol

from fsdpctl.checkpoint.manifest import BestValidation, Progress
from fsdpctl.comm.base import Collectives
from fsdpctl.errors import NonFiniteError, SelfCheckError, StoppedError
from fsdpctl.run.step_metrics import StepMetrics
from fsdpctl.training.journal import Journal
from fsdpctl.training.requests import RequestCollector, RequestFlags, RequestSync
from fsdpctl.training.step import TrainingParts


class TrainingRun(Protocol):
    """A run, as its callbacks see it."""

    parts: TrainingParts
    ranks: Collectives
    journal: Journal
    requests: RequestCollector
    step: int  # launched optimizer steps
    samples: int  # that they consumed
    total_steps: int
    lag: int  # steps that the host may launch ahead of the device
    owes_validation: bool
    best: BestValidation | None
    is_ending: bool  # a stop was requested after the last step
    is_traced: bool  # a profile is being recorded

    def is_due(self, callback: "Callback") -> bool: ...

    def save(self, *, was_requested: bool = False) -> None: ...

    def idle(self) -> None: ...

    def is_over(self) -> bool: ...

    def validated(self, loss: float) -> bool: ...

    def progress(self) -> Progress: ...

    def handle_requests(self) -> None: ...

    def request_sync(self, lag: int = 0) -> RequestSync: ...


class Callback:
    """Hooks of a run, complete when constructed. Each hook does nothing unless overridden.

    The loop calls the hooks of all callbacks in the order of their list. Collective means that
    all ranks call the hook at the same point, so that it may communicate.
    """

    def begin(self, run: TrainingRun) -> None:
        """Prepare for the first step of this start. Collective."""

    def launched(self, run: TrainingRun) -> None:
        """React to a launched step, without waiting for the device. Collective."""

    def has_gradients(self, run: TrainingRun) -> None:
        """Look at the reduced gradients of a step before they are applied. Not collective."""

    def is_due(self, step: int) -> bool:
        """Return whether `act` has work after `step`: the same on all ranks."""
        return False

    def step(self, run: TrainingRun, done: StepMetrics) -> None:
        """Handle the metrics of a completed step; steps come in order. Not collective."""

    def act(self, run: TrainingRun, requested: RequestFlags) -> RequestFlags:
        """Do what is due or requested; return what has been requested by its end. Collective."""
        return requested

    def idle(self, run: TrainingRun) -> None:
        """Do cheap work between pieces of long work. Not collective."""

    def end(self, run: TrainingRun, error: BaseException | None) -> None:
        """Finish, even after a failure. Collective if `is_joint(error)`."""


def is_joint(error: BaseException | None) -> bool:
    """Return whether a run that ends with `error` ends on all ranks at the same step."""
    return error is None or isinstance(error, StoppedError | NonFiniteError | SelfCheckError)
