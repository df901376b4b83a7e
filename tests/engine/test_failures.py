"""After an exception, a model has no leftovers, or raises a clear error."""

from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fsdpctl.engine.gradients import GradientReducer
from fsdpctl.engine.shard_model import shard_model
from fsdpctl.engine.sharded_model import GradAccumulator, ShardedModel
from fsdpctl.errors import EngineError
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.plan.schedule import Event
from fsdpctl.plan.schedule import EventKind as K
from fsdpctl.plan.strategy import STRATEGIES
from tests.distributed import distributed
from tests.engine.models import make_net, next_token_loss, one_step, token_batches
from tests.engine.test_parity import largest_difference
from tests.matrix import WHOLE, cases


def steps_with_accident(model: ShardedModel, rank: int, accident: int | None) -> None:
    optimizer = ShardedAdamW(model, lr=1e-2)
    for step, of_ranks in enumerate(token_batches(4, 2)):
        if step == accident:
            with pytest.raises(ZeroDivisionError):
                next_token_loss(model, of_ranks[rank][0]).backward()
            optimizer.zero_grad()
        one_step(model, optimizer, of_ranks[rank][0])


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError


@pytest.mark.slow
@WHOLE
@distributed(world_size=2)
def test_after_an_exception_the_next_step_is_as_if_it_had_not_happened(rank, world_size, whole):
    for phase, strategy in cases(["forward", "backward"], list(STRATEGIES), whole=whole):
        check_accident(rank, phase, strategy)


def check_accident(rank: int, phase: str, strategy: str) -> None:
    expected = shard_model(make_net(tied=False), strategy)
    steps_with_accident(expected, rank, None)
    model = shard_model(make_net(tied=False), strategy)
    calls = 0

    def breaks_once(module: nn.Module, args: object, out: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls != 3:
            return out
        if phase == "forward":
            raise ZeroDivisionError
        broken: Tensor = _Breaks.apply(out)
        return broken

    model.module.get_submodule("blocks.1").register_forward_hook(breaks_once)
    steps_with_accident(model, rank, 2)
    assert largest_difference(model.state_dict(), expected.state_dict()) == 0.0


@distributed(world_size=2)
def test_a_step_after_a_failed_backward_is_refused_until_gradients_are_dropped(rank, world_size):
    batches = [of_ranks[rank][0] for of_ranks in token_batches(2, world_size)]
    expected = shard_model(make_net(tied=False), "full_shard")
    next_token_loss(expected, batches[1]).backward()
    model = shard_model(make_net(tied=False), "full_shard")
    optimizer = ShardedAdamW(model, lr=1e-2)
    breaking = model.module.get_submodule("blocks.1").register_forward_hook(
        lambda module, args, out: _Breaks.apply(out)
    )
    failing = next_token_loss(model, batches[0])
    breaking.remove()
    other = next_token_loss(model, batches[1])
    with pytest.raises(ZeroDivisionError):
        failing.backward()
    with pytest.raises(EngineError, match="call zero_grad"):
        optimizer.step()
    model.zero_grad()
    other.backward()
    for ours, theirs in zip(model.flat_shards(), expected.flat_shards(), strict=True):
        assert torch.equal(as_tensor(ours.grad), as_tensor(theirs.grad))


@distributed(world_size=2)
def test_no_buffer_remains_wherever_a_backward_fails(rank: int, world_size: int) -> None:
    tokens = token_batches(1, world_size)[0][rank][0]
    failures = [(K.REDUCE, "full_shard"), (K.REDUCED, "full_shard")]
    failures += [(kind, "no_shard") for kind in (K.REDUCED, K.COMBINE, K.COMBINED)]
    right = GradientReducer.execute
    for kind, strategy in failures:
        model = shard_model(make_net(tied=False), strategy)
        before = model.accounting.nbytes

        def fails(self: GradientReducer, event: Event, kind: K = kind) -> None:
            if event.kind is kind and event.unit == "blocks.1":
                raise ZeroDivisionError
            right(self, event)

        loss = next_token_loss(model, tokens)
        with mock.patch.object(GradientReducer, "execute", fails), pytest.raises(ZeroDivisionError):
            loss.backward()
        model.zero_grad()
        assert model.accounting.nbytes == before, (kind, strategy)


def as_tensor(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


@distributed(world_size=2)
def test_an_accumulator_drops_a_window_with_an_exception(rank: int, world_size: int) -> None:
    model = shard_model(make_net(tied=False), "full_shard")
    batches = token_batches(1, world_size, micro_steps=2)[0][rank]
    for reduce in ("every", "last"):
        accumulator = GradAccumulator(model, steps=2, reduce=reduce)
        with accumulator.micro_step():
            next_token_loss(model, batches[0]).backward()
        breaking = model.module.get_submodule("blocks.1").register_forward_hook(
            lambda module, args, out: _Breaks.apply(out)
        )
        with pytest.raises(ZeroDivisionError), accumulator.micro_step():
            next_token_loss(model, batches[1]).backward()
        breaking.remove()
        for batch in batches:
            assert not accumulator.ready
            with accumulator.micro_step():
                next_token_loss(model, batch).backward()
        assert accumulator.ready
        results = [as_tensor(shard.grad).clone() for shard in model.flat_shards()]
        model.zero_grad()
        for batch in batches:
            (next_token_loss(model, batch) / 2).backward()
        for ours, shard in zip(results, model.flat_shards(), strict=True):
            assert torch.allclose(ours, as_tensor(shard.grad), atol=1e-7)
        model.zero_grad()
