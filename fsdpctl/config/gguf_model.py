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
_MODEL_TYPES = {
    "falcon": "falcon", "gemma2": "gemma2", "gemma3": "gemma3_text", "llama": "llama",
    "nemotron": "nemotron", "phi3": "phi3", "qwen2": "qwen2", "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "stablelm": "stablelm", "starcoder2": "starcoder2",
}  # fmt: skip
_NORM_EPS = "rms_norm_eps layer_norm_eps norm_eps norm_epsilon layer_norm_epsilon"
# transformers' names for each GGUF key; a configuration class has at most one of them.
_NAMES = {
    "context_length": "max_position_embeddings", "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size ffn_hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads num_kv_heads",
    "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": _NORM_EPS,
    "attention.layer_norm_epsilon": _NORM_EPS, "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping", "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "rope.freq_base": "rope_theta", "rope.freq_base_swa": "rope_local_base_freq",
}  # fmt: skip
_REQUIRED = ("context_length", "block_count", "embedding_length", "attention.head_count")
# Prefixes of keys whose values are not dimensions of tensors, and may be larger than any.
_NOT_IN_TENSORS = ("context_length", "attention.sliding_window", "rope.", "attn_", "final_")
# Keys that get no note: other code reads them, or they change nothing.
_NO_NOTE = (
    "vocab_size", "attention.value_length", "attention.scale", "tensor_data_layout",
    "use_parallel_residual", "attention.key_length",
    "rope.scaling.original_context_length", "rope.scaling.finetuned",
)  # fmt: skip
# Architectures with query_pre_attn_scalar: the number of blocks of the 27B model, which scales
# attention by (hidden_size / num_heads)**-0.5.
_GEMMA_DEPTHS = {"gemma2": 46, "gemma3": 62}
_ROPE_KEYS = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_attn_factor": "attention_factor",
}  # fmt: skip
# Tensors that scale rotary embeddings; fsdpctl does not read them.
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def config_of_gguf(path: Path) -> dict[str, Any]:
    """Return the content of a config.json for the model in a GGUF file.

    UsageError if the file is damaged, or if its model is not supported.
    """
    return dict(_config(path.absolute(), path.stat().st_mtime_ns)[0])


