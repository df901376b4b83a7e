"""Trains configurations in turn on two ranks, by the trainer's own steps."""

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import spawn

from fsdpctl.comm.world import World
from fsdpctl.config.schema import Config
from fsdpctl.optim.record import Limits, LocalStepStats
from fsdpctl.tools.compare.measure import drifts_between, in_turn
from fsdpctl.train.assemble import make_trainer
from fsdpctl.train.step import LaunchContext, launch_step

RANKS, WARM_UP = 2, 2


@contextmanager
def joined(rank: int, folder: Path) -> Iterator[World]:
    """A gloo group of the ranks that meet in `folder`."""
    torch.set_num_threads(1)
    store = FileStore(str(folder / "rendezvous"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    yield World(rank, rank, RANKS, torch.device("cpu"))
    dist.barrier()
    dist.destroy_process_group()


def step_seconds(configs: Mapping[str, Config], *, rounds: int, steps: int) -> dict[str, float]:
    """Of each resolved configuration, the median over rounds of the medians of their steps.

    Another one begins each round, and how fast the machine was in a round is divided out: what it
    does meanwhile, it does to all. Ranks have the allocator of a run's.
    """
    own = next(iter(configs.values())).launch.allocator_environment
    with mock.patch.dict(os.environ, own), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spawn(_train_all, (list(configs.values()), rounds, steps, folder), nprocs=RANKS)
        found: list[list[float]] = json.loads((folder / "seconds").read_text())
    drifts = drifts_between([[1 / each for each in of] for of in found])
    return {
        name: median(each * drift for each, drift in zip(of, drifts, strict=True))
        for name, of in zip(configs, found, strict=True)
    }


def _train_all(rank: int, configs: Sequence[Config], rounds: int, steps: int, folder: Path) -> None:
    seconds: list[list[float]] = [[] for _ in configs]
    with joined(rank, folder) as world:
        for number in range(rounds):
            for place in in_turn(range(len(configs)), number, rounds):
                run_dir = folder / f"{number}-{place}"
                seconds[place].append(_train(configs[place], world, run_dir, steps))
    if rank == 0:
        (folder / "seconds").write_text(json.dumps(seconds))


def _train(config: Config, world: World, run_dir: Path, steps: int) -> float:
    """The median of so many steps, after some that warm up."""
    run_dir.mkdir(exist_ok=True)
    last = WARM_UP + steps
    train = replace(config.train, run_dir=str(run_dir), steps=last)
    context = LaunchContext(lambda: False, time.time(), lambda barrier: None)
    parts = make_trainer(replace(config, train=train), world, context, shows=False).parts
    samples, seconds = 0, []
    for step in range(last):
        began = time.perf_counter()
        done = launch_step(parts, step, samples, limits=Limits(), own=LocalStepStats)
        done.record.figures()
        samples = done.samples
        seconds.append(time.perf_counter() - began)
    return median(seconds[WARM_UP:])
