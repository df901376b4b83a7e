"""Construction of the optimizer from a resolved configuration."""

from collections.abc import Callable
from typing import Any

import torch

from fsdpctl.config.schema import Config, OptimizerConfig
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.optim.muon import ShardedMuon
from fsdpctl.optim.sgd import ShardedSGD
from fsdpctl.plan.optimizers import MUON, get_optimizer
from fsdpctl.train.step import Optimizer, TrainedModel

_STATES = {None: None, "float32": torch.float32, "int8": torch.int8}


def make_optimizer(config: Config, model: TrainedModel) -> Optimizer:
    """Return the optimizer over the model's shards; UsageError if no optimizer has this name."""
    about = config.optimizer
    return MAKERS[get_optimizer(about.name).name](about, model)


def _sgd(about: OptimizerConfig, model: TrainedModel) -> Optimizer:
    return ShardedSGD(
        model, lr=about.lr or 0.0, momentum=about.momentum, weight_decay=about.weight_decay
    )


def _adamw(about: OptimizerConfig, model: TrainedModel) -> Optimizer:
    return ShardedAdamW(model, **_of_adamw(about), state_dtype=_STATES[about.state_dtype])


def _muon(about: OptimizerConfig, model: TrainedModel) -> Optimizer:
    return ShardedMuon(
        model,
        momentum=about.momentum,
        nesterov=about.nesterov,
        ns_steps=about.ns_steps,
        **_of_adamw(about),
    )


def _of_adamw(about: OptimizerConfig) -> dict[str, Any]:
    return {
        "lr": about.lr or 0.0,  # the trainer sets it before every step
        "betas": (about.beta1, about.beta2),
        "eps": about.eps,
        "weight_decay": about.weight_decay,
    }


MAKERS: dict[str, Callable[[OptimizerConfig, TrainedModel], Optimizer]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    MUON: _muon,
}
