"""Construction of the optimizer from a resolved configuration."""

from typing import Any

import torch

from fsdpctl.config.schema import Config
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.optim.muon import ShardedMuon
from fsdpctl.optim.sgd import ShardedSGD
from fsdpctl.plan.muon import MUON
from fsdpctl.train.step import Optimizer, TrainedModel

_STATES = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


def make_optimizer(config: Config, model: TrainedModel) -> Optimizer:
    """Return the optimizer over the model's shards."""
    about = config.optimizer
    if about.name == "sgd":
        return ShardedSGD(
            model, lr=about.lr or 0.0, momentum=about.momentum, weight_decay=about.weight_decay
        )
    adamw: dict[str, Any] = {
        "lr": about.lr or 0.0,  # the trainer sets it before every step
        "betas": (about.beta1, about.beta2),
        "eps": about.eps,
        "weight_decay": about.weight_decay,
    }
    if about.name == MUON:
        return ShardedMuon(
            model,
            momentum=about.momentum,
            nesterov=about.nesterov,
            ns_steps=about.ns_steps,
            **adamw,
        )
    return ShardedAdamW(model, **adamw, state_dtype=_STATES[about.state_dtype])
