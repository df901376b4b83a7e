"""Expansion of settings with commas into variants."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from fsdpctl.commands.compare.report import VariantResult
from fsdpctl.config.compose import Composed, compose_config
from fsdpctl.config.recipe import find_recipe, read_recipe
from fsdpctl.config.schema import GROUPS, KEYS, LENGTH_KEYS, Config
from fsdpctl.config.serialize import to_settings
from fsdpctl.errors import UsageError
from fsdpctl.plan.strategy import STRATEGIES, engine_strategies
from fsdpctl.resolve.launchers import ESTIMATE_ROLE, role_of
from fsdpctl.resolve.machine import assign_ranks, shares_memory, without_other_cluster
from fsdpctl.resolve.run_plan import RunPlan

_SEPARATOR = re.compile(r",(?![^\[]*\])")  # a comma that is not within brackets
_CLUSTER, _PRICE = "cluster", "cluster.price"
WITHOUT_SHARED_MEMORY = "launch.share_memory=false"


@dataclass(slots=True, eq=False)
class Variant:
    """A configuration to compare with others, with its results so far."""

    composed: Composed
    result: VariantResult
    plan: RunPlan | None = None

    @property
    def config(self) -> Config:
        """The configuration, with the selection if the variant could be planned."""
        return self.plan.config if self.plan else self.composed.config


def variants_of(settings: Sequence[str], recipe: str | None, *, simulates: bool) -> list[Variant]:
    """Return a variant for every combination of the alternatives in `settings`.

    Commas separate alternatives of group options and numbers. In texts, such as paths, and within
    brackets, commas have no meaning. Without alternatives, all strategies are compared. Strategies
    also vary if engines vary and no strategy is set: no engine of PyTorch has all strategies. If
    strategies vary, each variant ignores values that its strategy does not use.

    Several prices belong to the clusters in their order; a single price belongs to all clusters.
    Only simulated variants may set the length.
    """
    pairs = [setting.partition("=") for setting in settings]
    names = [name for name, *_ in pairs]
    for name in names:
        if name == "train.run_dir":
            raise UsageError(f"{name}: not supported by compare; pass --out to keep the runs")
        if name in LENGTH_KEYS and not simulates:
            raise UsageError(
                f"{name}: only valid with --simulate; pass --steps to set the length of each run"
            )
    alternatives: dict[str, list[str]] = {}
    for name, equals, text in pairs:
        if equals and _SEPARATOR.search(text) and _has_alternatives(name):
            texts = _SEPARATOR.split(text)
            if "" in texts:
                raise UsageError(f"{name}={text}: empty alternative between commas")
            alternatives[name] = texts if name == _PRICE else list(dict.fromkeys(texts))
    if len(names) != len(set(names)):
        compose_config(settings, recipe)  # raises: a setting is repeated
    recipe_settings = [] if recipe is None else read_recipe(find_recipe(recipe))
    engines_vary = "engine" in alternatives and "strategy" not in dict(recipe_settings)
    if "strategy" not in names and (engines_vary or not alternatives):
        alternatives = {"strategy": list(STRATEGIES), **alternatives}
    fixed = [each for name, each in zip(names, settings, strict=True) if name not in alternatives]
    prices = _prices(alternatives)
    result = []
    for values in product(*alternatives.values()):
        varied = dict(zip(alternatives, values, strict=True))
        varied |= {_PRICE: prices[varied[_CLUSTER]]} if prices else {}
        result.append(_variant(varied, fixed, recipe))
    return result


def _prices(alternatives: dict[str, list[str]]) -> dict[str, str]:
    """Remove the prices from the alternatives; return the price of each cluster."""
    if _PRICE not in alternatives:
        return {}
    prices, clusters = alternatives.pop(_PRICE), alternatives.get(_CLUSTER, [])
    if len(prices) != len(clusters):
        raise UsageError(
            f"{_PRICE}={','.join(prices)}: expected one price, or one for each of the "
            f"{len(clusters)} values of cluster"
        )
    return dict(zip(clusters, prices, strict=True))


def all_equivalent(compared: Sequence[Variant], *, simulates: bool) -> bool:
    """Return whether all strategies would run alike, because ranks would share memory."""
    composed = [x.composed if simulates else without_other_cluster(x.composed) for x in compared]
    configs = [each.config for each in composed]
    strategies = {each.strategy.name for each in configs}
    return len(strategies) > 1 and any(
        each.launch.share_memory is None
        and shares_memory(assign_ranks(each, ESTIMATE_ROLE if simulates else role_of(each.launch)))
        for each in configs
    )


def drop_duplicates(compared: Sequence[Variant]) -> tuple[list[Variant], list[str]]:
    """Return the variants that run differently, and a line for each duplicate.

    Without sharded parameters nothing is gathered in a pass, so prefetching changes nothing.
    """
    variants_by_settings: dict[frozenset[tuple[str, str]], Variant] = {}
    lines = []
    for each in compared:
        config = each.composed.config
        strategy = STRATEGIES.get(config.strategy.name)  # None for `auto`
        gathers = strategy is None or strategy.shards_params
        settings = frozenset(
            (name, text)
            for name, text in to_settings(config).items()
            if gathers or not name.startswith("prefetch")
        )
        first = variants_by_settings.setdefault(settings, each)
        if first is not each:
            lines.append(f"{each.result.label}: skipped, the same run as {first.result.label}")
    return list(variants_by_settings.values()), lines


def drop_unsupported(compared: Sequence[Variant]) -> tuple[list[Variant], list[str]]:
    """Return the variants whose engine supports their strategy, and a line about the others.

    A single variant is always returned: its run reports the error. UsageError if none is supported.
    """
    if len(compared) < 2:
        return list(compared), []
    remaining, unsupported = [], dict[str, list[str]]()
    for each in compared:
        engine, strategy = each.composed.config.engine.name, each.composed.config.strategy.name
        if strategy not in STRATEGIES or strategy in engine_strategies(engine):
            remaining.append(each)
        elif strategy not in unsupported.setdefault(engine, []):
            unsupported[engine].append(strategy)
    problem = "; ".join(
        f"engine={x} does not support {', '.join(names)}" for x, names in unsupported.items()
    )
    if not remaining:
        raise UsageError(problem)
    return remaining, [f"skipped: {problem}"] if problem else []


def _variant(varied: dict[str, str], fixed: Sequence[str], recipe: str | None) -> Variant:
    settings = [*fixed, *(f"{name}={text}" for name, text in varied.items())]
    composed = compose_config(settings, recipe)
    config = composed.config
    if "strategy" in varied:
        config = config.with_strategy(config.strategy.name)
    row = VariantResult(varied, config.strategy.name, config.engine.name)
    return Variant(replace(composed, config=config), row)


def _has_alternatives(name: str) -> bool:
    if name in GROUPS:
        return True
    return name in KEYS and (KEYS[name].type != "text" or bool(KEYS[name].choices))
