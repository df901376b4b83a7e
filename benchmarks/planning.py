"""How long planning takes: the largest model on the most ranks, beside importing torch.

    python -m benchmarks.planning --out benchmarks/results/planning.json

A process of its own for every measurement, because a module is imported once.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.report import write_report

MODELS = {"llama3_8b": (1, 8), "llama3_405b": (2048, 8)}  # nodes and ranks on each

_CHILD = """
import json, sys, time
began = time.perf_counter()
import torch
imported = time.perf_counter()
from fsdpctl.config.compose import compose_config
from fsdpctl.engine.build import divide_module
from fsdpctl.memory.estimate import timeline
from fsdpctl.models.registry import build_model
from fsdpctl.train.footprint import plan_run
from fsdpctl.train.machine import placed_on_cluster
model, nodes, ranks = sys.argv[1:]
launch = [f"launch.nnodes={nodes}", f"launch.nproc_per_node={ranks}"]
config = placed_on_cluster(compose_config([f"model={model}", "cluster=h100", *launch]).config)
ready = time.perf_counter()
module = build_model(config.model)
built = time.perf_counter()
moments = sum(1 for _ in timeline(*plan_run(config, divide_module(module, None), 1)))
planned = time.perf_counter()
print(json.dumps([imported - began, built - ready, planned - built, moments]))
"""


def measure(model: str, rounds: int) -> dict[str, object]:
    """Medians over fresh processes, as ratios to the time of `import torch`."""
    nodes, ranks = MODELS[model]
    words = [sys.executable, "-c", _CHILD, model, str(nodes), str(ranks)]
    runs = [
        json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
        for _ in range(rounds)
    ]
    return {
        "model": model,
        "world_size": nodes * ranks,
        "moments": runs[0][3],
        "module_over_import_torch": round(statistics.median(r[1] / r[0] for r in runs), 4),
        "plan_over_import_torch": round(statistics.median(r[2] / r[0] for r in runs), 4),
    }


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    results = [measure(model, words.rounds) for model in MODELS]
    for each in results:
        print(each, flush=True)
    write_report(words.out, "planning", results, rounds=words.rounds)


if __name__ == "__main__":
    main()
