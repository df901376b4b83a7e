"""Conversion between a Hugging Face config.json and the settings of a model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdpctl.config.families import NAMES
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.schema import KEYS
from fsdpctl.errors import UsageError
from fsdpctl.io.documents import read_json

CONFIG_JSON = "config.json"
_MODEL_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
# By fsdpctl's name; several names of Hugging Face mean the same function.
_ACTIVATIONS = {
    "silu": ("silu", "swish"),
    "gelu": ("gelu",),
    "gelu_tanh": ("gelu_new", "gelu_pytorch_tanh"),
    "relu": ("relu",),
}
# Settings that change the computation, with the only supported value.
_FIXED: dict[str, Any] = {
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}


# Names of earlier transformers versions for settings that are written under new names.
_WRITTEN_BEFORE = ("dtype", "rope_parameters", "transformers_version", "layer_types")


_MAY_BE_NULL = ("head_dim", "n_inner")
_LINEAR_KEYS = {"factor": "rope_factor"}
_YARN_KEYS = {"factor": "rope_factor", "original_max_position_embeddings": "rope_original_len"}
_ROPE_KEYS = {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_len",
}
_KEYS_OF_SCALING = {"linear": _LINEAR_KEYS, "llama3": _ROPE_KEYS, "yarn": _YARN_KEYS}
# None: the value follows from the factor.
_YARN_USUAL = {"beta_fast": 32, "beta_slow": 1, "truncate": True, "attention_factor": None,
               "mscale": None, "mscale_all_dim": None}  # fmt: skip


def model_words_of(file: Path) -> dict[str, str]:
    """Return the settings of the model in a config.json, without the prefix `model.`.

    Raises:
        UsageError: If the file can't be read, or if the model isn't supported.
    """
    return words_of_content(read_json(file, dict[str, Any]), str(file))


def words_of_content(content: Mapping[str, Any], file: str) -> dict[str, str]:
    """Return the settings of the model in the contents of the config.json `file`.

    Raises:
        UsageError: If the model isn't supported.
    """
    family = content.get("model_type")
    if not isinstance(family, str) or family not in NAMES:
        known = ", ".join(NAMES)
        raise UsageError(
            f"{file}: model_type {family}: not supported by model=hf; expected {known}, or "
            "model=transformers"
        )
    for name, only in _FIXED.items():
        if content.get(name, only) != only:
            raise UsageError(f"{file}: {name} {content[name]}: not supported; expected {only}")
    try:
        values = _values(content, family)
    except KeyError as error:
        raise UsageError(f"{file}: {error.args[0]} is required") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{file}: not as expected: {error}") from None
    values["architecture"] = family
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in values.items()
        if value is not None
    }


def _values(content: Mapping[str, Any], family: str) -> dict[str, Any]:
    names = NAMES[family]
    known = {**names.defaults, **content}
    if family != "gpt2" and known.get("num_key_value_heads") is None:
        known["num_key_value_heads"] = known["num_attention_heads"]
    values = {ours: known[theirs] for ours, theirs in names.of_keys.items()}
    for ours, theirs in names.of_keys.items():
        if values[ours] is None and theirs not in _MAY_BE_NULL:
            raise KeyError(theirs)
    KEYS["model.num_layers"].parse(str(values["num_layers"]))  # a limit for the loops below
    values["activation"] = _our_activation(values["activation"], family)
    if family == "gpt2":
        values["num_kv_heads"] = values["num_heads"]
        values["intermediate_size"] = values["intermediate_size"] or 4 * values["hidden_size"]
    else:
        values |= _rope_values(content, values["max_seq_len"])
        values |= _window_values(content, family, values["num_layers"])
    return values


def _our_activation(theirs: object, family: str) -> str:
    if family == "gemma" and theirs == "gelu":  # the first files say gelu, but mean gelu_tanh
        return "gelu_tanh"
    for ours, names in _ACTIVATIONS.items():
        if theirs in names:
            return ours
    raise ValueError(f"activation {theirs} is not supported")


def _rope_values(content: Mapping[str, Any], max_seq_len: int) -> dict[str, Any]:
    """Read `rope_parameters`, or the names before transformers 5, which take precedence."""
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    values: dict[str, Any] = {}
    usual = 10000.0
    if content["model_type"] == "gemma3_text":
        local = rope.get("sliding_attention") or {}
        known = content.get("rope_local_base_freq", 10000.0)
        values["rope_local_theta"] = local.get("rope_theta", known)
        if local.get("rope_type", "default") != "default":
            raise ValueError(
                f"rope_type {local['rope_type']} of sliding_attention is not supported"
            )
        rope, usual = rope.get("full_attention") or rope, 1e6
    kind = rope.get("rope_type", rope.get("type", "default"))
    values["rope_theta"] = rope.get("rope_theta", content.get("rope_theta", usual))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor: expected 1.0")
    if kind in (None, "default"):
        return values
    if kind not in _KEYS_OF_SCALING:
        expected = ", ".join(_KEYS_OF_SCALING)
        raise ValueError(f"rope_type {kind} is not supported; expected one of {expected}")
    if kind == "yarn":
        _check_yarn(rope)
    given = {"original_max_position_embeddings": max_seq_len, **rope}
    scaled = {ours: given[theirs] for theirs, ours in _KEYS_OF_SCALING[kind].items()}
    return {**values, "rope_scaling": kind, **scaled}


def _check_yarn(rope: Mapping[str, Any]) -> None:
    """Reject what differs from the paper's values, which transformers uses by default."""
    for name, usual in _YARN_USUAL.items():
        if rope.get(name) not in (None, usual):
            expected = "no value" if usual is None else usual
            raise ValueError(f"yarn with {name}={rope[name]} is not supported; expected {expected}")


