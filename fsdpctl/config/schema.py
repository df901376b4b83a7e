"""The typed shape of a run's configuration: a dataclass per section, a field per key.

Sections that are groups have a `name`: the choice, a file in conf/. None stands for `auto` until
a run resolves it.
"""

from dataclasses import dataclass, field

from fsdpctl.config.data import DataConfig
from fsdpctl.config.keeping import CheckpointConfig, LogConfig
from fsdpctl.config.keys import Key, key, keys_of
from fsdpctl.config.placement import ClusterConfig, EngineConfig, LaunchConfig
from fsdpctl.config.training import MOST_SAMPLES, TrainConfig
from fsdpctl.plan.owners import OWNER_MAPS
from fsdpctl.plan.strategy import STRATEGIES

DTYPES = ("float32", "bfloat16")
MOST_TOKENS = 1 << 24  # of a vocabulary; the largest published have a 64th of it
MOST_LAYERS, _MOST_WIDTH = 2000, 1 << 20  # twice the deepest, twenty times the widest published
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
ROPE_SCALINGS = ("none", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder: of the Llama family or GPT-2."""

    name: str = "llama_tiny"
    path: str | None = key(
        None,
        "hf: a Hugging Face directory, or a run or checkpoint of ours",
        is_path=True,
        optional=True,
    )
    init: str = key(
        "auto",
        "first weights; auto: those in model.path where it is given",
        choices=("auto", "pretrained", "random"),
    )
    architecture: str = key("llama", "whose layers they are", choices=ARCHITECTURES)
    num_layers: int = key(4, "decoder blocks", minimum=1, maximum=MOST_LAYERS)
    hidden_size: int = key(128, "width of the residual stream", minimum=1, maximum=_MOST_WIDTH)
    intermediate_size: int = key(384, "width inside the MLP", minimum=1, maximum=_MOST_WIDTH)
    num_heads: int = key(4, "query heads", minimum=1, maximum=_MOST_WIDTH)
    num_kv_heads: int = key(
        2, "key and value heads; divides num_heads", minimum=1, maximum=_MOST_WIDTH
    )
    head_dim: int | None = key(None, "width of a head", minimum=2, maximum=_MOST_WIDTH, auto=True)
    vocab_size: int | None = key(
        None, "rows of the embedding", minimum=1, maximum=MOST_TOKENS, auto=True
    )
    max_seq_len: int = key(2048, "longest sequence the exported model claims", minimum=1)
    norm_eps: float = key(1e-5, "added to the variance in norms", minimum=0)
    activation: str | None = key(
        None,
        "of the MLP; auto: silu, in gpt2 gelu_tanh",
        choices=("silu", "gelu", "gelu_tanh", "relu"),
        auto=True,
    )
    rope_theta: float = key(10000.0, "base of the rotary frequencies", minimum=1)
    rope_scaling: str = key(
        "none", "stretching of wavelengths: all, or only long ones", choices=ROPE_SCALINGS
    )
    rope_factor: float = key(8.0, "rope_scaling: how much longer", minimum=1)
    rope_low_freq_factor: float = key(1.0, "llama3 scaling: where it begins", minimum=0)
    rope_high_freq_factor: float = key(4.0, "llama3 scaling: where it is complete", minimum=0)
    rope_original_len: int = key(8192, "llama3 scaling: length trained on first", minimum=1)
    sliding_window: int | None = key(
        None, "mistral, qwen2, qwen3: tokens that a token sees", minimum=1, optional=True
    )
    first_sliding_layer: int = key(0, "the layers before it see all tokens", minimum=0)
    attention_bias: bool = key(False, "llama, qwen3: biases in the attention's projections")
    mlp_bias: bool = key(False, "llama: biases in the MLP")
    tie_embeddings: bool = key(True, "the output head shares the input embedding's weight")
    init_std: float = key(0.02, "standard deviation of the initial weights", minimum=0)

    @property
    def is_pretrained(self) -> bool:
        """Whether its first weights are read from `path`."""
        return self.init == "pretrained" or (self.init == "auto" and self.path is not None)


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
    """AdamW's numbers, and clipping."""

    name: str = "adamw"
    lr: float | None = key(
        None,
        "peak learning rate; auto: 3e-3 up to 1 M parameters, falling with their 4th root; "
        "a tenth for pretrained weights",
        minimum=0,
        auto=True,
    )
    beta1: float = key(0.9, "decay of the first moment", minimum=0, maximum=0.999999)
    beta2: float = key(0.95, "decay of the second moment", minimum=0, maximum=0.999999)
    eps: float = key(1e-8, "added to the denominator", minimum=0)
    weight_decay: float = key(0.1, "decoupled decay of matrices", minimum=0)
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
}
GROUPS = tuple(name for name, schema in SECTIONS.items() if hasattr(schema, "name"))
KEYS: dict[str, Key] = {
    name: each
    for section, schema in SECTIONS.items()
    for name, each in keys_of(section, schema).items()
}
LENGTHS = ("train.steps", "train.epochs", "train.tokens")
