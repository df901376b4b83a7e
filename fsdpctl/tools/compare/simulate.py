"""Comparison of variants by prediction, on hardware that need not exist."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fsdpctl.config.auto import left_open
from fsdpctl.config.schema import Config
from fsdpctl.errors import UsageError
from fsdpctl.estimate.estimator import Estimator, placed_for_estimate
from fsdpctl.estimate.prediction import StepPrediction, StepPredictor
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.estimate.search import choose
from fsdpctl.estimate.traffic import sent_in_step
from fsdpctl.predict.simulator import chrome_trace
from fsdpctl.resolve.machine import resolved_strategy, world_size
from fsdpctl.run.flops import flops_per_token
from fsdpctl.tools.compare.fitting import LargestModels, with_memory
from fsdpctl.tools.compare.row import REFUSED, Row
from fsdpctl.tools.compare.vary import Variant

TRACES = "traces"  # in the directory of a comparison
_TERA = 1e12


@dataclass(slots=True)
class _SimulatedVariant:
    """A variant and its prediction."""

    row: Row
    config: Config
    step: StepPrediction | None = None


class SimulatedComparison:
    """A comparison in which nothing runs."""

    def __init__(self, variants: Sequence[Variant]) -> None:
        self._estimator = Estimator()
        self._predictor = StepPredictor(self._estimator)
        self._variants = [_SimulatedVariant(each.row, each.composed.config) for each in variants]

    @property
    def rows(self) -> list[Row]:
        """A row for each variant, in their order."""
        return [each.row for each in self._variants]

    @property
    def configs(self) -> list[Config]:
        """The configuration of each variant, placed if that succeeded."""
        return [each.config for each in self._variants]

    def run(self) -> None:
        """Predict all variants."""
        for each in self._variants:
            try:
                self._predict(each)
            except UsageError as error:
                each.row = replace(each.row, status=f"{REFUSED}{error}")

    def find_largest(self) -> None:
        """Find the largest model that would fit, for each engine and strategy."""
        largest = LargestModels(self._estimator)
        for each in self._variants:
            if each.step is not None:
                each.row = replace(each.row, largest=largest.under(each.config))

    def write_traces(self, folder: Path) -> None:
        """Write the timeline of each predicted step for Perfetto, in a directory of its own."""
        for number, each in enumerate(self._variants, start=1):
            if each.step is not None:
                (folder / TRACES).mkdir(exist_ok=True)
                text = chrome_trace(each.step.simulated, f"predicted: {each.row.label}")
                (folder / TRACES / f"{number:02d}.json").write_text(text, encoding="utf-8")

    def _predict(self, each: _SimulatedVariant) -> None:
        config = placed_for_estimate(each.config)
        if left_open(config):
            config = choose(self._estimator, config).best.estimate.config
        config = replace(config, strategy=resolved_strategy(config, config.strategy))
        each.row = replace(each.row, strategy=config.strategy.name)
        estimate = self._estimator.estimate(config)
        step = self._predictor.predict(config)
        each.config, each.step = config, step
        units = self._estimator.traced_model(config).units
        sent = sent_in_step(config, units, estimate.batches.num_micro_batches).total
        row = replace(_with_times(each.row, config, step, estimate), sent_bytes_per_step=sent)
        each.row = with_memory(row, estimate)


def _with_times(row: Row, config: Config, step: StepPrediction, estimate: RunEstimate) -> Row:
    speed = step.tokens / step.seconds
    return replace(
        row,
        world_size=world_size(config),
        tokens_per_second=speed,
        step_seconds=step.seconds,
        compute_seconds=step.compute,
        exposed_communication_seconds=step.exposed_communication,
        optimizer_seconds=step.optimizer,
        mfu=_utilization(config, speed, estimate),
    )


def _utilization(config: Config, speed: float, estimate: RunEstimate) -> float | None:
    """Return the model FLOPs utilization, or None if the peak of the devices is unknown."""
    peak = config.cluster.flops
    if config.precision.param_dtype != "bfloat16":
        peak = config.cluster.flops_fp32
    if peak is None or estimate.num_trained < estimate.num_params:
        return None
    per_token = flops_per_token(config.model, estimate.num_active, config.train.seq_len)
    return per_token * speed / (peak * _TERA * world_size(config))
