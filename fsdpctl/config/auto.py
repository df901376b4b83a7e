"""The settings that `auto` selects: strategy, activation checkpointing, prefetch, micro-batch.

Each of these is `auto` until it is selected. A `train.micro_batch_size` that is not set is not
`auto`: it is a rank's whole share of the step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from fsdpctl.config.keys import AUTO, CHOSEN
from fsdpctl.config.schema import KEYS, Config, PrefetchConfig
from fsdpctl.errors import UsageError, nearest

STRATEGY, RECOMPUTATION, PREFETCH = "strategy", "activation_checkpointing", "prefetch"
MICRO_BATCH = "train.micro_batch_size"
RECOMPUTATIONS = ("none", "selective", "full")  # from the least to the most
PREFETCHES = (
    PrefetchConfig("none", 0, 0),
    PrefetchConfig("backward", 0, 1),
    PrefetchConfig("both", 1, 1),
)
# What `auto.may_use` allows: a key, and its values from the cheapest to the one that saves most.
MAY_USE = {
    "state_dtype": ("optimizer.state_dtype", ("int8",)),
    "offload": ("optimizer.offload", ("states", "all")),
    "offload_params": ("strategy.offload_params", ("true",)),
    "activation_offload": ("activation_checkpointing.offload", ("true",)),
    "base_dtype": ("model.base_dtype", ("nf4",)),
}
Pairs = tuple[tuple[str, str], ...]  # keys and values


@dataclass(frozen=True, slots=True)
class Selection:
    """A value for each setting that `auto` can select."""

    strategy: str
    activation_checkpointing: str
    prefetch: PrefetchConfig
    micro_batch_size: int | None  # None: a rank's whole share of the step
    extras: Pairs = ()  # of those that `auto.may_use` allows

    @staticmethod
    def of(config: Config) -> "Selection":
        """Return the values that a configuration has."""
        return Selection(
            config.strategy.name,
            config.activation_checkpointing.name,
            config.prefetch,
            config.train.micro_batch_size,
            tuple((name, _text(config, name)) for name in _allowed(config) if is_set(config, name)),
        )

    def text(self, names: Sequence[str]) -> str:
        """Return the settings called `names` as KEY=VALUE, separated by spaces."""
        values = {
            STRATEGY: self.strategy,
            RECOMPUTATION: self.activation_checkpointing,
            PREFETCH: self.prefetch.name,
            MICRO_BATCH: self.micro_batch_size,
        }
        settings = [(name, values[name]) for name in names]
        return " ".join(f"{name}={value}" for name, value in (*settings, *self.extras))


def left_open(config: Config) -> tuple[str, ...]:
    """Return the names of the settings that are `auto`.

    Raises:
        UsageError: If a setting that `auto` would select has a value too.
    """
    _allowed(config)
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


def filled(config: Config, selection: Selection) -> Config:
    """Return `config` with the selected value for every setting that is `auto`, and only those."""
    names = left_open(config)
    if STRATEGY in names:
        config = replace(config, strategy=config.strategy.under(selection.strategy))
    if RECOMPUTATION in names:
        mode = replace(config.activation_checkpointing, name=selection.activation_checkpointing)
        config = replace(config, activation_checkpointing=mode)
    if PREFETCH in names:
        config = replace(config, prefetch=selection.prefetch)
    if MICRO_BATCH in names:
        train = replace(config.train, micro_batch_size=selection.micro_batch_size)
        config = replace(config, train=train)
    return with_extras(config, selection.extras)


def extras_of(config: Config) -> Iterator[Pairs]:
    """Yield the changes that `auto.may_use` allows, the fewest first: none at first.

    Keys that have a value keep it, and `model.base_dtype` needs adapters.
    """
    names = [name for name in _allowed(config) if not is_set(config, name)]
    if config.model.lora.rank is None:
        names = [name for name in names if name != "model.base_dtype"]
    values = {name: of for name, of in MAY_USE.values() if name in names}
    chosen = [
        tuple((name, value) for name, value in zip(values, each, strict=True) if value is not None)
        for each in product(*((None, *of) for of in values.values()))
    ]
    yield from sorted(chosen, key=len)


def with_extras(config: Config, extras: Pairs) -> Config:
    """Return `config` with the values of `extras`."""
    for name, text in extras:
        section, last = name.split(".")
        part = replace(getattr(config, section), **{last: KEYS[name].parse(text)})
        config = replace(config, **{section: part})
    return config


def _allowed(config: Config) -> list[str]:
    """Return the keys that `auto.may_use` names.

    Raises:
        UsageError: If it names something else.
    """
    words = [word.strip() for word in (config.auto.may_use or "").split(",") if word.strip()]
    for word in words:
        if word not in MAY_USE:
            raise UsageError(
                f"auto.may_use={config.auto.may_use}: expected {', '.join(MAY_USE)}, separated by "
                f"commas, got {word}{nearest(word, MAY_USE)}"
            )
    return [name for word, (name, _) in MAY_USE.items() if word in words]


def is_set(config: Config, name: str) -> bool:
    """Return whether a key has another value than its default."""
    section, last = name.split(".")
    return bool(getattr(getattr(config, section), last) != KEYS[name].default)


def _text(config: Config, name: str) -> str:
    section, last = name.split(".")
    return KEYS[name].text(getattr(getattr(config, section), last))
