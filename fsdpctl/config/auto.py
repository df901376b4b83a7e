"""The settings that `auto` selects: strategy, activation checkpointing, prefetch, micro-batch.

Each of these is `auto` until it is selected. A `train.micro_batch_size` that is not set is not
`auto`: it is a rank's whole share of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdpctl.config.keys import AUTO, CHOSEN
from fsdpctl.config.schema import C, Config, PrefetchConfig
from fsdpctl.errors import UsageError

STRATEGY, RECOMPUTATION, PREFETCH = "strategy", "activation_checkpointing", "prefetch"
MICRO_BATCH = "train.micro_batch_size"
RECOMPUTATIONS = ("none", "selective", "full")  # from the least to the most
PREFETCHES = (
    PrefetchConfig("none", 0, 0),
    PrefetchConfig("backward", 0, 1),
    PrefetchConfig("both", 1, 1),
)


@dataclass(frozen=True, slots=True)
class Selection:
    """A value for each setting that `auto` can select."""

    strategy: str
    activation_checkpointing: str
    prefetch: PrefetchConfig
    micro_batch_size: int | None  # None: a rank's whole share of the step

    @staticmethod
    def of(config: Config) -> "Selection":
        """Return the values that a configuration has."""
        return Selection(
            config.strategy.name,
            config.activation_checkpointing.name,
            config.prefetch,
            config.train.micro_batch_size,
        )

    def text(self, names: Sequence[str]) -> str:
        values = {
            STRATEGY: self.strategy,
            RECOMPUTATION: self.activation_checkpointing,
            PREFETCH: self.prefetch.name,
            MICRO_BATCH: self.micro_batch_size,
        }
        return " ".join(f"{name}={values[name]}" for name in names)


def left_open(config: Config) -> tuple[str, ...]:
    """Return the names of the settings that are `auto`.

    Raises:
        UsageError: If a setting that `auto` would select has a value too.
    """
    prefetch, usual = config.prefetch, PrefetchConfig()
    if prefetch.name == AUTO:
        for name in ("forward", "backward"):
            if (given := getattr(prefetch, name)) != getattr(usual, name):
                raise UsageError(
                    f"prefetch.{name}={given}: conflicts with prefetch=auto; leave one of them out"
                )
    groups = (STRATEGY, RECOMPUTATION, PREFETCH)
    names = [name for name in groups if getattr(config, name).name == AUTO]
    return (*names, *([MICRO_BATCH] if config.train.micro_batch_size == CHOSEN else []))


def selected(config: C, selection: Selection) -> C:
    """Return `config` with the selected value for every setting that is `auto`, and only those."""
    names = left_open(config)
    values = {
        RECOMPUTATION: selection.activation_checkpointing,
        MICRO_BATCH: selection.micro_batch_size,
    }
    config = config.changed({name: value for name, value in values.items() if name in names})
    if STRATEGY in names:
        config = replace(config, strategy=config.strategy.under(selection.strategy))
    return replace(config, prefetch=selection.prefetch) if PREFETCH in names else config
