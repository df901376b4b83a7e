"""The configurations of transformers that our own decoder computes exactly, and its settings.

A configuration is exact if every value that transformers' module reads has a setting here, or is
the only one that our decoder computes. Values that its module doesn't read have no effect in
either.
"""

from collections.abc import Mapping
from typing import Any

from fsdpctl.config.model import ROPE_SCALINGS, ModelConfig
from fsdpctl.config.schema import KEYS
from fsdpctl.errors import UsageError

CONFIG_JSON = "config.json"
# By fsdpctl's name; several names of Hugging Face mean the same function.
ACTIVATIONS = {
    "silu": ("silu", "swish"),
    "gelu": ("gelu",),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new"),
    "relu": ("relu",),
}
NAMES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
_BIASES = {
    "llama": ("attention_bias", "mlp_bias"),
    "mistral": (),
    "qwen2": (),
    "qwen3": ("attention_bias",),
}
# Settings without an equal in the section `model` for decoders of transformers.
OWN_KEYS = (
    "activation", "norm_eps", "rope_theta", "rope_scaling", "rope_factor", "rope_original_len",
    "rope_low_freq_factor", "rope_high_freq_factor", "sliding_window", "first_sliding_layer",
)  # fmt: skip
OWN_FAMILIES = tuple(_BIASES)
_WINDOWED = ("qwen2", "qwen3")  # families whose layers have kinds
_SLIDING, _FULL = "sliding_attention", "full_attention"
# The defaults of transformers for keys that the table of published models leaves out.
_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu", "head_dim": None,
    "max_position_embeddings": 32768, "initializer_range": 0.02, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "attention_dropout": 0.0, "sliding_window": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
_DEFAULTS_OF: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048,
        "num_key_value_heads": None, "attention_bias": False, "mlp_bias": False,
    },
    "mistral": {
        "vocab_size": 32000, "intermediate_size": 14336, "max_position_embeddings": 131072,
        "num_key_value_heads": 8, "sliding_window": 4096,
    },
    "qwen2": {"vocab_size": 151936, "use_sliding_window": False},
    "qwen3": {
        "vocab_size": 151936, "use_sliding_window": False, "head_dim": 128, "attention_bias": False,
    },
}  # fmt: skip
# Declared by transformers, and without effect on logits and their gradients, or read in other keys.
_ABOUT = (
    "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id",
    "id2label", "is_encoder_decoder", "label2id", "max_window_layers", "model_type",
    "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type",
    "return_dict", "transformers_version", "use_cache", "use_sliding_window",
)  # fmt: skip
# Not declared, but read by code that families share.
_READ = ("attention_chunk_size", "is_causal", "per_layer_config", "quantization_config")
_LINEAR = {"factor": "rope_factor"}
_YARN = {**_LINEAR, "original_max_position_embeddings": "rope_original_len"}
_LLAMA3 = {
    **_YARN,
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
}
ROPES: dict[str, dict[str, str]] = {
    "none": {}, "linear": _LINEAR, "llama3": _LLAMA3, "yarn": _YARN,
}  # fmt: skip
# Values of the paper, which our decoder computes with, by name; None: follows from the factor.
_YARN_USUAL: dict[str, tuple[object, ...]] = {
    "beta_fast": (None, 32), "beta_slow": (None, 1), "truncate": (True,),
    "attention_factor": (None,), "mscale": (None,), "mscale_all_dim": (None,),
}  # fmt: skip
_SHORTEST_YARN = 7  # original length; below, transformers interpolates in the other direction


class InexactError(ValueError):
    """A value that our own decoder does not compute; the text is its key."""


def defaults_of(family: str) -> dict[str, Any]:
    """Return the values that a configuration of one of our families has by default."""
    return _DEFAULTS | _DEFAULTS_OF[family]


