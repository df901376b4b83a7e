"""The FLOPs of a model, and the share of the devices' peak that a run uses (MFU)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdpctl.config.any_decoder import declared, family_of
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.recipe import known_gpu
from fsdpctl.config.schema import Config
from fsdpctl.models.experts import idle_parameters
from fsdpctl.models.quantized import count_weights
from fsdpctl.models.registry import count_active


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """The FLOPs per token of a model, and the peak FLOP/s of the devices."""

    per_token: int  # forward and backward, without recomputation; 0: there are no tokens
    peak: float | None  # FLOP/s of all ranks together; None: unknown

    def utilization(self, tokens_per_second: float) -> float | None:
        """Return the model FLOPs utilization, MFU (Chowdhery et al., PaLM, 2022)."""
        return None if self.peak is None else self.per_token * tokens_per_second / self.peak


def model_flops(config: Config, module: Any, device: torch.device, ranks: int) -> ModelFlops:
    if config.model.is_own:
        return ModelFlops(0, None)
    per_token = flops_per_token(config.model, count_active(module), config.train.seq_len)
    per_token -= 2 * _num_frozen(module)
    peak = _peak(config, device)
    return ModelFlops(per_token, None if peak is None else peak * ranks)


def _peak(config: Config, device: torch.device) -> float | None:
    """Return the peak FLOP/s of a GPU in bfloat16, if the model computes in it; else None."""
    if device.type != "cuda" or config.precision.param_dtype != "bfloat16":
        return None
    gpu = known_gpu(torch.cuda.get_device_name(device))
    return None if gpu is None else gpu.peak


def _num_frozen(module: Any) -> int:
    """Count frozen parameters that a token uses: without a gradient, each saves it 2 FLOPs.

    Every frozen parameter is assumed to propagate the gradient of an activation.
    """
    looked_up = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
    looked_up -= {id(each.weight) for each in module.modules() if isinstance(each, nn.Linear)}
    counts, params = count_weights(module), dict(module.named_parameters())
    frozen = sum(
        counts[name]
        for name, param in params.items()
        if not param.requires_grad and id(param) not in looked_up
    )
    return frozen - idle_parameters(module.transformers_model, only_frozen=True)


def flops_per_token(model: ModelConfig, num_params: int, seq_len: int) -> int:
    """Return 6 (N - N_embedding) + 12 L h s as torchtitan: h is the total width of a layer's heads.

    N are the `num_params` parameters that a token uses. An embedding is a lookup and does not
    count, unless it is also the output head. Attention counts as if every token saw all
    `seq_len`; causal masking does not halve it.
    """
    assert model.vocab_size is not None
    if not declared(model, "tie_word_embeddings"):
        num_params -= model.vocab_size * model.hidden_size
    if family_of(model) == "gpt2":
        num_params -= model.max_seq_len * model.hidden_size
    heads = model.num_heads * model.head_width
    return 6 * num_params + 12 * model.num_layers * heads * seq_len
