"""Errors on all ranks if models, settings or the order of units differ."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdpctl.engine.shard_model import shard_model
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.errors import EngineError, UsageError
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.plan.step_plan import Prefetch
from tests.distributed import distributed, in_turn
from tests.engine.models import OddBlock, make_net
from tests.engine.odd import Wayward, square_loss


class _Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.requires_grad_(False)


class _Embeddingless(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def get_input_embeddings(self) -> nn.Module:
        raise ValueError("no embeddings here")


def _with_buffer(size: int) -> nn.Module:
    module = nn.Linear(3, 3)
    module.register_buffer("count", torch.zeros(size))
    return module


DISAGREEMENTS: dict[str, Callable[[int], ShardedModel]] = {
    "rank 0 has parameter embed.weight": lambda r: shard_model(make_net(tied=r == 0)),
    "rank 1 has .* frozen": lambda r: shard_model(_Frozen() if r else nn.Linear(3, 3)),
    r"rank 1 has parameter weight \[4, 3\]": lambda r: shard_model(nn.Linear(3, 3 + r)),
    "rank 1 has nothing more": lambda r: shard_model(nn.Linear(3, 3, bias=r == 0)),
    "has strategy no_shard": lambda r: shard_model(nn.Linear(3, 3), ["full_shard", "no_shard"][r]),
    "rank 1 has Prefetch": lambda r: shard_model(nn.Linear(3, 3), prefetch=Prefetch(r, 0)),
    "on the meta device, without values": lambda r: shard_model(
        nn.Linear(3, 3, device="meta" if r else None)
    ),
    "Conv2d": lambda r: shard_model(make_net(tied=True), units=[nn.Conv2d if r else OddBlock]),
    "no embeddings here": lambda r: shard_model(_Embeddingless() if r else nn.Linear(3, 3)),
    r"rank 1 has buffer count \[2\]": lambda r: shard_model(_with_buffer(1 + r)),
    "must divide": lambda r: shard_model(nn.Linear(3, 3), "hybrid_shard", dp_shard_size=2 + r),
}


@distributed(world_size=2)
def test_different_models_or_settings_raise_an_error_on_every_rank(rank, world_size):
    for message, shard in DISAGREEMENTS.items():
        with pytest.raises((EngineError, UsageError, ValueError), match=message):
            shard(rank)


@distributed(world_size=2)
def test_running_units_in_different_orders_raises_an_error(rank: int, world_size: int) -> None:
    net = Wayward([0, 1, 2, 3] if rank == 0 else [0, 2, 1, 3])
    model = shard_model(net, "full_shard", prefetch=Prefetch(0, 0))
    optimizer = ShardedAdamW(model, lr=1e-2)
    square_loss(model, torch.randn(4, 13)).backward()
    with pytest.raises(EngineError, match="in different orders"):
        optimizer.step()


@distributed(world_size=4)
@in_turn(
    strategy__size=[("no_shard", None), ("shard_optimizer", None), ("hybrid_shard", 2)]
    + [("hybrid_shard_optimizer", 2)]
)
def test_a_replica_that_differs_is_found(rank, world_size, strategy, size):
    model = shard_model(make_net(tied=True), strategy, dp_shard_size=size)
    model.check_replicas()
    buffer = model._runtime.units["blocks.1"].buffers[0]
    if rank == 3:
        values = buffer.shard.master if size else buffer.full
        values[0] += 1e-3
    with pytest.raises(EngineError, match=r"blocks\.1\..* on rank .*3.* differs"):
        model.check_replicas()


@distributed(world_size=4)
def test_an_invalid_shard_size_lists_the_valid_ones(rank: int, world_size: int) -> None:
    with pytest.raises(UsageError, match=r"must divide the 4 ranks \(1, 2, 4\)"):
        shard_model(make_net(tied=True), "hybrid_shard", dp_shard_size=3)


@pytest.mark.parametrize(
    ("strategy", "size", "groups"),
    [("full_shard", None, 2), ("no_shard", None, 2), ("hybrid_shard", 2, 4)]
    + [("hybrid_shard_optimizer", 2, 4)],
)
@distributed(world_size=4)
def test_few_process_groups_are_made(rank, world_size, strategy, size, groups):
    """Ranks make a default and a reduce group; replicas make two each, and one across replicas."""
    models = [shard_model(make_net(tied=True), strategy, dp_shard_size=size) for _ in range(2)]
    assert len(dist.distributed_c10d._world.pg_map) == groups
    mesh = models[0].mesh
    assert mesh.shard.reduce_group is not mesh.shard.group  # type: ignore[attr-defined]
