"""The settings that `auto` selects: strategy, activation checkpointing, prefetch, micro-batch.

Each of these is `auto` until it is selected. Those that are not set have their plain defaults if
these fit into memory, else they are `auto` too, except for the strategy. The default of
`train.micro_batch_size` is a rank's whole share of the step.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from fsdpctl.config.keys import AUTO, Value
from fsdpctl.config.schema import KEYS, C, Config, Origin, PrefetchConfig
from fsdpctl.plan.recomputation import BLOCKS, Recomputation

STRATEGY, RECOMPUTATION, PREFETCH = "strategy", "activation_checkpointing", "prefetch"
MICRO_BATCH = "train.micro_batch_size"
PREFETCHES = (
    PrefetchConfig("none", 0, 0),
    PrefetchConfig("backward", 0, 1),
    PrefetchConfig("both", 1, 1),
)
_HAS_DEFAULT = (RECOMPUTATION, PREFETCH, MICRO_BATCH)


@dataclass(frozen=True, slots=True)
class Selection:
    """A value for each setting that `auto` can select."""

    strategy: str
    recomputation: Recomputation
    prefetch: PrefetchConfig
    micro_batch_size: int | None  # None: a rank's whole share of the step

    @staticmethod
    def of(config: Config) -> "Selection":
        """Return the values that a configuration has."""
        return Selection(
            config.strategy.name,
            Recomputation(
                config.activation_checkpointing.name, config.activation_checkpointing.blocks
            ),
            config.prefetch,
            config.train.micro_batch_size,
        )

    @staticmethod
    def default(config: Config) -> "Selection":
        """Return the defaults for a placed configuration; the strategy has none."""
        share = -(-config.train.global_batch_size // config.num_groups)
        return replace(Selection.of(Config()), strategy="", micro_batch_size=share)

    def settings(self, names: Sequence[str], usual: "Selection | None" = None) -> list[str]:
        """Return the settings of these names, without those that are `usual`."""
        values = {
            STRATEGY: self.strategy,
            RECOMPUTATION: self.recomputation.text,
            PREFETCH: self.prefetch.name,
            MICRO_BATCH: self.micro_batch_size,
        }
        same = [] if usual is None else usual.settings(names)
        words = (f"{name}={values[name]}" for name in names)
        return [word for word in words if word not in same]

    def text(self, names: Sequence[str]) -> str:
        return " ".join(self.settings(names))


def unset_names(config: Config) -> tuple[str, ...]:
    """Return the names of settings that are selected if their defaults do not fit.

    They are neither `auto` nor selected, and none of their keys is set.
    """
    keys = {name: [x for x in KEYS if x.startswith(f"{name}.")] for name in _HAS_DEFAULT}
    keys[MICRO_BATCH] = ["accumulation.steps"]  # which fixes it
    return tuple(
        name
        for name, inner in keys.items()
        if config.origin(name) is Origin.DEFAULT and not config.is_set(*inner)
    )


def with_fixed_defaults(config: C) -> C:
    """Return a configuration in which nothing is selected if defaults do not fit."""
    fixed = dict.fromkeys(unset_names(config), Origin.DERIVED)
    return replace(config, origins={**config.origins, **fixed})


def reselected_names(config: Config, kept: Config) -> tuple[str, ...]:
    """Return the names that a run selects again as it was kept: `auto`, or without defaults."""
    words = Selection.of(kept).settings(unset_names(config), Selection.default(kept))
    return (*auto_names(config), *(word.partition("=")[0] for word in words))


def with_auto(config: C, names: Collection[str]) -> C:
    """Return a configuration in which these settings are `auto`."""
    values = {name: None if name == MICRO_BATCH else AUTO for name in names}
    if RECOMPUTATION in names:
        values[BLOCKS] = None
    usual = replace(config, prefetch=PrefetchConfig()) if PREFETCH in names else config
    return usual.changed(values, Origin.AUTO)


def with_defaults(config: C, names: Collection[str]) -> C:
    """Return a configuration in which these settings have their defaults."""
    return with_selection(with_auto(config, names), Selection.of(Config()))


def auto_names(config: Config) -> tuple[str, ...]:
    """Return the names of the settings that are `auto`."""
    return tuple(name for name in (STRATEGY, *_HAS_DEFAULT) if config.is_auto(name))


def with_selection(config: C, selection: Selection) -> C:
    """Return `config` with the selected value for every setting that is `auto`, and only those."""
    names = auto_names(config)
    values: dict[str, Value] = {}
    if RECOMPUTATION in names:
        values = {
            RECOMPUTATION: selection.recomputation.name,
            BLOCKS: selection.recomputation.blocks,
        }
    if MICRO_BATCH in names:
        values[MICRO_BATCH] = selection.micro_batch_size
    config = config.changed(values, Origin.SELECTED)
    if STRATEGY in names:
        config = config.with_strategy(selection.strategy, Origin.SELECTED)
    if PREFETCH in names:
        config = replace(config, prefetch=selection.prefetch)
        config = config.changed({PREFETCH: selection.prefetch.name}, Origin.SELECTED)
    return config
