"""What a configuration leaves to be chosen: strategy, recomputation, micro-batch, prefetch.

Each of these is `auto` until it is chosen. The size of a micro-batch that is not set is none of
them: it is all of a rank's share, and was before there was a choice.
"""

from dataclasses import replace

from fsdpctl.config.keys import AUTO, CHOSEN
from fsdpctl.config.schema import (
    ActivationCheckpointingConfig,
    Config,
    PrefetchConfig,
    StrategyConfig,
)
from fsdpctl.errors import UsageError

STRATEGY, RECOMPUTATION, PREFETCH = "strategy", "activation_checkpointing", "prefetch"
MICRO_BATCH = "train.micro_batch_size"
RECOMPUTATIONS = ("none", "selective", "full")  # from the least to the most
PREFETCHES = (
    PrefetchConfig("none", 0, 0),
    PrefetchConfig("backward", 0, 1),
    PrefetchConfig("both", 1, 1),
)


def left_open(config: Config) -> tuple[str, ...]:
    """The names of what is to be chosen.

    Raises:
        UsageError: something that would be chosen is given too.
    """
    prefetch, usual = config.prefetch, PrefetchConfig()
    if prefetch.name == AUTO:
        for name in ("forward", "backward"):
            if (given := getattr(prefetch, name)) != getattr(usual, name):
                raise UsageError(
                    f"prefetch.{name}={given}: prefetch=auto chooses it; leave one of them out"
                )
    groups = (STRATEGY, RECOMPUTATION, PREFETCH)
    names = [name for name in groups if getattr(config, name).name == AUTO]
    return (*names, *([MICRO_BATCH] if config.train.micro_batch_size == CHOSEN else []))


def stood_in(config: Config) -> Config:
    """With something in the place of what is to be chosen, for all that does not depend on it."""
    strategy = StrategyConfig("no_shard" if config.engine.name == "ddp" else "full_shard")
    return with_choice(config, replace(Config(), strategy=strategy), left_open(config))


def with_choice(config: Config, chosen: Config, names: tuple[str, ...]) -> Config:
    """`config` with what `chosen` has under `names`; what else it says of strategies stays."""
    if STRATEGY in names:
        config = replace(config, strategy=config.strategy.under(chosen.strategy.name))
    if RECOMPUTATION in names:
        mode = chosen.activation_checkpointing.name
        config = replace(config, activation_checkpointing=ActivationCheckpointingConfig(mode))
    if PREFETCH in names:
        config = replace(config, prefetch=chosen.prefetch)
    if MICRO_BATCH in names:
        size = chosen.train.micro_batch_size
        config = replace(config, train=replace(config.train, micro_batch_size=size))
    return config


def asked_again(config: Config, asked: Config) -> Config:
    """A resolved configuration with all that depends on a choice as it is in `asked`."""
    train = replace(
        config.train,
        micro_batch_size=asked.train.micro_batch_size,
        loss_chunk_tokens=asked.train.loss_chunk_tokens,
    )
    return replace(
        config,
        strategy=asked.strategy,
        activation_checkpointing=asked.activation_checkpointing,
        prefetch=asked.prefetch,
        accumulation=asked.accumulation,
        train=train,
    )


def words_of(config: Config, names: tuple[str, ...]) -> str:
    """What was chosen, as it is typed."""
    words = {
        STRATEGY: config.strategy.name,
        RECOMPUTATION: config.activation_checkpointing.name,
        PREFETCH: config.prefetch.name,
        MICRO_BATCH: config.train.micro_batch_size,
    }
    return " ".join(f"{name}={words[name]}" for name in names)
