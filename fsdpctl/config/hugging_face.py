"""Between a Hugging Face config.json and our words for a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpctl.config.model import ARCHITECTURES, ModelConfig
from fsdpctl.config.schema import KEYS
from fsdpctl.errors import UsageError
from fsdpctl.reading.documents import read_json

CONFIG_JSON = "config.json"
_MODEL_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
# Ours first: several of theirs name the same function.
_ACTIVATIONS = {
    "silu": ("silu", "swish"),
    "gelu": ("gelu",),
    "gelu_tanh": ("gelu_new", "gelu_pytorch_tanh"),
    "relu": ("relu",),
}
# What changes the computation, and has one value here.
_FIXED: dict[str, Any] = {
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}


# Names under which other versions of transformers keep what is written anew.
_WRITTEN_BEFORE = ("dtype", "rope_parameters", "transformers_version", "layer_types")


@dataclass(frozen=True, slots=True)
class _Names:
    """Their names of our keys, and the defaults of their classes for keys that may be missing."""

    of_keys: dict[str, str]
    defaults: dict[str, Any]


_LLAMA_LIKE = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
_COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "head_dim": None,
}
_BIASES = {"attention_bias": "attention_bias"}
_NAMES = {
    "llama": _Names(
        {**_LLAMA_LIKE, **_BIASES, "mlp_bias": "mlp_bias"},
        {**_COMMON, "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    ),
    "mistral": _Names(
        _LLAMA_LIKE,
        {**_COMMON, "max_position_embeddings": 131072, "num_key_value_heads": 8},
    ),
    "qwen2": _Names(_LLAMA_LIKE, {**_COMMON, "max_position_embeddings": 32768}),
    "qwen3": _Names(
        {**_LLAMA_LIKE, **_BIASES},
        {**_COMMON, "max_position_embeddings": 32768, "head_dim": 128, "attention_bias": False},
    ),
    "gpt2": _Names(
        {
            "num_layers": "n_layer",
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "num_heads": "n_head",
            "vocab_size": "vocab_size",
            "max_seq_len": "n_positions",
            "norm_eps": "layer_norm_epsilon",
            "activation": "activation_function",
            "tie_embeddings": "tie_word_embeddings",
            "init_std": "initializer_range",
        },
        {
            "n_inner": None,
            "n_positions": 1024,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new",
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
        },
    ),
}
_MAY_BE_NULL = ("head_dim", "n_inner")
_LINEAR_KEYS = {"factor": "rope_factor"}
_ROPE_KEYS = {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_len",
}


def model_words_of(file: Path) -> dict[str, str]:
    """The model that a config.json describes, as words below `model.`.

    Raises:
        UsageError: it cannot be read, or describes what is not offered.
    """
    content = read_json(file, dict[str, Any])
    family = content.get("model_type")
    if not isinstance(family, str) or family not in _NAMES:
        known = ", ".join(ARCHITECTURES)
        raise UsageError(f"{file}: model_type {family} is not offered; offered are {known}")
    for name, only in _FIXED.items():
        if content.get(name, only) != only:
            raise UsageError(f"{file}: {name} {content[name]} is not offered, only {only}")
    try:
        values = _values(content, family)
    except KeyError as error:
        raise UsageError(f"{file}: {error.args[0]} is missing") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{file}: not as expected: {error}") from None
    values["architecture"] = family
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in values.items()
        if value is not None
    }


def _values(content: Mapping[str, Any], family: str) -> dict[str, Any]:
    names = _NAMES[family]
    known = {**names.defaults, **content}
    if family != "gpt2" and known.get("num_key_value_heads") is None:
        known["num_key_value_heads"] = known["num_attention_heads"]
    values = {ours: known[theirs] for ours, theirs in names.of_keys.items()}
    for ours, theirs in names.of_keys.items():
        if values[ours] is None and theirs not in _MAY_BE_NULL:
            raise KeyError(theirs)
    KEYS["model.num_layers"].parse(str(values["num_layers"]))  # before they are gone through
    values["activation"] = _our_activation(values["activation"])
    if family == "gpt2":
        values["num_kv_heads"] = values["num_heads"]
        values["intermediate_size"] = values["intermediate_size"] or 4 * values["hidden_size"]
    else:
        values |= _rope_values(content, values["max_seq_len"])
        values |= _window_values(content, family, values["num_layers"])
    return values


def _our_activation(theirs: object) -> str:
    for ours, names in _ACTIVATIONS.items():
        if theirs in names:
            return ours
    raise ValueError(f"activation {theirs} is not offered")


def _rope_values(content: Mapping[str, Any], max_seq_len: int) -> dict[str, Any]:
    """From `rope_parameters`, or from what transformers wrote before version 5, which wins."""
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta", content.get("rope_theta", 10000.0))
    values: dict[str, Any] = {"rope_theta": theta}
    if kind in (None, "default"):
        return values
    if kind not in ("linear", "llama3"):
        raise ValueError(f"rope_type {kind} is not offered, only linear and llama3")
    given = {"original_max_position_embeddings": max_seq_len, **rope}
    names = _ROPE_KEYS if kind == "llama3" else _LINEAR_KEYS
    scaled = {ours: given[theirs] for theirs, ours in names.items()}
    return {**values, "rope_scaling": kind, **scaled}


def _window_values(content: Mapping[str, Any], family: str, num_layers: int) -> dict[str, Any]:
    """The sliding window, and the first layer that has it."""
    if family == "llama":
        return {}
    window = content.get("sliding_window", 4096)
    first = 0
    if family != "mistral":
        window = window if content.get("use_sliding_window", False) else None
        first = content.get("max_window_layers", 28)
    slides = [window is not None and layer >= first for layer in range(num_layers)]
    kinds = ["sliding_attention" if each else "full_attention" for each in slides]
    if (content.get("layer_types") or kinds) != kinds:
        raise ValueError("layer_types: only layers with full attention before sliding ones")
    return {"sliding_window": window, "first_sliding_layer": first} if any(slides) else {}


def config_json(config: ModelConfig, dtype: str, source: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of config.json for a model saved in `dtype`.

    Args:
        config: the model, its sizes filled in.
        dtype: torch's name of it.
        source: the config.json that the model came with; what is not about the model's shape
            (token ids, for one) is kept.
    """
    family = config.architecture
    kept = {
        name: value
        for name, value in source.items()
        if source.get("model_type") == family and name not in _WRITTEN_BEFORE
    }
    content = {theirs: getattr(config, ours) for ours, theirs in _NAMES[family].of_keys.items()}
    activation = _NAMES[family].of_keys["activation"]
    content[activation] = _ACTIVATIONS[config.activation or default_activation(family)][0]
    about = {
        "architectures": [_MODEL_CLASSES[family]],
        "model_type": family,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    own = {} if family == "gpt2" else _of_llama_like(config)
    # Their classes' defaults are tokens of the vocabulary they were made for.
    tokens = {"bos_token_id": None, "eos_token_id": None}
    return {**tokens, **kept, **about, **content, **own}


def default_activation(architecture: str) -> str:
    """What `model.activation=auto` means."""
    return "gelu_tanh" if architecture == "gpt2" else "silu"


def _of_llama_like(config: ModelConfig) -> dict[str, Any]:
    content: dict[str, Any] = {
        "head_dim": config.head_dim or config.hidden_size // config.num_heads,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
    }
    if config.rope_scaling != "none":
        names = _ROPE_KEYS if config.rope_scaling == "llama3" else _LINEAR_KEYS
        content["rope_scaling"] = {
            "rope_type": config.rope_scaling,
            **{theirs: getattr(config, ours) for theirs, ours in names.items()},
        }
    if config.architecture != "llama":
        content["sliding_window"] = config.sliding_window
    if config.architecture in ("qwen2", "qwen3"):
        content["use_sliding_window"] = config.sliding_window is not None
        content["max_window_layers"] = config.first_sliding_layer
    return content
