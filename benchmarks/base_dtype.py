"""A step of adapters over a frozen base in NF4, beside one in float32 and bfloat16, on the CPU.

    python -m benchmarks.base_dtype --out benchmarks/results/base-dtype.json

All models are there at once, and rounds of a step of each alternate, so that the load of the
machine is the same for all. The CPU says nothing about GPUs.
"""

import argparse
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.report import write_report
from benchmarks.training import train_step
from fsdpctl.config.compose import compose_config
from fsdpctl.engine.model import ShardedModel
from fsdpctl.plan.schedule import Event, EventKind
from fsdpctl.resolve.machine import placed_on_cluster
from fsdpctl.train.assemble import make_model
from fsdpctl.train.optimizers import make_optimizer

BASES = {
    "fp32": ["precision=fp32"],
    "bf16": ["precision=bf16"],
    "nf4, fp32 compute": ["precision=fp32", "model.base_dtype=nf4"],
    "nf4, bf16 compute": ["precision=bf16", "model.base_dtype=nf4"],
}
RANKS = 2


@dataclass(frozen=True, slots=True)
class Step:
    """A step with one kind of base."""

    base: str
    tokens_per_rank: int
    median_seconds: float
    gathered_bytes: int  # of all units, in a step
    at_rest_bytes: int  # of the largest rank's parameters


def words(width: int, seq_len: int) -> list[str]:
    """Return the settings that all models share."""
    return [
        "launch.device=cpu", f"launch.nproc_per_node={RANKS}", "model.num_layers=4",
        f"model.hidden_size={width}", f"model.intermediate_size={4 * width}",
        "model.num_heads=8", "model.num_kv_heads=8", "model.vocab_size=4096",
        "model.lora.rank=16", f"train.seq_len={seq_len}", "train.micro_batch_size=1",
        f"train.global_batch_size={RANKS}", "accumulation.steps=1", "train.loss_chunk_tokens=0",
    ]  # fmt: skip


def measure(rank: int, given: argparse.Namespace, seq_len: int, store: str, out: str) -> None:
    """Measure on one rank; rank 0 writes what all took."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // RANKS))
    where = f"file://{store}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=RANKS)
    runs = {}
    for name, more in BASES.items():
        config = placed_on_cluster(compose_config([*words(given.width, seq_len), *more]).config)
        model = make_model(config, torch.device("cpu"))
        runs[name] = (config, model, make_optimizer(config, model))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(given.rounds + 1):  # the first one warms up
        for name, (config, model, optimizer) in runs.items():
            dist.barrier()
            start = time.perf_counter()
            train_step(config, model, optimizer)
            dist.barrier()
            if number:
                seconds[name].append(time.perf_counter() - start)
    results = []
    for name, (config, model, optimizer) in runs.items():
        events: list[Event] = []
        model.ledger.trace = events
        train_step(config, model, optimizer)
        gathered = sum(each.nbytes for each in events if each.kind is EventKind.GATHER)
        results.append(Step(name, seq_len, median(seconds[name]), gathered, at_rest(model)))
    if rank == 0:
        Path(out).write_text(json.dumps([asdict(each) for each in results]))
    dist.destroy_process_group()


def at_rest(model: ShardedModel) -> int:
    """Return the bytes of a rank's parameters between steps."""
    return sum(shard.master.nbytes for shard in model.flat_shards())


def main() -> None:
    """Measure, print, and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--seq-lens", type=int, nargs="*", default=[256, 1024])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for seq_len in given.seq_lens:
            out, store = (str(Path(folder) / f"{name}-{seq_len}") for name in ("out", "store"))
            spawn(measure, (given, seq_len, store, out), nprocs=RANKS)
            for each in json.loads(Path(out).read_text()):
                print(each, flush=True)
                results.append(each)
    about = {"ranks": RANKS, "width": given.width, "rounds": given.rounds}
    write_report(given.out, "base_dtype", results, **about)


if __name__ == "__main__":
    main()
