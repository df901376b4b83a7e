"""How far estimates are from what real runs hold, on CPU ranks and beside published runs.

    python -m benchmarks.estimates --out benchmarks/results/estimates.json

The peak of all tensors in a step of small random configurations on one to four gloo ranks, every
rank of each; and the runs that others published, as tests/predict/test_published_memory.py
models them.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import spawn

from benchmarks.report import write_report
from tests.predict.test_published_memory import PUBLISHED
from tests.predict.test_total import peaks_of

_GIB = 1 << 30


def _rank(rank: int, ranks: int, folder: str, count: int) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(Path(folder) / "rendezvous"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    errors = []
    for seed in range(count):
        estimated, measured = peaks_of(rank, ranks, seed)
        errors.append(estimated / measured - 1)
    torch.save(errors, Path(folder) / f"errors-{rank}")
    dist.barrier()
    dist.destroy_process_group()


def small_runs(count: int) -> list[dict[str, Any]]:
    """Errors of the peak of all tensors, over all ranks of `count` configurations each."""
    results = []
    for ranks in (1, 2, 3, 4):
        with tempfile.TemporaryDirectory() as folder:
            spawn(_rank, (ranks, folder, count), nprocs=ranks)
            errors = [
                abs(error)
                for rank in range(ranks)
                for error in torch.load(Path(folder) / f"errors-{rank}")
            ]
        results.append(
            {
                "world_size": ranks,
                "configurations": count,
                "median_error": round(median(errors), 6),
                "worst_error": round(max(errors), 6),
            }
        )
        print(results[-1], flush=True)
    return results


def published_runs() -> list[dict[str, Any]]:
    """What was measured, and what is estimated of it; in GiB."""
    results = []
    for each in PUBLISHED:
        found = each.estimate()
        estimated = {
            "allocated": found.peak_allocated / _GIB,
            "reserved": found.peak_reserved / _GIB,
        }
        for name, measured in each.measured.items():
            error = estimated[name] / measured - 1
            results.append(
                {
                    "run": each.name,
                    "what": name,
                    "measured": measured,
                    "estimated": round(estimated[name], 2),
                    "error": round(error, 4),
                }
            )
            print(results[-1], flush=True)
    return results


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=56)
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    results = {"published": published_runs(), "small": small_runs(words.count)}
    write_report(words.out, "estimates", results)


if __name__ == "__main__":
    main()
