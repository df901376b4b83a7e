"""Settings of runs of earlier versions, which had decoders of their own for Gemma and Phi-3."""

from collections.abc import Mapping
from typing import Any

from fsdpctl.config.any_decoder import canonical
from fsdpctl.config.hugging_face import ACTIVATIONS, NAMES, OWN_KEYS, ROPES
from fsdpctl.config.keys import NONE
from fsdpctl.config.model import TRANSFORMERS

_FAMILIES = ("gemma", "gemma3_text", "phi3")
_GONE = ("model.rope_local_theta", "model.sliding_pattern", "model.query_scalar")
_TEXTS = {"true": True, "false": False, NONE: None, "auto": None}


def of_this_version(words: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run with its model as one of transformers, if it was of these."""
    kept = {name: text for name, text in words.items() if name not in _GONE}
    if words.get("model.architecture") not in _FAMILIES:
        return kept
    known = {name.removeprefix("model."): _value(str(text)) for name, text in words.items()}
    kept = {
        name: text for name, text in kept.items() if name.removeprefix("model.") not in OWN_KEYS
    }
    told = {"model.architecture": TRANSFORMERS, "model.config_json": canonical(_content(known))}
    return {**kept, **told}


def _content(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model with these settings."""
    family, scaling = known["architecture"], known.get("rope_scaling") or "none"
    content = {theirs: known.get(ours) for ours, theirs in NAMES.items()}
    content = {name: value for name, value in content.items() if value is not None}
    usual = "silu" if family == "phi3" else "gelu_tanh"
    is_gemma3 = family == "gemma3_text"
    activation = ACTIVATIONS[str(known.get("activation") or usual)][0]
    width = int(known["hidden_size"]) // int(known["num_heads"])
    rope = {
        "rope_type": "default" if scaling == "none" else scaling,
        "rope_theta": known.get("rope_theta", 10000.0),
        **{theirs: known[ours] for theirs, ours in ROPES[scaling].items()},
    }
    content |= {
        "model_type": family,
        "head_dim": known.get("head_dim") or width,
        "hidden_activation" if is_gemma3 else "hidden_act": activation,
        "rope_parameters": rope,
        "pad_token_id": None,
    }
    window = known.get("sliding_window")
    if family == "phi3":
        content["sliding_window"] = window
    if not is_gemma3:
        return content
    period, first = known.get("sliding_pattern"), known.get("first_sliding_layer", 0)
    slides = [
        window is not None and bool((each + 1) % period if period else each >= first)
        for each in range(known["num_layers"])
    ]
    local = {"rope_type": "default", "rope_theta": known.get("rope_local_theta", 10000.0)}
    return content | {
        "sliding_window": window or 4096,
        "query_pre_attn_scalar": known.get("query_scalar") or content["head_dim"],
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
    }


def _value(text: str) -> Any:
    if text in _TEXTS:
        return _TEXTS[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
