"""Models of transformers with experts: what a token uses, and the loss of their routers."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Counts = Callable[[Tensor], Tensor]


def idle_parameters(model: Any) -> int:
    """Count the parameters of experts that a token is not sent to."""
    config = model.config
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
    top = next((value for name in names if (value := getattr(config, name, None))), None)
    if top is None:
        return 0
    experts = (
        param
        for name, param in model.named_parameters()
        if param.ndim == 3 and "expert" in name and len(param) > top
    )
    return sum(param.numel() * (len(param) - top) // len(param) for param in experts)


def aux_loss_factor(model: Any) -> float:
    """Return the factor of the routers' auxiliary loss; 0 if the model has none."""
    takes = "output_router_logits" in inspect.signature(type(model).forward).parameters
    found = getattr(model.config, "router_aux_loss_coef", None) if takes else None
    return float(found or 0.0)


def global_balance(routers: Any, config: Any, reduce_counts: Counts | None) -> Tensor:
    """Return the load-balancing loss with each expert's share of tokens taken over all ranks.

    The loss of Fedus et al., Switch Transformer, 2021, eq. 4, over all layers at once as in
    transformers: only the mean probabilities, which have the gradient, are this rank's.

    Args:
        routers: The router logits of each layer, (tokens, experts).
        config: transformers' configuration.
        reduce_counts: Sums a tensor over all ranks.
    """
    logits = torch.cat([each.flatten(0, -2) for each in routers], dim=0)
    odds = torch.softmax(logits, dim=-1)
    chosen = torch.topk(odds, config.num_experts_per_tok, dim=-1).indices
    counts = torch.zeros(logits.shape[-1] + 1, dtype=torch.float32, device=logits.device)
    counts[:-1] = F.one_hot(chosen, logits.shape[-1]).sum(dim=(0, 1))
    counts[-1] = len(logits)
    if reduce_counts is not None:
        counts = reduce_counts(counts)
    return logits.shape[-1] * torch.sum(counts[:-1] / counts[-1] * odds.mean(dim=0))
