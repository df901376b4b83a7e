"""Training on ranks forked from this process, with planted losses and gradients."""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from fsdpctl.comm.world import World
from fsdpctl.config.compose import compose_config
from fsdpctl.config.schema import Resolved
from fsdpctl.data.batches import MicroBatch
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.errors import FsdpctlError
from fsdpctl.io.run_files import METRICS
from fsdpctl.resolve.prepare import prepare
from fsdpctl.resolve.run_plan import make_run_plan, stored_plan
from fsdpctl.run.assets import collect_assets
from fsdpctl.run.directory import inspect_run_dir, prepare_run_dir
from fsdpctl.training import train_step
from fsdpctl.training import validation_loss as losses
from fsdpctl.training.assemble import make_trainer
from fsdpctl.training.decoder_loss import summed_loss
from fsdpctl.training.train_step import LaunchContext
from fsdpctl.training.trainer import Trainer
from tests.commands.run import TINY, make_text
from tests.distributed import distributed

LOWEST = 8
CPU = torch.device("cpu")
Plants = Mapping[int, tuple[str, int]]  # by number of the batch: what to plant, and on which rank


class _BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float("nan")


def _large_gradient(loss: Tensor) -> Tensor:
    return loss.detach() + 1e9 * (loss - loss.detach())


PLANTED: dict[str, Callable[[Tensor], Tensor]] = {
    "loss": lambda loss: loss * float("nan"), "gradient": _BadGradient.apply,
    "loss spike": lambda loss: loss * 100, "gradient spike": _large_gradient,
}  # fmt: skip


def run_args(folder: Path, ranks: int, *more: str) -> list[str]:
    """Return the settings of a run without validation and with a constant learning rate."""
    args = [
        *TINY, f"data.path={make_text(folder)}", "data.val_fraction=0", "optimizer.lr=1e-2",
        "lr_scheduler=constant", "lr_scheduler.warmup_steps=0", "optimizer.max_grad_norm=0",
        "checkpoint.mode=sync", "checkpoint.every=4", "train.global_batch_size=12",
        f"launch.nproc_per_node={ranks}", "launch.device=cpu", "train.self_check=off", *more,
    ]  # fmt: skip
    last = dict(arg.split("=", 1) for arg in args)
    return [f"{name}={value}" for name, value in last.items()]


def lines(run: Path) -> list[dict[str, Any]]:
    """Return the lines of the metrics file of a run."""
    return [json.loads(line) for line in (run / METRICS).read_text().splitlines()]


def resolved(typed: list[str]) -> Resolved:
    return make_run_plan(prepare(compose_config(typed)).config).config


def new_trainer(
    typed: list[str], stop_requested: Callable[[], bool] = lambda: False, device: torch.device = CPU
) -> Trainer:
    """Return the trainer of this rank, and make the run directory. Collective."""
    opened = prepare(compose_config(typed))
    config = make_run_plan(opened.config).config
    seen = inspect_run_dir(config, "auto")
    dist.barrier()
    if dist.get_rank() == 0:
        seen.run_dir.mkdir(exist_ok=True)
        prepare_run_dir(seen, config, typed, collect_assets(config, opened.data))
    dist.barrier()
    world = World(dist.get_rank(), dist.get_rank(), dist.get_world_size(), device)
    context = LaunchContext(stop_requested, time.time(), lambda wait_for_all: wait_for_all())
    return make_trainer(stored_plan(seen.config), world, context, shows=False)


def plant(trainer: Trainer, plants: Plants) -> AbstractContextManager[object]:
    """Plant values into the losses of batches, one per step."""
    count = trainer.samples // trainer.parts.config.train.global_batch_size

    def planted(*options: Any) -> Tensor:
        nonlocal count
        what, fault_rank = plants.get(count, ("", -1))
        count += 1
        loss: Tensor = summed_loss(*options)
        return PLANTED[what](loss) if fault_rank == dist.get_rank() else loss

    return mock.patch.object(train_step, "summed_loss", planted)


def plant_valley(trainer: Trainer) -> AbstractContextManager[object]:
    """Plant validation losses that fall until step LOWEST and rise after it."""

    def planted(model: object, batch: MicroBatch, *options: object) -> tuple[float, int]:
        return batch.targets.numel() * (1.0 + abs(trainer.step - LOWEST)), batch.targets.numel()

    return mock.patch.object(losses, "_pass_loss", planted)


@distributed(timeout=150)
def train(
    rank: int, world_size: int, typed: list[str], plants: Plants, lag: int = 0, stops_at: int = 0,
    result: str = "",
) -> None:  # fmt: skip
    """Train to the end, or until a stop is requested before step `stops_at`.

    If the run has `train.patience`, its validation losses are those of `plant_valley`.

    The weights are written to the file `result`, and the error to `result`.error.
    """
    holder: list[Trainer] = []

    def is_asked() -> bool:
        return rank == world_size - 1 and bool(stops_at) and holder[0].step + 1 >= stops_at

    trainer = new_trainer(typed, is_asked)
    holder.append(trainer)
    trainer.lag = lag  # as on CUDA
    valley = plant_valley(trainer) if trainer.parts.config.train.patience else nullcontext()
    error = ""
    try:
        with plant(trainer, plants), valley:
            trainer.run()
    except FsdpctlError as raised:
        error = f"{raised.exit_code} {raised}"
    errors = trainer.parts.model.collectives.all_gather_values(error)
    assert len(set(errors)) == 1, errors
    assert isinstance(trainer.parts.model, ShardedModel)
    state = trainer.parts.model.state_dict()
    if rank == 0:
        torch.save(state, result)
        Path(f"{result}.error").write_text(error)
