"""The planned bytes of model states are those that the engine holds."""

import torch

from fsdpctl.engine.build import divide_module
from fsdpctl.engine.precision import Precision
from fsdpctl.engine.shard import shard_model
from fsdpctl.memory.states import state_bytes
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.plan.schedule import Prefetch
from fsdpctl.plan.strategy import STRATEGIES
from fsdpctl.plan.units import lay_out
from tests.distributed import distributed
from tests.engine.models import make_net, next_token_loss, token_batches
from tests.matrix import matrix

CASES = [(name, "even") for name in STRATEGIES] + [
    ("shard_optimizer", name) for name in ("round_robin", "contiguous", "balanced")
]


@matrix(case=CASES, bf16=[False, True])
@distributed(world_size=2)
def test_planned_bytes_are_the_engines(
    rank: int, world_size: int, case: tuple[str, str], bf16: bool
) -> None:
    strategy, owner_map = case
    precision = Precision(param_dtype=torch.bfloat16 if bf16 else None)
    units = divide_module(make_net(tied=False), None)
    row = STRATEGIES[strategy]
    planned = state_bytes(
        lay_out(units, world_size, owner_map),
        row,
        param_dtype="bfloat16" if bf16 else "float32",
        master_dtype="float32",
        prefetch_depth=1,
    )
    model = shard_model(
        make_net(tied=False),
        strategy,
        owner_map=owner_map,
        prefetch=Prefetch(1, 1),
        precision=precision,
    )
    optimizer = ShardedAdamW(model, lr=1e-2)
    largest = 0
    with model.recorded_events():
        largest = model.gathered_nbytes()
        next_token_loss(model, token_batches(1, world_size)[0][rank][0]).backward()
    optimizer.step()
    shards = model.flat_shards()
    masters = sum(shard.master.nbytes for shard in shards)
    gradients = sum(shard.grad.nbytes for shard in shards if shard.grad is not None)
    counters = 4 * len(optimizer.runs)
    held = (masters, gradients, optimizer.memory_bytes() - counters)
    of_ranks = model.collectives.gather_objects(held)
    fullest = max(of_ranks, key=lambda each: sum(each))  # type: ignore[call-overload]
    # The optimizer has no states for stretches of padding alone.
    assert fullest[:2] == (planned.masters, planned.gradients)  # type: ignore[index]
    assert 0 <= planned.optimizer - fullest[2] <= 8 * 64 * len(shards)  # type: ignore[index]
    if row.keeps_whole_params:
        assert largest == planned.gathered + (0 if bf16 else planned.masters)
