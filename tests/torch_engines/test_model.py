"""Models under PyTorch's engines, without whole runs."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdpctl.errors import EngineError
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.plan.step_plan import Prefetch
from fsdpctl.torch_engines.ddp import AllReduceWaits
from fsdpctl.torch_engines.model import TorchEngineModel, build_torch_engine
from fsdpctl.torch_engines.settings import TorchEngineSettings
from tests.distributed import distributed

CPU = torch.device("cpu")


class Net(nn.Module):
    """A network with a shared parameter and odd sizes: three rows, one row, vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5))] * 1)
        self.one = nn.Linear(5, 1)
        self.again = nn.Linear(3, 5, bias=False)
        self.again.weight = self.first.weight
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x):
        hidden = self.first(x) + self.again(x)
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        return self.scale * self.one(hidden).square().sum()


def draw(name: str, whole: Tensor) -> None:
    generator = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
    whole.copy_(torch.randn(whole.shape, generator=generator))


def make_engine(engine: str, ranks_per_replica: int = 1) -> TorchEngineModel:
    with torch.device("meta"):
        net = Net()
    net.scale = torch.tensor([2.0])
    setup = TorchEngineSettings(
        engine, ("blocks.0",), ranks_per_replica, reshard_after_forward=True,
        prefetch=Prefetch(1, 1), param_dtype=torch.float32, reduce_dtype=torch.float32,
        master_dtype=torch.float32, compiles=False,
    )  # fmt: skip
    return build_torch_engine(net, setup, CPU, draw)


def reference(batches: list[Tensor], lr: float) -> dict[str, Tensor]:
    """Return the parameters after two steps of one process with the mean over ranks."""
    net = Net()
    for name, param in net.named_parameters():
        draw(name, param.data)
    groups: list[dict[str, Any]] = [
        {"params": [each for each in net.parameters() if each.ndim > 1]},
        {"params": [each for each in net.parameters() if each.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        sum(net(batch) / len(batches) for batch in batches).backward()
        optimizer.step()
    return {name: param.detach() for name, param in net.named_parameters()}


@pytest.mark.parametrize(("engine", "ranks_per_replica"), [("fsdp2", 2), ("fsdp2", 1), ("ddp", 1)])
@distributed(world_size=2)
def test_steps_equal_those_of_one_process(rank, world_size, engine, ranks_per_replica):
    batches = [torch.randn(4, 3, generator=torch.Generator().manual_seed(each)) for each in (1, 2)]
    model = make_engine(engine, ranks_per_replica)
    optimizer = ShardedAdamW(model, lr=1e-2)
    for _ in range(2):
        model(batches[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = reference(batches, 1e-2)
    names = set()
    for shard in model.flat_shards():
        for piece in shard.param_slices():
            full = expected[piece.param.name].flatten()
            local = shard.view(shard.master, piece.in_flat)
            torch.testing.assert_close(local, full[piece.in_param.start : piece.in_param.stop])
        (param,) = shard.layout.params
        names.add(param.name)
    assert names == set(expected)
    written = sum(shard.saved_span.numel for shard in model.flat_shards())
    every = model.collectives.all_gather_values(written)
    assert sum(every) == sum(param.numel() for param in expected.values())


@pytest.mark.parametrize(("engine", "ranks_per_replica"), [("fsdp2", 1), ("ddp", 1)])
@distributed(world_size=2)
def test_a_replica_that_differs_is_found(rank, world_size, engine, ranks_per_replica):
    model = make_engine(engine, ranks_per_replica)
    model.check_replicas()
    if rank == 1:
        model.flat_shards()[0].master[0] += 1e-3
    with pytest.raises(EngineError, match=r"first\.weight on rank"):
        model.check_replicas()


def test_exposed_communication_counts_from_the_last_gradient() -> None:
    first, second = (nn.Parameter(torch.ones(3)) for _ in range(2))
    waits = AllReduceWaits([first, second], CPU)
    (first.sum() + second.sum()).backward()
    time.sleep(0.02)
    assert 0.02 <= waits.take()() < 2
    assert waits.take()() == 0
    waits.is_on = False
    (first.sum() + second.sum()).backward()
    assert waits.take()() == 0
