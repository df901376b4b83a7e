"""Modules and initial weights by model configuration."""

import hashlib
import math

import torch
from torch import Tensor, nn

from fsdpctl.config.model import TRANSFORMERS, ModelConfig
from fsdpctl.config.peft import is_adapter
from fsdpctl.config.schema import KEYS
from fsdpctl.errors import UsageError
from fsdpctl.models.experts import idle_parameters
from fsdpctl.models.llama import LlamaDecoder
from fsdpctl.models.lora import choose_trained, draw_adapter
from fsdpctl.models.quantized import count_weights
from fsdpctl.models.transformers_build import build_transformers, draw_parameter
from fsdpctl.models.transformers_decoder import TransformersDecoder

DRAWN_ON_DEVICE = 1 << 24  # elements of a matrix from which a GPU draws it
_DRAWN_AT_ONCE = 1 << 24

# Settings of some architectures only, and their value in the others.
_ONLY = {
    "sliding_window": (("mistral", "qwen2", "qwen3"), None),
    "attention_bias": (("llama", "qwen3"), False),
    "mlp_bias": (("llama",), False),
}


def _check(config: ModelConfig) -> None:
    name = config.architecture
    if name == TRANSFORMERS:
        return  # config.json determines all of them
    for key, (having, nothing) in _ONLY.items():
        if getattr(config, key) != nothing and name not in having:
            raise UsageError(
                f"model.{key}={KEYS[f'model.{key}'].text(getattr(config, key))}: not supported by "
                f"model.architecture={name}, only by {', '.join(having)}"
            )
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
    if name == "gpt2":
        _check_gpt2(config)
    elif _head_dim(config) % 2:
        raise UsageError(
            f"model.head_dim={_head_dim(config)}: rotary embeddings need an even width"
        )
    if config.rope_scaling == "yarn" and config.rope_theta == 1:
        raise UsageError("model.rope_theta=1: yarn needs a base above 1")
    if config.rope_high_freq_factor <= config.rope_low_freq_factor:
        raise UsageError(
            f"model.rope_high_freq_factor={config.rope_high_freq_factor:g}: must exceed "
            f"model.rope_low_freq_factor={config.rope_low_freq_factor:g}"
        )


def _check_gpt2(config: ModelConfig) -> None:
    if config.num_kv_heads != config.num_heads:
        raise UsageError(
            f"model.num_kv_heads={config.num_kv_heads}: gpt2 requires the value of "
            f"model.num_heads={config.num_heads}"
        )
    if _head_dim(config) * config.num_heads != config.hidden_size:
        raise UsageError(
            f"model.head_dim={config.head_dim}: gpt2 requires model.hidden_size / model.num_heads"
        )
    if config.rope_scaling != "none":
        raise UsageError(f"model.rope_scaling={config.rope_scaling}: gpt2 has no rotary embeddings")


def _head_dim(config: ModelConfig) -> int:
    return config.head_dim or config.hidden_size // config.num_heads


def build_model(config: ModelConfig) -> nn.Module:
    """Build the module with its adapters on the meta device, without memory.

    Raises:
        UsageError: If the model's numbers are inconsistent, or nothing is trained.
    """
    module = build_plain(config)
    whole = sum(count_weights(module).values())
    if config.router_aux_loss == "global" and count_active(module) == whole:
        raise UsageError("model.router_aux_loss=global: only valid with a model that has routers")
    with torch.device("meta"):
        choose_trained(module, config)
    return module


def build_plain(config: ModelConfig) -> nn.Module:
    """Build the module without adapters, with all parameters trainable, on the meta device.

    Raises:
        UsageError: If the model's numbers are inconsistent.
    """
    _check(config)
    if config.vocab_size is None:
        raise UsageError("model.vocab_size=auto: unknown without data; set a number")
    try:
        with torch.device("meta"):
            module: nn.Module
            if config.is_foreign:
                module = build_transformers(config)
            else:
                module = LlamaDecoder(config, _head_dim(config), config.vocab_size)
            return module
    except (RuntimeError, TypeError, OverflowError):
        raise UsageError("model: matrices of these sizes are too large for any machine") from None


def count_active(module: nn.Module) -> int:
    """Count the parameters that a token uses: of experts, only as many as it is sent to."""
    count = sum(count_weights(module).values())
    if not isinstance(module, TransformersDecoder):
        return count
    return count - idle_parameters(module.transformers_model)


def initialize_parameter(name: str, whole: Tensor, *, seed: int, config: ModelConfig) -> None:
    """Initialize a parameter in place, from the seed and its name alone.

    Vectors are norm weights, which become 1, or biases, which become 0. On CUDA the device draws
    matrices of at least DRAWN_ON_DEVICE elements, because one core takes an hour for 405B. So
    models with such matrices have other initial weights on a GPU than on a CPU, but the same for
    any number of ranks. In GPT-2, projections into the residual stream are scaled down by the root
    of their number, as its authors do. `draw_adapter` draws adapters.
    """
    if config.architecture == TRANSFORMERS and not is_adapter(name):
        draw_parameter(name, whole, _seed_of(name, seed), config)
        return
    if whole.ndim <= 1:
        whole.fill_(0.0 if name.endswith(".bias") else 1.0)
        return
    number = _seed_of(name, seed)
    generator = torch.Generator().manual_seed(number)
    if is_adapter(name):
        draw_adapter(name, whole, generator)
        return
    std = config.init_std
    if config.architecture == "gpt2" and name.endswith("c_proj.weight"):
        std /= math.sqrt(2 * config.num_layers)
    if whole.is_cuda and whole.numel() >= DRAWN_ON_DEVICE:
        generator = torch.Generator(whole.device).manual_seed(number)
        for part in whole.view(-1).split(_DRAWN_AT_ONCE):
            values = torch.empty(len(part), dtype=torch.float32, device=whole.device)
            part.copy_(values.normal_(0.0, std, generator=generator))
        return
    # Drawn on the CPU in float32, so that device and precision do not change the draw.
    values = torch.empty(whole.shape, dtype=torch.float32)
    whole.copy_(values.normal_(0.0, std, generator=generator))


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
