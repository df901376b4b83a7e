"""Compare predicted with measured steps: `python -m benchmarks.predicted_steps --out FILE.json`.

With a profile of this machine (made first, and again every few minutes, unless --profile gives it):
three models under every strategy, with and without prefetch and accumulation, on two ranks over
gloo, whose strategies take turns of a few steps in one process; and runs over network links of 100,
300 and 1,000 Mbit/s between two hosts (network namespaces, which need root). Continues with the
results that the file has.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import groupby, product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.contest import step_seconds
from benchmarks.report import write_report
from fsdpctl.config.compose import compose_config
from fsdpctl.estimate.estimator import Estimator, StepPrediction, plan_for_estimate
from fsdpctl.plan.strategy import STRATEGIES
from fsdpctl.resolve.run import open_run
from fsdpctl.run.metrics import last_step
from tests.cli.run import command, environment, make_text
from tests.launch.hosts import Hosts, hosts

FIRST, LAST = 4, 13  # earlier steps warm up
FRESH = 240.0  # seconds
STEPS = 4  # in a turn, after two that warm up
MODELS = {
    "llama": "model.num_layers=6 model.hidden_size=256 model.intermediate_size=768 "
    "model.num_heads=4 model.num_kv_heads=4 train.seq_len=128",
    "gpt2": "model=gpt2 model.num_layers=4 model.hidden_size=256 model.intermediate_size=1024 "
    "model.num_heads=4 model.num_kv_heads=4 model.max_seq_len=128 train.seq_len=128",
    "qwen3": "model.architecture=qwen3 model.num_layers=3 model.hidden_size=512 "
    "model.intermediate_size=1280 model.num_heads=8 model.num_kv_heads=4 model.head_dim=64 "
    "train.seq_len=64",
}
PASSES = {
    "one pass": "train.global_batch_size=8",
    "two passes": "train.global_batch_size=16 train.micro_batch_size=4",
}
ALWAYS = (
    "train.sample_tokens=0 train.eval_every=0 train.final_eval_batches=1 checkpoint.every=0 "
    "data=text precision=fp32 launch.device=cpu"
)
LINKS = (100, 300, 1000)  # Mbit/s


class Case(NamedTuple):
    """A configuration, on one machine or over a network link."""

    model: str
    strategy: str
    prefetch: str
    passes: str
    mbit: int | None = None

    @property
    def name(self) -> str:
        """The name in the file."""
        link = "" if self.mbit is None else f", {self.mbit} Mbit/s"
        return f"{self.model}, {self.strategy}, prefetch {self.prefetch}, {self.passes}{link}"

    @property
    def words(self) -> list[str]:
        """The settings."""
        nodes, ranks = (1, 2) if self.mbit is None else (2, 1)
        words = [
            *ALWAYS.split(), *MODELS[self.model].split(), *PASSES[self.passes].split(),
            f"strategy={self.strategy}", f"prefetch={self.prefetch}", f"train.steps={LAST}",
            f"launch.nnodes={nodes}", f"launch.nproc_per_node={ranks}",
        ]  # fmt: skip
        if STRATEGIES[self.strategy].replicates:
            words.append("strategy.dp_shard_size=2")
        return words


class Measured(NamedTuple):
    """A measured step."""

    seconds: float
    sent: float | None  # bytes of a host over its link


def cases() -> Iterator[Case]:
    """Yield all cases, strategy by strategy; over network links without accumulation.

    On two ranks of one machine, those with replicas are other strategies.
    """
    names = [name for name in STRATEGIES if name != "hybrid_shard_optimizer"]
    alone = [name for name in names if not STRATEGIES[name].replicates]
    for model, prefetch, passes, name in product(MODELS, ("none", "both"), PASSES, alone):
        yield Case(model, name, prefetch, passes)
    for mbit, model, name in product(LINKS, MODELS, names):
        yield Case(model, name, "both", "one pass", mbit)


def predicted(predictor: Estimator, case: Case, profile: Path, text: Path) -> StepPrediction:
    """Predict a case from the profile and the rate of the link."""
    words = [*case.words, f"cluster.profile={profile}", f"data.path={text}"]
    if case.mbit is not None:
        words.append(f"cluster.inter_bandwidth={case.mbit / 8e3}")
    return predictor.predict(plan_for_estimate(compose_config(words)))


def measured(rivals: Sequence[Case], rounds: int, text: Path) -> list[Measured]:
    """Measure cases: in turn on one machine, otherwise one run each."""
    if rivals[0].mbit is not None:
        return [_run(case, case.mbit) for case in rivals if case.mbit is not None]
    configs = {
        case.name: open_run(compose_config([*case.words, f"data.path={text}"])).config
        for case in rivals
    }
    found = step_seconds(configs, rounds=rounds, steps=STEPS)
    return [Measured(found[case.name], None) for case in rivals]


def _run(case: Case, mbit: int) -> Measured:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = folder / "run"
        words = ["train", *case.words, f"data.path={make_text(folder)}", f"train.run_dir={run}"]
        with hosts(2, mbit=mbit) as found:
            counters = _over_a_link(found, words, folder)
        lines = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
    seconds = [line["seconds"] for line in lines if line.get("loss") and line["step"] > FIRST]
    return Measured(median(seconds), (counters[LAST] - counters[FIRST]) / (LAST - FIRST))


def _over_a_link(found: Hosts, words: Sequence[str], folder: Path) -> dict[int, int]:
    endpoint = f"launch.rdzv_endpoint={found.addresses[0]}:29500"
    started = [
        found.start(host, *words, endpoint, f"launch.node_rank={host}", cwd=folder)
        for host in range(2)
    ]
    counters: dict[int, int] = {}
    metrics = folder / "run" / "metrics.jsonl"
    while started[0].poll() is None:
        step = last_step(metrics)
        if step in (FIRST, LAST) and step not in counters:
            counters[step] = found.sent(0)
        time.sleep(0.005)
    said = [each.communicate(timeout=60)[0] for each in started]
    assert [each.returncode for each in started] == [0, 0], said
    return counters


def _row(case: Case, step: StepPrediction, found: Measured) -> dict[str, Any]:
    leaving, (seconds, sent) = sum(step.sent.values()), found
    return {
        "case": case.name,
        **case._asdict(),
        "measured_seconds": round(seconds, 5),
        "predicted_seconds": round(step.seconds, 5),
        "error": round(step.seconds / seconds - 1, 4),
        "predicted_sent_bytes": round(leaving),
        "sent_bytes": sent if sent is None else round(sent),
        "sent_error": None if sent is None else round(leaving / sent - 1, 4),
    }


class _Profiles:
    """Profiles of this machine, whose speed varies: none is older than some minutes."""

    def __init__(self, given: Path | None, folder: Path) -> None:
        self._given, self._folder = given, folder
        self._newest = self._folder
        self._taken = -FRESH

    def newest(self) -> Path:
        """Return the given profile, or a new one if the last is too old."""
        if self._given is not None:
            return self._given
        if time.monotonic() - self._taken >= FRESH:
            self._taken = time.monotonic()
            self._newest = self._folder / f"{self._taken:.0f}.json"
            words = command("profile-device", str(self._newest))
            subprocess.run(words, env=environment(), check=True, capture_output=True)
        return self._newest


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--rounds", type=int, default=7, help="of strategies on one machine")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # two hosts that are one machine would both take all cores
    results: list[dict[str, Any]] = []
    if args.out is not None and args.out.exists():
        results = json.loads(args.out.read_text())["results"]
    done = {row["case"] for row in results}
    predictor = Estimator()
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        profiles, text = _Profiles(args.profile, folder), make_text(folder)
        wanted = [each for each in cases() if args.only in each.name and each.name not in done]
        for _, group in groupby(wanted, key=lambda case: case._replace(strategy="")):
            rivals, profile = list(group), profiles.newest()
            found = measured(rivals, args.rounds, text)
            for case, each in zip(rivals, found, strict=True):
                step = predicted(predictor, case, profile, text)
                results.append(_row(case, step, each))
                print(json.dumps(results[-1]), flush=True)
                write_report(args.out, "predicted_steps", results, rounds=args.rounds)


if __name__ == "__main__":
    main()
