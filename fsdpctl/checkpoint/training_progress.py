"""The progress of a run, which its checkpoints record and a resumed run continues from."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Self

from fsdpctl.io.untrusted import Count


@dataclass(frozen=True, slots=True)
class AcceptedStep:
    """An applied step, which later steps are compared with to detect spikes."""

    step: Count
    loss: float
    log_grad_norm: float


@dataclass(frozen=True, slots=True)
class BestValidation:
    """The lowest validation loss of a run."""

    loss: float
    step: Count
    unimproved: Count = 0  # validations since then


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run."""

    step: Count = 0  # completed optimizer steps
    samples: Count = 0  # samples consumed: the position in the data
    data_fingerprint: str = ""
    owes_validation: bool = False  # a stop request cut the validation at this step short
    best: BestValidation | None = None  # None: no validation was finite
    num_skips: Count = 0  # steps rejected because of their values
    accepted: list[AcceptedStep] = field(default_factory=list)  # the newest, to detect spikes
    optimizer_step: Count = 0  # of every parameter that `optimizer_steps` does not name
    optimizer_steps: dict[str, Count] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)  # values of a custom training loop
    param_groups: list[dict[str, Any]] = field(default_factory=list)  # of its optimizer

    def after_validation(self, loss: float) -> Self:
        """Return the progress after the validation of this step, with its loss."""
        best = self.best
        if math.isfinite(loss) and (best is None or loss < best.loss):
            best = BestValidation(loss, self.step)
        elif best is not None:
            best = BestValidation(best.loss, best.step, best.unimproved + 1)
        return replace(self, best=best, owes_validation=False)

    def is_finished(self, steps: int, patience: int | None) -> bool:
        """Return whether nothing is left to train."""
        waited = 0 if self.best is None else self.best.unimproved
        return self.step >= steps or (patience is not None and waited >= patience)
