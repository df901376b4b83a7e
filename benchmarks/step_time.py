"""The time of a training step with each engine, interleaved in one run.

    python -m benchmarks.step_time --out benchmarks/results/step-time-cpu.json

Each engine has separate processes, as in training: the time of a step depends on the heap, which
would have memory of other engines. In every round, each engine has a turn while all others wait, so
that disturbances of the machine affect all engines. The order changes, and the first step of a turn
is not counted, because it fills the caches. Processes are started several times, because the memory
that a process happens to get changes the time of its steps by several percent. Engines to compare
run beside each other: each group has its floor and its FSDP2. The figures to read are ratios: the
time that an engine adds to the floor, over the time that FSDP2 adds.
"""

import argparse
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import start_processes

from benchmarks.contestants import CONTESTANTS
from benchmarks.report import arguments, write_report
from fsdpctl.config.compose import compose_config
from fsdpctl.models.build_model import build_base_model, initialize_parameter
from fsdpctl.models.small_copy import allocate
from fsdpctl.models.transformers_build import fill_buffers
from fsdpctl.models.transformers_decoder import TransformersDecoder

WARM_UP = 1  # rounds
TURN = 3  # steps
# Millions of parameters -> width, blocks, vocabulary.
SIZES = {"8M": (320, 5, 2000), "25M": (512, 6, 4000), "60M": (768, 7, 6000)}
SHARE_OF_ROUNDS = {"8M": 2.0, "25M": 1.0, "60M": 0.34}  # short steps need more rounds
BESIDE_ALL = ("floor", "fsdp2")
GROUPS = {
    "ddp": ("ddp", "no_shard", "zero_redundancy_optimizer", "shard_optimizer"),
    "fsdp2": ("fsdp2_tuned", "full_shard", "fsdp2_keeps", "shard_grad_op"),
    "shared": ("ddp", "full_shard", "shared_memory"),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_decoder(width: int, blocks: int, vocab: int) -> TransformersDecoder:
    """Return a decoder with equal weights in every process."""
    settings = [
        f"model.num_layers={blocks}", f"model.hidden_size={width}", f"model.vocab_size={vocab}",
        f"model.intermediate_size={width * 3}", f"model.num_heads={width // 64}",
        f"model.num_kv_heads={width // 64}", "model.overrides.tie_word_embeddings=false",
        "model.overrides.initializer_range=0.02",
    ]  # fmt: skip
    config = compose_config(settings).config.model
    model = build_base_model(config)
    fill_buffers(model)
    allocate(model)
    with torch.no_grad():
        for name, param in model.named_parameters():
            initialize_parameter(name, param, seed=0, config=config)
    return model


class Engine:
    """An engine on all ranks; the processes of the ranks work only during a turn."""

    def __init__(self, name: str, size: str, dtype: str, world_size: int) -> None:
        """Start the processes; the next call raises the failure of a process."""
        self._folder = tempfile.TemporaryDirectory()
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.contestants"])  # imported once
        pipes = [context.Pipe() for _ in range(world_size)]
        self._ends = [here for here, _ in pipes]
        rendezvous = str(Path(self._folder.name) / "rendezvous")
        args = (name, size, dtype, rendezvous, [there for _, there in pipes])
        self._processes = start_processes(
            _rank_main, args, world_size, join=False, start_method="forkserver"
        )
        for _, there in pipes:
            there.close()  # otherwise `recv` does not detect that a process died

    def turn(self, steps: int) -> tuple[list[float], float]:
        """Return the seconds of each of `steps` steps, and the last loss, on rank 0."""
        for end in self._ends:
            end.send(steps)
        try:
            answers: list[tuple[list[float], float]] = [end.recv() for end in self._ends]
        except EOFError:
            self._processes.join()
            raise
        return answers[0]

    def close(self) -> None:
        """End the processes.

        Raises:
            torch.multiprocessing.ProcessException: If a process failed.
        """
        for end in self._ends:
            end.close()
        self._processes.join()
        self._folder.cleanup()


def _rank_main(
    rank: int, name: str, size: str, dtype: str, rendezvous: str, ends: list[Connection]
) -> None:
    connection = ends[rank]
    for end in ends:
        if end is not connection:
            end.close()  # otherwise this process keeps the pipes of other ranks open
    torch.set_num_threads(1)
    store = FileStore(rendezvous, len(ends))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(ends))
    torch.manual_seed(rank)
    tokens, targets = torch.randint(0, SIZES[size][2], (2, 4, 128)).unbind()
    step = CONTESTANTS[name](make_decoder(*SIZES[size]), DTYPES[dtype], torch.device("cpu"))
    try:
        while True:
            seconds = []
            for _ in range(connection.recv()):
                dist.barrier()
                began = time.perf_counter()
                loss = step(tokens, targets)
                dist.barrier()
                seconds.append(time.perf_counter() - began)
            connection.send((seconds, float(loss)))
    except EOFError:  # no more turns
        dist.destroy_process_group()


def measure(
    options: argparse.Namespace, size: str, dtype: str, rounds: int
) -> dict[str, dict[str, float]]:
    """Return medians of every engine, measured beside the engines of its group."""
    results: dict[str, Any] = {}
    for group in options.groups:
        turns = [*BESIDE_ALL, *GROUPS[group]]
        seconds: dict[str, list[float]] = {name: [] for name in turns}
        losses: dict[str, float] = {}
        for start in range(options.starts):
            order = random.Random(start)
            with ExitStack() as stack:
                engines = {name: Engine(name, size, dtype, options.world_size) for name in turns}
                for engine in engines.values():
                    stack.callback(engine.close)
                for number in range(WARM_UP + rounds):
                    order.shuffle(turns)
                    for name in turns:
                        (_, *counted), losses[name] = engines[name].turn(TURN)
                        if number >= WARM_UP:
                            seconds[name] += counted
        results = _figures(seconds, losses) | results
    return {name: results[name] for name in CONTESTANTS if name in results}


def _figures(seconds: dict[str, list[float]], losses: dict[str, float]) -> dict[str, Any]:
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    least, fsdp2 = medians["floor"], medians["fsdp2"]
    return {
        name: {
            "median_over_floor": round(median / least, 4),
            "added_over_fsdp2_added": round((median - least) / (fsdp2 - least), 4),
            "spread": round((max(seconds[name]) - min(seconds[name])) / median, 4),
            "last_loss": losses[name],
        }
        for name, median in medians.items()
    }


def main() -> None:
    """Measure, print and write."""
    defaults = {"sizes": SIZES, "dtypes": DTYPES, "groups": GROUPS}
    options = arguments(world_size=2, starts=3, rounds=3, **defaults)  # rounds of each start
    results: list[dict[str, Any]] = []
    for size in options.sizes:
        for dtype in options.dtypes:
            rounds = max(1, round(options.rounds * SHARE_OF_ROUNDS[size]))
            about_case = {"starts": options.starts, "rounds_of_each": rounds}
            engines = measure(options, size, dtype, rounds)
            results.append({"size": size, "dtype": dtype, **about_case, "engines": engines})
            print(results[-1], flush=True)
            # Written after each case, so that an interrupted run keeps its results.
            kwargs = {"backend": "gloo", "world_size": options.world_size}
            write_report(options.out, "step_time", results, **kwargs)


if __name__ == "__main__":
    main()
