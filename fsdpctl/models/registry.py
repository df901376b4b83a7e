"""From a model's configuration to a module, its initial weights and its Hugging Face config."""

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from fsdpctl.config.schema import ModelConfig
from fsdpctl.errors import UsageError
from fsdpctl.models.llama import LlamaDecoder


def head_dim_of(config: ModelConfig) -> int:
    """The width of a head.

    Raises:
        UsageError: the model's numbers contradict each other.
    """
    if config.num_heads % config.num_kv_heads:
        raise UsageError(
            f"model.num_kv_heads={config.num_kv_heads}: must divide the "
            f"{config.num_heads} heads of model.num_heads"
        )
    if config.head_dim is None and config.hidden_size % config.num_heads:
        raise UsageError(
            f"model.num_heads={config.num_heads}: must divide model.hidden_size="
            f"{config.hidden_size}, or set model.head_dim"
        )
    head_dim = config.head_dim or config.hidden_size // config.num_heads
    if head_dim % 2:
        raise UsageError(f"model.head_dim={head_dim}: rotary embeddings need an even width")
    if config.rope_high_freq_factor <= config.rope_low_freq_factor:
        raise UsageError(
            f"model.rope_high_freq_factor={config.rope_high_freq_factor:g}: must exceed "
            f"model.rope_low_freq_factor={config.rope_low_freq_factor:g}"
        )
    return head_dim


def build_model(config: ModelConfig) -> nn.Module:
    """The module on the meta device: shapes and names, no memory.

    Raises:
        UsageError: the model's numbers contradict each other.
    """
    head_dim = head_dim_of(config)
    if config.vocab_size is None:
        raise UsageError("model.vocab_size=auto: not known without data; give a number")
    try:
        with torch.device("meta"):
            return LlamaDecoder(config, head_dim, config.vocab_size)
    except (RuntimeError, TypeError, OverflowError):
        raise UsageError("model: its sizes make matrices too large for any machine") from None


def initialize_parameter(name: str, whole: Tensor, *, seed: int, std: float) -> None:
    """Fill a parameter in place, from the seed and its name alone.

    Vectors are norm weights and become 1. Projections into the residual stream are not scaled
    down: the models here are normalised before each projection.
    """
    if whole.ndim <= 1:
        whole.fill_(1.0)
        return
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    # Drawn on the CPU in float32, so that device and precision do not change the draw.
    values = torch.empty(whole.shape, dtype=torch.float32)
    whole.copy_(values.normal_(0.0, std, generator=generator))


def hugging_face_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The contents of config.json for a model saved in `dtype`."""
    family = "qwen3" if config.qk_norm else "llama"
    content: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM"],
        "model_type": family,
        "attention_bias": False,
        "head_dim": head_dim_of(config),
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": config.init_std,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_seq_len,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }
    if config.rope_scaling == "llama3":
        content["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": config.rope_factor,
            "low_freq_factor": config.rope_low_freq_factor,
            "high_freq_factor": config.rope_high_freq_factor,
            "original_max_position_embeddings": config.rope_original_len,
        }
    return content
