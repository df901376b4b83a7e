"""The progress of a run, which its checkpoints record and a resumed run continues from."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Self

from fsdpctl.io.untrusted import Count


@dataclass(frozen=True, slots=True)
class AcceptedStep:
    """An applied optimizer step, with which later steps are compared to detect spikes."""

    step: Count
    loss: float
    log_grad_norm: float


@dataclass(frozen=True, slots=True)
class BestValidation:
    """The lowest validation loss of a run."""

    loss: float
    step: Count
    unimproved: Count = 0  # validations since that step


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run; its fields are keys of the manifest's JSON."""

    step: Count = 0  # completed optimizer steps
    samples: Count = 0  # consumed samples, which are the position in the data
    data_fingerprint: str = ""
    owes_validation: bool = False  # whether a stop request interrupted the validation at this step
    best: BestValidation | None = None  # None: no validation was finite
    num_skips: Count = 0  # steps that were skipped because they were non-finite or spiking
    accepted: list[AcceptedStep] = field(default_factory=list)  # newest steps, to detect spikes
    optimizer_step: Count = 0  # steps of all parameters that `optimizer_steps` does not name
    optimizer_steps: dict[str, Count] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)  # values of a custom training loop
    param_groups: list[dict[str, Any]] = field(
        default_factory=list
    )  # options of that loop's optimizer

    def after_validation(self, loss: float) -> Self:
        """Return the progress after the validation at this step, which had `loss`."""
        best = self.best
        if math.isfinite(loss) and (best is None or loss < best.loss):
            best = BestValidation(loss, self.step)
        elif best is not None:
            best = BestValidation(best.loss, best.step, best.unimproved + 1)
        return replace(self, best=best, owes_validation=False)

    def is_finished(self, steps: int, patience: int | None) -> bool:
        """Return whether training has ended, after `steps` or by early stopping."""
        unimproved = 0 if self.best is None else self.best.unimproved
        return self.step >= steps or (patience is not None and unimproved >= patience)
