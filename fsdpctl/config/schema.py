"""The typed configuration of a run: a dataclass per section, a field per key.

A section that is a group has a `name`: the selected option, which is a file in conf/. None means
`auto` until `resolve` computes the value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from operator import attrgetter
from typing import Any, NewType, Self, TypeVar

from fsdpctl.config.clusters import ClusterConfig
from fsdpctl.config.data import DataConfig
from fsdpctl.config.decoder_config import SIZE_NAMES, with_sizes
from fsdpctl.config.keys import AUTO, Key, auto_key, key, keys_of, optional_key
from fsdpctl.config.launch import EngineConfig, LaunchConfig
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.training import MAX_SAMPLES, CheckpointConfig, LogConfig, TrainConfig
from fsdpctl.plan.optimizers import MATRICES, NS_STEPS, STATE_DTYPES
from fsdpctl.plan.owner_map import OWNER_MAPS
from fsdpctl.plan.precision import SPLIT, TF32, Precision
from fsdpctl.plan.recomputation import (
    LEVELS,
    OFFLOAD,
    BlockCheckpointing,
    block_checkpointing,
    normalize_blocks,
    parse_counts,
)
from fsdpctl.plan.step_plan import Prefetch
from fsdpctl.plan.strategy import STRATEGIES, Offload

DTYPES = ("float32", "bfloat16")


class Origin(Enum):
    """The source of a value."""

    DEFAULT = "default"
    OPTION = "option"  # the file of the selected option of a group
    RECIPE = "recipe"
    TYPED = "typed"  # the command line
    AUTO = "auto"  # `auto`: computed from other values, or to be selected by an estimate
    SELECTED = "selected"  # selected by an estimate
    DERIVED = "derived"  # the files of the model or the data


@dataclass(frozen=True, slots=True)
class StrategyConfig:
    """The sharding strategy, and where model states are stored."""

    name: str = "full_shard"
    dp_shard_size: int | None = auto_key(
        "hybrid_*: ranks per replica; auto: the ranks of a node", minimum=1
    )
    owner_map: str | None = auto_key(
        "shard_optimizer: how optimizer states are assigned to ranks; auto: matrices with "
        "optimizer=muon, else even",
        choices=(*OWNER_MAPS, MATRICES),
    )
    offload: str = key(
        "none",
        "model states in host memory; states: master weights and moments, and the optimizer step; "
        "gradients: reduced gradients, only with states; params: frozen parameters (with states: "
        "all), from which units are gathered",
        choices=("none", "states", "gradients", "params", "all"),
        normalize=lambda text: str(Offload.parse(text)),
        is_list=True,
    )

    @property
    def offloaded(self) -> Offload:
        return Offload.parse(self.offload)

    def with_name(self, name: str) -> "StrategyConfig":
        """Return the section for another strategy, without keys that the strategy doesn't use."""
        if name not in STRATEGIES:  # auto
            return replace(self, name=name)
        new, old = STRATEGIES[name], STRATEGIES.get(self.name)
        size = self.dp_shard_size if new.replicates else None
        # A strategy that has no owner map computes "even", which the user did not choose.
        is_unused = self.owner_map == "even" and old is not None and not old.has_owner_map
        owner_map = self.owner_map if new.has_owner_map and not is_unused else None
        offload = self.offloaded if new.can_offload_params else self.offloaded & ~Offload.PARAMS
        return StrategyConfig(name, size, owner_map, str(offload))


@dataclass(frozen=True, slots=True)
class PrefetchConfig:
    """The number of units that are all-gathered ahead of the running unit."""

    name: str = "both"
    forward: int = key(1, "units to all-gather ahead in forward", minimum=0)
    backward: int = key(1, "units to all-gather ahead in backward", minimum=0)

    @property
    def planned(self) -> Prefetch:
        return Prefetch(self.forward, self.backward)


@dataclass(frozen=True, slots=True)
class AccumulationConfig:
    """Gradient accumulation: reduction after every micro-batch, or after the last of a step."""

    name: str = "every"
    steps: int | None = auto_key(
        "micro-batches per step; auto: computed from the batch sizes", within=(1, MAX_SAMPLES)
    )


