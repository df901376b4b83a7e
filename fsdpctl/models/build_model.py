"""Building a model from its configuration, and initializing its parameters by name."""

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

from fsdpctl.config.decoder_config import config_value, model_type_of
from fsdpctl.config.model import ModelConfig
from fsdpctl.errors import UsageError
from fsdpctl.models.adapter_names import is_adapter_name
from fsdpctl.models.experts import idle_parameters
from fsdpctl.models.lora import init_adapter, set_trainable
from fsdpctl.models.quantized import count_weights
from fsdpctl.models.transformers_build import build_transformers, init_as_transformers
from fsdpctl.models.transformers_decoder import TransformersDecoder

MIN_DRAWN_ON_DEVICE = 1 << 24  # elements: a GPU initializes matrices of this size or larger
_ELEMENTS_AT_ONCE = 1 << 24

# Model types that this file initializes; transformers' code initializes the others.
_INIT_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")


def build_model(config: ModelConfig, *, transformers_norms: bool = False) -> TransformersDecoder:
    """Build the module with its adapters on the meta device.

    UsageError if settings select no parameter to train, or the model does not support them.
    """
    module = build_base_model(config, transformers_norms=transformers_norms)
    num_weights = sum(count_weights(module).values())
    # Routers are detected by the experts that they leave idle for a token.
    if config.router_aux_loss == "global" and count_active_parameters(module) == num_weights:
        raise UsageError("model.router_aux_loss=global: only valid with a model that has routers")
    with torch.device("meta"):
        set_trainable(module, config)
    return module


def build_base_model(
    config: ModelConfig, *, transformers_norms: bool = False
) -> TransformersDecoder:
    """Build the module without adapters, with all parameters trainable, on the meta device.

    With `transformers_norms`, norms run transformers' code, which saves more for backward.
    UsageError if the vocabulary size is unknown, or matrices are too large.
    """
    if config.vocab_size is None:
        raise UsageError("model.vocab_size=auto: unknown without data; set a number")
    try:
        with torch.device("meta"):
            return build_transformers(config, transformers_norms=transformers_norms)
    except (RuntimeError, TypeError, OverflowError):
        raise UsageError("model: matrices of these sizes are too large for any machine") from None


def count_active_parameters(module: Any) -> int:
    """Count the parameters that a token uses, without the experts that routers do not select."""
    return sum(count_weights(module).values()) - idle_parameters(module.transformers_model)


def initialize_parameter(name: str, tensor: Tensor, *, seed: int, config: ModelConfig) -> None:
    """Initialize a parameter in place as transformers does, from its name and a seed only.

    On CUDA, the device draws matrices of `_INIT_TYPES` with at least MIN_DRAWN_ON_DEVICE elements,
    because one CPU core would take an hour for 405B. So initial weights of models with such
    matrices differ between GPU and CPU, but are the same on any number of ranks.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    param_seed = int.from_bytes(digest[:8], "little") >> 1
    model_type = "" if is_adapter_name(name) else model_type_of(config)
    if model_type and model_type not in _INIT_TYPES:
        init_as_transformers(name, tensor, param_seed, config)
        return
    if tensor.ndim <= 1:
        tensor.fill_(0.0 if name.endswith(".bias") else 1.0)
        return
    generator = torch.Generator().manual_seed(param_seed)
    if is_adapter_name(name):
        init_adapter(name, tensor, generator)
        return
    std = float(config_value(config, "initializer_range"))
    if model_type == "gpt2" and name.endswith("c_proj.weight"):
        std /= math.sqrt(2 * config.num_layers)  # projections into the residual stream
    if tensor.is_cuda and tensor.numel() >= MIN_DRAWN_ON_DEVICE:
        generator = torch.Generator(tensor.device).manual_seed(param_seed)
        for chunk in tensor.view(-1).split(_ELEMENTS_AT_ONCE):
            values = torch.empty(len(chunk), dtype=torch.float32, device=tensor.device)
            chunk.copy_(values.normal_(0.0, std, generator=generator))
        return
    # The CPU draws in float32, so that device and dtype do not change the values.
    values = torch.empty(tensor.shape, dtype=torch.float32)
    tensor.copy_(values.normal_(0.0, std, generator=generator))
