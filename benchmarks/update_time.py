"""The time of updates of compressed states, and of steps over a base in NF4, on one CPU thread.

    python -m benchmarks.update_time --out benchmarks/results/update-time.json

Updates alternate with one another, and so do steps, so that the load of the machine is equal.
"""

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.little_memory import BASELINE, BF16, WAYS
from benchmarks.report import arguments, write_report
from fsdpctl.config.compose import compose_config
from fsdpctl.config.schema import Resolved
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.resolve.machine import assign_ranks
from fsdpctl.resolve.run_plan import stored_config
from fsdpctl.training.assemble import make_model, make_optimizer
from fsdpctl.training.train_step import Optimizer
from tests.train_step import train_step

ADAPTERS = ["precision=fp32", "model.lora.rank=8"]
BASES = {"float32 weights": ADAPTERS, "NF4 weights": [*ADAPTERS, "model.base_dtype=nf4"]}
SHAPE = [
    "launch.device=cpu", "launch.nproc_per_node=1", "model.num_layers=4", "model.vocab_size=256",
    "train.seq_len=256", "train.micro_batch_size=4", "train.global_batch_size=4",
    "accumulation.steps=1",
]  # fmt: skip


def _bytes(model: ShardedModel, optimizer: Optimizer) -> dict[str, float]:
    """Return the bytes per parameter of master weights and moments, and those that a step moves."""
    shards = list(model.flat_shards())
    numel = sum(shard.master.numel() for shard in shards)
    masters = [shard.master for shard in shards]
    masters += [shard.remainder for shard in shards if shard.remainder is not None]
    at_rest = sum(each.nbytes for each in masters) + optimizer.memory_bytes()
    gradients = sum(shard.master.numel() * shard.grad_dtype.itemsize for shard in shards)
    moved = (2 * at_rest + gradients) / numel  # with gradients: read and written
    return {
        "bytes_per_parameter": round(at_rest / numel, 3),
        "moved_bytes_per_parameter": round(moved, 3),
    }


def _made(settings: list[str], width: int) -> tuple[Resolved, ShardedModel, Optimizer]:
    shape = [*SHAPE, f"model.hidden_size={width}", f"model.intermediate_size={3 * width}"]
    config = stored_config(assign_ranks(compose_config([*shape, *settings]).config))
    model = make_model(config, torch.device("cpu"))
    return config, model, make_optimizer(config, model)


def _updating(model: ShardedModel, optimizer: Optimizer) -> Callable[[], object]:
    """Return an update with the gradients of one backward."""
    model(torch.randint(256, (1, 16))).float().square().mean().backward()
    scale, finite = torch.tensor(2.0), torch.zeros(())  # as the trainer clips
    return partial(optimizer.step, grad_scale=scale, found_inf=finite)


def _times(functions: Mapping[str, Callable[[], object]], rounds: int) -> list[dict[str, Any]]:
    """Return medians over alternating rounds, and ratios to the first function."""
    turns = [{name: _seconds(f) for name, f in functions.items()} for _ in range(1 + rounds)][1:]
    base = next(iter(functions))
    return [
        {
            "name": name,
            "seconds": median(turn[name] for turn in turns),
            "over_float32": round(median(turn[name] / turn[base] for turn in turns), 3),
        }
        for name in functions
    ]


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    """Measure, print and write."""
    options = arguments(width=512, rounds=25)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    runs = {name: _made([*BF16, *args], options.width)[1:] for name, args in WAYS.items()}
    times = _times({name: _updating(*each) for name, each in runs.items()}, options.rounds)
    results = [{**time, **_bytes(*runs[time["name"]])} for time in times]
    steps = {n: partial(train_step, *_made(args, options.width)) for n, args in BASES.items()}
    adapters = _times(steps, options.rounds)
    print(*results, *adapters, sep="\n")
    parameters = sum(shard.master.numel() for shard in runs[BASELINE][0].flat_shards())
    kwargs = {"parameters": parameters, "tokens": 4 * 256, "rounds": options.rounds}
    write_report(options.out, "update_time", results, adapters=adapters, **kwargs)


if __name__ == "__main__":
    main()
