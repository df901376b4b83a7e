"""What a step with optimizer states on the host costs on CPU ranks, and what its schedule hides.

    python -m benchmarks.offload --out benchmarks/results/offload.json

All models are there at once, and rounds of a few steps of each alternate. Ranks and the threads
that step share the cores, so nothing can be gained: in the first setting. In the second, each block
also sleeps in forward, and the host as long in the step of each unit. They stand for a device that
leaves the cores alone, and for a host as slow. Variants that wait settle the host in each step. The
CPU says nothing about GPUs.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from benchmarks.contest import RANKS, joined
from benchmarks.report import write_report
from benchmarks.training import train_step
from fsdpctl.comm.host import Copier, Job
from fsdpctl.config.compose import compose_config
from fsdpctl.config.schema import Config
from fsdpctl.engine.model import ShardedModel
from fsdpctl.engine.offload import HostStates
from fsdpctl.plan.sizes import Offload
from fsdpctl.resolve.machine import placed_on_cluster
from fsdpctl.tools.compare.measure import in_turn
from fsdpctl.train.assemble import make_model
from fsdpctl.train.optimizers import make_optimizer
from fsdpctl.train.step import Optimizer

STEPS, BLOCKS = 4, 8
VARIANTS = [(Offload.NONE, True), *((each, x) for each in list(Offload)[1:] for x in (True, False))]


@dataclass(slots=True)
class Total:
    """What happened in some steps."""

    stepping: float = 0.0  # seconds of the thread that steps on the host
    waiting: float = 0.0  # seconds in which the rank waited for it
    copied: int = 0  # bytes


class Round(NamedTuple):
    """A step, by the mean of some."""

    seconds: float
    stepping: float  # as in `Total`
    waiting: float
    copied: int


@dataclass(slots=True)
class Contender:
    """A model and how it is trained."""

    config: Config
    model: ShardedModel
    optimizer: Optimizer
    overlaps: bool  # the step on the host with the next forward
    rounds: list[Round] = field(default_factory=list)

    def train(self, pause: Tensor) -> None:
        """Time some steps, after one that leaves the host at work."""
        total = Total()
        with watched(total, pause):
            self._step()
            waited, began = total.waiting, time.perf_counter()
            for _ in range(STEPS):
                self._step()
            seconds = (time.perf_counter() - began) / STEPS
            waiting = (total.waiting - waited) / STEPS
            self._settle()
        count = STEPS + 1
        self.rounds.append(Round(seconds, total.stepping / count, waiting, total.copied // count))

    def _step(self) -> None:
        train_step(self.config, self.model, self.optimizer)
        if not self.overlaps:
            self._settle()

    def _settle(self) -> None:
        if self.model.host is not None:
            self.model.host.settle()


@contextmanager
def watched(total: Total, pause: Tensor) -> Iterator[None]:
    """Add up what the thread does that steps, and what waits for it; each step sleeps, too."""
    run, step, wait, copy = HostStates._run, HostStates._step, Job.wait, Copier.copy

    def timed_run(*given: Any) -> None:
        began = time.perf_counter()
        run(*given)
        total.stepping += time.perf_counter() - began

    def slow_step(*given: Any) -> Any:
        time.sleep(float(pause))
        return step(*given)

    def timed_wait(job: Job) -> None:
        began = time.perf_counter()
        wait(job)
        total.waiting += time.perf_counter() - began

    def counted(copier: Copier, target: Tensor, *given: Any) -> Any:
        total.copied += target.nbytes
        return copy(copier, target, *given)

    with (
        mock.patch.object(HostStates, "_run", timed_run),
        mock.patch.object(HostStates, "_step", slow_step),
        mock.patch.object(Job, "wait", timed_wait),
        mock.patch.object(Copier, "copy", counted),
    ):
        yield


@dataclass(frozen=True, slots=True)
class Result:
    """One value of optimizer.offload in one setting."""

    setting: str
    offload: str
    time_over_none: float
    time_over_waiting: float  # relative to steps that wait for the host before they end
    host_step_over_none: float  # seconds in which the host steps, relative to a step without
    hidden_share: float  # of those seconds: in which the rank did not wait
    copied_bytes_per_step: int


def config_of(width: int, offload: str) -> Config:
    """Return the configuration of a model."""
    words = [
        "launch.device=cpu", f"launch.nproc_per_node={RANKS}", f"model.num_layers={BLOCKS}",
        f"model.hidden_size={width}", f"model.intermediate_size={3 * width}",
        "model.num_heads=8", "model.num_kv_heads=8", f"model.vocab_size={8 * width}",
        "train.seq_len=16", "train.micro_batch_size=1", f"train.global_batch_size={RANKS}",
        "accumulation.steps=1", "train.loss_chunk_tokens=0", "precision=fp32",
        "strategy=full_shard", f"optimizer.offload={offload}",
    ]  # fmt: skip
    return placed_on_cluster(compose_config(words).config)


def results_of(setting: str, contenders: list[Contender]) -> Iterator[Result]:
    """Yield the results of a setting."""
    none = contenders[0].rounds
    for overlapping, waiting in zip(contenders[1::2], contenders[2::2], strict=True):
        own = overlapping.rounds
        ratios = (
            [a.seconds / b.seconds for a, b in zip(own, none, strict=True)],
            [a.seconds / b.seconds for a, b in zip(own, waiting.rounds, strict=True)],
            [a.stepping / b.seconds for a, b in zip(own, none, strict=True)],
            [1 - each.waiting / each.stepping for each in own],
        )
        over_none, over_waiting, host_step, hidden = (round(median(e), 3) for e in ratios)
        offload = overlapping.config.optimizer.offload
        yield Result(setting, offload, over_none, over_waiting, host_step, hidden, own[0].copied)


def _measure(rank: int, width: int, rounds: int, folder: Path) -> None:
    with joined(rank, folder):
        contenders = []
        pause = torch.zeros(())  # seconds of each block
        for offload, overlaps in VARIANTS:
            config = config_of(width, offload)
            model = make_model(config, torch.device("cpu"), trains=True)
            for name, module in model.named_modules():
                if name.rpartition(".")[0].endswith("layers"):
                    module.register_forward_pre_hook(lambda *_: time.sleep(float(pause)))
            contenders.append(Contender(config, model, make_optimizer(config, model), overlaps))
        found: list[Result] = []
        for setting in ("shared cores", "sleeping"):
            for each in contenders:
                each.rounds = []
            for number in range(rounds):
                for each in in_turn(contenders, number, rounds):
                    each.train(pause)
            found += results_of(setting, contenders)
            pause.fill_(median(each.seconds for each in contenders[0].rounds) / BLOCKS)
            torch.distributed.broadcast(pause, 0)
    if rank == 0:
        (folder / "results").write_text(json.dumps([asdict(each) for each in found]))


def main() -> None:
    """Measure what the command line asks for, and write a report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        spawn(_measure, (words.width, words.rounds, Path(name)), nprocs=RANKS)
        results = json.loads((Path(name) / "results").read_text())
    print(*results, sep="\n")
    write_report(words.out, "offload", results, rounds=words.rounds, ranks=RANKS, width=words.width)


if __name__ == "__main__":
    main()
