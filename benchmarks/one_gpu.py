"""Shared parts of the benchmarks on one GPU: the device, random values, and fake ranks.

Over torch's fake process group, one process is rank 0 of many: compute, kernels, copies and
allocations are real, and collectives send nothing.
"""

import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdpctl.comm.collectives import Collectives, Handle
from fsdpctl.comm.mesh import make_mesh
from fsdpctl.comm.nccl import NcclCollectives
from fsdpctl.engine.build import Sharding, WeightInit, build_runtime
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.models.module_spec import module_units
from fsdpctl.plan.step_plan import StepPlan
from fsdpctl.plan.strategy import get_strategy
from fsdpctl.plan.units import ModelLayout, unit_layouts

DEVICE = torch.device("cuda", 0)  # with its index: NCCL's process group accepts no other
_STD = 0.02
# torch 2.11's fake group leaves the outputs of these unwritten, and NaN operands change speed.
_UNWRITTEN = ("reduce_scatter_single", "reduce_scatter_tensor", "all_to_all_single")


class FakeNccl(NcclCollectives):
    """Collectives that assume the same values on every rank in small all-reduces."""

    def start_all_reduce(self, values: Tensor) -> Handle:
        """Return the sum over equal ranks."""
        handle = super().start_all_reduce(values)
        return Handle(lambda: handle.wait().mul_(self.size))


def device_seconds(run: Callable[[], object]) -> float:
    """Return the seconds that the device takes for what a function launches."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    run()
    ended.record()
    torch.cuda.synchronize()
    return float(began.elapsed_time(ended)) / 1000


@contextmanager
def joined(world_size: int, *, fake: bool) -> Iterator[NcclCollectives]:
    """Join a process group as rank 0: torch's fake one, or NCCL's with this rank alone."""
    torch.cuda.set_device(DEVICE)
    if fake:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        with _written():
            yield FakeNccl(DEVICE)
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        store = FileStore(str(Path(folder) / "rendezvous"), 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=DEVICE)
        yield NcclCollectives(DEVICE)
        dist.destroy_process_group()


@contextmanager
def _written() -> Iterator[None]:
    """Copy the input's first part into the output of collectives that the fake group skips."""
    with ExitStack() as patches:
        for name in _UNWRITTEN:
            if hasattr(dist, name):
                patches.enter_context(patch.object(dist, name, _copying(getattr(dist, name))))
        yield


def _copying(plain: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(plain)
    def run(output: Tensor, input: Tensor, *args: object, **more: object) -> object:
        count = min(output.numel(), input.numel())
        output.view(-1)[:count].copy_(input.view(-1)[:count])
        return plain(output, input, *args, **more)

    return run


@torch.no_grad()
def draw(name: str, param: Tensor) -> None:
    """Fill a parameter on its device, from its name alone.

    The trainer draws on the CPU, which for billions of parameters takes longer than the benchmark.
    """
    if param.ndim <= 1:
        param.fill_(1.0)
        return
    seed = int.from_bytes(name.encode(), "little") % (1 << 62)
    generator = torch.Generator(param.device).manual_seed(seed)
    param.normal_(0.0, _STD, generator=generator)


def sharded(
    module: nn.Module,
    collectives: Collectives,
    sharding: Sharding,
    *,
    source: WeightInit,
    strategy: str = "full_shard",
    blocks: Sequence[str] | None = None,
) -> ShardedModel:
    """Return a module under fsdpctl's engine with these collectives, even on a single rank."""
    row, specs = get_strategy(strategy), module_units(module, blocks)
    division = ModelLayout(specs, unit_layouts(specs, collectives.size), row)
    mesh = make_mesh(collectives, source.device, collectives.size)
    options = (sharding.precision, sharding.prefetch, sharding.offloaded)
    plan = StepPlan(division, mesh.position, *options)
    return ShardedModel(module, build_runtime(module, plan, mesh, source), row)
