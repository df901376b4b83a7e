"""Foresees variants side by side, on hardware that need not be here."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fsdpctl.config.choosing import left_open
from fsdpctl.config.schema import Config
from fsdpctl.errors import UsageError
from fsdpctl.estimate.choosing import choose
from fsdpctl.estimate.estimator import Estimator, placed_for_estimate
from fsdpctl.estimate.foresight import Foreseen, Foresight
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.estimate.traffic import sent_in_step
from fsdpctl.predict.chrome import chrome_trace
from fsdpctl.resolve.machine import resolved_strategy, world_size
from fsdpctl.run.flops import flops_per_token
from fsdpctl.tools.compare.fitting import LargestModels, lacks_room, with_memory
from fsdpctl.tools.compare.row import OK, REFUSED, Row
from fsdpctl.tools.compare.vary import Variant

TRACES = "traces"  # of the folder of a comparison
_TERA = 1e12


@dataclass(slots=True)
class _Imagined:
    """A variant, and what was foreseen of it."""

    row: Row
    config: Config
    step: Foreseen | None = None


class Foreseeing:
    """All variants; nothing runs."""

    def __init__(self, variants: Sequence[Variant]) -> None:
        """Nothing is foreseen yet."""
        self._estimator = Estimator()
        self._foresight = Foresight(self._estimator)
        self._imagined = [
            _Imagined(Row(each.varied, config.strategy.name, config.engine.name), config)
            for each in variants
            for config in [each.composed.config]
        ]

    @property
    def rows(self) -> list[Row]:
        """A row for each variant, in their order."""
        return [each.row for each in self._imagined]

    @property
    def configs(self) -> list[Config]:
        """Of each variant, placed where that could be."""
        return [each.config for each in self._imagined]

    def run(self) -> None:
        """Foresee all of them."""
        for each in self._imagined:
            try:
                self._foresee(each)
            except UsageError as error:
                each.row = replace(each.row, status=f"{REFUSED}{error}")

    def find_largest(self) -> None:
        """For each engine and strategy the largest model that would fit there."""
        largest = LargestModels(self._estimator)
        for each in self._imagined:
            if each.step is not None:
                each.row = replace(each.row, largest=largest.under(each.config))

    def write_traces(self, folder: Path) -> None:
        """The course of each foreseen step, for Perfetto, in a directory of its own."""
        known = [(n, each) for n, each in enumerate(self._imagined, start=1) if each.step]
        if known:
            (folder / TRACES).mkdir()
        for number, each in known:
            assert each.step is not None
            text = chrome_trace(each.step.played, f"foreseen: {each.row.label}")
            (folder / TRACES / f"{number:02d}.json").write_text(text, encoding="utf-8")

    def _foresee(self, each: _Imagined) -> None:
        config = self._with_choice(placed_for_estimate(each.config))
        config = replace(config, strategy=resolved_strategy(config, config.strategy))
        each.row = replace(each.row, strategy=config.strategy.name)
        estimate = self._estimator.estimate(config)
        step = self._foresight.step(config)
        each.config, each.step = config, step
        row = _with_times(each.row, config, step, estimate)
        units = self._estimator.traced_model(config).units
        sent = sent_in_step(config, units, estimate.batches.num_micro_batches).total
        row = replace(row, sent_bytes_per_step=sent)
        each.row = replace(with_memory(row, estimate), status=lacks_room(estimate) or OK)

    def _with_choice(self, placed: Config) -> Config:
        """With what is left open chosen, by the figures that this was chosen by."""
        return choose(self._estimator, placed).chosen if left_open(placed) else placed


def _with_times(row: Row, config: Config, step: Foreseen, estimate: RunEstimate) -> Row:
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
    """Model FLOPs utilisation, where the peak of the devices is known."""
    peak = config.cluster.flops
    if config.precision.param_dtype != "bfloat16":
        peak = config.cluster.flops_fp32
    if peak is None or estimate.num_trained < estimate.num_params:
        return None
    per_token = flops_per_token(config.model, estimate.num_params, config.train.seq_len)
    return per_token * speed / (peak * _TERA * world_size(config))
