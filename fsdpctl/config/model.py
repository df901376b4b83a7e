"""The section `model`: architecture, source of the weights, and trained parameters."""

import math
from dataclasses import dataclass, field

from fsdpctl.config.keys import key
from fsdpctl.plan.attention_kernels import KERNELS, THEIRS

MOST_TOKENS = 1 << 24  # of a vocabulary; 64 times the largest published
MOST_LAYERS, MOST_WIDTH = 2000, 1 << 20  # twice the deepest, 20 times the widest published
ARCHITECTURES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gpt2",
    "transformers",
)
TRANSFORMERS, OWN = (
    "transformers",
    "own",
)  # values of model.module; the first is an architecture too
ROPE_SCALINGS = ("none", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Low-rank adapters of linear layers (Hu et al., LoRA, 2021); all other weights are frozen."""

    rank: int | None = key(
        None, "rank of LoRA adapters; all other weights are frozen", minimum=1, maximum=MOST_WIDTH,
        optional=True,
    )  # fmt: skip
    alpha: float | None = key(
        None,
        "LoRA alpha: adapters are scaled by alpha / rank; auto: twice the rank",
        minimum=0,
        auto=True,
    )
    rslora: bool = key(False, "scale LoRA adapters by alpha / sqrt(rank) instead of alpha / rank")
    dropout: float = key(0.0, "dropout of the inputs of LoRA adapters", minimum=0, maximum=0.99)
    targets: str = key(
        "all_linear",
        "layers with LoRA adapters: all_linear (except the output head), a list of names or their "
        "ends such as q_proj,v_proj, or a regular expression that is searched in the names",
        is_names=True,
    )
    path: str | None = key(
        None, "PEFT directory with the initial adapters", is_path=True, optional=True
    )

    @property
    def scale(self) -> float:
        """The factor of an adapter's output."""
        rank = self.rank or 1
        alpha = 2.0 * rank if self.alpha is None else self.alpha
        return alpha / (math.sqrt(rank) if self.rslora else rank)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family, or any one of transformers."""

    name: str = "llama_tiny"
    path: str | None = key(
        None,
        "hf: Hugging Face directory, name in its cache, or run or checkpoint of fsdpctl",
        is_path=True,
        optional=True,
    )
    init: str = key(
        "auto",
        "initial weights; auto: those in model.path if it is set, else random",
        choices=("auto", "pretrained", "random"),
    )
    module: str = key(
        "auto",
        "hf: whose code computes the model; auto: fsdpctl's own decoder if it computes exactly "
        "what config.json says, else that of transformers",
        choices=("auto", OWN, TRANSFORMERS),
    )
    config_json: str | None = key(None, "transformers: contents of config.json", optional=True)
    router_aux_loss: str = key(
        "model",
        "transformers: auxiliary loss of routers; model: if config.json has output_router_logits; "
        "global: with token counts of all ranks",
        choices=("model", "global", "none"),
    )
    architecture: str = key(
        "llama", "architecture; gpt2, transformers: code of transformers", choices=ARCHITECTURES
    )
    num_layers: int = key(4, "number of decoder blocks", minimum=1, maximum=MOST_LAYERS)
    hidden_size: int = key(128, "width of the residual stream", minimum=1, maximum=MOST_WIDTH)
    intermediate_size: int = key(384, "width inside the MLP", minimum=1, maximum=MOST_WIDTH)
    num_heads: int = key(4, "number of query heads", minimum=1, maximum=MOST_WIDTH)
    num_kv_heads: int = key(
        2, "number of key and value heads; divides num_heads", minimum=1, maximum=MOST_WIDTH
    )
    head_dim: int | None = key(
        None,
        "width of a head; auto: hidden_size / num_heads",
        minimum=2,
        maximum=MOST_WIDTH,
        auto=True,
    )
    vocab_size: int | None = key(
        None,
        "size of the vocabulary; auto: that of the tokenizer",
        minimum=1,
        maximum=MOST_TOKENS,
        auto=True,
    )
    max_seq_len: int = key(2048, "longest sequence that the exported model declares", minimum=1)
    norm_eps: float = key(1e-5, "epsilon of the norms, added to the variance", minimum=0)
    activation: str | None = key(
        None,
        "activation function of the MLP; auto: silu; gelu_tanh for gpt2",
        choices=("silu", "gelu", "gelu_tanh", "relu"),
        auto=True,
    )
    rope_theta: float = key(10000.0, "base of the rotary embedding frequencies", minimum=1)
    rope_scaling: str = key(
        "none",
        "scaling of rotary wavelengths: all (linear), or only long ones (llama3, yarn)",
        choices=ROPE_SCALINGS,
    )
    rope_factor: float = key(8.0, "rope_scaling: factor of the context length", minimum=1)
    rope_low_freq_factor: float = key(
        1.0, "llama3 rope_scaling: turns per context up to which frequencies are scaled", minimum=0
    )
    rope_high_freq_factor: float = key(
        4.0, "llama3 rope_scaling: turns per context from which they are not scaled", minimum=0
    )
    rope_original_len: int = key(
        8192, "llama3 and yarn rope_scaling: context length before scaling", minimum=1
    )
    sliding_window: int | None = key(
        None,
        "mistral, qwen2, qwen3: tokens that a token attends to",
        minimum=1,
        optional=True,
    )
    first_sliding_layer: int = key(0, "first layer with a sliding window", minimum=0)
    attention_bias: bool = key(False, "llama, qwen3: biases in the attention projections")
    mlp_bias: bool = key(False, "llama: biases in the MLP")
    tie_embeddings: bool = key(True, "share the weight of input embedding and output head")
    init_std: float = key(0.02, "standard deviation of the initial weights", minimum=0)
    attention: str | None = key(
        None,
        "attention kernel; transformers: its own; auto: by the GPU",
        choices=(*KERNELS, THEIRS),
        auto=True,
    )

    trainable: str | None = key(
        None,
        "trained parameters: a list of parts of their names such as norm,lm_head, or a "
        "regular expression that is searched in the names",
        optional=True,
        is_names=True,
    )
    lora: LoraConfig = field(default_factory=LoraConfig)
    base_dtype: str | None = key(
        None,
        "dtype of linear layers' frozen weights under model.lora: nf4 takes 0.516 bytes per "
        "weight, int8 1.03; float32: as other tools load them; auto: precision.param_dtype",
        choices=("nf4", "int8", "float32"),
        auto=True,
    )
    quantize_experts: bool = key(
        True, "with model.base_dtype: also experts that are one parameter of a layer"
    )

    def window_of(self, layer: int) -> int | None:
        """Return how many tokens a token attends to in a layer; None: all before it."""
        return self.sliding_window if layer >= self.first_sliding_layer else None

    @property
    def is_foreign(self) -> bool:
        """Whether transformers' code computes the model."""
        return self.architecture in ("gpt2", TRANSFORMERS)

    @property
    def is_pretrained(self) -> bool:
        """Whether the initial weights are read from `path`."""
        return self.init == "pretrained" or (self.init == "auto" and self.path is not None)
