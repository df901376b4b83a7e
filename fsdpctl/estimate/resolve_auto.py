"""The selection of settings that are `auto`, for every command."""

from collections.abc import Callable
from dataclasses import replace

from fsdpctl.config.compose import Composed
from fsdpctl.config.schema import Config, Filled
from fsdpctl.config.selection import Selection, auto_names, restored_names, unset_names, with_auto
from fsdpctl.errors import UsageError
from fsdpctl.estimate.candidates import Ranking, is_distinct_on_cluster
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.estimate.search import rank_candidates
from fsdpctl.estimate.summary import describe_ranking
from fsdpctl.resolve.machine import supported_strategies
from fsdpctl.resolve.run_plan import RunPlan, make_run_plan

# A resumed run selects again if any of these settings has changed.
_SELECTED_FOR = ("launch.device", "launch.nnodes", "launch.nproc_per_node", "cluster.memory")


def estimates_of(
    estimator: Estimator, composed: Composed, *, all_strategies: bool
) -> list[tuple[RunEstimate, Ranking | None]]:
    """Estimate a configuration on its cluster, with the selection of `resolve_auto`.

    With `all_strategies`, estimate each strategy that the engine and the other settings support, if
    it differs from the other strategies on this cluster. Keys that a strategy does not use are
    dropped. If nothing fits, a strategy is estimated with the defaults. UsageError if the
    configuration is invalid.
    """
    config = estimator.prepare(composed, all_strategies=all_strategies).config
    if not all_strategies:
        return [resolve_auto(estimator, config)]
    estimates, errors = [], []
    names = (x for x in supported_strategies(config) if is_distinct_on_cluster(config, x))
    for name in names:
        try:
            estimate, ranking = resolve_auto(estimator, config.with_strategy(name))
            if ranking is not None and ranking.defaults and not ranking.ranked:
                # Strategies that do not fit are compared with equal settings.
                estimate, ranking = ranking.defaults, None
            estimates.append((estimate, ranking))
        except UsageError as error:
            errors.append(error)
    if not estimates:
        raise errors[0]
    return estimates


def resolve_auto(estimator: Estimator, config: Filled) -> tuple[RunEstimate, Ranking | None]:
    """Return the estimate with the selected settings, and the ranking if settings were selected.

    Settings that are `auto` are selected, and unset settings if their defaults do not fit. All
    commands select by this function. If nothing fits, the closest combination is estimated.
    UsageError if no combination is valid.
    """
    unset = unset_names(config)
    if auto_names(config):
        ranking = rank_candidates(estimator, config)
        if ranking.ranked or not unset:
            return ranking.estimate, ranking
        defaults = ranking.estimate  # unset settings have their defaults
    else:
        ranking, defaults = None, estimator.estimate(make_run_plan(config))
        if defaults.fits or not unset:
            return defaults, None
    unset_ranking = rank_candidates(estimator, with_auto(config, unset), complete=False)
    unset_ranking = replace(unset_ranking, defaults=defaults)
    if not unset_ranking.ranked and unset_ranking.estimate.margin <= defaults.margin:
        return defaults, ranking
    return unset_ranking.estimate, unset_ranking


def resolve_auto_of_run(
    estimator: Estimator,
    config: Filled,
    stored: Config | None,
    file: object,
    note: Callable[[str], None],
) -> tuple[RunPlan, RunEstimate, tuple[str, ...]]:
    """Select the `auto` settings for the ranks of a run; a resumed run keeps its selection.

    `stored` is the configuration that a resumed run has stored in `file`. The result is the plan,
    its estimate, and lines that explain the selection.
    """
    reselected: tuple[str, ...] = ()
    if stored is not None and all(stored.value(x) == config.value(x) for x in _SELECTED_FOR):
        reselected = restored_names(config, stored)
    if stored is not None and reselected:
        selection = Selection.of(stored)
        plan = make_run_plan(with_auto(config, reselected), selection)
        line = f"{'auto':<8}{selection.text(reselected)}, as in {file}"
        return plan, estimator.estimate(plan), (line,)
    if auto_names(config):
        note("selecting the fastest configuration that fits")
    _, ranking = resolve_auto(estimator, config)
    if ranking is None:
        plan = make_run_plan(config)
        return plan, estimator.estimate(plan), ()
    plan = make_run_plan(with_auto(config, ranking.names), ranking.selection)
    return plan, estimator.estimate(plan), (*describe_ranking(ranking),)
