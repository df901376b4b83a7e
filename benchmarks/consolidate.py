"""Consolidating a sharded checkpoint beside `cat` of the same bytes, and the memory it takes.

Both bring their file to the disk: what appears complete shall be so after a power failure too.
`cat` that leaves its file in the page cache is measured beside them. Ours also checks every byte.
Memory is the most that the process has held, above an interpreter that has imported nothing.

    python -m benchmarks.consolidate --out benchmarks/results/consolidate.json
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.report import write_report
from fsdpctl.checkpoint.consolidate import shard_weights
from fsdpctl.checkpoint.manifest import TensorInfo
from fsdpctl.checkpoint.publish import About
from fsdpctl.checkpoint.tensor_file import CHUNK_BYTES, ITEMSIZES, rank_file
from fsdpctl.plan.layout import Span

RANKS = 4
_LAYER = {"q_proj": (2048, 2048), "k_proj": (512, 2048), "v_proj": (512, 2048),
          "o_proj": (2048, 2048), "gate_proj": (8192, 2048), "up_proj": (8192, 2048),
          "down_proj": (2048, 8192), "norm": (2048,)}  # fmt: skip
_VOCABULARY = (32000, 2048)
_CONSOLIDATE = """
import json, re, sys, time
from pathlib import Path
def most():  # getrusage would count what the parent held when it forked
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
base = most()
from fsdpctl.checkpoint.consolidate import consolidate
from fsdpctl.checkpoint.reader import CheckpointReader
began = time.perf_counter()
consolidate(CheckpointReader(Path(sys.argv[1])), Path(sys.argv[2]))
seconds = time.perf_counter() - began
print(json.dumps({"seconds": seconds, "bytes_above_interpreter": most() - base}))
"""


class RandomWeights:
    """As many bfloat16 layers of one shape as `num_bytes` needs, without a model."""

    def __init__(self, num_bytes: int) -> None:
        shapes: dict[str, tuple[int, ...]] = {"embed_tokens": _VOCABULARY}
        layer = 0
        while sum(int(np.prod(shape)) * 2 for shape in shapes.values()) < num_bytes:
            shapes.update({f"layers.{layer:03d}.{name}": each for name, each in _LAYER.items()})
            layer += 1
        self._shapes = shapes
        self._noise = memoryview(np.random.default_rng(0).bytes(CHUNK_BYTES))

    def names(self, kind: str) -> list[str]:
        """Of the tensors."""
        return sorted(self._shapes)

    def info(self, key: str) -> TensorInfo:
        """Of one tensor."""
        return TensorInfo(list(self._shapes[key.partition("/")[2]]), "BF16")

    def read(self, key: str, span: Span | None = None) -> Iterator[tuple[Span, memoryview]]:
        """The same noise again and again."""
        assert span is not None
        left = span.numel * ITEMSIZES["BF16"]
        while left:
            data = self._noise[: min(left, CHUNK_BYTES)]
            left -= len(data)
            yield span, data


def measure(num_bytes: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Medians of interleaved rounds, in each of which another one begins."""
    source, out = folder / "checkpoint", folder / "cat"
    total = shard_weights(RandomWeights(num_bytes), source, num_files=RANKS, about=About())
    cat = f"cat {' '.join(str(source / rank_file(rank)) for rank in range(RANKS))} > {out}"
    contestants: dict[str, Callable[[], dict[str, float]]] = {
        "cat": lambda: _run_shell(f"{cat} && sync {out}", out),
        "cat_cached": lambda: _run_shell(cat, out),
        "ours": lambda: _consolidate(source, folder / "hf"),
    }

    def measured(name: str) -> dict[str, float]:
        os.sync()  # what was written before is not paid for here
        _run_shell(cat, out)  # nor are pages that a virtual machine has to ask its host for
        return contestants[name]()

    found: list[dict[str, dict[str, float]]] = []
    for number in range(rounds + 1):  # the first fills the page cache
        names = list(contestants)
        names = names[number % 3 :] + names[: number % 3]
        found.append({name: measured(name) for name in names})
    kept = found[1:]

    def over(name: str) -> float:
        return round(median(each["ours"]["seconds"] / each[name]["seconds"] for each in kept), 3)

    return {
        "checkpoint_bytes": total,
        "ranks": RANKS,
        "time_over_cat": over("cat"),
        "time_over_cat_cached": over("cat_cached"),
        "bytes_above_interpreter": max(each["ours"]["bytes_above_interpreter"] for each in kept),
        "rounds": kept,
    }


def _run_shell(command: str, out: Path) -> dict[str, float]:
    began = time.perf_counter()
    subprocess.run(["sh", "-c", command], check=True)
    seconds = time.perf_counter() - began
    out.unlink()
    return {"seconds": seconds}


def _consolidate(source: Path, out: Path) -> dict[str, float]:
    command = [sys.executable, "-c", _CONSOLIDATE, str(source), str(out)]
    found: dict[str, float] = json.loads(
        subprocess.run(command, check=True, capture_output=True).stdout
    )
    shutil.rmtree(out)
    return found


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[2.0, 4.0])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    sizes = []
    for gigabytes in given.gigabytes:
        with tempfile.TemporaryDirectory() as folder:
            sizes.append(measure(int(gigabytes * 1e9), given.rounds, Path(folder)))
        print(json.dumps({k: v for k, v in sizes[-1].items() if k != "rounds"}), flush=True)
    write_report(given.out, "consolidate", sizes, rounds=given.rounds)


if __name__ == "__main__":
    main()
