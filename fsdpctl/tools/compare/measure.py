"""Measures variants side by side, in rounds of short runs.

Note: why rounds of whole runs. A machine drifts: it warms up, others use it. In every round each
variant runs once, from the beginning and for all steps, and every round begins with another one, so
that what the machine does to one it does to all. A run that was continued instead would have to
write and read a checkpoint for every turn, and would warm up again all the same; runs that start
anew also show how much one start differs from another, and have to end at the same loss.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from fsdpctl.config.auto import Selection, left_open
from fsdpctl.config.schema import Config
from fsdpctl.engine.build import divide_module
from fsdpctl.errors import FsdpctlError, InterruptError, StoppedError, UsageError
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.estimate.run_plan import estimate_run
from fsdpctl.estimate.search import choose
from fsdpctl.estimate.traffic import sent_in_step
from fsdpctl.plan.engines import OURS
from fsdpctl.resolve.machine import placed_on_cluster, world_size
from fsdpctl.resolve.run import Opened, Settled, open_run, settle
from fsdpctl.run.assets import collect_assets
from fsdpctl.start.probe import short_run
from fsdpctl.tools.compare.figures import round_of, summarised
from fsdpctl.tools.compare.fitting import LargestModels, lacks_room, with_memory
from fsdpctl.tools.compare.row import FAILED, NOT_REACHED, OK, REFUSED, Row
from fsdpctl.tools.compare.vary import Variant

T = TypeVar("T")
RUN_FOLDER = "runs"  # of the folder of a comparison


@dataclass(slots=True)
class _Contender:
    """A variant on its way through the rounds."""

    variant: Variant
    row: Row  # with what is known of it so far
    config: Config | None = None  # resolved; None: it cannot run
    assets: Mapping[str, bytes] = field(default_factory=dict)


class Measurement:
    """Runs all variants; what is known of them is there at any time, also after an exception."""

    def __init__(
        self,
        variants: Sequence[Variant],
        folder: Path,
        *,
        num_rounds: int,
        is_kept: bool,
        say: Callable[[str], None],
    ) -> None:
        """Nothing runs yet.

        Args:
            variants: what to run.
            folder: an existing directory for the runs' directories.
            num_rounds: how often each of them runs.
            is_kept: whether the folder stays.
            say: is told what is being run.
        """
        self._folder, self._num_rounds, self._is_kept = folder, num_rounds, is_kept
        self._say = say
        self._estimator = Estimator()
        self._contenders = [
            _Contender(each, Row(each.varied, config.strategy.name, config.engine.name))
            for each in variants
            for config in [each.composed.config]
        ]

    @property
    def rows(self) -> list[Row]:
        """A row for each variant, in their order."""
        rows = (each.row for each in self._contenders)
        return summarised(
            [
                replace(row, status=NOT_REACHED) if row.status == OK and not row.rounds else row
                for row in rows
            ]
        )

    @property
    def configs(self) -> list[Config]:
        """Of each variant, resolved where that could be."""
        return [each.config or each.variant.composed.config for each in self._contenders]

    def run(self) -> None:
        """Every variant in every round; one that fails does not keep the others from running.

        Raises:
            StoppedError, InterruptError: somebody asked to stop.
        """
        for each in self._contenders:
            self._prepare(each)
        for number in range(self._num_rounds):
            running = [each for each in self._contenders if each.row.status == OK]
            for place, each in enumerate(in_turn(running, number, self._num_rounds), start=1):
                turn = f"round {number + 1}/{self._num_rounds}  {place}/{len(running)}"
                self._say(f"{turn}  {each.row.label}")
                self._run_once(each, number)

    def find_largest(self) -> None:
        """For each engine and strategy that ran, the largest model that would fit here."""
        self._say("the largest model that fits, under each strategy")
        largest = LargestModels(self._estimator)
        for each in self._contenders:
            if each.config is not None:
                found = largest.under(placed_on_cluster(each.config))
                each.row = replace(each.row, largest=found)

    # ---- before it runs ------------------------------------------------------------------

    def _prepare(self, each: _Contender) -> None:
        """Resolve it, and say what is expected of it."""
        try:
            opened = open_run(each.variant.composed)
            settled = settle(opened.config, self._selection(opened.config))
            if opened.notes:  # something else would be measured than was asked for
                raise UsageError(opened.notes[0])
        except UsageError as error:
            each.row = replace(each.row, status=f"{REFUSED}{error}")
            return
        config = settled.config
        each.config, each.assets = config, collect_assets(config, opened.data)
        estimate = self._estimate(config)
        each.row = replace(
            _expected(each.row, opened, settled, estimate),
            strategy=config.strategy.name,
            world_size=world_size(config),
        )
        each.row = replace(each.row, status=(estimate and lacks_room(estimate)) or OK)

    def _selection(self, config: Config) -> Selection | None:
        if not left_open(config):
            return None
        return choose(self._estimator, placed_on_cluster(config)).best.selection

    def _estimate(self, config: Config) -> RunEstimate | None:
        try:
            return self._estimator.estimate(placed_on_cluster(config))
        except UsageError:
            return None  # it is not estimated, and may run all the same

    # ---- a run of it ---------------------------------------------------------------------

    def _run_once(self, each: _Contender, number: int) -> None:
        place = self._contenders.index(each) + 1
        run_dir = self._folder / RUN_FOLDER / f"{place:02d}" / f"round-{number + 1}"
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        assert each.config is not None
        config = replace(each.config, train=replace(each.config.train, run_dir=str(run_dir)))
        kept = str(run_dir.relative_to(self._folder)) if self._is_kept else None
        try:
            failure = short_run(config, each.row.label, each.assets, "all variants had run")
            measured = None if failure else round_of(run_dir, kept)
        except (InterruptError, StoppedError):
            raise
        except UsageError as error:
            each.row = replace(each.row, status=f"{REFUSED}{error}")
            return
        except FsdpctlError as error:
            failure, measured = str(error), None
        if measured is None:
            later = f"in round {number + 1}, " if number else ""
            each.row = replace(each.row, status=f"{FAILED}{later}{failure}")
            return
        each.row = replace(each.row, rounds=(*each.row.rounds, measured))


def in_turn(contenders: Sequence[T], number: int, num_rounds: int) -> list[T]:
    """Their order in a round: each begins with another one, as far as they go."""
    first = number * max(len(contenders) // num_rounds, 1) % max(len(contenders), 1)
    return [*contenders[first:], *contenders[:first]]


def _expected(row: Row, opened: Opened, settled: Settled, estimate: RunEstimate | None) -> Row:
    units, passes = divide_module(opened.module, None), settled.batches.num_micro_batches
    row = replace(row, sent_bytes_per_step=sent_in_step(settled.config, units, passes).total)
    parts = None
    if settled.config.engine.name == OURS:
        engine = estimate_run(settled.config, opened.module, passes)
        parts = engine.breakdown.to_dict()
        row = replace(
            row, estimated_peak_allocated_bytes=engine.peak_bytes, estimated_breakdown=parts
        )
    return row if estimate is None else with_memory(row, estimate, parts)
