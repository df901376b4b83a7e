"""The typed shape of a run's configuration: a dataclass per section, a field per key.

Sections that are groups have a `name`: the choice, a file in conf/. None stands for `auto` until
a run resolves it.
"""

from dataclasses import dataclass, field, replace

from fsdpctl.config.data import DataConfig
from fsdpctl.config.keeping import CheckpointConfig, LogConfig
from fsdpctl.config.keys import Key, key, keys_of
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.placement import ClusterConfig, EngineConfig, LaunchConfig
from fsdpctl.config.training import MOST_SAMPLES, TrainConfig
from fsdpctl.plan.owners import OWNER_MAPS
from fsdpctl.plan.strategy import STRATEGIES

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class StrategyConfig:
    """Which model states are sharded."""

    name: str = "full_shard"
    dp_shard_size: int | None = key(
        None, "hybrid_*: ranks that share one copy; auto: the ranks of a node", minimum=1, auto=True
    )
    owner_map: str = key(
        "even", "shard_optimizer: who keeps which optimizer states", choices=OWNER_MAPS
    )

    def under(self, name: str) -> "StrategyConfig":
        """The same for the strategy `name`, without what that has no use for."""
        if name not in STRATEGIES:  # one that is to be chosen
            return replace(self, name=name)
        row = STRATEGIES[name]
        size = self.dp_shard_size if row.replicates else None
        return StrategyConfig(name, size, self.owner_map if row.has_owner_map else "even")


@dataclass(frozen=True, slots=True)
class PrefetchConfig:
    """How many units' parameters are all-gathered ahead of the running one."""

    name: str = "both"
    forward: int = key(1, "units ahead in forward", minimum=0)
    backward: int = key(1, "units ahead in backward", minimum=0)


@dataclass(frozen=True, slots=True)
class AccumulationConfig:
    """When gradients of several micro-batches are reduced: after every, or after the last."""

    name: str = "every"
    steps: int | None = key(
        None,
        "micro-batches of a step; auto: from the batch sizes",
        minimum=1,
        maximum=MOST_SAMPLES,
        auto=True,
    )


@dataclass(frozen=True, slots=True)
class PrecisionConfig:
    """Dtypes of compute, reduction and master weights."""

    name: str = "auto"
    param_dtype: str | None = key(None, "of compute and gathers", choices=DTYPES, auto=True)
    reduce_dtype: str | None = key(None, "of gradient reduction", choices=DTYPES, auto=True)
    master_dtype: str | None = key(None, "of what the optimizer updates", choices=DTYPES, auto=True)
    # Auto: over gloo param_dtype where that is narrower, over NCCL reduce_dtype.
    wire_dtype: str | None = key(None, "of gradients between ranks", choices=DTYPES, auto=True)

    @property
    def dtypes(self) -> tuple[str | None, ...]:
        """All of them, in the order above."""
        return self.param_dtype, self.reduce_dtype, self.master_dtype, self.wire_dtype


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """Which one, its numbers, and clipping."""

    name: str = "adamw"
    lr: float | None = key(
        None,
        "peak learning rate; auto: 3e-3 up to 1 M parameters, falling with their 4th root; "
        "a tenth for pretrained weights; sgd has none",
        minimum=0,
        auto=True,
    )
    beta1: float = key(0.9, "adamw: decay of the first moment", minimum=0, maximum=0.999999)
    beta2: float = key(0.95, "adamw: decay of the second moment", minimum=0, maximum=0.999999)
    eps: float = key(1e-8, "adamw: added to the denominator", minimum=0)
    momentum: float = key(
        0.9,
        "sgd: share of the last update in the next; 0: none",
        minimum=0,
        maximum=0.999999,
        is_later=True,
    )
    weight_decay: float = key(
        0.1, "of matrices: decoupled, with sgd added to the gradient", minimum=0
    )
    max_grad_norm: float = key(1.0, "gradients are scaled down to it; 0: never", minimum=0)


@dataclass(frozen=True, slots=True)
class LrSchedulerConfig:
    """The learning rate over the steps."""

    name: str = "cosine"
    warmup_steps: int = key(50, "steps of linear rise from 0", minimum=0)
    warmup_ratio: float | None = key(
        None, "the same as a share of all steps", minimum=0, maximum=1, optional=True
    )
    min_lr_ratio: float = key(0.1, "final over peak learning rate", minimum=0, maximum=1)
    decay_ratio: float = key(0.2, "wsd: share of the steps that decay", minimum=0, maximum=1)


@dataclass(frozen=True, slots=True)
class ActivationCheckpointingConfig:
    """Which activations are computed again in backward instead of kept."""

    name: str = "none"


@dataclass(frozen=True, slots=True)
class AutoConfig:
    """How `auto` is chosen where it says what fits and is fastest."""

    probe: bool = key(
        True,
        "before a new run on this machine, the three that are foreseen fastest run some steps",
        is_later=True,
    )


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that a run is told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    accumulation: AccumulationConfig = field(default_factory=AccumulationConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    activation_checkpointing: ActivationCheckpointingConfig = field(
        default_factory=ActivationCheckpointingConfig
    )
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LrSchedulerConfig = field(default_factory=LrSchedulerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    auto: AutoConfig = field(default_factory=AutoConfig)


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "strategy": StrategyConfig,
    "prefetch": PrefetchConfig,
    "accumulation": AccumulationConfig,
    "precision": PrecisionConfig,
    "activation_checkpointing": ActivationCheckpointingConfig,
    "optimizer": OptimizerConfig,
    "lr_scheduler": LrSchedulerConfig,
    "engine": EngineConfig,
    "launch": LaunchConfig,
    "cluster": ClusterConfig,
    "train": TrainConfig,
    "checkpoint": CheckpointConfig,
    "log": LogConfig,
    "auto": AutoConfig,
}
GROUPS = tuple(name for name, schema in SECTIONS.items() if hasattr(schema, "name"))
KEYS: dict[str, Key] = {
    name: each
    for section, schema in SECTIONS.items()
    for name, each in keys_of(section, schema).items()
}
LENGTHS = ("train.steps", "train.epochs", "train.tokens")
SIZES = ("train.global_batch_size", "train.global_batch_tokens")
