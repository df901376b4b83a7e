"""Copies of the model: their ranks share out what the optimizer has, or each copy keeps it."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fsdpctl
from fsdpctl.comm.base import Collectives, Gathering
from fsdpctl.errors import EngineError, UsageError
from fsdpctl.plan.schedule import Event, EventKind
from fsdpctl.plan.strategy import STRATEGIES, Strategy, effective_strategy, with_resharding
from tests.distributed import distributed, in_turn
from tests.engine.events import gathered_nbytes, recording
from tests.engine.models import make_net, next_token_loss, token_batches
from tests.engine.test_parity import largest_difference
from tests.matrix import fast
from tests.reference import train_reference

SHARED = "hybrid_shard_optimizer"
HYBRIDS = fast(SHARED, slow=["hybrid_shard", "hybrid_shard_grad_op"])
K = EventKind


def copies_of_two(
    *, strategy: str = SHARED, tied: bool = True, **more: Any
) -> fsdpctl.ShardedModel:
    return fsdpctl.shard_model(make_net(tied=tied), strategy, dp_shard_size=2, **more)


def one_step(model: fsdpctl.ShardedModel, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    next_token_loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("strategy", "alone", "whole_copies", "one_copy"),
    [
        ("hybrid_shard", "no_shard", "no_shard", "full_shard"),
        ("hybrid_shard_grad_op", "no_shard", "no_shard", "shard_grad_op"),
        (SHARED, "no_shard", "shard_optimizer", "full_shard"),
        ("full_shard", "no_shard", None, "full_shard"),
    ],
)
def test_a_single_replica_runs_the_strategy_without_replicas(
    strategy, alone, whole_copies, one_copy
):
    row = STRATEGIES[strategy]
    assert effective_strategy(row, 1, 1) == (STRATEGIES[alone], 1)
    assert effective_strategy(row, 8, 8) == (STRATEGIES[one_copy], 8)
    if whole_copies is not None:
        assert effective_strategy(row, 1, 8) == (STRATEGIES[whole_copies], 8)
        assert effective_strategy(row, 2, 8) == (row, 2)


def test_a_strategy_that_shares_unsharded_states_is_rejected():
    with pytest.raises(UsageError, match="strategy mine: shards_over_copies requires replicates"):
        Strategy("mine", "", True, True, True, True, replicates=False, shards_over_copies=True)


def test_no_such_strategy_keeps_parameters_until_backward():
    assert with_resharding(SHARED, True).name == SHARED
    with pytest.raises(UsageError, match="reshard_after_forward=false is not supported"):
        with_resharding(SHARED, False)


@pytest.mark.parametrize("strategy", HYBRIDS)
@distributed(world_size=4)
def test_full_weights_are_loaded_and_returned(rank: int, world_size: int, strategy: str) -> None:
    model = copies_of_two(strategy=strategy)
    batch, expected = token_batches(1, 1)[0][0][0], make_net(tied=True).state_dict()
    assert largest_difference(model.state_dict(), expected) == 0.0
    other = {name: value + 1 for name, value in expected.items()}
    model.load_state_dict(other)
    assert largest_difference(model.state_dict(), other) == 0.0
    plain = make_net(tied=True)
    plain.load_state_dict(other)
    assert torch.equal(model(batch), plain(batch))
    with model.full_parameters(writeback=True), torch.no_grad():
        embedding = model.module.get_parameter("embed.weight")
        assert torch.equal(embedding, other["embed.weight"])
        embedding.fill_(float(rank + 3))
    assert (model.state_dict()["head.weight"] == 3.0).all()
    model.check_replicas()
    unwrapped = model.unwrap()
    assert (unwrapped.get_parameter("embed.weight") == 3.0).all()


@pytest.mark.parametrize("strategy", HYBRIDS)
@distributed(world_size=4)
@in_turn(bf16=[False, True])
def test_written_shards_reach_every_replica(
    rank: int, world_size: int, strategy: str, bf16: bool
) -> None:
    precision = fsdpctl.Precision(torch.bfloat16 if bf16 else None)
    model = copies_of_two(strategy=strategy, precision=precision)
    numel = sum(shard.master.numel() for shard in model.flat_shards())
    with pytest.raises(EngineError, match=rf"shape \[{numel}\], as this rank's"):
        model.update_shards(torch.zeros(3))
    model.update_shards(torch.full((numel,), 2.0))
    assert all((value == 2.0).all() for value in model.state_dict().values())
    with torch.no_grad():
        for flat in model.flat_parameters():
            flat.fill_(0.5)
    model.broadcast_updated_params()
    plain = make_net(tied=True).to(torch.bfloat16 if bf16 else torch.float32)
    with torch.no_grad():
        for param in plain.parameters():
            param.fill_(0.5)
    batch = token_batches(1, 1)[0][0][0]
    assert torch.equal(model(batch), plain(batch))
    model.check_replicas()


@pytest.mark.parametrize("strategy", HYBRIDS)
@distributed(world_size=4)
def test_any_elementwise_optimizer_and_clipping_count_each_element_once(
    rank: int, world_size: int, strategy: str
) -> None:
    batches = token_batches(3, world_size)
    model, plain = copies_of_two(strategy=strategy), make_net(tied=True)
    optimizer = torch.optim.SGD(model.flat_parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for of_ranks in batches:
        next_token_loss(model, of_ranks[rank][0]).backward()
        norm = fsdpctl.clip_grad_norm_(model, 0.05)
        for other in of_ranks:
            (next_token_loss(plain, other[0]) / world_size).backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        assert float(norm) == pytest.approx(float(expected), rel=1e-5)
        assert float(norm) > 0.05
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        reference.zero_grad()
    assert largest_difference(model.state_dict(), plain.state_dict()) <= 1e-6


@pytest.mark.parametrize("strategy", HYBRIDS)
@pytest.mark.parametrize("reduce", fast("last", slow=["every"]))
@distributed(world_size=4)
def test_the_accumulator_returns_the_mean_of_full_and_partial_windows(
    rank: int, world_size: int, strategy: str, reduce: str
) -> None:
    batches = token_batches(2, world_size, micro_steps=3) + token_batches(1, world_size, 2)
    net = make_net(tied=True, dtype=torch.float64)
    expected = train_reference(make_net(tied=True, dtype=torch.float64), next_token_loss, batches)
    model = fsdpctl.shard_model(net, strategy, dp_shard_size=2)
    optimizer = fsdpctl.ShardedAdamW(model, lr=1e-2)
    accumulator = fsdpctl.GradAccumulator(model, steps=3, reduce=reduce)  # type: ignore[arg-type]
    for of_ranks in batches:
        for batch in of_ranks[rank]:
            with accumulator.micro_step():
                next_token_loss(model, batch).backward()
        accumulator.sync()
        optimizer.step()
        optimizer.zero_grad()
    assert largest_difference(model.state_dict(), expected) <= 1e-12


@pytest.mark.parametrize("bf16", fast(True, slow=[False]))
@distributed(world_size=4)
def test_updates_that_arrive_late_change_nothing(rank: int, world_size: int, bf16: bool) -> None:
    found = []
    for overlaps in (False, True):
        model = copies_of_two(precision=fsdpctl.Precision(torch.bfloat16 if bf16 else None))
        model.overlap_param_gather = overlaps
        optimizer = fsdpctl.ShardedAdamW(model, lr=1e-2)
        for number, of_ranks in enumerate(token_batches(4, world_size)):
            one_step(model, optimizer, of_ranks[rank][0])
            if number == 0:
                model.prefetch_forward_params()
            if number == 1:
                model.check_replicas()
            if number == 2:
                with torch.no_grad():
                    next_token_loss(model, of_ranks[rank][0])
        assert any(model._runtime.param_sync._arriving.values()) == overlaps
        found.append(model.state_dict())
    assert largest_difference(*found) == 0.0


@distributed(world_size=4)
def test_after_a_backward_that_failed_the_next_step_is_right(rank: int, world_size: int) -> None:
    first, second = token_batches(2, world_size)
    expected = train_reference(make_net(tied=True), next_token_loss, [second])
    model = copies_of_two()
    optimizer = fsdpctl.ShardedAdamW(model, lr=1e-2)

    def fail(*about: object) -> None:
        raise ArithmeticError("in backward")

    block = model.module.get_submodule("blocks.1")
    handle = block.register_full_backward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        next_token_loss(model, first[rank][0]).backward()
    handle.remove()
    optimizer.zero_grad()
    one_step(model, optimizer, second[rank][0])
    assert largest_difference(model.state_dict(), expected) <= 1e-6
    assert model.ledger.nbytes == gathered_nbytes(model)


class Links:
    """Counts what a rank sends or gets over each set of ranks, as bytes of the whole tensor."""

    def __init__(self) -> None:
        self.nbytes = Counter[str]()

    def watch(self, name: str, collectives: Collectives) -> None:
        calls = "all_gather", "reduce_scatter", "start_all_reduce", "all_reduce", "broadcast"
        for call in calls:
            setattr(collectives, call, self._counted(name, getattr(collectives, call)))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(values: Any, *others: Any, **more: Any) -> Any:
            given = [values] if isinstance(values, Tensor) else [_tensor(each) for each in values]
            self.nbytes[name] += sum(each.nbytes for each in given)
            return call(values, *others, **more)

        return counted


def _tensor(given: Gathering | tuple[object, Tensor]) -> Tensor:
    return given.whole if isinstance(given, Gathering) else given[1]


def sent(events: list[Event], *kinds: EventKind) -> int:
    return sum(event.nbytes for event in events if event.kind in kinds)


@distributed(world_size=4)
@in_turn(bf16=[False, True])
def test_only_gradients_and_updates_are_sent_between_replicas(
    rank: int, world_size: int, bf16: bool
) -> None:
    """A rank's part of them; and over all ranks next to nothing."""
    model = copies_of_two(precision=fsdpctl.Precision(torch.bfloat16 if bf16 else None))
    optimizer = fsdpctl.ShardedAdamW(model, lr=1e-2)
    batch = token_batches(1, world_size)[0][rank][0]
    one_step(model, optimizer, batch)
    links, mesh = Links(), model.mesh
    assert mesh.replicas is not None
    for name, collectives in {
        "in": mesh.shard,
        "between": mesh.replicas,
        "all": mesh.world,
    }.items():
        links.watch(name, collectives)
    with recording(model) as events:
        one_step(model, optimizer, batch)
    numel = sum(shard.layout.numel for shard in model.flat_shards())
    assert links.nbytes["in"] == sent(events, K.GATHER, K.REDUCE)
    assert links.nbytes["between"] == sent(events, K.COMBINE, K.SYNC)
    assert sent(events, K.COMBINE) == numel // 2 * 4
    assert sent(events, K.SYNC) == numel // 2 * (2 if bf16 else 4)
    assert links.nbytes["all"] < 1000