@dataclass(frozen=True, slots=True)
class PrecisionConfig:
    """Dtypes of compute, reduction and master weights."""

    name: str = "auto"
    param_dtype: str | None = auto_key("dtype of computation and all-gathers", choices=DTYPES)
    reduce_dtype: str | None = auto_key("dtype of gradient reduction", choices=DTYPES)
    master_dtype: str | None = auto_key(
        "dtype of master weights; bfloat16+int8: 24-bit, gathered as bf16", choices=(*DTYPES, SPLIT)
    )

    @property
    def planned(self) -> Precision:
        dtypes = (self.param_dtype, self.reduce_dtype, self.master_dtype)
        param, reduce, master = (dtype or "float32" for dtype in dtypes)
        master_dtype = master.removesuffix("+int8")
        return Precision(param, reduce, master_dtype, has_remainders=master == SPLIT)


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """The optimizer and gradient clipping."""

    name: str = "adamw"
    lr: float | None = auto_key(
        "peak learning rate; auto: 3e-3 / max(1, parameters in M)^(1/4), a tenth of that for "
        "pretrained weights; required for sgd",
        minimum=0,
    )
    beta1: float = key(0.9, "adamw, muon: decay rate of the first moment", within=(0, 0.999999))
    beta2: float = key(0.95, "adamw, muon: decay rate of the second moment", within=(0, 0.999999))
    eps: float = key(1e-8, "adamw, muon: epsilon, added to the denominator", minimum=0)
    momentum: float = key(0.9, "sgd, muon: momentum (muon: 0.95); 0: none", within=(0, 0.999999))
    nesterov: bool = key(True, "muon: Nesterov momentum")
    ns_steps: int = key(NS_STEPS, "muon: Newton-Schulz steps per update", within=(1, 99))
    weight_decay: float = key(
        0.1,
        "weight decay of matrices; decoupled in adamw and muon, part of the gradient in sgd",
        minimum=0,
    )
    state_dtype: str | None = auto_key(
        "adamw: dtype of the moments of matrices of at least 4096 elements; other moments are "
        "float32; int8: in blocks of 64; auto: the dtype of the master weights",
        choices=STATE_DTYPES,
    )
    max_grad_norm: float = key(1.0, "gradient norm to clip to; 0: no clipping", minimum=0)


@dataclass(frozen=True, slots=True)
class LrSchedulerConfig:
    """The learning rate schedule."""

    name: str = "cosine"
    warmup_steps: int | None = auto_key(
        "steps of linear warmup; auto: 50, or a tenth of all steps if that is less; "
        "with lr_scheduler.warmup_ratio: a maximum",
        minimum=0,
    )
    warmup_ratio: float | None = optional_key(
        "warmup as a fraction of steps, rounded up, or down if warmup_steps is set", within=(0, 1)
    )
    start_lr_ratio: float | None = auto_key(
        "first warmup rate, as a fraction of the peak; auto: 1 / (warmup steps + 1)", within=(0, 1)
    )
    min_lr_ratio: float = key(0.1, "final learning rate, as a fraction of the peak", within=(0, 1))
    reaches_min: bool = key(True, "the last step reaches the final rate; false: the step after it")
    decay_ratio: float = key(0.2, "wsd: fraction of the steps that decay", within=(0, 1))
    decay_type: str = key("linear", "wsd: form of decay", choices=("linear", "cosine", "1-sqrt"))


@dataclass(frozen=True, slots=True)
class ActivationCheckpointingConfig:
    """The activations that are recomputed in backward."""

    name: str = "none"
    offload: bool = key(False, "inputs of recomputed blocks in host memory until backward")
    blocks: str | None = optional_key(
        "counts of the first blocks, which are recomputed more than the other blocks, such as "
        "full:20,selective:8; offload: full, with the inputs of blocks in host memory",
        choices=LEVELS[1:],
        normalize=normalize_blocks,
        is_list=True,
    )

    @property
    def is_on(self) -> bool:
        """Whether some blocks are recomputed."""
        return self.name != "none" or self.blocks is not None

    @property
    def offloads_inputs(self) -> bool:
        return self.offload or OFFLOAD in (self.blocks or "")

    @property
    def title(self) -> str:
        """The modes of all blocks, as text."""
        counts = parse_counts(self.blocks) if self.blocks else []
        first = [f"{mode} in {count} block{'s' * (count > 1)}, " for mode, count in counts]
        rest = f"{self.name}{', inputs in host memory' * self.offload}"
        return f"{''.join(first)}{rest} in the others" if first else rest

    def per_block(self, num_blocks: int) -> tuple[BlockCheckpointing, ...]:
        """Return the checkpointing of each block; UsageError if `blocks` counts more blocks."""
        return block_checkpointing(self.name, self.blocks, num_blocks, offload=self.offload)


