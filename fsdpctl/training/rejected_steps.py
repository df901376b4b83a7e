"""Rejection of steps with a non-finite or spiking loss or gradient norm.

Note: the device decides whether a step is applied, from sums that are the same on every rank and
limits that every rank knows in advance, so no rank waits for the decision. The limits of a step
come from the steps up to the second to last one. On CUDA, the host does not know the last step's
values when it launches the step, and the decision must be the same on the CPU and after a resume.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from fsdpctl.checkpoint.training_progress import AcceptedStep, Progress
from fsdpctl.config.training import TrainConfig
from fsdpctl.data.batches import Batches
from fsdpctl.errors import NonFiniteError
from fsdpctl.optim.record import SpikeLimits, StepStats

Reason = Literal["nonfinite_loss", "nonfinite_grad", "loss_spike", "grad_spike"]
Action = Literal["stop", "skip"]

_DEVIATION = 1.4826  # standard deviations in a median absolute deviation of normal values
_FLOOR = 1e-3  # smallest deviation, relative to the median: constant values have a deviation of 0
_EXCLUDED_STEPS = 1  # the newest steps, whose values the host may not know yet
WINDOW = 128  # applied steps from which the limits come
MIN_ACCEPTED = 32  # with fewer applied steps, there is no limit
_MOST_LOG = 700.0  # a float holds exp(700)
_DONE: dict[Action, str] = {"stop": "rejected, training stops", "skip": "skipped"}


@dataclass(frozen=True, slots=True)
class RejectedStep:
    """A step that was not applied."""

    step: int
    reason: Reason
    rank: int | None  # the rank with the value; None if only the sum shows it
    loss: float
    grad_norm: float
    threshold: float | None  # the limit that a spike exceeded
    action: Action
    number: int  # the run's rejected steps up to this step

    @property
    def message(self) -> str:
        cause = f"loss {self.loss:.6g}, gradient norm {self.grad_norm:.6g}"
        if self.threshold is not None:
            statistic = "loss" if self.reason == "loss_spike" else "gradient norm"
            cause += f", {statistic} above {self.threshold:.4g}"
        if self.rank is not None:
            cause += f", rank {self.rank}"
        return f"step {self.step}: {_DONE[self.action]} ({cause})"

    def to_line(self, batches: Batches, position: int) -> dict[str, Any]:
        """Return the line for metrics.jsonl; the step follows `position` samples."""
        rank_samples = [] if self.rank is None else batches.sample_indices(position, self.rank)
        values = {
            "reason": self.reason, "action": self.action, "rank": self.rank,
            "loss": _json_number(self.loss), "grad_norm": _json_number(self.grad_norm),
            "threshold": self.threshold, "number": self.number,
            "samples": batches.sample_indices(position), "rank_samples": rank_samples,
        }  # fmt: skip
        return {"step": self.step, "rejected_step": values}


def _json_number(value: float) -> float | str:
    """Return a non-finite value as text: JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else str(value)


class RejectionRule:
    """The rule that accepts or rejects each step, with the same result on every rank."""

    def __init__(self, config: TrainConfig, progress: Progress) -> None:
        self._config = config
        self.num_rejected = progress.num_skips
        self.accepted = tuple(progress.accepted)

    def limits(self, step: int) -> SpikeLimits:
        """Return the limits for `step`, counted from 1; it is not applied if a value is higher."""
        factor = self._config.spike_factor
        window = [each for each in self.accepted if each.step < step - _EXCLUDED_STEPS][-WINDOW:]
        if factor is None or len(window) < MIN_ACCEPTED:
            return SpikeLimits()
        log_norm = _threshold([each.log_grad_norm for each in window], factor)
        loss = _threshold([each.loss for each in window], factor)
        return SpikeLimits(loss, math.exp(min(log_norm, _MOST_LOG)))

    def evaluate(self, step: int, stats: StepStats, limits: SpikeLimits) -> RejectedStep | None:
        """Count a step that was not applied, and return it; None if it was applied."""
        if stats.was_applied:
            self._accept(step, stats)
            return None
        reason, on_nonfinite = _reason(stats, limits), self._config.on_nonfinite
        self.num_rejected += 1
        thresholds = {"loss_spike": limits.loss, "grad_spike": limits.grad_norm}
        is_over = self.num_rejected > self._config.max_skips
        action: Action = "stop" if is_over else cast("Action", on_nonfinite)
        return RejectedStep(
            step, reason, _rank_of(reason, stats), stats.loss, stats.grad_norm,
            thresholds.get(reason), action, self.num_rejected,
        )  # fmt: skip

    def _accept(self, step: int, stats: StepStats) -> None:
        if self._config.spike_factor is None:
            return
        log_norm = math.log(max(stats.grad_norm, math.exp(-_MOST_LOG)))
        # One more than WINDOW, because `limits` excludes the newest.
        self.accepted = (*self.accepted[-WINDOW:], AcceptedStep(step, stats.loss, log_norm))

    def as_error(self, rejected: RejectedStep) -> NonFiniteError:
        if self._config.on_nonfinite == "stop":
            advice = "a lower optimizer.lr may help; train.on_nonfinite=skip skips such steps"
        else:
            advice = f"train.max_skips={self._config.max_skips} reached"
        return NonFiniteError(f"{rejected.message}; {advice}")


def _threshold(values: Sequence[float], factor: float) -> float:
    middle = median(values)
    deviation = median(abs(each - middle) for each in values)
    return middle + factor * _DEVIATION * max(deviation, _FLOOR * abs(middle))


def _reason(stats: StepStats, limits: SpikeLimits) -> Reason:
    if not math.isfinite(stats.loss):
        return "nonfinite_loss"
    if not math.isfinite(stats.grad_norm):
        return "nonfinite_grad"
    return "loss_spike" if stats.loss > limits.loss else "grad_spike"


def _rank_of(reason: Reason, stats: StepStats) -> int | None:
    is_loss = reason in ("nonfinite_loss", "loss_spike")
    values = stats.rank_losses if is_loss else stats.rank_grad_norms
    if reason in ("nonfinite_loss", "nonfinite_grad"):
        return next((rank for rank, v in enumerate(values) if not math.isfinite(v)), None)
    largest = max(values, default=0.0)
    return values.index(largest) if largest > 0 else None


class GradientProbe:
    """The norm of the gradient at the output of the embedding, over the micro-batches of a step.

    The probe shows on which rank a non-finite value occurs. The value propagates to the output of
    the embedding on that rank, whereas gradients that are summed over ranks do not show the rank.
    The cost is one norm of a hidden state per micro-batch. The probe does not detect an overflow
    that occurs only in the gradient of a parameter. Its hook lives as long as the module.
    """

    def __init__(self, module: nn.Module) -> None:
        """Watch the input embedding of `module`, if it has `get_input_embeddings`."""
        self._norms: list[Tensor] = []
        find = getattr(module, "get_input_embeddings", None)
        if find is not None:
            find().register_forward_hook(self._watch)

    def _watch(self, module: nn.Module, args: object, output: object) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(self._record_norm)

    def _record_norm(self, gradient: Tensor) -> None:
        self._norms.append(torch.linalg.vector_norm(gradient, dtype=torch.float32))

    def take(self) -> Tensor | None:
        """Return the norm of gradients since the last call, a scalar; None without gradients."""
        norms, self._norms = self._norms, []
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else None
