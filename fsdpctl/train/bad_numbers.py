"""Steps whose loss or gradient is not finite, or far above those before: found, and dealt with.

Note: whether a step is applied is decided on the device, from sums that are the same on every rank
and limits that every rank knows beforehand; nothing waits for it. The limits of a step come from
the steps up to the one before the last: on CUDA the host knows no more of them when it launches the
step, and on the CPU, and after a resume, the decision must be the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from fsdpctl.checkpoint.manifest import AcceptedStep, Progress
from fsdpctl.config.training import TrainConfig
from fsdpctl.data.batches import Batches
from fsdpctl.errors import NonFiniteError
from fsdpctl.optim.record import Limits, StepFigures

Reason = Literal["nonfinite_loss", "nonfinite_grad", "loss_spike", "grad_spike"]
Action = Literal["stop", "skip", "rollback"]

_WINDOW, _LEAST = 128, 32  # accepted steps that count; so many must be there
_DEVIATION = 1.4826  # standard deviations in a median absolute deviation of normal values
_FLOOR = 1e-3  # of the median: figures that stand still have no deviation
_LAG = 1  # steps before this one that its limits do not know
_MOST_LOG = 700.0  # of what a float holds
_DONE: dict[Action, str] = {
    "stop": "the step was not applied",
    "skip": "skipped",
    "rollback": "back to the newest checkpoint",
}


@dataclass(frozen=True, slots=True)
class BadStep:
    """What is on record of a step that was not applied."""

    step: int
    reason: Reason
    rank: int | None  # whose value it was; None where only the sum shows it
    loss: float
    grad_norm: float
    threshold: float | None  # of a spike, what it was above
    action: Action
    number: int  # how many there have been in the run, with this one

    @property
    def in_words(self) -> str:
        """What it was, and what was done."""
        rank = "" if self.rank is None else f", on rank {self.rank}"
        above = ""
        if self.threshold is not None:
            what = "loss" if self.reason == "loss_spike" else "gradient norm"
            above = f": a spike of the {what}, above {self.threshold:.4g}"
        figures = f"loss {self.loss:.6g}, gradient norm {self.grad_norm:.6g}"
        return f"step {self.step}: {figures}{above}{rank}; {_DONE[self.action]}"

    def to_line(self, batches: Batches, position: int) -> dict[str, Any]:
        """The object in metrics.jsonl.

        Args:
            batches: of training.
            position: samples consumed before the step.
        """
        of_rank = [] if self.rank is None else batches.numbers(position, self.rank)
        about = {
            "reason": self.reason,
            "action": self.action,
            "rank": self.rank,
            "loss": _written(self.loss),
            "grad_norm": _written(self.grad_norm),
            "threshold": self.threshold,
            "number": self.number,
            "samples": batches.numbers(position),
            "rank_samples": of_rank,
        }
        return {"step": self.step, "bad_numbers": about}


def _written(value: float) -> float | str:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else str(value)


class BadNumbers:
    """Decides what becomes of each step, alike on every rank."""

    def __init__(self, config: TrainConfig, done: Progress) -> None:
        """Of a run that has come as far as `done`."""
        self._config = config
        self.number = done.num_skips
        self.accepted = tuple(done.accepted)

    def limits(self, step: int) -> Limits:
        """Above which `step`, counted from 1, is not applied."""
        factor = self._config.spike_factor
        known = [each for each in self.accepted if each.step < step - _LAG][-_WINDOW:]
        if factor is None or len(known) < _LEAST:
            return Limits()
        log_norm = _threshold([each.log_grad_norm for each in known], factor)
        return Limits(
            loss=_threshold([each.loss for each in known], factor),
            grad_norm=math.exp(min(log_norm, _MOST_LOG)),
        )

    def judge(self, step: int, figures: StepFigures, limits: Limits) -> BadStep | None:
        """What is wrong with a step that had these limits, which is counted; None: nothing."""
        if figures.was_applied:
            self._accept(step, figures)
            return None
        reason = _reason(figures, limits)
        self.number += 1
        thresholds = {"loss_spike": limits.loss, "grad_spike": limits.grad_norm}
        return BadStep(
            step,
            reason,
            _rank_of(reason, figures),
            figures.loss,
            figures.grad_norm,
            thresholds.get(reason),
            "stop" if self.number > self._config.max_skips else self._wished,
            self.number,
        )

    @property
    def _wished(self) -> Action:
        chosen: dict[str, Action] = {"skip": "skip", "rollback": "rollback"}
        return chosen.get(self._config.on_nonfinite, "stop")

    def _accept(self, step: int, figures: StepFigures) -> None:
        if self._config.spike_factor is None:
            return
        log_norm = math.log(max(figures.grad_norm, math.exp(-_MOST_LOG)))
        kept = self.accepted[-(_WINDOW + _LAG) + 1 :]
        self.accepted = (*kept, AcceptedStep(step, figures.loss, log_norm))

    def go_back(self, done: Progress) -> None:
        """Know what was known at `done`, but for how many bad steps there were."""
        self.accepted = tuple(done.accepted)

    def as_error(self, bad: BadStep) -> NonFiniteError:
        """What ends the run."""
        if self._config.on_nonfinite == "stop":
            advice = (
                "a lower optimizer.lr may help; train.on_nonfinite=skip goes on without such "
                "steps, train.on_nonfinite=rollback from the newest checkpoint"
            )
        else:
            advice = f"train.max_skips={self._config.max_skips}: there were as many before it"
        return NonFiniteError(f"{bad.in_words}; {advice}")


def _threshold(values: Sequence[float], factor: float) -> float:
    """Above the median by `factor` robust standard deviations."""
    middle = median(values)
    deviation = median(abs(each - middle) for each in values)
    return middle + factor * _DEVIATION * max(deviation, _FLOOR * abs(middle))


def _reason(figures: StepFigures, limits: Limits) -> Reason:
    if not math.isfinite(figures.loss):
        return "nonfinite_loss"
    if not math.isfinite(figures.grad_norm):
        return "nonfinite_grad"
    return "loss_spike" if figures.loss > limits.loss else "grad_spike"


def _rank_of(reason: Reason, figures: StepFigures) -> int | None:
    """Whose value it was: the first that is not finite, of a spike the largest."""
    is_loss = reason in ("nonfinite_loss", "loss_spike")
    values = figures.rank_losses if is_loss else figures.rank_grad_norms
    if reason in ("nonfinite_loss", "nonfinite_grad"):
        return next((rank for rank, v in enumerate(values) if not math.isfinite(v)), None)
    largest = max(values, default=0.0)
    return values.index(largest) if largest > 0 else None
