"""What it costs a rank to say where it is: `python -m benchmarks.watching [--out FILE.json]`.

Two ranks over gloo train a small model. Steps that write to the page that a launcher reads take
turns with steps that do not.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F

import fsdpctl
from benchmarks.report import write_report
from fsdpctl.comm.rank_status import (
    RANK_STATUS,
    RankStatusPage,
    make_status_file,
    read_rank_statuses,
)
from fsdpctl.config.model import ModelConfig
from fsdpctl.models.registry import build_model

RANKS, STEPS, WARM_UP = 2, 60, 6


def measure(rank: int, steps: int, folder: str) -> None:
    """Medians of both kinds of step, their ratio, and how often a step says where it is."""
    torch.set_num_threads(1)
    where = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=RANKS)
    config = ModelConfig(num_layers=12, hidden_size=256, intermediate_size=688, vocab_size=256)
    model = fsdpctl.shard_model(build_model(config).to_empty(device="cpu"), strategy="full_shard")
    optimizer = fsdpctl.ShardedAdamW(model, lr=1e-4)
    tokens = torch.randint(0, 256, (2, 128))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    pages, written = Path(folder) / "pages", RankStatusPage()
    written.open(pages, rank)
    for number in range(2 * (steps + WARM_UP)):
        writes = number % 2 == 0
        RANK_STATUS.__dict__.update(written.__dict__ if writes else RankStatusPage().__dict__)
        began = time.perf_counter()
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds[writes].append(time.perf_counter() - began)
        if writes:
            written.__dict__.update(RANK_STATUS.__dict__)
    with pages.open("rb") as file:
        beat = read_rank_statuses(file)[rank]
    dist.destroy_process_group()
    medians = {writes: statistics.median(each[WARM_UP:]) for writes, each in seconds.items()}
    found = {
        "step_seconds": round(medians[True], 5),
        "time_over_unwatched": round(medians[True] / medians[False], 4),
        "beats_per_step": round(beat.count / (steps + WARM_UP), 1),
    }
    if rank == 0:
        (Path(folder) / "found").write_text(json.dumps(found))


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_status_file(Path(folder) / "pages", RANKS)
        spawn(measure, (args.steps, folder), nprocs=RANKS)
        results = json.loads((Path(folder) / "found").read_text())
    print(results)
    write_report(args.out, "watching", results, world_size=RANKS)


if __name__ == "__main__":
    main()
