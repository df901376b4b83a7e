"""The options of benchmarks, functions on CPU ranks, and the JSON file of results."""

import argparse
import json
import platform
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import spawn

from fsdpctl.io.resources import num_cores

PAIRS = {  # a strategy, and PyTorch's engine that keeps as much memory
    "full_shard": "fsdp2",
    "shard_grad_op": "fsdp2_keeps",
    "shard_optimizer": "zero_redundancy_optimizer",
    "no_shard": "ddp",
}


def arguments(**defaults: Any) -> argparse.Namespace:
    """Return the options of the command line, and the file to write.

    `defaults` has the default of each option. A tuple is the default of an option with several
    values, which are texts if the tuple is empty. The keys of a mapping are the allowed values, and
    all are the default. A type belongs to an optional value. False is an option without a value.
    """
    parser = argparse.ArgumentParser()
    for name, default in defaults.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(default, bool):
            parser.add_argument(option, action="store_true")
        elif isinstance(default, type):
            parser.add_argument(option, type=default)
        elif isinstance(default, Mapping):
            parser.add_argument(option, nargs="+", choices=default, default=tuple(default))
        elif isinstance(default, tuple):
            parser.add_argument(option, nargs="+", type=type((*default, "")[0]), default=default)
        else:
            parser.add_argument(option, type=type(default), default=default)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser.parse_args()


def on_ranks(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `function(rank, *args)` on single-threaded gloo ranks; return its results."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (count, Path(folder), function, args), nprocs=count)
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(count)]


def _rank(
    rank: int, count: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(folder / "rendezvous"), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    (folder / str(rank)).write_text(json.dumps(function(rank, *args)))
    dist.barrier()
    dist.destroy_process_group()


def write_report(path: Path | None, benchmark: str, results: Any, **kwargs: Any) -> None:
    """Write the results of a benchmark as JSON; nothing if the path is None."""
    if path is None:
        return
    machine = f"{num_cores()} cores, {platform.machine()}"
    report = {"benchmark": benchmark, "torch": torch.__version__, "machine": machine}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**report, **kwargs, "results": results}, indent=2) + "\n")
