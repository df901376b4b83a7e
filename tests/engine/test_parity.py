"""Every strategy equals one process with all ranks' data."""

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from fsdpctl.engine.shard_model import shard_model
from fsdpctl.engine.sharded_model import GradAccumulator, ShardedModel
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.optim.record import record_step
from fsdpctl.plan.owner_map import OwnerMap
from fsdpctl.plan.precision import Precision
from fsdpctl.plan.strategy import STRATEGIES
from tests.distributed import distributed
from tests.engine.models import make_net, next_token_loss, one_step, token_batches
from tests.engine.nccl import nccl_path
from tests.engine.odd import KINDS, Batches, Kind
from tests.matrix import HALF, WHOLE, cases, fast, half_of
from tests.reference import train_reference

STEPS = 3
STRATEGY_NAMES = list(STRATEGIES)
HYBRIDS = [name for name, row in STRATEGIES.items() if row.replicates]
SHARDINGS = [(name, "even") for name in STRATEGIES] + [
    ("shard_optimizer", name) for name in ("round_robin", "contiguous", "balanced")
]
STRATEGIES_ALONE = len(STRATEGIES)  # SHARDINGS has the strategies, then the owner maps
MAPPED = ["tied embedding", "mixed", "used on some ranks"]
# Micro-batches per window; the last window can be partial.
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
    largest = [(ours[name] - theirs[name]).abs().max().double() for name in ours]
    return float(torch.stack(largest).max())  # NaN if any is NaN


@dataclass(frozen=True)
class Case:
    sharding: tuple[str, str]  # strategy and owner map
    kind: str
    window: str
    ranks: int

    @property
    def exact(self) -> bool:
        """Return whether one process adds up in the same order."""
        return self.window != "every" and self.sharding[0] not in HYBRIDS

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.exact else torch.float64

    @property
    def batches(self) -> Batches:
        return KINDS[self.kind].batches(STEPS, self.ranks, WINDOWS[self.window])

    def trained(self, rank: int) -> dict[str, Tensor]:
        """Return the full state after training. Collective."""
        kind, (strategy, owner_map) = KINDS[self.kind], self.sharding
        copy = 2 if strategy in HYBRIDS and self.ranks == 4 else None
        net: nn.Module = kind.make().to(self.dtype)
        model = shard_model(net, strategy, owner_map=owner_map, dp_shard_size=copy)
        train(model, rank, self.batches, kind, self.window)
        state: dict[str, Tensor] = model.state_dict()
        return state

    def check(self, state: dict[str, Tensor]) -> None:
        kind = KINDS[self.kind]
        plain, divides_after = kind.make().to(self.dtype), self.window == "partial"
        expected = train_reference(plain, kind.loss, self.batches, divides_after=divides_after)
        assert largest_difference(state, expected) <= (0.0 if self.exact else 1e-12), self


def check(rank: int, all_cases: Iterable[Case]) -> None:
    """Train on all ranks; each rank then checks its share of the states."""
    states = [(case, case.trained(rank)) for case in all_cases]
    for number, (case, state) in enumerate(states):
        if number % case.ranks == rank:
            case.check(state)


@cache
def pairs() -> list[tuple[int, str, str, tuple[str, str]]]:
    plain, mapped = SHARDINGS[:STRATEGIES_ALONE], SHARDINGS[STRATEGIES_ALONE:]
    kinds = list(KINDS)
    # Two and four ranks take turns over kinds and strategies, to save time.
    return [
        *(
            (4 if (kinds.index(kind) + plain.index(sharding)) % 2 else 2, window, kind, sharding)
            for window, kind, sharding in cases(list(WINDOWS), kinds, plain, whole=False)
        ),
        *cases([2, 4], list(WINDOWS), MAPPED, mapped, whole=False),
        *cases([3], list(WINDOWS), MAPPED, SHARDINGS[1::2], whole=False),
    ]


@HALF
@pytest.mark.parametrize("world_size", fast(2, slow=[3, 4]))
@distributed(timeout=120)
def test_equals_one_process(rank: int, world_size: int, half: int) -> None:
    """Compare bit for bit in fp32; if additions have another order, to 1e-12 in float64.

    The cases have all pairs of window, kind of module and strategy. Owner maps and three ranks
    only have the kinds of MAPPED, whose parts are the most uneven.
    """
    result = half_of([each for each in pairs() if each[0] == world_size], half)
    check(rank, [Case(sharding, kind, window, ranks) for ranks, window, kind, sharding in result])


@pytest.mark.slow
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@distributed(timeout=600)
def test_equals_one_process_in_every_case(rank, world_size, sharding):
    check(rank, (Case(sharding, *each, world_size) for each in product(KINDS, WINDOWS)))


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard", "hybrid_shard"])
def test_one_rank_equals_one_process(strategy: str) -> None:
    windows = ("one", "last", "partial")
    check(0, (Case((strategy, "even"), kind, windows[i % 3], 1) for i, kind in enumerate(KINDS)))


@WHOLE
@distributed(world_size=3)
def test_clipping_equals_one_process(rank: int, world_size: int, whole: bool) -> None:
    batches = token_batches(STEPS, world_size)
    expected = train_reference(make_net(tied=True), next_token_loss, batches, max_norm=0.05)
    for strategy in STRATEGY_NAMES if whole else STRATEGY_NAMES[::3]:
        model = shard_model(make_net(tied=True), strategy)
        optimizer = ShardedAdamW(model, lr=1e-2)
        for of_ranks in batches:
            next_token_loss(model, of_ranks[rank][0]).backward()
            record = record_step(
                model, loss_sum=torch.zeros(()), tokens=torch.tensor(15),
                nominal_tokens=15 * world_size, max_grad_norm=0.05,
            )  # fmt: skip
            assert record.stats().grad_norm > 0.05
            optimizer.step(grad_scale=record.grad_scale, found_inf=record.found_inf)
            optimizer.zero_grad()
        assert largest_difference(model.state_dict(), expected) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("dp_shard_size", fast(2, slow=[1]))
@distributed(world_size=4)
def test_replicas_of_any_size_equal_one_process(rank, world_size, dp_shard_size):
    for strategy in HYBRIDS:
        batches = token_batches(STEPS, world_size)
        net, plain = (make_net(tied=True, dtype=torch.float64) for _ in range(2))
        expected = train_reference(plain, next_token_loss, batches)
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


@distributed(world_size=2)
def test_equal_parts_in_another_order_go_to_their_owners(rank: int, world_size: int) -> None:
    """Use the even collectives of NCCL, which send part r to rank r."""
    batches = token_batches(3, world_size)
    expected = train_reference(make_net(tied=False), next_token_loss, batches)
    net = make_net(tied=False)
    layouts = shard_model(make_net(tied=False), "shard_optimizer").flat_shards()
    even = OwnerMap.even([shard.layout.numel for shard in layouts], world_size)
    swapped = OwnerMap(even.sizes, tuple(parts[::-1] for parts in even.spans))
    with nccl_path():
        model = shard_model(net, "shard_optimizer", owner_map=swapped)
        optimizer = ShardedAdamW(model, lr=1e-2)
        for of_ranks in batches:
            one_step(model, optimizer, of_ranks[rank][0])
        assert largest_difference(model.state_dict(), expected) <= 1e-6
