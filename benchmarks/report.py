"""What benchmarks share: options, CPU ranks, and the JSON file of their figures."""

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

PAIRS = {  # ours, and the engine of PyTorch's that keeps as much
    "full_shard": "fsdp2",
    "shard_grad_op": "fsdp2_keeps",
    "shard_optimizer": "zero_redundancy_optimizer",
    "no_shard": "ddp",
}


def arguments(**defaults: Any) -> argparse.Namespace:
    """Return the command line's options, each with a default, and the file to write.

    A tuple is the default of several values, which are words if it is empty; a mapping, all values
    that can be chosen; a type, that of a value that can be left out; False, of an option without
    a value.
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


def on_ranks(count: int, function: Callable[..., Any], *given: Any) -> list[Any]:
    """Call `function(rank, *given)` on ranks over gloo with a thread each; return its values."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (count, Path(folder), function, given), nprocs=count)
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(count)]


def _rank(
    rank: int, count: int, folder: Path, function: Callable[..., Any], given: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(folder / "rendezvous"), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    (folder / str(rank)).write_text(json.dumps(function(rank, *given)))
    dist.barrier()
    dist.destroy_process_group()


def write_report(path: Path | None, benchmark: str, results: Any, **about: Any) -> None:
    """Write one benchmark's figures as JSON; nothing where no path is given."""
    if path is None:
        return
    machine = f"{num_cores()} cores, {platform.machine()}"
    report = {"benchmark": benchmark, "torch": torch.__version__, "machine": machine}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**report, **about, "results": results}, indent=2) + "\n")
