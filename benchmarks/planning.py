"""The time of estimates, for the largest model on the most ranks.

    python -m benchmarks.planning --out benchmarks/results/planning.json

Each measurement is in a new process, because a module is imported once.
"""

import json
import subprocess
import sys
from statistics import median

from benchmarks.report import arguments, write_report

MODELS = {"llama3_8b": (1, 8), "llama3_405b": (2048, 8)}  # nodes and ranks on each

_CHILD = """
import json, resource, sys, time
began = time.perf_counter()
import torch
imported = time.perf_counter()
from fsdpctl.config.compose import compose_config
from fsdpctl.plan.strategy import STRATEGIES
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.resolve_auto import estimates_of
model, nodes, ranks = sys.argv[1:]
launch = [f"launch.nnodes={nodes}", f"launch.nproc_per_node={ranks}"]
launch += ["train.seq_len=8192", "activation_checkpointing=full"]
composed = compose_config([f"model={model}", "cluster=h100", *launch])
estimator = Estimator()
estimates_of(estimator, composed, every=False)
estimated = time.perf_counter()
estimates_of(estimator, composed, every=True)
further = (time.perf_counter() - estimated) / len(STRATEGIES)
mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([imported - began, estimated - imported, further, mib]))
"""


def measure(model: str, rounds: int) -> dict[str, object]:
    """Return medians over new processes, and the ratio to the time of `import torch`."""
    nodes, ranks = MODELS[model]
    command = [sys.executable, "-c", _CHILD, model, str(nodes), str(ranks)]
    runs = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(rounds)
    ]
    return {
        "model": model,
        "world_size": nodes * ranks,
        "estimate_over_import_torch": round(median(run[1] / run[0] for run in runs), 4),
        "estimate_seconds": round(median(run[1] for run in runs), 3),
        "further_strategy_seconds": round(median(run[2] for run in runs), 4),
        "most_memory_mib": round(max(run[3] for run in runs)),
    }


def main() -> None:
    """Measure, print and write."""
    options = arguments(rounds=7)
    results = [measure(model, options.rounds) for model in MODELS]
    print(*results, sep="\n")
    write_report(options.out, "planning", results, rounds=options.rounds)


if __name__ == "__main__":
    main()
