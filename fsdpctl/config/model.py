"""The section `model`: architecture, source of the weights, and trained parameters."""

import math
from dataclasses import dataclass, field

from fsdpctl.config.keys import auto_key, key, optional_key
from fsdpctl.plan.attention_kernels import KERNELS, TRANSFORMERS

# If a script passed its module and data, config.yaml has data=own and model=own:NAME.
SCRIPT_DATA, SCRIPT_PREFIX = "own", "own:"
NO_DECODER = (
    "a run of fsdpctl.train with a module of a script; expected a run of a decoder; "
    "fsdpctl.load_checkpoint reads the module's weights"
)
MAX_TOKENS = 1 << 24  # largest vocabulary, 64 times the largest published one; longest sequence
MAX_LAYERS, MAX_WIDTH = 2000, 1 << 20  # twice the deepest, 20 times the widest published model


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Low-rank adapters of linear layers (Hu et al., LoRA, 2021)."""

    rank: int | None = optional_key("LoRA rank; other weights are frozen", within=(1, MAX_WIDTH))
    alpha: float | None = auto_key(
        "LoRA alpha: adapters are scaled by alpha / rank; auto: twice the rank", minimum=0
    )
    rslora: bool = key(False, "scale LoRA adapters by alpha / sqrt(rank) instead of alpha / rank")
    dropout: float = key(0.0, "dropout of the inputs of LoRA adapters", within=(0, 0.99))
    targets: str = key(
        "all_linear",
        "layers with LoRA adapters: all_linear (except the output head), a list of names or their "
        "ends such as q_proj,v_proj, or a regular expression that is searched in the names",
        is_list=True,
    )
    also: str | None = optional_key(
        "modules that are trained whole in addition to LoRA adapters, as PEFT's modules_to_save: a "
        "list of names or their ends such as embed_tokens,lm_head, or a regular expression",
        is_list=True,
    )
    path: str | None = optional_key("PEFT directory with the initial adapters", is_path=True)

    @property
    def used_alpha(self) -> float:
        return 2.0 * (self.rank or 1) if self.alpha is None else self.alpha

    @property
    def scale(self) -> float:
        """The factor of an adapter's output."""
        rank = self.rank or 1
        return self.used_alpha / (math.sqrt(rank) if self.rslora else rank)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of transformers."""

    name: str = "llama_tiny"
    path: str | None = optional_key(
        "for model=hf: Hugging Face directory, Hub name, GGUF file, run or checkpoint", is_path=True
    )
    init: str = key(
        "auto",
        "initial weights; auto: the weights in model.path if it is set, else random",
        choices=("auto", "pretrained", "random"),
    )
    overrides: str | None = optional_key(
        "values merged into config.json, such as rope_scaling.factor=32", is_mapping=True
    )
    config_json: str | None = optional_key("the whole config.json", user_key="model.overrides")
    router_aux_loss: str = key(
        "model",
        "auxiliary loss of routers; model: the model's, if config.json sets output_router_logits; "
        "global: with the token counts of all ranks; none: no auxiliary loss",
        choices=("model", "global", "none"),
    )
    num_layers: int = key(4, "number of decoder blocks", within=(1, MAX_LAYERS))
    hidden_size: int = key(128, "width of the residual stream", within=(1, MAX_WIDTH))
    intermediate_size: int = key(384, "width inside the MLP", within=(1, MAX_WIDTH))
    num_heads: int = key(4, "number of query heads", within=(1, MAX_WIDTH))
    num_kv_heads: int = key(
        2, "number of key and value heads; divides num_heads", within=(1, MAX_WIDTH)
    )
    head_dim: int | None = auto_key(
        "width of a head; auto: hidden_size / num_heads", within=(2, MAX_WIDTH)
    )
    vocab_size: int | None = auto_key(
        "size of the vocabulary; auto: the tokenizer's", within=(1, MAX_TOKENS)
    )
    max_seq_len: int = key(2048, "longest sequence that an export declares", within=(1, MAX_TOKENS))
    first_new_token: int | None = optional_key(
        "first row of embeddings for added tokens, which start as the mean of the rows before",
        within=(1, MAX_TOKENS),
        user_key="data.new_tokens",
    )
    attention: str | None = auto_key(
        "attention kernel; transformers: its own code; auto: flash, cudnn or efficient by GPU",
        choices=(*KERNELS, TRANSFORMERS),
    )
    trainable: str | None = optional_key(
        "trained parameters: a list of parts of their names such as norm,lm_head, or a "
        "regular expression that is searched in the names",
        is_list=True,
    )
    lora: LoraConfig = field(default_factory=LoraConfig)
    base_dtype: str | None = auto_key(
        "dtype of linear layers' frozen weights under model.lora: nf4 takes 0.516 bytes per "
        "weight, int8 1.03; float32: as TRL loads them; auto: precision.param_dtype",
        choices=("nf4", "int8", "float32"),
    )
    quantize_experts: bool = key(
        True, "with model.base_dtype: also quantize experts that are stacked in one parameter"
    )

    @property
    def title(self) -> str:
        """The name that the user set: an option, a name on the Hub, or a path."""
        return self.path or self.name

    @property
    def used_head_dim(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def is_script_module(self) -> bool:
        """Whether the model is a module that a script passed to `fsdpctl.train`."""
        return self.name.startswith(SCRIPT_PREFIX)

    @property
    def is_pretrained(self) -> bool:
        return self.init == "pretrained" or (self.init == "auto" and self.path is not None)
