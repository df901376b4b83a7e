"""Whether what `auto` chooses fits, and is as fast as the best that fits: every combination is run.

    python -m benchmarks.auto --out benchmarks/results/auto.json

Random small configurations with a planted limit of memory. For each, all combinations that fit by
their estimate train in turn on two ranks, in rounds, beside what a run chooses by itself; the
fastest few of them and what was chosen train again, more often, since the fastest of many is also
the luckiest. Of what was chosen, a step is watched tensor by tensor on both ranks. Goes on with
what the file has.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

from benchmarks.contest import RANKS, joined, step_seconds
from benchmarks.report import write_report
from benchmarks.training import train_step
from fsdpctl.config.auto import Selection, left_open
from fsdpctl.config.compose import compose_config
from fsdpctl.config.recipe import read_recipe
from fsdpctl.config.schema import Config
from fsdpctl.estimate.candidates import Axes, SearchPoint
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.hardware import with_speed
from fsdpctl.resolve.machine import placed_on_cluster
from fsdpctl.resolve.run import Opened, open_run
from fsdpctl.resolve.settle import settle
from fsdpctl.train.assemble import make_model
from fsdpctl.train.optimizers import make_optimizer
from tests.predict.watch import watched_step

OPEN = (
    "strategy=auto",
    "activation_checkpointing=auto",
    "prefetch=auto",
    "train.micro_batch_size=auto",
)
_GIB = 1 << 30
_CLOSE = 1.1  # of the best that fits
FINALISTS, FINAL_ROUNDS = 7, 6


def drawn(seed: int) -> list[str]:
    """A random configuration that trains here."""
    draw = random.Random(seed)
    heads = draw.choice([2, 4])
    hidden = heads * draw.choice([16, 32, 64])
    return [
        f"model.num_layers={draw.randint(1, 6)}",
        f"model.num_heads={heads}",
        f"model.num_kv_heads={draw.choice([1, 2])}",
        f"model.hidden_size={hidden}",
        f"model.intermediate_size={hidden * draw.choice([2, 3, 4])}",
        f"train.seq_len={draw.choice([32, 64, 128, 256])}",
        f"train.global_batch_size={draw.choice([4, 8, 12, 16])}",
        f"accumulation={draw.choice(['every', 'last'])}",
        "launch.nproc_per_node=2",
        "launch.device=cpu",
    ]


def combinations(axes: Axes) -> Iterator[SearchPoint]:
    """All of them."""
    for strategy in axes.strategies:
        for mode in axes.recomputations:
            for place in range(len(axes.sizes)):
                point: SearchPoint | None = axes.point(strategy, mode, place, most=True)
                while point is not None:
                    yield point
                    point = axes.less_prefetch(point)


class Case:
    """One configuration, with a limit between the least and the most that a combination takes."""

    def __init__(self, seed: int, profile: Path | None, most: int) -> None:
        self.words = drawn(seed)
        if profile is not None:
            self.words.append(f"cluster.profile={profile}")
        self.opened, axes = self._all()
        draw, estimator = random.Random(f"limit {seed}"), Estimator()
        estimates = {p: estimator.estimate(axes.plan(p)) for p in combinations(axes)}
        first = next(iter(estimates.values()))
        outside = first.memory_bytes - first.available
        held = sorted(each.peak_reserved for each in estimates.values())
        limit = held[0] + draw.random() * (held[-1] - held[0])
        self.words.append(f"cluster.memory={(limit + outside) / _GIB:.6f}")
        fitting = [p for p, each in estimates.items() if each.peak_reserved <= limit]
        self.count, self.limit = len(fitting), int(limit)
        draw.shuffle(fitting)
        self.configs = {
            self.named(axes.plan(p).config): axes.plan(p).config for p in fitting[:most]
        }

    def _all(self) -> tuple[Opened, Axes]:
        opened = open_run(compose_config([*self.words, *OPEN]))
        return opened, Axes.of(with_speed(placed_on_cluster(opened.config))[0])

    def named(self, config: Config) -> str:
        """What is chosen in it, as it is typed."""
        return Selection.of(config).text(left_open(self.opened.config))

    def chosen(self, folder: Path) -> Config:
        """What a run chooses; it trains a step."""
        words = [*self.words, *OPEN, "train.steps=1", f"train.run_dir={folder}"]
        words += ["train.sample_tokens=0", "train.eval_batches=1"]
        command = [sys.executable, "-m", "fsdpctl", "train", *words]
        subprocess.run(command, check=True, capture_output=True)
        return compose_config([f"{k}={v}" for k, v in read_recipe(folder / "config.yaml")]).config

    def resolved(self, config: Config) -> Config:
        """The run with what is chosen in `config`."""
        return settle(self.opened.config, Selection.of(config)).config


def _watched(rank: int, config: Config, folder: Path) -> None:
    with joined(rank, folder):
        model = make_model(config, torch.device("cpu"))
        optimizer = make_optimizer(config, model)
        peak, _ = watched_step(model, lambda: train_step(config, model, optimizer))
        (folder / f"peak-{rank}").write_text(str(peak))


def peak_of(config: Config) -> int:
    """Bytes of all tensors at the peak of a step, on the rank that holds most."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_watched, (config, Path(folder)), nprocs=RANKS)
        return max(int((Path(folder) / f"peak-{rank}").read_text()) for rank in range(RANKS))


def measure(seed: int, words: argparse.Namespace) -> dict[str, Any]:
    """What was chosen, beside the best that fits."""
    case = Case(seed, words.profile, words.most)
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        chosen = case.chosen(Path(folder) / "chosen")
        took = time.monotonic() - began
    name = case.named(chosen)
    configs = {each: case.resolved(of) for each, of in {name: chosen, **case.configs}.items()}
    first = step_seconds(configs, rounds=words.rounds, steps=words.steps)
    names = {name, *sorted(first, key=lambda each: first[each])[:FINALISTS]}
    finalists = {each: configs[each] for each in names}
    seconds = step_seconds(finalists, rounds=FINAL_ROUNDS, steps=words.steps)
    best = min(seconds, key=lambda each: seconds[each])
    held = peak_of(configs[name])
    return {
        "seed": seed,
        "words": case.words,
        "limit_bytes": case.limit,
        "combinations_that_fit": case.count,
        "measured": len(configs),
        "rounds": words.rounds,
        "steps": words.steps,
        "chosen": name,
        "best": best,
        "chosen_over_best": round(seconds[name] / seconds[best], 4),
        "peak_bytes_of_chosen": held,
        "fits": held <= case.limit,
        "seconds_to_choose_and_begin": round(took, 1),
    }


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How often it was right."""
    ratios = sorted(each["chosen_over_best"] for each in results)
    return {
        "cases": len(results),
        "fit": sum(each["fits"] for each in results),
        "within_a_tenth": sum(ratio <= _CLOSE for ratio in ratios),
        "median_over_best": median(ratios),
        "worst_over_best": ratios[-1],
    }


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--most", type=int, default=1000, help="combinations of a case that run")
    parser.add_argument("--profile", type=Path, help="what profile-device wrote")
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    results: list[dict[str, Any]] = []
    if words.out is not None and words.out.exists():
        results = json.loads(words.out.read_text())["results"]
    done = {each["seed"] for each in results}
    for seed in range(words.first, words.first + words.cases):
        if seed not in done:
            results.append(measure(seed, words))
            print(json.dumps(results[-1]), flush=True)
            write_report(words.out, "auto", results, summary=summary(results))
    print(json.dumps(summary(results)))


if __name__ == "__main__":
    main()