@dataclass(frozen=True, slots=True)
class Config:
    """The complete configuration of a run."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    strategy: StrategyConfig = StrategyConfig()
    prefetch: PrefetchConfig = PrefetchConfig()
    accumulation: AccumulationConfig = AccumulationConfig()
    precision: PrecisionConfig = PrecisionConfig()
    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_scheduler: LrSchedulerConfig = LrSchedulerConfig()
    engine: EngineConfig = EngineConfig()
    launch: LaunchConfig = LaunchConfig()
    cluster: ClusterConfig = ClusterConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    # The origin of each key and group; Origin.DEFAULT is left out.
    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_ranks(self) -> int:
        assert self.launch.nproc_per_node is not None
        return self.launch.nproc_per_node * self.launch.nnodes

    @property
    def data_parallel_size(self) -> int:
        """The number of context-parallel groups, each with its own samples; needs known ranks."""
        return self.num_ranks // self.train.context_parallel

    @property
    def samples_per_group(self) -> int:
        """The share of a step of each context-parallel group."""
        return -(-self.train.global_batch_size // self.data_parallel_size)

    @property
    def uses_tf32(self) -> bool:
        """Whether ranks round the operands of float32 matrix products to TF32."""
        return self.precision.name == TF32 and self.launch.device != "cpu"

    @property
    def compares_losses(self) -> bool:
        """Whether validation losses decide which checkpoint is kept, or when the run ends."""
        return self.checkpoint.keep_best or self.train.patience is not None

    def value(self, key: str) -> Any:
        """Return the value of a key, or the selected option of a group."""
        return attrgetter(key if "." in key else f"{key}.name")(self)

    def origin(self, key: str) -> Origin:
        """Return the origin of a key or group. It stays AUTO after the value is computed."""
        is_auto = key in GROUPS and self.value(key) == AUTO
        return Origin.AUTO if is_auto else self.origins.get(key, Origin.DEFAULT)

    def is_auto(self, key: str) -> bool:
        """Return whether the value is computed from other values, or selected."""
        return self.origin(key) is Origin.AUTO

    def is_set(self, *keys: str) -> bool:
        """Return whether the command line or the recipe sets one of the keys."""
        return any(self.origins.get(key) in (Origin.TYPED, Origin.RECIPE) for key in keys)

    def is_typed(self, key: str) -> bool:
        """Return whether the command line sets a key.

        Unlike `is_set`, it is false for recipes, which may be a run's config.yaml with every key.
        """
        return self.origins.get(key) is Origin.TYPED

    def changed(self, values: Mapping[str, Any], origin: Origin | None = None) -> Self:
        """Return the configuration with other values by key, and their origin if it's not None."""
        origins = {} if origin is None else dict.fromkeys(values, origin)
        config = replace(self, origins={**self.origins, **origins}) if origins else self
        for name, value in values.items():
            section, _, key = name.partition(".")
            if section == "model" and key in SIZE_NAMES:  # config.json must change too
                config = replace(config, model=with_sizes(config.model, **{key: value}))
            else:
                config = _set(config, [section, *(key or "name").split(".")], value)
        return config

    def with_strategy(self, strategy: str, origin: Origin | None = None) -> Self:
        """Return the configuration with another strategy, without keys that it doesn't use."""
        config = replace(self, strategy=self.strategy.with_name(strategy))
        return config if origin is None else config.changed({"strategy": strategy}, origin)


def _set(node: Any, path: list[str], value: Any) -> Any:
    first, *rest = path
    return replace(node, **{first: _set(getattr(node, first), rest, value) if rest else value})


# Stages of a configuration; mypy keeps them apart. `replace` and `changed` keep the stage.
WithRanks = NewType("WithRanks", Config)  # device, ranks and dtypes are known
Filled = NewType("Filled", WithRanks)  # values that follow from the data and the model are known
Resolved = NewType("Resolved", Filled)  # checked for a number of ranks, without `auto`
ConfigT = TypeVar("ConfigT", bound=Config)  # for functions that return the stage they receive
SECTIONS: dict[str, type] = {
    each.name: type(getattr(Config(), each.name)) for each in fields(Config) if each.compare
}
# The section of a group has the field `name`: the selected option.
GROUPS = tuple(section for section, schema in SECTIONS.items() if hasattr(schema, "name"))
KEYS: dict[str, Key] = {}
for _section, _schema in SECTIONS.items():
    KEYS |= keys_of(_section, _schema)
LENGTH_KEYS = ("train.steps", "train.epochs", "train.tokens")
BATCH_SIZE = "train.global_batch_size"
BATCH_KEYS = (BATCH_SIZE, "train.global_batch_tokens")
