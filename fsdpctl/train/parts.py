"""What the training loop works with."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from fsdpctl.config.schema import Config
from fsdpctl.data.batches import Batches
from fsdpctl.data.source import DataSet
from fsdpctl.engine.model import ShardedModel
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.optim.record import StepRecord
from fsdpctl.train.clock import StepClock
from fsdpctl.watch.run_watch import RunWatch


@dataclass(frozen=True, slots=True)
class TrainingParts:
    """Everything that a loop works with, made by assemble.py."""

    config: Config
    run_dir: Path
    data: DataSet
    model: ShardedModel
    optimizer: ShardedAdamW
    train_batches: Batches
    val_batches: Batches | None
    device: torch.device
    watch: RunWatch
    stop_requested: Callable[[], bool]
    shows: bool  # whether rank 0 shows the progress


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device may still be busy with."""

    step: int  # steps done, this one included
    record: StepRecord
    lr: float
    clock: StepClock
