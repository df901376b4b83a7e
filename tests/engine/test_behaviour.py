"""What users' modules and loops may do, and what they are told when they may not."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fsdpctl.engine.model import ShardedModel
from fsdpctl.engine.shard import shard_model
from fsdpctl.errors import EngineError, UsageError
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.plan.schedule import EventKind, Prefetch
from fsdpctl.plan.strategy import STRATEGIES
from tests.distributed import distributed
from tests.engine.models import OddBlock, make_net, next_token_loss, token_batches
from tests.engine.odd import Wayward, square_loss
from tests.engine.test_parity import largest_difference
from tests.matrix import matrix
from tests.reference import train_reference


@distributed(world_size=2)
def test_a_parameter_keeps_its_identity_name_and_shape(rank: int, world_size: int) -> None:
    net = make_net(tied=True)
    before = {name: (id(param), param.shape) for name, param in net.named_parameters()}
    model = shard_model(net, "full_shard")
    next_token_loss(model, token_batches(1, world_size)[0][rank][0]).backward()
    assert {n: (id(p), p.shape) for n, p in model.named_parameters()} == before
    assert net.head.weight is net.embed.weight


@distributed(world_size=2)
def test_a_parameter_at_rest_reads_nan_and_refuses_writes(rank: int, world_size: int) -> None:
    model = shard_model(make_net(tied=False), "full_shard")
    param = dict(model.named_parameters())["blocks.0.up.weight"]
    assert param.isnan().all()
    with torch.no_grad(), pytest.raises(RuntimeError, match="more than one element"):
        param.add_(1)


@distributed(world_size=2)
def test_parameters_are_views_of_one_buffer_while_whole(rank: int, world_size: int) -> None:
    model = shard_model(make_net(tied=False), "full_shard")
    seen: list[set[int]] = []
    block = model.module.get_submodule("blocks.0")
    block.register_forward_pre_hook(
        lambda *_: seen.append({p.untyped_storage().data_ptr() for p in block.parameters()})
    )
    model(token_batches(1, world_size)[0][rank][0])
    assert len(seen[0]) == 1


def steps_with_accident(model: ShardedModel, rank: int, accident: int | None) -> None:
    optimizer = ShardedAdamW(model, lr=1e-2)
    for step, of_ranks in enumerate(token_batches(4, 2)):
        if step == accident:
            with pytest.raises(ZeroDivisionError):
                next_token_loss(model, of_ranks[rank][0]).backward()
            optimizer.zero_grad()
        next_token_loss(model, of_ranks[rank][0]).backward()
        optimizer.step()
        optimizer.zero_grad()


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError


@matrix(where=["forward", "backward"], strategy=list(STRATEGIES))
@distributed(world_size=2)
def test_after_an_exception_the_next_step_is_as_if_it_had_not_happened(
    rank: int, world_size: int, where: str, strategy: str
) -> None:
    expected = shard_model(make_net(tied=False), strategy)
    steps_with_accident(expected, rank, None)
    model = shard_model(make_net(tied=False), strategy)
    calls = 0

    def breaks_once(module: nn.Module, args: object, out: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls != 3:
            return out
        if where == "forward":
            raise ZeroDivisionError
        broken: Tensor = _Breaks.apply(out)
        return broken

    model.module.get_submodule("blocks.1").register_forward_hook(breaks_once)
    steps_with_accident(model, rank, 2)
    assert largest_difference(model.state_dict(), expected.state_dict()) == 0.0


@distributed(world_size=2)
def test_evaluation_between_forward_and_backward_changes_nothing(
    rank: int, world_size: int
) -> None:
    batch = token_batches(1, world_size)[0][rank][0]
    plain = shard_model(make_net(tied=False), "full_shard")
    next_token_loss(plain, batch).backward()
    model = shard_model(make_net(tied=False), "full_shard")
    loss = next_token_loss(model, batch)
    with torch.no_grad():
        model(batch)
    loss.backward()
    for ours, theirs in zip(model.flat_shards(), plain.flat_shards(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


class _Hidden:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class _HidingBlock(OddBlock):
    def forward(self, x: Tensor) -> Tensor:
        return _Hidden(super().forward(x))  # type: ignore[return-value]


class _HidingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_HidingBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).value
        return x


@distributed(world_size=2)
def test_an_output_that_hides_its_tensors_is_an_error_not_a_wrong_result(
    rank: int, world_size: int
) -> None:
    model = shard_model(_HidingNet(), "full_shard")
    loss = square_loss(model, torch.randn(4, 13))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@distributed(world_size=2)
def test_padding_stays_zero(rank: int, world_size: int) -> None:
    model = shard_model(make_net(tied=True), "full_shard")
    optimizer = ShardedAdamW(model, lr=1e-2)
    for of_ranks in token_batches(5, world_size):
        next_token_loss(model, of_ranks[rank][0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    for shard in model.flat_shards():
        for gap in shard.layout.padding:
            inside = gap.intersect(shard.held)
            if inside is not None:
                assert not shard.view(shard.master, inside).any()


@distributed(world_size=2)
def test_states_are_sharded(rank: int, world_size: int) -> None:
    model = shard_model(make_net(tied=False), "full_shard")
    optimizer = ShardedAdamW(model, lr=1e-2)
    next_token_loss(model, token_batches(1, world_size)[0][rank][0]).backward()
    total = sum(shard.layout.numel for shard in model.flat_shards())
    assert sum(shard.master.numel() for shard in model.flat_shards()) * 2 == total
    assert sum(s.grad.numel() for s in model.flat_shards() if s.grad is not None) * 2 == total
    optimizer.step()
    steps = 4 * len(optimizer.runs)
    assert optimizer.memory_bytes() - steps <= 2 * 4 * total // 2


class _Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.requires_grad_(False)


DISAGREEMENTS: dict[str, Callable[[int], ShardedModel]] = {
    "rank 0 has parameter embed.weight": lambda r: shard_model(make_net(tied=r == 0)),
    "rank 1 has .* frozen": lambda r: shard_model(_Frozen() if r else nn.Linear(3, 3)),
    r"rank 1 has parameter weight \[4, 3\]": lambda r: shard_model(nn.Linear(3, 3 + r)),
    "rank 1 has nothing more": lambda r: shard_model(nn.Linear(3, 3, bias=r == 0)),
    "has strategy no_shard": lambda r: shard_model(nn.Linear(3, 3), ["full_shard", "no_shard"][r]),
    "rank 1 has Prefetch": lambda r: shard_model(nn.Linear(3, 3), prefetch=Prefetch(r, 0)),
    "has no values": lambda r: shard_model(nn.Linear(3, 3, device="meta" if r else None)),
    "Conv2d": lambda r: shard_model(make_net(tied=True), units=[nn.Conv2d if r else OddBlock]),
    "must divide": lambda r: shard_model(nn.Linear(3, 3), "hybrid_shard", dp_shard_size=2 + r),
}


@distributed(world_size=2)
def test_ranks_that_disagree_are_told_on_every_rank(rank: int, world_size: int) -> None:
    for said, shard in DISAGREEMENTS.items():
        with pytest.raises((EngineError, UsageError), match=said):
            shard(rank)


@distributed(world_size=2)
def test_ranks_that_run_units_in_different_orders_are_told(rank: int, world_size: int) -> None:
    model = shard_model(Wayward([0, 1, 2, 3] if rank == 0 else [0, 2, 1, 3]), "full_shard")
    optimizer = ShardedAdamW(model, lr=1e-2)
    square_loss(model, torch.randn(4, 13)).backward()
    with pytest.raises(EngineError, match="in different orders"):
        optimizer.step()


@distributed(world_size=2)
def test_units_in_another_order_are_gathered_ahead_in_that_order_after_one_warning(
    rank: int, world_size: int
) -> None:
    model = shard_model(Wayward([3, 2, 1, 0]), "full_shard")
    optimizer = ShardedAdamW(model, lr=1e-2)
    for step in range(3):
        with warnings.catch_warnings(record=True) as caught, model.recorded_events() as trace:
            warnings.simplefilter("always")
            square_loss(model, torch.randn(4, 13)).backward()
        assert len(caught) == (step == 0)
        optimizer.step()
        optimizer.zero_grad()
    assert model.unit_order.forward == ("blocks.3", "blocks.2", "blocks.1", "blocks.0")
    kinds = (EventKind.GATHER, EventKind.RELEASE)
    gathers = [(event.kind, event.unit) for event in trace if event.kind in kinds]
    second = gathers.index((EventKind.GATHER, "blocks.2"))
    assert second < gathers.index((EventKind.RELEASE, "blocks.3"))


@pytest.mark.parametrize(
    ("strategy", "size"), [("no_shard", None), ("shard_optimizer", None), ("hybrid_shard", 2)]
)
@distributed(world_size=4)
def test_a_replica_that_went_astray_is_found(
    rank: int, world_size: int, strategy: str, size: int | None
) -> None:
    model = shard_model(make_net(tied=True), strategy, dp_shard_size=size)
    model.check_replicas()
    unit = model._runtime.units["blocks.1"]
    buffer = unit.buffers[0]
    if rank == 3:
        values = buffer.shard.master if size else buffer.whole
        values[0] += 1e-3
    with pytest.raises(EngineError, match=r"blocks\.1\..* on rank .*3.* differs"):
        model.check_replicas()


@distributed(world_size=2)
def test_syncing_without_gradients_is_an_error(rank: int, world_size: int) -> None:
    model = shard_model(make_net(tied=True), "full_shard")
    with pytest.raises(EngineError, match="call backward first"):
        model.sync_gradients()


@distributed(world_size=4)
def test_a_shard_size_that_does_not_divide_lists_those_that_do(rank: int, world_size: int) -> None:
    with pytest.raises(UsageError, match=r"must divide the 4 ranks \(1, 2, 4\)"):
        shard_model(make_net(tied=True), "hybrid_shard", dp_shard_size=3)


def test_an_owner_map_where_there_is_none_is_an_error():
    with pytest.raises(UsageError, match="only shard_optimizer has one"):
        shard_model(make_net(tied=True), "full_shard", owner_map="balanced")


def test_without_a_process_group_it_runs_as_one_rank():
    batches = token_batches(3, 1)
    expected = train_reference(make_net(tied=True), next_token_loss, batches)
    model = shard_model(make_net(tied=True), "full_shard")
    optimizer = ShardedAdamW(model, lr=1e-2)
    for of_ranks in batches:
        next_token_loss(model, of_ranks[0][0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert largest_difference(model.state_dict(), expected) == 0.0
