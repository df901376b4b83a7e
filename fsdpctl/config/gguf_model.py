"""The model in a GGUF file: its metadata as a config.json.

Values that a file lacks are llama.cpp's defaults, or else those of transformers.
"""

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

from fsdpctl.errors import UsageError, did_you_mean
from fsdpctl.io.gguf_header import (
    GGUF_CONFIG_JSON,
    GGUF_EMBEDDING,
    GgufHeader,
    is_gguf,
    read_header,
)
from fsdpctl.io.untrusted import parse_json

# transformers' model_type for each architecture of GGUF files.
_FAMILIES = {
    "falcon": "falcon", "gemma2": "gemma2", "gemma3": "gemma3_text", "llama": "llama",
    "nemotron": "nemotron", "phi3": "phi3", "qwen2": "qwen2", "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "stablelm": "stablelm", "starcoder2": "starcoder2",
}  # fmt: skip
_NORMS = "rms_norm_eps layer_norm_eps norm_eps norm_epsilon layer_norm_epsilon"
# transformers' names of sizes; a configuration class has at most one name of each row.
_NAMES = {
    "context_length": "max_position_embeddings", "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size ffn_hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads num_kv_heads",
    "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": _NORMS,
    "attention.layer_norm_epsilon": _NORMS, "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping", "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "rope.freq_base": "rope_theta", "rope.freq_base_swa": "rope_local_base_freq",
}  # fmt: skip
_REQUIRED = ("context_length", "block_count", "embedding_length", "attention.head_count")
_NOT_IN_TENSORS = ("context_length", "attention.sliding_window", "rope.", "attn_", "final_")
# Keys that other code reads, or that change nothing.
_OTHERS = (
    "vocab_size", "attention.value_length", "attention.scale", "tensor_data_layout",
    "use_parallel_residual", "attention.key_length",
    "rope.scaling.original_context_length", "rope.scaling.finetuned",
)  # fmt: skip
# Blocks of the 27B models of these families, whose attention has another scale.
_LARGE = {"gemma2": 46, "gemma3": 62}
_SCALED = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_attn_factor": "attention_factor",
}  # fmt: skip
# Tensors that scale rotary embeddings; fsdpctl does not read them.
SCALINGS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def config_of_gguf(path: Path) -> dict[str, Any]:
    """Return the content of a config.json for the model in a GGUF file.

    UsageError if the file is damaged, or if its model is not supported.
    """
    return dict(_config(path.absolute(), path.stat().st_mtime_ns)[0])