def _window_values(content: Mapping[str, Any], family: str, num_layers: int) -> dict[str, Any]:
    """Return the sliding window, and which layers have it."""
    if family in ("llama", "gemma"):
        return {}
    window = content.get("sliding_window", None if family == "phi3" else 4096)
    first, pattern = 0, None
    if family == "gemma3_text":
        pattern = content.get("sliding_window_pattern") or _pattern_of(content.get("layer_types"))
    elif family in ("qwen2", "qwen3"):
        window = window if content.get("use_sliding_window", False) else None
        first = content.get("max_window_layers", 28)
    if pattern is None:
        slides = [window is not None and layer >= first for layer in range(num_layers)]
    else:
        slides = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    kinds = ["sliding_attention" if each else "full_attention" for each in slides]
    if (content.get("layer_types") or kinds) != kinds:
        raise ValueError(
            f"layer_types: not supported; they differ from those of {family} with these settings"
        )
    if pattern is not None:
        return {"sliding_window": window, "sliding_pattern": pattern}
    return {"sliding_window": window, "first_sliding_layer": first} if any(slides) else {}


def _pattern_of(kinds: Sequence[str] | None) -> int:
    """Return the period of layers with full attention; the default is that of Gemma 3."""
    if not kinds:
        return 6
    return 1 + next((n for n, kind in enumerate(kinds) if kind == "full_attention"), len(kinds))


def config_json(config: ModelConfig, dtype: str, source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of config.json for a model with weights of `dtype`.

    Settings of `source`, the config.json of the pretrained model, that don't describe the shape,
    such as token ids, are kept.
    """
    family = config.architecture
    if config.config_json is not None:
        kept = {**json.loads(config.config_json), **source}
        kept.pop("torch_dtype", None)
        return {**kept, "model_type": json.loads(config.config_json)["model_type"], "dtype": dtype}
    kept = {
        name: value
        for name, value in source.items()
        if source.get("model_type") == family and name not in _WRITTEN_BEFORE
    }
    content = {theirs: getattr(config, ours) for ours, theirs in NAMES[family].of_keys.items()}
    activation = NAMES[family].of_keys["activation"]
    content[activation] = _ACTIVATIONS[config.activation or default_activation(family)][0]
    about = {
        "architectures": [_MODEL_CLASSES[family]],
        "model_type": family,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    own = {} if family == "gpt2" else _of_llama_like(config)
    # The defaults of the classes are tokens of the vocabulary of the first models.
    tokens = {"bos_token_id": None, "eos_token_id": None}
    return {**tokens, **kept, **about, **content, **own}


def default_activation(architecture: str) -> str:
    """Return the activation function that `model.activation=auto` selects."""
    return "gelu_tanh" if architecture.startswith(("gpt2", "gemma")) else "silu"


def _of_llama_like(config: ModelConfig) -> dict[str, Any]:
    content: dict[str, Any] = {
        "head_dim": config.head_dim or config.hidden_size // config.num_heads,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
    }
    if config.rope_scaling != "none":
        names = _KEYS_OF_SCALING[config.rope_scaling]
        content["rope_scaling"] = {
            "rope_type": config.rope_scaling,
            **{theirs: getattr(config, ours) for theirs, ours in names.items()},
        }
    if config.architecture not in ("llama", "gemma"):
        content["sliding_window"] = config.sliding_window
    if config.architecture == "gemma3_text":
        content["sliding_window_pattern"] = config.sliding_pattern
        content["rope_local_base_freq"] = config.rope_local_theta
        content["query_pre_attn_scalar"] = config.query_scalar or content["head_dim"]
    if config.architecture in ("qwen2", "qwen3"):
        content["use_sliding_window"] = config.sliding_window is not None
        content["max_window_layers"] = config.first_sliding_layer
    return content
