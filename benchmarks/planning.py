"""How long planning and estimating take: the largest model on the most ranks.

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
from fsdpctl.engine.describe import divide_module
from fsdpctl.predict.engine_bytes import timeline
from fsdpctl.models.registry import build_model
from fsdpctl.plan.strategy import STRATEGIES
from fsdpctl.estimate.run_plan import plan_run
from fsdpctl.resolve.machine import placed_on_cluster
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.search import estimates_of
model, nodes, ranks = sys.argv[1:]
launch = [f"launch.nnodes={nodes}", f"launch.nproc_per_node={ranks}"]
launch += ["train.seq_len=8192", "activation_checkpointing=full"]
composed = compose_config([f"model={model}", "cluster=h100", *launch])
config = placed_on_cluster(composed.config)
ready = time.perf_counter()
module = build_model(config.model)
built = time.perf_counter()
moments = sum(1 for _ in timeline(*plan_run(config, divide_module(module, None), 1)))
planned = time.perf_counter()
import resource
estimator, began = Estimator(), time.perf_counter()
estimates_of(estimator, composed, every=False)
estimated = time.perf_counter()
estimates_of(estimator, composed, every=True)
again = (time.perf_counter() - estimated) / len(STRATEGIES)
first = (ready - imported) + (estimated - began)
mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([imported - began, built - ready, planned - built, moments, first, again, mib]))
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
        "estimate_over_import_torch": round(statistics.median(r[4] / r[0] for r in runs), 4),
        "estimate_seconds": round(statistics.median(r[4] for r in runs), 3),
        "further_strategy_seconds": round(statistics.median(r[5] for r in runs), 4),
        "most_memory_mib": round(max(r[6] for r in runs)),
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
