"""Fills in what a configuration leaves to be chosen, for a run or for an estimate."""

from collections.abc import Callable
from dataclasses import replace

from fsdpctl.config.choosing import asked_again, left_open, stood_in, with_choice
from fsdpctl.config.compose import Composed
from fsdpctl.config.placement import LaunchConfig
from fsdpctl.config.schema import Config
from fsdpctl.estimate.choice import Choice
from fsdpctl.estimate.choosing import choose
from fsdpctl.estimate.estimator import Estimator, estimate_strategies, placed_for_estimate
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.plan.engines import has_strategy
from fsdpctl.plan.strategy import STRATEGIES
from fsdpctl.resolve.machine import placed_on_cluster
from fsdpctl.resolve.run import ResolvedRun, resolve, resolved_again


def estimates_of(
    estimator: Estimator, config: Config, *, every: bool
) -> list[tuple[RunEstimate, Choice | None]]:
    """As `estimate_strategies`, with what is left open chosen for each of them.

    Where nothing fits, the estimate is of what comes closest.

    Raises:
        UsageError: the configuration cannot work.
    """
    if not left_open(config):
        found = estimate_strategies(estimator, config, every=every)
        return [(estimate, None) for estimate in found]
    placed = placed_for_estimate(config)
    given = [config.strategy]
    if every:
        can = (name for name, row in STRATEGIES.items() if has_strategy(config.engine.name, row))
        given = [config.strategy.under(name) for name in can]
    choices = [choose(estimator, replace(placed, strategy=each)) for each in given]
    return [(choice.estimate, choice if choice.names else None) for choice in choices]


def chosen_on_cluster(config: Config) -> Choice:
    """What is chosen for the cluster of a configuration.

    Raises:
        UsageError: as `choose`.
    """
    return choose(Estimator(), placed_for_estimate(config))


def chosen_for_run(run: ResolvedRun, asked: Config) -> Choice:
    """What is chosen of what `asked` leaves open, for the ranks of a run of it.

    Raises:
        UsageError: as `choose`.
    """
    return choose(Estimator(), placed_on_cluster(asked_again(run.config, asked)))


def resolved_with_stand_ins(
    composed: Composed,
    launch: LaunchConfig | None = None,
    on_rows: Callable[[int], None] = lambda count: None,
) -> ResolvedRun:
    """As `resolve`, with something in the place of what is left open."""
    return resolve(replace(composed, config=stood_in(composed.config)), launch, on_rows)


def with_chosen(composed: Composed, chosen: Config) -> Composed:
    """What was asked for, with what was chosen."""
    config = composed.config
    return replace(composed, config=with_choice(config, chosen, left_open(config)))


def resolved_with_choice(composed: Composed) -> ResolvedRun:
    """As `resolve`, with what is left open chosen for the ranks of the run.

    Raises:
        UsageError: it cannot work, or nothing fits.
    """
    run = resolved_with_stand_ins(composed)
    if not left_open(composed.config):
        return run
    chosen = chosen_for_run(run, composed.config).chosen
    return resolved_again(run, with_chosen(composed, chosen).config)
