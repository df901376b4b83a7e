"""From words with commas to the settings of each run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from fsdpctl.config.compose import Composed, compose_config
from fsdpctl.config.schema import GROUPS, KEYS, LENGTHS
from fsdpctl.config.serialize import config_words
from fsdpctl.errors import UsageError
from fsdpctl.plan.strategy import STRATEGIES

_OURS = dict.fromkeys(LENGTHS, "--steps says how long each run is") | {
    "train.run_dir": "--out keeps the runs"
}


@dataclass(frozen=True, slots=True)
class Variant:
    """One run of a comparison."""

    varied: dict[str, str]  # only what differs between the runs
    composed: Composed

    @property
    def label(self) -> str:
        """The words that make it what it is."""
        return " ".join(f"{name}={text}" for name, text in self.varied.items())


def variants(
    words: Sequence[str], recipe: str | None, config_dir: Path | None, *, steps: int
) -> list[Variant]:
    """Every combination of the alternatives in `words`; of all strategies where there are none.

    Commas separate alternatives of choices and numbers; in texts, such as paths, they are commas.
    Where strategies vary, values that one of them has no use for are left out under it.

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
    if not alternatives and "strategy" not in names:
        alternatives = {"strategy": list(STRATEGIES)}
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
        gathers = STRATEGIES[config.strategy.name].shards_params
        words = frozenset(
            (name, text)
            for name, text in config_words(config).items()
            if gathers or not name.startswith("prefetch")
        )
        first = kept.setdefault(words, each)
        if first is not each:
            lines.append(f"{each.label}: is the same as {first.label}")
    return list(kept.values()), lines


def _variant(
    varied: dict[str, str],
    fixed: Sequence[str],
    recipe: str | None,
    config_dir: Path | None,
    steps: int,
) -> Variant:
    words = [*fixed, *(f"{name}={text}" for name, text in varied.items()), f"train.steps={steps}"]
    composed = compose_config(words, recipe, config_dir)
    config = composed.config
    if "strategy" in varied:
        given = config.strategy
        config = replace(config, strategy=given.under(given.name))
    return Variant(varied, replace(composed, config=config))


def _has_alternatives(name: str) -> bool:
    if name in GROUPS:
        return True
    return name in KEYS and (KEYS[name].type != "text" or bool(KEYS[name].choices))
