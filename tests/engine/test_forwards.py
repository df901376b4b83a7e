"""Several forwards before a backward, and retained outputs: which forwards take part."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdpctl.engine.shard_model import shard_model
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.errors import EngineError
from fsdpctl.plan.schedule import Event, EventKind
from tests.distributed import distributed
from tests.engine.events import recording
from tests.engine.models import OddNet, gradients_beside, make_net, token_batches
from tests.engine.test_failures import as_tensor
from tests.matrix import fast

K = EventKind
Loss = Callable[[nn.Module, list[Tensor], int], None]


def _loss(module: nn.Module, tokens: Tensor) -> Tensor:
    return as_tensor(module(tokens)).square().mean()


def one(module: nn.Module, batches: list[Tensor], rank: int) -> None:
    _loss(module, batches[0]).backward()


def together(module: nn.Module, batches: list[Tensor], rank: int) -> None:
    (_loss(module, batches[0]) * _loss(module, batches[1])).backward()


def first_of_two(module: nn.Module, batches: list[Tensor], rank: int) -> None:
    """Run two forwards, of which one takes part; both outputs stay alive."""
    first, _other = _loss(module, batches[0]), _loss(module, batches[1])
    first.backward()


def one_by_one(module: nn.Module, batches: list[Tensor], rank: int) -> None:
    first, second = _loss(module, batches[0]), _loss(module, batches[1])
    second.backward()
    first.backward()


def by_rank(module: nn.Module, batches: list[Tensor], rank: int) -> None:
    """Run three forwards; ranks run the backwards of different ones."""
    losses = [_loss(module, batch) for batch in batches]
    (losses[rank] + losses[2]).backward()


def kept_from_before(module: nn.Module, batches: list[Tensor], rank: int) -> None:
    """Run a backward after the backward of a later forward."""
    before = _loss(module, batches[0])
    _loss(module, batches[1]).backward()
    _loss(module, batches[2]).backward()
    before.backward()


def within_a_checkpoint(module: nn.Module, batches: list[Tensor], rank: int) -> None:
    """Run a forward again within the backward of another forward."""
    plain = _loss(module, batches[0])
    scale = torch.ones((), requires_grad=True)
    again = checkpoint(lambda scale: scale * _loss(module, batches[1]), scale, use_reentrant=True)
    (plain + as_tensor(again)).backward()


def hidden_states(module: nn.Module, batches: list[Tensor], rank: int) -> None:
    """Run a backward of inner outputs, of which one depends on parameters alone."""
    states: list[Tensor] = []
    net = module.module if isinstance(module, ShardedModel) else module
    assert isinstance(net, OddNet)
    hooks = [
        each.register_forward_hook(lambda _module, _args, out: states.append(out))
        for each in (net.embed, net.blocks[2])
    ]
    for batch in batches[:2]:
        module(batch)
    for hook in hooks:
        hook.remove()
    (states[0].square().mean() + states[3].square().mean()).backward()


LOSSES: list[Loss] = [
    together, first_of_two, one_by_one, kept_from_before, within_a_checkpoint, hidden_states,
]  # fmt: skip


def _plain_gradients(loss: Loss, batches: list[list[Tensor]]) -> dict[str, Tensor]:
    """Return the mean gradients over ranks, computed in one process."""
    total: dict[str, Tensor] = {}
    for rank, rank_batches in enumerate(batches):
        net = make_net(tied=False)
        loss(net, rank_batches, rank)
        for name, param in net.named_parameters():
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            total[name] = total.get(name, torch.zeros_like(param)) + grad / len(batches)
    return total


@pytest.mark.parametrize("strategy", fast("full_shard", "no_shard", slow=["shard_grad_op"]))
@distributed(world_size=2)
def test_gradients_are_those_of_one_process(rank: int, world_size: int, strategy: str) -> None:
    batches = token_batches(1, world_size, micro_steps=3)[0]
    # If parameters are gathered, ranks that visit different forwards raise an error.
    for loss in LOSSES if strategy == "full_shard" else [*LOSSES, by_rank]:
        expected = _plain_gradients(loss, batches)
        model = shard_model(make_net(tied=False), strategy)
        loss(model, batches[rank], rank)
        model.sync_gradients()
        for ours, theirs, name in gradients_beside(model, expected):
            assert torch.allclose(ours, theirs, atol=1e-6), (loss.__name__, name)


def _reductions_before_the_last_block(events: list[Event]) -> int:
    """Return the number of reductions that have started before the first unit's backward."""
    last = max(i for i, event in enumerate(events) if event.kind is K.BACKWARD)
    return sum(event.kind is K.REDUCE for event in events[:last])


@distributed(world_size=2)
def test_reductions_are_as_early_as_after_one_forward(rank: int, world_size: int) -> None:
    batches = token_batches(1, world_size, micro_steps=3)[0][rank]
    results = {}
    for loss in (one, together, first_of_two):
        model = shard_model(make_net(tied=False), "full_shard")
        with recording(model) as events:
            loss(model, batches, rank)
        results[loss.__name__] = _reductions_before_the_last_block(events)
    assert results["one"] > 4
    assert results["together"] == results["first_of_two"] == results["one"]


@distributed(world_size=2)
def test_different_gathers_on_ranks_raise_an_error(rank: int, world_size: int) -> None:
    batches = token_batches(1, world_size, micro_steps=3)[0][rank]
    model = shard_model(make_net(tied=False), "full_shard")
    with pytest.raises(EngineError, match=r"of 3 forwards, .* \[1, 3\] on rank 0 and .* \[2, 3\]"):
        by_rank(model, batches, rank)
    model.zero_grad()
    one(model, batches, rank)
    model.sync_gradients()


@distributed(world_size=2)
def test_a_retained_output_delays_no_reduction(rank: int, world_size: int) -> None:
    batches = token_batches(1, world_size, micro_steps=2)[0][rank]
    model = shard_model(make_net(tied=False), "full_shard")
    _kept = model(batches[0])
    results = []
    for _ in range(2):
        with recording(model) as events:
            one(model, batches[1:], rank)
        results.append(_reductions_before_the_last_block(events))
    assert results[0] == results[1] > 4


@distributed(world_size=2)
def test_a_graph_is_freed_with_its_outputs(rank: int, world_size: int) -> None:
    """The tracker of forwards keeps no activations alive."""
    model = shard_model(make_net(tied=False), "full_shard")
    alive: list[weakref.ref[object]] = []

    class Watched(torch.autograd.Function):
        """An identity whose backward node a weak reference watches."""

        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *gradients: Tensor) -> Tensor:
            return gradients[0]

    def watch(_module: nn.Module, _args: object, out: Tensor) -> Tensor:
        output = as_tensor(Watched.apply(out))
        alive.append(weakref.ref(output.grad_fn))
        return output

    model.module.get_submodule("blocks.2").register_forward_hook(watch)
    gc.disable()
    try:
        for tokens in token_batches(1, world_size, micro_steps=3)[0][rank]:
            output = model(tokens)
            assert alive[-1]() is not None
            del output
            assert alive[-1]() is None
    finally:
        gc.enable()
