"""The settings that estimates can select: strategy, recomputation, prefetch and micro-batch.

A setting is selected if its value is `auto`. A setting that is not set has its default if the
defaults fit into memory; else it is selected too, except for the strategy. The default of
`train.micro_batch_size` is a rank's whole share of a step.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from fsdpctl.config.keys import AUTO, Value
from fsdpctl.config.schema import KEYS, Config, ConfigT, Origin, PrefetchConfig
from fsdpctl.plan.recomputation import BLOCKS, Recomputation

STRATEGY, RECOMPUTATION, PREFETCH = "strategy", "activation_checkpointing", "prefetch"
MICRO_BATCH = "train.micro_batch_size"
PREFETCHES = (
    PrefetchConfig("none", 0, 0), PrefetchConfig("backward", 0, 1), PrefetchConfig("both", 1, 1),
)  # fmt: skip
_SELECTED_IF_FULL = (RECOMPUTATION, PREFETCH, MICRO_BATCH)  # if defaults exceed the memory


@dataclass(frozen=True, slots=True)
class Selection:
    """A value for each setting that estimates can select."""

    strategy: str
    recomputation: Recomputation
    prefetch: PrefetchConfig
    micro_batch_size: int | None  # None: a rank's whole share of the step

    @staticmethod
    def of(config: Config) -> "Selection":
        """Return the values of a configuration."""
        mode = config.activation_checkpointing
        recomputation = Recomputation(mode.name, mode.blocks)
        size = config.train.micro_batch_size
        return Selection(config.strategy.name, recomputation, config.prefetch, size)

    @staticmethod
    def default(config: Config) -> "Selection":
        """Return the defaults of a configuration with ranks; `strategy` is empty."""
        size = config.samples_per_group
        return replace(Selection.of(Config()), strategy="", micro_batch_size=size)

    def settings(self, names: Sequence[str], default: "Selection | None" = None) -> list[str]:
        """Return the settings of `names`, except for values that `default` has too."""
        values = {
            STRATEGY: self.strategy, RECOMPUTATION: self.recomputation.text,
            PREFETCH: self.prefetch.name, MICRO_BATCH: self.micro_batch_size,
        }  # fmt: skip
        same = [] if default is None else default.settings(names)
        texts = (f"{name}={values[name]}" for name in names)
        return [text for text in texts if text not in same]

    def text(self, names: Sequence[str]) -> str:
        return " ".join(self.settings(names))


def unset_names(config: Config) -> tuple[str, ...]:
    """Return the names of settings that are selected if their defaults do not fit into memory.

    These settings have their defaults, and none of their keys is set.
    """
    keys = {name: [x for x in KEYS if x.startswith(f"{name}.")] for name in _SELECTED_IF_FULL}
    keys[MICRO_BATCH] = ["accumulation.steps"]  # determines the micro-batch
    defaults = (name for name in keys if config.origin(name) is Origin.DEFAULT)
    return tuple(name for name in defaults if not config.is_set(*keys[name]))


def with_fixed_defaults(config: ConfigT) -> ConfigT:
    """Return a configuration that keeps its defaults even if they do not fit into memory."""
    fixed = dict.fromkeys(unset_names(config), Origin.DERIVED)  # any origin but DEFAULT
    return replace(config, origins={**config.origins, **fixed})


def restored_names(config: Config, stored: Config) -> tuple[str, ...]:
    """Return the names of settings that a resumed run takes from its `stored` selection."""
    settings = Selection.of(stored).settings(unset_names(config), Selection.default(stored))
    return (*auto_names(config), *(text.partition("=")[0] for text in settings))


def with_auto(config: ConfigT, names: Collection[str]) -> ConfigT:
    """Return a configuration in which the settings of `names` are `auto`."""
    values = {name: None if name == MICRO_BATCH else AUTO for name in names}
    if RECOMPUTATION in names:
        values[BLOCKS] = None
    config = replace(config, prefetch=PrefetchConfig()) if PREFETCH in names else config
    return config.changed(values, Origin.AUTO)


def with_defaults(config: ConfigT, names: Collection[str]) -> ConfigT:
    """Return a configuration in which the settings of `names` have their defaults."""
    # Unlike `Selection.default`, this needs no ranks: without a micro-batch, the share is whole.
    return with_selection(with_auto(config, names), Selection.of(Config()))


def auto_names(config: Config) -> tuple[str, ...]:
    """Return the names of the settings that are `auto`."""
    return tuple(name for name in (STRATEGY, *_SELECTED_IF_FULL) if config.is_auto(name))


def with_selection(config: ConfigT, selection: Selection) -> ConfigT:
    """Return a configuration with the selected value of each setting that is `auto`."""
    names = auto_names(config)
    mode = selection.recomputation
    values: dict[str, Value] = {}
    if RECOMPUTATION in names:
        values = {RECOMPUTATION: mode.name, BLOCKS: mode.blocks}
    if MICRO_BATCH in names:
        values[MICRO_BATCH] = selection.micro_batch_size
    config = config.changed(values, Origin.SELECTED)
    if STRATEGY in names:
        config = config.with_strategy(selection.strategy, Origin.SELECTED)
    if PREFETCH in names:
        config = replace(config, prefetch=selection.prefetch)
        config = config.changed({PREFETCH: selection.prefetch.name}, Origin.SELECTED)
    return config
