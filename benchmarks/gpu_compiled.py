"""One GPU: graphs, launches, fused kernels and garbage collections, with the expected figures.

    python -m benchmarks.gpu_compiled --out benchmarks/results/gpu-compiled.json

Exits with 1 if a figure that must be exact differs, for example if Dynamo gives up on a block.
`--small` takes no time, and compiles with Dynamo's eager backend.
"""

import gc
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from logging.handlers import BufferingHandler
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile, supported_activities

import fsdpctl
from benchmarks.contestants import Step, loss_of
from benchmarks.gpu import SIZES, Size, make_model, ours
from benchmarks.one_gpu import DEVICE, device_seconds, draw, joined, sharded
from benchmarks.report import arguments, write_report
from fsdpctl.comm.nccl import NcclCollectives
from fsdpctl.config.clusters import gpu_by_name
from fsdpctl.config.compose import compose_config
from fsdpctl.engine.blocks import compile_block
from fsdpctl.engine.build import Sharding, WeightInit
from fsdpctl.models.custom_ops import fuse_kernels
from fsdpctl.models.module_spec import block_names
from fsdpctl.models.quantized import INT8, NF4
from fsdpctl.training.trainer import synchronized_gc

BLOCKS, STEPS, WORLD_SIZE = 12, 3, 8
LOGGER = logging.getLogger("torch._dynamo.convert_frame")
# Bytes per element, as in fsdpctl/predict/hardware.py.
MOVED = {"nf4": (27.0, 2.5), "int8": (21.1, 3.0), "AdamW, int8 moments": (310, 16)}
STREAMING = 0.85  # share of the memory's rate that large kernels reach
Row = dict[str, Any]


def _batch(size: Size) -> tuple[Tensor, Tensor]:
    tokens, targets = torch.randint(0, size.vocab, (2, size.samples, size.length)).to(DEVICE)
    return tokens, targets


def graphs(size: Size) -> Iterator[Row]:
    """Count the graphs of compiled blocks under full_shard, after each step."""
    handler = BufferingHandler(capacity=1000)
    handler.setLevel(logging.WARNING)
    LOGGER.addHandler(handler)
    results = []
    with joined(WORLD_SIZE, fake=True) as nccl:
        model = make_model(replace(size, blocks=BLOCKS))
        for name in block_names(model):
            compile_block(model.get_submodule(name))
        step = ours(model, nccl, fsdpctl.Precision(torch.bfloat16))
        counters.clear()
        for _ in range(STEPS):
            step(*_batch(size))
            results.append(counters["stats"]["unique_graphs"])
    LOGGER.removeHandler(handler)
    messages = [record.getMessage() for record in handler.buffer]
    yield {"what": "graphs after each step", "found": results, "exactly": [1] * STEPS}
    yield {"what": "reasons why Dynamo gave up", "found": messages, "exactly": []}


def launches(size: Size) -> Iterator[Row]:
    """Count what the engine launches for a unit in a forward and its backward.

    The fake group launches no collectives. The engine launches two copies of the rank's part, one
    of all gradients into the buffer, their scaling to the mean, and zeros between them.
    """
    counts = {
        is_sharded: [_kernels(replace(size, blocks=n), is_sharded=is_sharded) for n in (2, 6)]
        for is_sharded in (False, True)
    }
    (few, many), (plain_few, plain_many) = counts[True], counts[False]
    per_unit = ((many - few) - (plain_many - plain_few)) / 4
    yield {"what": "kernels and copies of the engine per unit", "found": per_unit, "about": 5}


def _kernels(size: Size, *, is_sharded: bool) -> int:
    with joined(WORLD_SIZE, fake=True) as nccl:
        model: nn.Module = make_model(size)
        precision = fsdpctl.Precision(torch.bfloat16)
        if is_sharded:
            model = sharded(model, nccl, Sharding(precision=precision), source=WeightInit(DEVICE))
        else:
            model.to(torch.bfloat16)
        batch = _batch(size)
        loss_of(model, *batch).backward()
        model.zero_grad()
        if ProfilerActivity.CUDA not in supported_activities():  # an emulated device
            return 0
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as traced:
            loss_of(model, *batch).backward()
            torch.cuda.synchronize()
    on_device = (each for each in traced.events() if str(each.device_type).endswith("CUDA"))
    return sum(1 for each in on_device)


def groups(count: int) -> Iterator[Row]:
    """Count NCCL's groups for the broadcasts of one uneven unit, and for its reductions."""
    with joined(1, fake=False) as nccl:
        parts = torch.ones(count, 1024, device=DEVICE).unbind()
        sends = {
            "broadcasts": (nccl.group, partial(dist.broadcast, group_src=0)),
            "reductions": (nccl.reduce_group, partial(dist.reduce, group_dst=0)),
        }
        for name, (group, send) in sends.items():
            before = _launched(group)
            with nccl._one_launch(group):
                for part in parts:
                    send(part, group=group)
            result = _launched(group) - before
            yield {"what": f"groups of {count} uneven {name}", "found": result, "exactly": 1}


