"""Mixture-of-experts models of transformers: idle parameters, and the routers' auxiliary loss."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fsdpctl.config.decoder_config import CONFIG_LOCATION
from fsdpctl.errors import UsageError
from fsdpctl.models.adapter_names import EXPERT_ADAPTERS
from fsdpctl.models.quantized import quantized_shapes
from fsdpctl.models.stacked_experts import named_experts

# Attributes of a PreTrainedModel that hold the factor of its auxiliary loss.
_AUX_FACTORS = ("router_aux_loss_coef", "aux_loss_coef")
_UNSUPPORTED_LOSSES = ("z_loss_coefficient", "z_loss_coef", "router_z_loss_coef")

ReduceCounts = Callable[[Tensor], Tensor]  # sums a tensor over all ranks


def idle_parameters(model: Any, *, only_frozen: bool = False) -> int:
    """Count the parameters, or the frozen ones, of experts that a token's routers do not select."""
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
    top_k = next((value for name in names if (value := getattr(model.config, name, None))), None)
    if top_k is None:
        return 0
    quantized, stacks = quantized_shapes(model), dict(named_experts(model))
    idle = 0
    for name, param in model.named_parameters():
        if only_frozen and param.requires_grad:
            continue
        shape = quantized.get(name, tuple(param.shape))
        num_experts = shape[0] if len(shape) == 3 and "expert" in name else 0
        owner, separator, _ = name.partition(EXPERT_ADAPTERS)
        if separator and owner in stacks:  # an adapter has two dimensions
            num_experts = stacks[owner].num_experts
        if num_experts > top_k:
            idle += prod(shape) * (num_experts - top_k) // num_experts
    return idle


def aux_loss_factor(model: Any) -> float:
    """Return the factor of the routers' auxiliary loss, or 0 without routers.

    UsageError if the model has another loss of routers.
    """
    for name in _UNSUPPORTED_LOSSES:
        if factor := getattr(model, name, None):
            hint = "set it to 0, or model.router_aux_loss=none to train without it"
            raise UsageError(f"{CONFIG_LOCATION}: {name}={factor}: not supported; {hint}")
    factor = next((value for name in _AUX_FACTORS if (value := getattr(model, name, None))), 0.0)
    router_classes: list[Any] = []
    # transformers lists the modules that record an output. Without a router, there is no loss. A
    # backbone may list other outputs than the model.
    for each in model.modules():
        outputs = (getattr(type(each), "_can_record_outputs", None) or {}).get("router_logits", [])
        recorders = outputs if isinstance(outputs, list | tuple) else [outputs]
        router_classes += [getattr(recorder, "target_class", recorder) for recorder in recorders]
    classes = tuple(set(router_classes))
    return float(factor) if any(isinstance(each, classes) for each in model.modules()) else 0.0


def global_aux_loss(
    router_logits: Any, mask: Tensor, model: Any, reduce_counts: ReduceCounts | None
) -> Tensor:
    """Return the load-balancing loss, with each expert's share of tokens over all ranks.

    This is equation 4 of Fedus et al., Switch Transformer, 2021, over all layers at once as in
    transformers. The mean probabilities, which have a gradient, are over this rank's tokens.

    Args:
        router_logits: One tensor for each layer, (tokens, experts).
        mask: Whether a token counts, (batch, length).
        model: The PreTrainedModel.
        reduce_counts: Sums a tensor over all ranks.

    Raises:
        UsageError: If the routers do not have a logit for each expert.
    """
    num_experts = model.num_experts
    if any(each.shape[-1] != num_experts for each in router_logits):
        raise UsageError(
            f"model.router_aux_loss=global: not supported by {model.config.model_type}, whose "
            "routers have no logit for each expert; expected model or none"
        )
    logits = torch.cat([each.flatten(0, -2) for each in router_logits])
    probabilities = torch.softmax(logits, dim=-1)
    expert_indices = torch.topk(probabilities, model.num_experts_per_tok, dim=-1).indices
    weights = mask.flatten().to(torch.float32).repeat(len(router_logits)).unsqueeze(-1)
    counts = torch.zeros(num_experts + 1, dtype=torch.float32, device=probabilities.device)
    counts[:-1] = (F.one_hot(expert_indices, num_experts).sum(dim=1) * weights).sum(dim=0)
    # The number of tokens is the last element, so that one all-reduce suffices.
    counts[-1] = local_tokens = weights.sum()
    if reduce_counts is not None:
        counts = reduce_counts(counts)
    mean_probabilities = (probabilities * weights).sum(dim=0) / local_tokens.clamp(min=1)
    return torch.sum(counts[:-1] / counts[-1] * mean_probabilities) * int(num_experts)