@lru_cache(maxsize=4)
def _config(path: Path, mtime_ns: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the content of config.json, and notes on what is ignored or missing."""
    header = read_header(path)
    arch = header.architecture
    if arch not in _MODEL_TYPES:
        hint = f"{did_you_mean(arch, list(_MODEL_TYPES))}; expected {', '.join(_MODEL_TYPES)}"
        raise UsageError(f"{path}: architecture {arch}: not supported{hint}")
    if problem := _problem(header):
        raise UsageError(f"{path}: {problem}")
    if (text := header.metadata.get(GGUF_CONFIG_JSON)) is None:
        return _convert(header)
    content = parse_json(text, dict[str, Any], f"{path}: {GGUF_CONFIG_JSON}")
    return {**_convert(header)[0], **content}, ()  # fsdpctl wrote `content`: nothing is ignored


def _problem(header: GgufHeader) -> str:
    """Return the missing or impossible value of the metadata, or an empty text."""
    arch, tensors, head_dim = header.architecture, header.tensors, _head_dim(header)
    required = [*_REQUIRED, *(["feed_forward_length"] if not header.get("expert_count") else [])]
    for key in required:
        if header.get(key) is None:
            return f"{arch}.{key}: not found"
    if not any(header.get(key) for key, names in _NAMES.items() if names == _NORM_EPS):
        return f"{arch}.attention.layer_norm_rms_epsilon: not found"
    if GGUF_EMBEDDING not in tensors or len(tensors[GGUF_EMBEDDING].shape) != 2:
        return f"{GGUF_EMBEDDING}: not found, or not a matrix"
    blocks = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
    if len(blocks) != header.get("block_count"):
        return f"{arch}.block_count={header.get('block_count')}: the file has {len(blocks)} blocks"
    largest = max(size for each in tensors.values() for size in each.shape)
    unused = ("feed_forward_length",) if header.get("expert_count") else ()
    for key in _NAMES:
        value = header.get(key, 0)
        if not key.startswith((*_NOT_IN_TENSORS, *unused)) and value > largest:
            return f"{arch}.{key}={value}: larger than any tensor"
    if header.get("attention.value_length", head_dim) != head_dim:
        return f"{arch}.attention.value_length: expected {head_dim}, the key_length"
    if header.get("rope.dimension_count", head_dim) > head_dim:
        return f"{arch}.rope.dimension_count: expected at most {head_dim}, the head size"
    if arch == "falcon" and header.get("attention.head_count_kv", 1) != 1:
        return "falcon with several key heads: not supported; transformers orders heads differently"
    scale = header.get("attention.scale")
    if scale is not None and arch not in _GEMMA_DEPTHS and not math.isclose(scale, head_dim**-0.5):
        return f"{arch}.attention.scale={scale}: not supported by transformers"
    return ""


def _head_dim(header: GgufHeader) -> int:
    head_dim: int = header.get("embedding_length", 1) // header.get("attention.head_count", 1)
    if header.architecture == "llama":  # it rotates all dimensions of a head
        head_dim = header.get("rope.dimension_count", head_dim)
    return int(header.get("attention.key_length", head_dim))


def _convert(header: GgufHeader) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the content of config.json from all metadata but GGUF_CONFIG_JSON, and notes."""
    from transformers import AutoConfig
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    arch, tensors, head_dim = header.architecture, header.tensors, _head_dim(header)
    hf_config = AutoConfig.for_model(_MODEL_TYPES[arch])
    names = {*hf_config.to_dict(), *hf_config.attribute_map, "rope_theta"}
    # Names that these configuration classes read, but have no default for.
    names |= {"gemma3": {"rope_local_base_freq"}, "qwen3moe": {"head_dim"}}.get(arch, set())
    prefix = f"{arch}."
    unread_keys = {
        x.removeprefix(prefix): y for x, y in header.metadata.items() if x.startswith(prefix)
    }
    heads = unread_keys["attention.head_count"]
    defaults = {"attention.head_count_kv": heads, "attention.key_length": head_dim}
    config: dict[str, Any] = {"model_type": _MODEL_TYPES[arch]}
    for key, value in (defaults | unread_keys).items():
        for name in names.intersection(_NAMES.get(key, "").split()):
            config[name] = value or None  # 0: none, such as no sliding window
            unread_keys.pop(key, None)
    for name, key in {"bos": "bos", "eos": "eos", "pad": "padding"}.items():
        config[f"{name}_token_id"] = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
    config["vocab_size"] = tensors[GGUF_EMBEDDING].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in tensors or arch == "falcon"
    if arch == "stablelm":
        config["use_qkv_bias"] = any(name.endswith(".attn_q.bias") for name in tensors)
        config["use_parallel_residual"] = not any(".ffn_norm." in name for name in tensors)
    if arch == "qwen3moe":
        config["norm_topk_prob"] = True  # llama.cpp always normalizes
    rotary_dim = unread_keys.pop("rope.dimension_count", head_dim)
    if "partial_rotary_factor" in (hf_config.rope_parameters or {}):
        config["partial_rotary_factor"] = rotary_dim / head_dim
    elif rotary_dim != head_dim:
        unread_keys["rope.dimension_count"] = rotary_dim
    notes = _add_rope(config, unread_keys, header) + _add_attention_scale(config, header)
    vocab_type, pre = (header.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if vocab_type == "gpt2" and pre not in (*GGUF_PRE_TOKENIZER_SPLITS, "gpt-2", None):
        notes.append(f"transformers would split text as gpt-2, not as {pre}; set data.tokenizer")
    if unread := sorted(key for key, value in unread_keys.items() if value and key not in _NO_NOTE):
        notes.append(f"{', '.join(unread)}: ignored, as by transformers")
    return config, tuple(notes)


def _add_rope(config: dict[str, Any], unread: dict[str, Any], header: GgufHeader) -> list[str]:
    """Add RoPE scaling to `config`, remove its keys from `unread`, and return notes."""
    rope_type = unread.pop("rope.scaling.type", "none")
    scaling = {name: unread.pop(key) for key, name in _ROPE_KEYS.items() if key in unread}
    if rope_type in ("linear", "yarn") and "factor" in scaling:
        config["rope_scaling"] = {"rope_type": rope_type, **scaling}
        return []
    if rope_type == "none" and not header.tensors.keys() & set(ROPE_FACTORS):
        return []
    return ["RoPE scaling: ignored, as by transformers; set model.overrides.rope_scaling"]


def _add_attention_scale(config: dict[str, Any], header: GgufHeader) -> list[str]:
    """Add the scale of attention to `config`; return a note if it or the window is missing."""
    arch, key = header.architecture, "query_pre_attn_scalar"
    if arch == "starcoder2" and header.get("attention.sliding_window") is None:
        return ["the file has no attention window; set model.overrides.sliding_window"]
    if arch in _GEMMA_DEPTHS and (scale := header.get("attention.scale")):
        config[key] = round(scale**-2)
    elif arch in _GEMMA_DEPTHS and config["num_hidden_layers"] == _GEMMA_DEPTHS[arch]:
        config[key] = config["hidden_size"] // config["num_attention_heads"]
    elif arch in _GEMMA_DEPTHS and config["head_dim"] != 256:
        note = "the file has no attention scale; fsdpctl uses 256**-0.5"
        return [f"{note}; set model.overrides.{key}"]
    return []


def notes_on_gguf(path: str | None) -> tuple[str, ...]:
    """Return lines on what a GGUF file lacks or fsdpctl ignores; () for other models."""
    if path is None or not is_gguf(Path(path)):
        return ()
    file = Path(path)
    return tuple(f"{path}: {each}" for each in _config(file.absolute(), file.stat().st_mtime_ns)[1])
