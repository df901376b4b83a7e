"""Every strategy equals one process that sees all ranks' data."""

from contextlib import nullcontext
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from fsdpctl.engine.accumulation import GradAccumulator
from fsdpctl.engine.model import ShardedModel
from fsdpctl.engine.precision import Precision
from fsdpctl.engine.shard import shard_model
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.optim.record import record_step
from fsdpctl.plan.strategy import STRATEGIES
from tests.distributed import distributed
from tests.engine.models import make_net, next_token_loss, token_batches
from tests.engine.odd import KINDS, Batches, Kind
from tests.matrix import WHOLE, cases, fast
from tests.reference import train_reference

STEPS = 3
STRATEGY_NAMES = list(STRATEGIES)
HYBRIDS = [name for name, row in STRATEGIES.items() if row.replicates]
SHARDINGS = [(name, "even") for name in STRATEGIES] + [
    ("shard_optimizer", name) for name in ("round_robin", "contiguous", "balanced")
]
STRATEGIES_ALONE = len(STRATEGIES)  # of SHARDINGS; then come the owner maps
MAPPED = ["tied embedding", "mixed", "used on some ranks"]
# Micro-steps of a window; what is left of one is a window that ends before it is full.
WINDOWS = {"one": 1, "every": 3, "last": 3, "partial": 3}


def train(model: ShardedModel, rank: int, batches: Batches, kind: Kind, window: str) -> None:
    optimizer = ShardedAdamW(model, lr=1e-2)
    for of_ranks in batches:
        if window == "partial":
            accumulator = GradAccumulator(model, WINDOWS[window] + 1, reduce="last")
            for batch in of_ranks[rank]:
                with accumulator.micro_step():
                    kind.loss(model, batch).backward()
            accumulator.sync()
        else:
            count = len(of_ranks[rank])
            for number, batch in enumerate(of_ranks[rank], start=1):
                holds = window == "last" and number < count
                with model.no_sync() if holds else nullcontext():
                    (kind.loss(model, batch) / count).backward()
        optimizer.step()
        optimizer.zero_grad()


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def difference_to_one_process(
    kind: Kind, window: str, sharding: tuple[str, str], rank: int, ranks: int, dtype: torch.dtype
) -> float:
    """On rank 0; the others only take part, and find 0."""
    batches = kind.batches(STEPS, ranks, WINDOWS[window])
    strategy, owner_map = sharding
    copy = 2 if strategy in HYBRIDS and ranks == 4 else None
    net: nn.Module = kind.make().to(dtype)
    model = shard_model(net, strategy, owner_map=owner_map, dp_shard_size=copy)
    train(model, rank, batches, kind, window)
    state = model.state_dict()
    if rank > 0:
        return 0.0
    plain = kind.make().to(dtype)
    expected = train_reference(plain, kind.loss, batches, divides_after=window == "partial")
    return largest_difference(state, expected)


def check(rank: int, ranks: int, sharding: tuple[str, str], name: str, window: str) -> None:
    exact = window != "every" and sharding[0] not in HYBRIDS
    dtype = torch.float32 if exact else torch.float64
    difference = difference_to_one_process(KINDS[name], window, sharding, rank, ranks, dtype)
    assert difference <= (0.0 if exact else 1e-12), (sharding, name, window, difference)


@cache
def pairs() -> list[tuple[int, str, str, tuple[str, str]]]:
    plain, mapped = SHARDINGS[:STRATEGIES_ALONE], SHARDINGS[STRATEGIES_ALONE:]
    return [
        *cases([2, 4], list(WINDOWS), list(KINDS), plain, whole=False),
        *cases([2, 4], list(WINDOWS), MAPPED, mapped, whole=False),
        *cases([3], list(WINDOWS), MAPPED, SHARDINGS[1::2], whole=False),
    ]


@pytest.mark.parametrize("world_size", fast(2, slow=[3, 4]))
@distributed(timeout=120)
def test_equals_one_process(rank: int, world_size: int) -> None:
    """Bit for bit in fp32; where additions have another order, to 1e-12 in float64.

    Every two of window, kind of module and strategy meet in some case; owner maps, and three
    ranks, with those kinds that make parts most uneven.
    """
    for ranks, window, name, sharding in pairs():
        if ranks == world_size:
            check(rank, ranks, sharding, name, window)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@distributed(timeout=600)
def test_equals_one_process_in_every_case(
    rank: int, world_size: int, sharding: tuple[str, str]
) -> None:
    for name, window in product(KINDS, WINDOWS):
        check(rank, world_size, sharding, name, window)


@pytest.mark.parametrize("strategy", ["no_shard", "hybrid_shard"])
def test_one_rank_equals_one_process(strategy: str) -> None:
    for number, name in enumerate(KINDS):
        window = ("one", "last", "partial")[number % 3]
        check(0, 1, (strategy, "even"), name, window)


@WHOLE
@distributed(world_size=3)
def test_clipping_equals_one_process(rank: int, world_size: int, whole: bool) -> None:
    for strategy, tied in product(STRATEGY_NAMES if whole else STRATEGY_NAMES[::3], [True]):
        batches = token_batches(STEPS, world_size)
        expected = train_reference(make_net(tied=tied), next_token_loss, batches, max_norm=0.05)
        model = shard_model(make_net(tied=tied), strategy)
        optimizer = ShardedAdamW(model, lr=1e-2)
        for of_ranks in batches:
            next_token_loss(model, of_ranks[rank][0]).backward()
            record = record_step(
                model,
                loss_sum=torch.zeros(()),
                tokens=torch.tensor(15),
                nominal_tokens=15 * world_size,
                max_grad_norm=0.05,
            )
            assert record.figures().grad_norm > 0.05
            optimizer.step(grad_scale=record.grad_scale, found_inf=record.found_inf)
            optimizer.zero_grad()
        assert largest_difference(model.state_dict(), expected) <= 1e-6


@pytest.mark.parametrize("dp_shard_size", [1, 2])
@distributed(world_size=4)
def test_copies_of_any_size_equal_one_process(
    rank: int, world_size: int, dp_shard_size: int
) -> None:
    for strategy in HYBRIDS:
        batches = token_batches(STEPS, world_size)
        net = make_net(tied=True, dtype=torch.float64)
        expected = train_reference(
            make_net(tied=True, dtype=torch.float64), next_token_loss, batches
        )
        model = shard_model(net, strategy, dp_shard_size=dp_shard_size)
        train(model, rank, batches, KINDS["tied embedding"], "one")
        assert largest_difference(model.state_dict(), expected) <= 1e-12


@distributed(world_size=2)
def test_bf16_compute_equals_other_strategies_bit_for_bit(rank: int, world_size: int) -> None:
    kind = KINDS["odd shapes"]
    batches = kind.batches(STEPS, world_size, 1)
    states = []
    for strategy in STRATEGY_NAMES:
        precision = Precision(param_dtype=torch.bfloat16)
        model = shard_model(kind.make(), strategy, precision=precision)
        train(model, rank, batches, kind, "one")
        assert {shard.master.dtype for shard in model.flat_shards()} == {torch.float32}
        states.append(model.state_dict())
    for state in states:
        assert largest_difference(state, states[0]) == 0.0


@distributed(world_size=2)
def test_ranks_with_different_weights_become_rank_zeros_model(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    net = make_net(tied=True)
    with torch.no_grad():
        for param in net.parameters():
            param.add_(rank)
    model = shard_model(net, "full_shard")
    assert largest_difference(model.state_dict(), make_net(tied=True).state_dict()) == 0.0
