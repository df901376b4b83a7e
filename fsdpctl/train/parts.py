"""What the training loop works with."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from fsdpctl.checkpoint.manifest import BaseInfo
from fsdpctl.config.schema import Config
from fsdpctl.data.batches import Batches
from fsdpctl.data.source import DataSet
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.optim.record import Limits, StepRecord
from fsdpctl.optim.sgd import ShardedSGD
from fsdpctl.run.clock import StepClock
from fsdpctl.shards import TrainedModel
from fsdpctl.train.run_watch import RunWatch

Optimizer = ShardedAdamW | ShardedSGD


@dataclass(frozen=True, slots=True)
class Outside:
    """What a loop has to do with the process that it runs in."""

    stop_requested: Callable[[], bool]  # by a signal to this rank
    started: float  # when the launch began, in seconds since the epoch
    on_begun: Callable[[Callable[[], None]], None]  # told once, with a barrier of all ranks, when
    # there is something to save: until then a request ends this rank at once


@dataclass(frozen=True, slots=True)
class TrainingParts:
    """Everything that a loop works with, made by assemble.py."""

    config: Config
    run_dir: Path
    data: DataSet
    model: TrainedModel
    optimizer: Optimizer
    train_batches: Batches
    val_batches: Batches | None
    device: torch.device
    outside: Outside
    watch: RunWatch
    shows: bool  # whether rank 0 shows the progress
    lines: tuple[str, ...]  # printed first
    base: BaseInfo | None  # what has the weights that checkpoints leave out; None: they leave none


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device may still be busy with."""

    step: int  # steps done, this one included
    samples: int  # samples consumed, those of this one included
    tokens: int  # of all ranks' samples, without what fills them up
    record: StepRecord
    limits: Limits  # above which it is not applied
    lr: float
    clock: StepClock