def own_words(known: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of our own decoder, without the prefix `model.`.

    Args:
        known: All values of a configuration of transformers, as it resolves them.
        usual: The defaults of the same class.

    Raises:
        InexactError: If our decoder would compute something else.
    """
    family = str(known.get("model_type"))
    if family not in OWN_FAMILIES:
        raise InexactError(f"model_type {family}")
    _check_others(known, usual, family)
    pad, size = known.get("pad_token_id"), known.get("vocab_size")
    if isinstance(pad, int) and isinstance(size, int) and pad >= size:
        raise InexactError(f"pad_token_id {pad}")  # transformers could not load an export
    values: dict[str, Any] = {ours: known.get(theirs) for ours, theirs in NAMES.items()}
    values |= {name: known[name] for name in _BIASES[family]}
    if values["num_kv_heads"] is None:
        values["num_kv_heads"] = values["num_heads"]
    if values["head_dim"] == known["hidden_size"] / known["num_attention_heads"]:
        values["head_dim"] = None  # follows from them
    values["activation"] = _activation(known["hidden_act"])
    values |= _rope(known) | _window(known, family) | {"architecture": family}
    words = {name: _text(value) for name, value in values.items() if value is not None}
    for name, text in words.items():
        try:
            KEYS[f"model.{name}"].parse(text)
        except UsageError:
            raise InexactError(f"{NAMES.get(name, name)} {text}") from None
    return words


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_others(known: Mapping[str, Any], usual: Mapping[str, Any], family: str) -> None:
    """Check that all other values are those that our decoder computes with."""
    handled = {*NAMES.values(), *_BIASES[family], *_ABOUT, "hidden_act", "rope_parameters"}
    handled |= {"sliding_window"} - ({"sliding_window"} if family == "llama" else set())
    handled |= {"layer_types"} if family in _WINDOWED else set()
    for name, value in known.items():
        if name in handled:
            continue
        is_read = name in usual or name in (*_READ, "sliding_window", "layer_types")
        if is_read and value != usual.get(name):
            raise InexactError(f"{name} {value}")


def _activation(theirs: object) -> str:
    for ours, names in ACTIVATIONS.items():
        if theirs in names:
            return ours
    raise InexactError(f"hidden_act {theirs}")


def _rope(known: Mapping[str, Any]) -> dict[str, Any]:
    rope = known.get("rope_parameters") or {}
    kind = rope.get("rope_type")
    scaling = "none" if kind == "default" else kind
    nested = next((name for name, value in rope.items() if isinstance(value, Mapping)), None)
    if nested or scaling not in ROPE_SCALINGS:
        raise InexactError(f"rope_parameters {nested}" if nested else f"rope_type {kind}")
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise InexactError(f"partial_rotary_factor {rope['partial_rotary_factor']}")
    found: dict[str, Any] = {ours: rope.get(theirs) for theirs, ours in ROPES[scaling].items()}
    found["rope_theta"] = rope.get("rope_theta")
    missing = next((name for name, value in found.items() if not _is_number(value)), None)
    if missing is not None:
        raise InexactError(f"rope_parameters without {missing}")
    if scaling == "yarn":
        for name, usual in _YARN_USUAL.items():
            if name in rope and rope[name] not in usual:
                raise InexactError(f"yarn with {name} {rope[name]}")
        if found["rope_original_len"] < _SHORTEST_YARN:
            raise InexactError(f"yarn with an original length of {found['rope_original_len']}")
    return {"rope_scaling": scaling, **found}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _window(known: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return the sliding window, and the first layer that has it."""
    window = known.get("sliding_window")
    if family == "llama" or (family in _WINDOWED and not known.get("use_sliding_window")):
        window = None
    kinds = known.get("layer_types")
    if kinds is None:
        kinds = [_FULL if window is None or family in _WINDOWED else _SLIDING]
        kinds = kinds * known["num_hidden_layers"]
    first = kinds.index(_SLIDING) if _SLIDING in kinds else len(kinds)
    if len(kinds) != known["num_hidden_layers"] or kinds != _kinds(first, len(kinds)):
        raise InexactError("layer_types")
    if first == len(kinds):
        return {}
    if window is None:
        raise InexactError("sliding_window None")
    return {"sliding_window": window, "first_sliding_layer": first}


def _kinds(first: int, count: int) -> list[str]:
    return [_SLIDING if layer >= first else _FULL for layer in range(count)]


def own_content(config: ModelConfig) -> dict[str, Any]:
    """Return the values of config.json that the settings of our own decoder determine."""
    family, first = config.architecture, config.first_sliding_layer
    content = {theirs: getattr(config, ours) for ours, theirs in NAMES.items()}
    content |= {name: getattr(config, name) for name in _BIASES[family]}
    content["head_dim"] = config.head_dim or config.hidden_size // config.num_heads
    content["hidden_act"] = ACTIVATIONS[config.activation or "silu"][0]
    kind = "default" if config.rope_scaling == "none" else config.rope_scaling
    content["rope_parameters"] = {
        "rope_type": kind,
        "rope_theta": config.rope_theta,
        **{theirs: getattr(config, ours) for theirs, ours in ROPES[config.rope_scaling].items()},
    }
    if family != "llama":
        content["sliding_window"] = config.sliding_window
    if family in _WINDOWED:
        slides = config.sliding_window is not None
        content["use_sliding_window"] = slides
        content["layer_types"] = _kinds(first if slides else config.num_layers, config.num_layers)
        content["max_window_layers"] = min(first, config.num_layers) if slides else 28
    return {**content, "model_type": family}
