"""Strategies over a slow cable: `python -m benchmarks.slow_links [--mbit 100] [--out FILE.json]`.

Two hosts (network namespaces of this machine, which takes root) with two ranks each. What a step
takes, and what a host sends for it by its interface's own counter; starts are interleaved.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.report import write_report
from fsdpctl.run.metrics import last_step
from tests.cli.run import make_text
from tests.launch.hosts import Hosts, hosts

STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_optimizer")
FIRST, LAST = 2, 8  # between these steps bytes are counted; the first ones warm up
WORDS = [
    "model.num_layers=4", "model.hidden_size=256", "model.intermediate_size=688",
    "model.num_heads=4", "model.num_kv_heads=4", "train.seq_len=32", "train.global_batch_size=8",
    "train.sample_tokens=0", "train.eval_every=0", "train.final_eval_batches=1",
    "checkpoint.every=0", "data=text", f"train.steps={LAST}", "launch.nnodes=2",
    "launch.nproc_per_node=2", "precision=fp32",
]  # fmt: skip


def one_start(found: Hosts, folder: Path, strategy: str) -> tuple[list[float], float]:
    """Seconds of each counted step, and the bytes that host 0 sends in one."""
    folder.mkdir()
    run = folder / "run"
    words = [
        *WORDS, f"strategy={strategy}", f"data.path={make_text(folder)}", f"train.run_dir={run}",
        f"launch.rdzv_endpoint={found.addresses[0]}:29500",
    ]  # fmt: skip
    started = [
        found.start(host, "train", *words, f"launch.node_rank={host}", cwd=folder)
        for host in range(2)
    ]
    counters = {}
    while started[0].poll() is None:
        step = last_step(run / "metrics.jsonl")
        if step in (FIRST, LAST) and step not in counters:
            counters[step] = found.sent(0)
        time.sleep(0.005)
    said = [each.communicate(timeout=60)[0] for each in started]
    assert [each.returncode for each in started] == [0, 0], said
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    seconds = [line["seconds"] for line in lines if line.get("loss") and line["step"] > FIRST]
    return seconds, (counters[LAST] - counters[FIRST]) / (LAST - FIRST)


def measure(mbit: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each strategy."""
    seconds, sent = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    with tempfile.TemporaryDirectory() as kept, hosts(2, mbit=mbit) as found:
        for number in range(rounds):
            for strategy in STRATEGIES:
                steps, nbytes = one_start(found, Path(kept) / f"{strategy}-{number}", strategy)
                seconds[strategy] += steps
                sent[strategy].append(nbytes)
    base = STRATEGIES[0]
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    volumes = {name: statistics.median(each) for name, each in sent.items()}
    return [
        {
            "strategy": name,
            "step_seconds": round(medians[name], 4),
            "sent_bytes_per_host_and_step": round(volumes[name]),
            "time_over_full_shard": round(medians[name] / medians[base], 3),
            "bytes_over_full_shard": round(volumes[name] / volumes[base], 3),
        }
        for name in STRATEGIES
    ]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = measure(args.mbit, args.rounds)
    for each in results:
        print(json.dumps(each))
    write_report(args.out, "slow_links", results, mbit=args.mbit, rounds=args.rounds)


if __name__ == "__main__":
    main()
