"""The objects of a training run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from fsdpctl.config.schema import Config
from fsdpctl.data.batches import Batches
from fsdpctl.data.tokens import DataSet
from fsdpctl.engine.model import ShardedModel
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.optim.record import Limits, StepRecord
from fsdpctl.optim.sgd import ShardedSGD
from fsdpctl.peers.model import PeerModel
from fsdpctl.run.clock import StepClock

Optimizer = ShardedAdamW | ShardedSGD
TrainedModel = ShardedModel | PeerModel


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """The process of a rank, as the training loop sees it."""

    stop_requested: Callable[[], bool]  # by a signal to this rank
    started: float  # when the launch began, in seconds since the epoch
    # Called once there is something to save, with a barrier of all ranks. Before that, a stop
    # request ends this rank at once.
    on_first_step: Callable[[Callable[[], None]], None]


@dataclass(frozen=True, slots=True)
class TrainingParts:
    """The objects of a training run, made by assemble.py."""

    config: Config
    run_dir: Path
    data: DataSet
    model: TrainedModel
    optimizer: Optimizer
    train_batches: Batches
    val_batches: Batches | None
    device: torch.device


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device may still be computing."""

    step: int  # steps, including this one
    samples: int  # samples consumed, including this step
    tokens: int  # in the samples of all ranks, without padding
    record: StepRecord
    limits: Limits  # above which the step is not applied
    lr: float
    clock: StepClock