@lru_cache(maxsize=4)
def _config(path: Path, changed: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    header = read_header(path)
    kind = header.architecture
    if kind not in _FAMILIES:
        families = f"{did_you_mean(kind, list(_FAMILIES))}; expected {', '.join(_FAMILIES)}"
        raise UsageError(f"{path}: architecture {kind}: not supported{families}")
    if problem := _problem(header):
        raise UsageError(f"{path}: {problem}")
    if (config := header.metadata.get(GGUF_CONFIG_JSON)) is None:
        return _made(header)
    return _made(header)[0] | parse_json(config, dict[str, Any], f"{path}: {GGUF_CONFIG_JSON}"), ()


def _problem(header: GgufHeader) -> str:
    """Return the missing or impossible value of the metadata, or an empty text."""
    kind, tensors, width = header.architecture, header.tensors, _head_width(header)
    required = [*_REQUIRED, *(["feed_forward_length"] if not header.get("expert_count") else [])]
    for key in required:
        if header.get(key) is None:
            return f"{kind}.{key}: not found"
    if not any(header.get(key) for key, names in _NAMES.items() if names == _NORMS):
        return f"{kind}.attention.layer_norm_rms_epsilon: not found"
    if GGUF_EMBEDDING not in tensors or len(tensors[GGUF_EMBEDDING].shape) != 2:
        return f"{GGUF_EMBEDDING}: not found, or not a matrix"
    blocks = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
    if len(blocks) != header.get("block_count"):
        return f"{kind}.block_count={header.get('block_count')}: the file has {len(blocks)} blocks"
    largest = max(size for each in tensors.values() for size in each.shape)
    unused = ("feed_forward_length",) if header.get("expert_count") else ()
    for key in _NAMES:
        value = header.get(key, 0)
        if not key.startswith((*_NOT_IN_TENSORS, *unused)) and value > largest:
            return f"{kind}.{key}={value}: larger than any tensor"
    if header.get("attention.value_length", width) != width:
        return f"{kind}.attention.value_length: expected {width}, as for keys"
    if header.get("rope.dimension_count", width) > width:
        return f"{kind}.rope.dimension_count: expected at most {width}, as heads have"
    if kind == "falcon" and header.get("attention.head_count_kv", 1) != 1:
        return "falcon with several key heads: not supported; the file orders them differently"
    scale = header.get("attention.scale")
    if scale is not None and kind not in _LARGE and not math.isclose(scale, width**-0.5):
        return f"{kind}.attention.scale={scale}: not supported by transformers"
    return ""


def _head_width(header: GgufHeader) -> int:
    width: int = header.get("embedding_length", 1) // header.get("attention.head_count", 1)
    if header.architecture == "llama":
        width = header.get("rope.dimension_count", width)
    return int(header.get("attention.key_length", width))


def _made(header: GgufHeader) -> tuple[dict[str, Any], tuple[str, ...]]:
    from transformers import AutoConfig
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    kind, tensors, width = header.architecture, header.tensors, _head_width(header)
    default = AutoConfig.for_model(_FAMILIES[kind])
    names = {*default.to_dict(), *default.attribute_map, "rope_theta"}
    names |= {"gemma3": {"rope_local_base_freq"}, "qwen3moe": {"head_dim"}}.get(kind, set())
    parts = {key.partition("."): value for key, value in header.metadata.items()}
    unread_keys = {key: value for (first, _, key), value in parts.items() if first == kind}
    config: dict[str, Any] = {"model_type": _FAMILIES[kind]}
    defaults = {
        "attention.head_count_kv": unread_keys["attention.head_count"],
        "attention.key_length": width,
    }
    for key, value in (defaults | unread_keys).items():
        for name in names.intersection(_NAMES.get(key, "").split()):
            config[name] = value or None
            unread_keys.pop(key, None)
    for name, key in {"bos": "bos", "eos": "eos", "pad": "padding"}.items():
        config[f"{name}_token_id"] = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
    config["vocab_size"] = tensors[GGUF_EMBEDDING].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in tensors or kind == "falcon"
    if kind == "stablelm":
        config["use_qkv_bias"] = any(name.endswith(".attn_q.bias") for name in tensors)
        config["use_parallel_residual"] = not any(".ffn_norm." in name for name in tensors)
    if kind == "qwen3moe":
        config["norm_topk_prob"] = True  # llama.cpp always normalizes
    rotated = unread_keys.pop("rope.dimension_count", width)
    if "partial_rotary_factor" in (default.rope_parameters or {}):
        config["partial_rotary_factor"] = rotated / width
    elif rotated != width:
        unread_keys["rope.dimension_count"] = rotated
    notes = [*_scale_rope(config, unread_keys, header), *_scale_attention(config, header)]
    vocabulary, pre = (header.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if vocabulary == "gpt2" and pre not in (*GGUF_PRE_TOKENIZER_SPLITS, "gpt-2", None):
        notes.append(f"the tokenizer splits text as gpt-2, not as {pre}; set data.tokenizer")
    if unread := sorted(key for key, value in unread_keys.items() if value and key not in _OTHERS):
        notes.append(f"{', '.join(unread)}: not read, as in transformers")
    return config, tuple(notes)


def _scale_rope(config: dict[str, Any], unread: dict[str, Any], header: GgufHeader) -> list[str]:
    kind = unread.pop("rope.scaling.type", "none")
    scaling = {name: unread.pop(key) for key, name in _SCALED.items() if key in unread}
    if kind in ("linear", "yarn") and "factor" in scaling:
        config["rope_scaling"] = {"rope_type": kind, **scaling}
        return []
    if kind == "none" and not header.tensors.keys() & set(SCALINGS):
        return []
    return [
        "scaling of rotary embeddings: not read, as in transformers; set "
        "model.overrides.rope_scaling"
    ]


def _scale_attention(config: dict[str, Any], header: GgufHeader) -> list[str]:
    kind, key = header.architecture, "query_pre_attn_scalar"
    if kind == "starcoder2" and header.get("attention.sliding_window") is None:
        return ["no attention window in such files; set model.overrides.sliding_window"]
    if kind in _LARGE and (scale := header.get("attention.scale")):
        config[key] = round(scale**-2)
    elif kind in _LARGE and config["num_hidden_layers"] == _LARGE[kind]:
        config[key] = config["hidden_size"] // config["num_attention_heads"]
    elif kind in _LARGE and config["head_dim"] != 256:
        return [f"no attention scale in the file; 256 is used, set model.overrides.{key}"]
    return []


def notes_on_gguf(path: str | None) -> tuple[str, ...]:
    """Return a line for each value of a GGUF file that is ignored; () for other models."""
    if path is None or not is_gguf(Path(path)):
        return ()
    file = Path(path)
    return tuple(f"{path}: {each}" for each in _config(file.absolute(), file.stat().st_mtime_ns)[1])