def _launched(group: Any) -> int:
    if hasattr(dist.ProcessGroupNCCL, "groups"):  # of an emulated device
        return len(dist.ProcessGroupNCCL.groups())
    return int(group._get_sequence_number_for_group())


def bases(numel: int, rounds: int) -> Iterator[Row]:
    """Dequantize frozen weights by separate operators and by a fused kernel."""
    for packing in (NF4, INT8):
        packed = packing.quantize(torch.randn(numel, device=DEVICE))
        unpack = partial(packing.dequantize, packed, (numel,), torch.bfloat16)
        yield from _beside(packing.name, numel, unpack, rounds)
        with fuse_kernels("cuda"):
            fused = unpack()
        what = f"{packing.name}: the same bits"
        yield {"what": what, "found": torch.equal(fused, unpack()), "exactly": True}


def moments(width: int, rounds: int) -> Iterator[Row]:
    """Step 8-bit moments by separate operators and by a fused kernel."""
    codes: list[Tensor] = []
    with joined(1, fake=False) as nccl:
        for device in (None, "cuda"):
            optimizer = _EightBits(width, nccl)
            with fuse_kernels(device):
                optimizer()
            codes += [optimizer.codes()]
        off = int((codes[0].int() - codes[1].int()).abs().max())
        yield {"what": "AdamW: codes apart after a step", "found": off, "at_most": 1}
        yield from _beside("AdamW, int8 moments", width * width, optimizer, rounds)


class _EightBits:
    """A step of a square matrix with one gradient."""

    def __init__(self, width: int, nccl: NcclCollectives) -> None:
        linear = nn.Linear(width, width, bias=False, device=DEVICE)
        draw("weight", linear.weight)
        options: dict[str, Any] = {"source": WeightInit(DEVICE), "blocks": ["Linear"]}
        self.model = sharded(nn.Sequential(linear), nccl, Sharding(), **options)
        self.optimizer = fsdpctl.ShardedAdamW(self.model, state_dtype=torch.int8)
        generator = torch.Generator(DEVICE).manual_seed(0)
        x = torch.randn(64, width, device=DEVICE, generator=generator)
        self.model(x).square().mean().backward()

    def __call__(self) -> None:
        finite = torch.zeros((), device=DEVICE)
        self.optimizer.step(grad_scale=finite + 2, found_inf=finite)

    def codes(self) -> Tensor:
        ((_, state),) = self.optimizer.span_states()
        return state["exp_avg.codes"].clone()


def _beside(name: str, numel: int, run: Callable[[], object], rounds: int) -> Iterator[Row]:
    """Time a function by separate operators and fused, beside the time to move its bytes."""
    gpu = gpu_by_name(torch.cuda.get_device_name())
    rate = None
    if gpu is not None:
        rate = compose_config([f"cluster={gpu.cluster}"]).config.cluster.memory_bandwidth
    for way, device, moved in zip(("eager", "fused"), (None, "cuda"), MOVED[name], strict=True):
        with fuse_kernels(device):
            seconds = statistics.median([device_seconds(run) for _ in range(3 + rounds)][3:])
        options = None if rate is None else moved * numel / (rate * 1e9 * STREAMING)
        yield {"what": f"{name}, {way}: seconds", "found": seconds, "about": options}


def pauses(size: Size) -> Iterator[Row]:
    """Time a joint collection, and count the collections that Python begins in steps."""
    times: list[float] = []

    def collections() -> int:
        return sum(each["collections"] for each in gc.get_stats())

    with joined(WORLD_SIZE, fake=True) as nccl:
        step: Step = ours(make_model(size), nccl, fsdpctl.Precision(torch.bfloat16))
        with synchronized_gc():
            before = collections()
            for _ in range(STEPS):
                step(*_batch(size))
            by_itself = collections() - before
            times.append(_host_seconds(gc.collect))
        plain = _host_seconds(gc.collect)
    yield {"what": "collections in steps", "found": by_itself, "exactly": 0}
    yield {"what": "a joint collection: seconds", "found": times[0], "at_most": 0.05}
    yield {"what": "one of all objects: seconds", "found": plain, "about": 0.2}


def _host_seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    """Measure everything; exit with 1 if a figure that must be exact differs."""
    options = arguments(rounds=20, small=False)
    torch.cuda.set_device(DEVICE)
    if options.small:
        torch.compile = partial(torch.compile, backend="eager")
    size = SIZES["tiny"]
    numel, width = (1 << 16, 128) if options.small else (1 << 26, 8192)
    seen = [graphs(size), launches(size), groups(7), bases(numel, options.rounds)]
    results: list[Row] = []
    for rows in (*seen, moments(width, options.rounds), pauses(size)):
        for row in rows:
            results.append(row)
            print(row, flush=True)
        chip = torch.cuda.get_device_name()
        write_report(options.out, "gpu_compiled", results, device=chip, rounds=options.rounds)
    wrong = [row["what"] for row in results if row.get("exactly", row["found"]) != row["found"]]
    if wrong:
        raise SystemExit(f"other than expected: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
