"""The duration and the cost of a run, from the predicted time of its steps."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from fsdpctl.config.clusters import price_source
from fsdpctl.config.schema import LENGTH_KEYS, Config, Resolved
from fsdpctl.errors import UsageError
from fsdpctl.estimate.accuracy import ErrorBand, band_of
from fsdpctl.estimate.cluster_specs import ASSUMED, with_specs
from fsdpctl.estimate.estimator import Estimator, StepPrediction
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.io.texts import three_digits
from fsdpctl.models.packed_documents import ASSUMED_TOKENS
from fsdpctl.resolve.auto_values import total_steps
from fsdpctl.resolve.run_data import notes_on_epochs

_HOUR = 3600
_TEXTS = {"hours": "{} hours", "gpu_hours": "{} GPU hours", "cost": "cost {}"}


class RunLength(NamedTuple):
    """The number of steps of a run, if it is set."""

    steps: int | None = None
    unknown: str = ""  # why the number of steps is unknown although a length is set
    standard_error: float | None = None  # relative, of estimated tokens; None: tokens are counted

    @property
    def error(self) -> str:
        """Two standard errors of the estimated tokens; empty if tokens are counted."""
        if self.standard_error is None:
            return ""
        return f"±{2 * self.standard_error:.1%}: tokens of the data are estimated"

    def line(self, tokens: int) -> str:
        """Return a line with the number of steps of `tokens` each; empty if no length is set."""
        if self.steps is None:
            return self.unknown and f"length  {self.unknown}"
        inexact = self.error and f" ({self.error})"
        return f"length  {self.steps:,} steps of {tokens:,} tokens{inexact}"


@dataclass(frozen=True, slots=True)
class RunTime:
    """The time of a run on GPUs, without validation, checkpoints and restarts."""

    step_seconds: float
    tokens: int  # per step, over all ranks
    num_ranks: int
    length: RunLength = RunLength()
    price: float | None = None  # per GPU hour
    band: ErrorBand | None = None  # None: the specs of the hardware are assumed
    spec_source: str = ""  # source of the hardware specs
    notes: tuple[str, ...] = ()  # assumptions, a line each

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds

    @property
    def totals(self) -> dict[str, Any]:
        """The hours and the cost of the run; None if its length or the price is not set."""
        steps = self.length.steps
        hours = None if steps is None else steps * self.step_seconds / _HOUR
        gpu_hours = None if hours is None else hours * self.num_ranks
        cost = None if gpu_hours is None or self.price is None else gpu_hours * self.price
        return {"hours": hours, "gpu_hours": gpu_hours, "cost": cost}

    def to_dict(self) -> dict[str, Any]:
        return {
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "error_band": self.band and asdict(self.band),
            "prediction_source": self.spec_source,
            "steps": self.length.steps,
            **self.totals,
            "notes": self.notes,
        }

    def texts(self, *names: str, band: ErrorBand | None = None) -> list[str]:
        """Return the totals in `names` that are known, each with its range by `band`."""
        texts = []
        for name, total in self.totals.items():
            if name in names and total is not None:
                text = _TEXTS[name].format(three_digits(total))
                if band is not None:
                    low, high = three_digits(total * band.low), three_digits(total * band.high)
                    text += f" ({low} to {high})"
                texts.append(text)
        return texts

    def lines(self) -> Iterator[str]:
        """Yield a line about a step, a line about the run with the range of totals, and notes."""
        source = self.spec_source if self.band is None else f"{self.spec_source}; {self.band}"
        seconds, speed = three_digits(self.step_seconds), f"{self.tokens_per_second:,.0f} tok/s"
        yield f"time    {seconds} s/step predicted, {speed} ({source})"
        if line := self.length.line(self.tokens):
            totals = ", ".join(self.texts(*_TEXTS, band=self.band))
            yield f"{line}: {totals}" if totals else line
        yield from (f"note    {line}" for line in self.notes)


def has_length(config: Config) -> bool:
    return config.is_set(*LENGTH_KEYS)


def run_time(
    estimator: Estimator, estimate: RunEstimate, step: StepPrediction | None = None
) -> RunTime:
    """Return the time of a run by its predicted `step`; without `step`, predict the step.

    UsageError if the device is a CPU, or the specs of the hardware are incomplete.
    """
    config, source = with_specs(estimate.config)
    if config.launch.device == "cpu":
        raise UsageError("launch.device=cpu: times are predicted for GPUs only; set cluster")
    step = step or estimator.predict(replace(estimate.plan, config=config))
    band = None if source.startswith(ASSUMED) else band_of(estimate, step.seconds)
    length = run_length(config, step.tokens, estimator)
    return RunTime(
        step_seconds=step.seconds, tokens=step.tokens, num_ranks=config.num_ranks, length=length,
        price=config.cluster.price, band=band, spec_source=source,
        notes=tuple(_notes(config, length, estimator)),
    )  # fmt: skip


def notes_on_price(config: Config) -> tuple[str, ...]:
    """Return a line with the source of the price, unless the price is set or unknown."""
    price, source = config.cluster.price, price_source(config.cluster.name)
    if price is None or config.is_set("cluster.price") or not source:
        return ()
    return (f"cost at {price:g} USD per GPU hour: {source}; set cluster.price to change it",)


def _notes(config: Resolved, length: RunLength, estimator: Estimator) -> Iterator[str]:
    seq_len, steps = config.train.seq_len, length.steps
    if steps is not None:
        yield from notes_on_price(config)
    if config.data.masks_documents:
        tokens = min(ASSUMED_TOKENS, -(-seq_len // 2))
        yield (
            f"samples of {seq_len:,} tokens are assumed to contain documents of {tokens} tokens, "
            "which do not attend to one another: less attention than in a single text"
        )
    if steps is not None:
        with suppress(UsageError):  # the data may be missing on this machine
            yield from notes_on_epochs(config, estimator.data_of(config), steps)


def run_length(config: Resolved, tokens: int, estimator: Estimator) -> RunLength:
    """Return the number of steps, each of `tokens`, or why it is unknown."""
    train = config.train
    if not has_length(config):
        return RunLength()
    steps = None if config.is_auto("train.steps") else train.steps
    if train.epochs is None:
        return RunLength(steps or -(-(train.tokens or 0) // tokens))
    try:
        data = estimator.data_of(config)
        return RunLength(total_steps(config, data), standard_error=data.relative_error)
    except UsageError as error:
        text = f"train.epochs={train.epochs:g}: size of the data unknown; set train.tokens"
        return RunLength(unknown=f"{text} ({error})")
