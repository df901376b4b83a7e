"""The engine on a CUDA device: streams, NCCL and precision, at world size 1.

One rank alone normally runs as no_shard; here the sharded paths are forced through NCCL.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from fsdpctl.comm.mesh import make_mesh
from fsdpctl.comm.nccl import NcclCollectives
from fsdpctl.engine.build import Sharding, WeightInit, build_runtime
from fsdpctl.engine.shard_model import shard_from
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.models.module_spec import module_units
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.plan.precision import Precision
from fsdpctl.plan.step_plan import Prefetch, StepPlan
from fsdpctl.plan.strategy import STRATEGIES
from fsdpctl.plan.units import ModelLayout, unit_layouts
from tests.engine.events import gathered_nbytes
from tests.engine.models import make_net, next_token_loss, token_batches
from tests.engine.odd import freeze_all_but_vectors

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SLEEP_CYCLES = 20_000_000  # about ten milliseconds


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[torch.device]:
    store = FileStore(str(Path(tmp_path_factory.mktemp("store")) / "rendezvous"), 1)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    yield device
    dist.destroy_process_group()


class SleepyCollectives(NcclCollectives):
    """Collectives that sleep first on their stream, so that a missing wait changes results."""

    def all_gather(self, buffers):
        with torch.cuda.stream(self.gather_stream):
            torch.cuda._sleep(SLEEP_CYCLES)
        return super().all_gather(buffers)

    def reduce_scatter(self, whole, parts):
        with torch.cuda.stream(self.reduce_stream):
            torch.cuda._sleep(SLEEP_CYCLES)
        return super().reduce_scatter(whole, parts)


def forced(
    device: torch.device, strategy: str, *, precision: Precision | None = None,
    collectives: Callable[[torch.device], NcclCollectives] = NcclCollectives,
    prefetch: Prefetch | None = None, in_part: bool = False,
) -> ShardedModel:  # fmt: skip
    net = make_net(tied=False)
    if in_part:
        freeze_all_but_vectors(net)
    row = STRATEGIES[strategy]
    nccl = collectives(device)
    specs = module_units(net, None)
    mesh = make_mesh(nccl, device, nccl.size)
    division = ModelLayout(specs, unit_layouts(specs, 1), row)
    plan = StepPlan(division, mesh.position, precision or Precision(), prefetch or Prefetch())
    return ShardedModel(net, build_runtime(net, plan, mesh, WeightInit(device)), row)


def losses(model: ShardedModel, device: torch.device, steps: int = 6) -> list[float]:
    optimizer = ShardedAdamW(model, lr=1e-2)
    results: list[Tensor] = []
    for of_ranks in token_batches(steps, 1):
        loss = next_token_loss(model, of_ranks[0][0].to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.detach())
    return torch.stack(results).tolist()


def unsharded_losses(
    device: torch.device, precision: Precision | None = None, *, in_part: bool = False
) -> list[float]:
    """Return the losses of an unsharded model, over NCCL with one rank."""
    sharding, net = Sharding("no_shard", precision=precision or Precision()), make_net(tied=False)
    if in_part:
        freeze_all_but_vectors(net)
    return losses(shard_from(WeightInit(device), net, sharding), device)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_losses_equal_the_unsharded_ones(device: torch.device, strategy: str) -> None:
    expected = pytest.approx(unsharded_losses(device), rel=1e-6)
    assert losses(forced(device, strategy), device) == expected


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_frozen_parameters_are_gathered_with_trained_ones(device, strategy):
    result = losses(forced(device, strategy, in_part=True), device)
    assert result == pytest.approx(unsharded_losses(device, in_part=True), rel=1e-6)


def test_bf16_compute_keeps_float32_masters(device: torch.device) -> None:
    precision = Precision(param_dtype=torch.bfloat16)
    model = forced(device, "full_shard", precision=precision)
    assert losses(model, device) == pytest.approx(unsharded_losses(device, precision), rel=1e-2)
    assert {shard.master.dtype for shard in model.flat_shards()} == {torch.float32}


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_slow_streams_change_nothing(device: torch.device, depth: int) -> None:
    prefetch = Prefetch(depth, depth)
    sleepy = forced(device, "full_shard", collectives=SleepyCollectives, prefetch=prefetch)
    assert losses(sleepy, device) == losses(forced(device, "full_shard", prefetch=prefetch), device)


def test_only_states_and_slots_stay_allocated_between_steps(device: torch.device) -> None:
    losses(forced(device, "full_shard"), device, steps=1)  # allocates the workspaces of cuBLAS
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model = forced(device, "full_shard")
    losses(model, device, steps=2)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    masters = sum(shard.master.nbytes for shard in model.flat_shards())
    # The optimizer and its moments are freed; the allocator rounds tensors up to 512 bytes.
    tensors = 6 * sum(len(shard.layout.param_spans) for shard in model.flat_shards()) + 64
    assert held <= masters + gathered_nbytes(model) + 512 * tensors