@distributed(world_size=4)
def test_frozen_parameters_are_sent_once(rank: int, world_size: int) -> None:
    """When it is loaded, and no more after a step."""
    batch = token_batches(1, world_size)[0][rank][0]
    for strategy, size in ((SHARED, 2), ("shard_optimizer", None)):
        net = make_net(tied=False)
        net.embed.requires_grad_(False)
        net.blocks.requires_grad_(False)
        for block in net.blocks[::2]:
            block.norm.requires_grad_(True)
        model = fsdpctl.shard_model(net, strategy, dp_shard_size=size)
        optimizer = fsdpctl.ShardedAdamW(model, lr=1e-2)
        plain = make_net(tied=False)
        with torch.no_grad():
            for param in plain.parameters():
                param.mul_(0.5)
        with recording(model) as loaded:
            model.load_state_dict(plain.state_dict())
        whole = sum(shard.layout.numel for shard in model.flat_shards()) * 4
        assert sent(loaded, K.SYNC) == whole // (size or 1)
        with recording(model) as stepped:
            one_step(model, optimizer, batch)
        trained = sum(s.layout.numel for s in model.flat_shards() if s.trainable) * 4
        assert sent(stepped, K.SYNC) == trained // (size or 1) < whole // (size or 1)
        units = {event.unit for event in stepped if event.kind is K.SYNC}
        assert units == {"root", "head", "blocks.0", "blocks.2", "blocks.4"}
        plain.load_state_dict(model.state_dict())
        torch.testing.assert_close(model(batch), plain(batch))
        model.check_replicas()


@distributed(world_size=4)
def test_a_rank_has_a_quarter_of_the_masters_and_half_of_the_parameters(
    rank: int, world_size: int
) -> None:
    model = copies_of_two(precision=fsdpctl.Precision(torch.bfloat16))
    optimizer = fsdpctl.ShardedAdamW(model, lr=1e-2)
    one_step(model, optimizer, token_batches(1, world_size)[0][rank][0])
    assert model.shard_memory_bytes() * 4 == model.replicated_memory_bytes()
    buffers = [buffer for unit in model._runtime.units.values() for buffer in unit.buffers]
    assert sum(each.part.nbytes for each in buffers) * 4 == model.replicated_memory_bytes()
    assert optimizer.memory_bytes() <= model.replicated_memory_bytes() // 2 + 4 * len(
        optimizer.runs
    )
    spans = [
        [(span.start, span.stop) for span in (shard.owned, shard.held, shard.written)]
        for shard in model.flat_shards()
    ]
    for of_ranks in zip(*model.collectives.gather_objects(spans), strict=True):
        owned = sorted(tuple(span) for span, *_ in of_ranks)
        assert all(span == own == written for span, own, written in of_ranks)
        assert [start for start, _ in owned[1:]] == [stop for _, stop in owned[:-1]]
