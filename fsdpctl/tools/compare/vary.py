"""From words with commas to the settings of each run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from fsdpctl.config.compose import Composed, compose_config
from fsdpctl.config.recipe import find_recipe, read_recipe
from fsdpctl.config.schema import GROUPS, KEYS, LENGTHS
from fsdpctl.config.serialize import config_words
from fsdpctl.errors import UsageError
from fsdpctl.plan.engines import has_strategy
from fsdpctl.plan.strategy import STRATEGIES

_OURS = dict.fromkeys(LENGTHS, "--steps says how long each run is") | {
    "train.run_dir": "--out keeps the runs"
}


@dataclass(frozen=True, slots=True)
class Variant:
    """What is run in each round."""

    varied: dict[str, str]  # only what differs between the runs
    composed: Composed
    words: tuple[str, ...] = ()  # all that were typed for it, without its length

    @property
    def label(self) -> str:
        """The words that make it what it is."""
        return " ".join(f"{name}={text}" for name, text in self.varied.items())


def variants(
    words: Sequence[str], recipe: str | None, config_dir: Path | None, *, steps: int
) -> list[Variant]:
    """Every combination of the alternatives in `words`; of all strategies where there are none.

    Commas separate alternatives of choices and numbers; in texts, such as paths, they are commas.
    Where strategies vary, values that one of them has no use for are left out under it. Where only
    engines vary and nobody named a strategy, strategies vary too: no engine of PyTorch's has all.

    Raises:
        UsageError: a word is unknown, or its value is not allowed.
    """
    for word in words:
        name = word.partition("=")[0]
        if name in _OURS:
            raise UsageError(f"{name}: compare decides it; {_OURS[name]}")
    alternatives = {
        name: list(dict.fromkeys(text.split(",")))
        for name, equals, text in (word.partition("=") for word in words)
        if equals and "," in text and _has_alternatives(name)
    }
    for name, texts in alternatives.items():
        if "" in texts:
            raise UsageError(f"{name}={','.join(texts)}: an alternative between commas is empty")
    names = [word.partition("=")[0] for word in words]
    if len(names) != len(set(names)):  # its error names both
        compose_config(words, recipe, config_dir)
    between_engines = "engine" in alternatives and "strategy" not in _named_in(recipe)
    if "strategy" not in names and (between_engines or not alternatives):
        alternatives = {"strategy": list(STRATEGIES), **alternatives}
    fixed = [word for word in words if word.partition("=")[0] not in alternatives]
    return [
        _variant(dict(zip(alternatives, values, strict=True)), fixed, recipe, config_dir, steps)
        for values in product(*alternatives.values())
    ]


def distinct(found: Sequence[Variant]) -> tuple[list[Variant], list[str]]:
    """Those that differ in what they run, and a line for each of the others.

    Where parameters are whole at rest nothing is gathered, so prefetch changes nothing.
    """
    kept: dict[frozenset[tuple[str, str]], Variant] = {}
    lines = []
    for each in found:
        config = each.composed.config
        name = config.strategy.name
        gathers = name not in STRATEGIES or STRATEGIES[name].shards_params  # or is to be chosen
        words = frozenset(
            (name, text)
            for name, text in config_words(config).items()
            if gathers or not name.startswith("prefetch")
        )
        first = kept.setdefault(words, each)
        if first is not each:
            lines.append(f"{each.label}: is the same as {first.label}")
    return list(kept.values()), lines


def possible(found: Sequence[Variant]) -> tuple[list[Variant], list[str]]:
    """Of combinations those that their engine has, and a line that says which it does not.

    One that was asked for by itself stays, to be answered.

    Raises:
        UsageError: none of them is left.
    """
    if len(found) < 2:
        return list(found), []
    kept, lacking = [], dict[str, list[str]]()
    for each in found:
        engine, strategy = each.composed.config.engine.name, each.composed.config.strategy.name
        if strategy not in STRATEGIES or has_strategy(engine, STRATEGIES[strategy]):
            kept.append(each)
        elif strategy not in lacking.setdefault(engine, []):
            lacking[engine].append(strategy)
    said = "; ".join(f"engine={e} does not have {', '.join(s)}" for e, s in lacking.items())
    if not kept:
        raise UsageError(said)
    return kept, [f"left out: {said}"] if said else []


def _named_in(recipe: str | None) -> set[str]:
    return set() if recipe is None else {name for name, _ in read_recipe(find_recipe(recipe))}


def _variant(
    varied: dict[str, str],
    fixed: Sequence[str],
    recipe: str | None,
    config_dir: Path | None,
    steps: int,
) -> Variant:
    words = (*fixed, *(f"{name}={text}" for name, text in varied.items()))
    composed = compose_config([*words, f"train.steps={steps}"], recipe, config_dir)
    config = composed.config
    if "strategy" in varied:
        given = config.strategy
        config = replace(config, strategy=given.under(given.name))
    return Variant(varied, replace(composed, config=config), words)


def _has_alternatives(name: str) -> bool:
    if name in GROUPS:
        return True
    return name in KEYS and (KEYS[name].type != "text" or bool(KEYS[name].choices))
