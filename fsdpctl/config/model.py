"""Which model it is, where its weights come from, and which of them are trained."""

import math
from dataclasses import dataclass, field

from fsdpctl.config.keys import key
from fsdpctl.plan.attention import KERNELS

MOST_TOKENS = 1 << 24  # of a vocabulary; the largest published have a 64th of it
MOST_LAYERS, _MOST_WIDTH = 2000, 1 << 20  # twice the deepest, twenty times the widest published
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "phi3", "gpt2")
ROPE_SCALINGS = ("none", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Low-rank adapters beside linear layers (Hu et al., LoRA, 2021); all else is frozen."""

    rank: int | None = key(
        None, "of the adapters; all other weights are frozen", minimum=1, maximum=_MOST_WIDTH,
        optional=True,
    )  # fmt: skip
    alpha: float | None = key(
        None, "what adapters add is times alpha / rank; auto: twice the rank", minimum=0, auto=True
    )
    rslora: bool = key(False, "times alpha / sqrt(rank) instead")
    dropout: float = key(0.0, "share of an adapter's inputs left out", minimum=0, maximum=0.99)
    targets: str = key(
        "all_linear",
        "what gets one: all_linear, without the output head; or a regular expression that is found "
        "in the names of layers",
    )
    path: str | None = key(
        None, "begin with the adapters in a PEFT directory", is_path=True, optional=True
    )

    @property
    def scale(self) -> float:
        """What an adapter's output is multiplied by."""
        rank = self.rank or 1
        alpha = 2.0 * rank if self.alpha is None else self.alpha
        return alpha / (math.sqrt(rank) if self.rslora else rank)


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
        "of the MLP; auto: silu, in gpt2 and gemma gelu_tanh",
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
    rope_local_theta: float = key(
        10000.0, "gemma3_text: that of layers with a sliding window", minimum=1, is_later=True
    )
    sliding_window: int | None = key(
        None, "not in llama, gemma, gpt2: tokens that a token sees", minimum=1, optional=True
    )
    first_sliding_layer: int = key(0, "the layers before it see all tokens", minimum=0)
    sliding_pattern: int | None = key(
        None, "gemma3_text: each so-many-th layer sees all tokens", minimum=1, optional=True
    )
    query_scalar: int | None = key(
        None,
        "gemma3_text: scores of tokens are divided by its root; auto: head_dim",
        minimum=1,
        auto=True,
        is_later=True,
    )
    attention_bias: bool = key(False, "llama, qwen3: biases in the attention's projections")
    mlp_bias: bool = key(False, "llama: biases in the MLP")
    tie_embeddings: bool = key(True, "the output head shares the input embedding's weight")
    init_std: float = key(0.02, "standard deviation of the initial weights", minimum=0)
    attention: str | None = key(
        None,
        "attention kernel; auto: on CUDA the fastest of those that run, timed at the start",
        choices=KERNELS,
        auto=True,
        is_later=True,
    )

    trainable: str | None = key(
        None,
        "train only parameters in whose names this regular expression is found",
        optional=True,
    )
    lora: LoraConfig = field(default_factory=LoraConfig)

    def window_of(self, layer: int) -> int | None:
        """How many tokens a token sees in a layer; None for all before it."""
        if self.sliding_pattern is not None:
            slides = (layer + 1) % self.sliding_pattern != 0
        else:
            slides = layer >= self.first_sliding_layer
        return self.sliding_window if slides else None

    @property
    def is_gemma(self) -> bool:
        """Whether norms and embeddings are Gemma's."""
        return self.architecture.startswith("gemma")

    @property
    def is_pretrained(self) -> bool:
        """Whether its first weights are read from `path`."""
        return self.init == "pretrained" or (self.init == "auto" and self.path is not None)
