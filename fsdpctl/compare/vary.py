"""From words with commas to the settings of each run."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from fsdpctl.config.compose import Composed, compose_config
from fsdpctl.config.schema import GROUPS, KEYS, LENGTHS
from fsdpctl.errors import UsageError
from fsdpctl.plan.strategy import STRATEGIES

_OURS = (*LENGTHS, "train.run_dir")


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

    Raises:
        UsageError: a word is unknown, or its value is not allowed.
    """
    for word in words:
        name = word.partition("=")[0]
        if name in _OURS:
            raise UsageError(f"{name}: compare decides it; --steps says how long each run is")
    alternatives = {
        name: text.split(",")
        for name, equals, text in (word.partition("=") for word in words)
        if equals and "," in text and _has_alternatives(name)
    }
    fixed = [word for word in words if word.partition("=")[0] not in alternatives]
    names = [word.partition("=")[0] for word in words]
    if len(names) != len(set(names)):  # its error names both
        compose_config(words, recipe, config_dir)
    if not alternatives and "strategy" not in names:
        alternatives = {"strategy": list(STRATEGIES)}
    found = []
    for values in product(*alternatives.values()):
        varied = dict(zip(alternatives, values, strict=True))
        typed = [*fixed, *(f"{name}={text}" for name, text in varied.items())]
        length = [f"train.steps={steps}"]
        found.append(Variant(varied, compose_config([*typed, *length], recipe, config_dir)))
    return found


def _has_alternatives(name: str) -> bool:
    if name in GROUPS:
        return True
    return name in KEYS and (KEYS[name].type != "text" or bool(KEYS[name].choices))
