"""Weight gradients that linear layers write themselves are those that autograd would have made."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fsdpctl.engine.build import divide_module
from fsdpctl.engine.direct import DirectLinear, Write, accumulation, use_direct_linears
from fsdpctl.engine.model import ShardedModel
from fsdpctl.engine.precision import Precision
from fsdpctl.engine.shard import shard_model
from fsdpctl.errors import EngineError
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.plan.replay import Itemsizes
from fsdpctl.plan.schedule import Prefetch
from fsdpctl.plan.strategy import STRATEGIES
from tests.distributed import distributed
from tests.engine.models import (
    OddNet,
    backward_window,
    make_net,
    next_token_loss,
    token_batches,
)
from tests.engine.test_trace import MICRO_STEPS, planned_events, recorded_events
from tests.matrix import WHOLE, cases, fast

Batches = list[Tensor]


def direct_net(*, tied: bool = False) -> OddNet:
    """Five blocks, of which each has two layers that can write."""
    net = make_net(tied=tied)
    assert use_direct_linears(net) is net
    return net


def count_writes(model: ShardedModel) -> list[tuple[int, ...]]:
    """A list that gets the shape of every gradient that a layer of `model` writes."""
    shapes: list[tuple[int, ...]] = []

    def count(linear: DirectLinear, weight: Tensor, write: Write, num_hooks: int) -> None:
        def counted(rows: Tensor, inputs: Tensor) -> bool:
            was_taken = write(rows, inputs)
            if was_taken:
                shapes.append(tuple(weight.shape))
            return was_taken

        linear._attached = {0: (weight, counted, num_hooks)}

    for each in model.module.modules():
        if isinstance(each, DirectLinear):
            for attached in list(each._attached.values()):
                count(each, *attached)
    return shapes


def trained(
    net: OddNet, strategy: str, rank: int, ranks: int, reduces: tuple[bool, ...]
) -> list[Tensor]:
    """The masters after three steps."""
    model = shard_model(net, strategy)
    optimizer = ShardedAdamW(model, lr=1e-2)
    for of_ranks in token_batches(3, ranks, micro_steps=len(reduces)):
        backward_window(model, of_ranks[rank], reduces)
        optimizer.step()
        optimizer.zero_grad()
    return [shard.master.clone() for shard in model.flat_shards()]


@WHOLE
@pytest.mark.parametrize("world_size", fast(2, slow=[1, 3, 4]))
@distributed()
def test_training_gives_the_same_bits(rank: int, world_size: int, whole: bool) -> None:
    # Where gradients are held, a product is added to them before it is rounded.
    reduces_each = [MICRO_STEPS["one"], MICRO_STEPS["every"]]
    for strategy, reduces in cases(list(STRATEGIES), reduces_each, whole=whole):
        expected = trained(make_net(tied=False), strategy, rank, world_size, reduces)
        found = trained(direct_net(), strategy, rank, world_size, reduces)
        assert all(map(torch.equal, found, expected)), (strategy, reduces)


@WHOLE
@distributed(world_size=2)
def test_events_equal_the_plan(rank: int, world_size: int, whole: bool) -> None:
    for strategy, tied in cases(list(STRATEGIES), [False, True], whole=whole):
        model = shard_model(direct_net(tied=tied), strategy)
        writes = count_writes(model)
        planned = planned_events(
            model, direct_net(tied=tied), Prefetch(), "even", Itemsizes(4, 4, 4)
        )
        assert recorded_events(model, rank) == planned, (strategy, tied)
        assert len(writes) == 6 * 10  # backwards, and layers in blocks


def once(module: nn.Module, batches: Batches) -> None:
    next_token_loss(module, batches[0]).backward()


def two_forwards(module: nn.Module, batches: Batches) -> None:
    (next_token_loss(module, batches[0]) + 2 * next_token_loss(module, batches[1])).backward()


def two_backwards(module: nn.Module, batches: Batches) -> None:
    once(module, batches)
    next_token_loss(module, batches[1]).backward()


def same_graph_again(module: nn.Module, batches: Batches) -> None:
    loss = next_token_loss(module, batches[0])
    loss.backward(retain_graph=True)
    loss.backward()


def autocast(module: nn.Module, batches: Batches) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = next_token_loss(module, batches[0])
    loss.backward()


def differentiable(module: nn.Module, batches: Batches) -> None:
    next_token_loss(module, batches[0]).backward(create_graph=True)


def some_inputs(module: nn.Module, batches: Batches) -> None:
    weight = module.get_parameter("blocks.3.down.weight")
    next_token_loss(module, batches[0]).backward(inputs=[weight])


def checkpointed(*, reentrant: bool) -> Callable[[nn.Module, Batches], None]:
    def run(module: nn.Module, batches: Batches) -> None:
        for block in module.get_submodule("blocks").children():
            forward = block.forward
            block.forward = lambda x, forward=forward: checkpoint(
                forward, x, use_reentrant=reentrant
            )
        once(module, batches)

    return run


def written_in_place(module: nn.Module, batches: Batches) -> None:
    """Layers with a bias and three-dimensional inputs, whose outputs are written to."""
    for block in module.get_submodule("blocks").children():
        for layer in (block.get_submodule("up"), block.get_submodule("down")):
            layer.register_forward_hook(lambda module, args, out: out.mul_(2))
    once(module, batches)


def frozen_late(module: nn.Module, batches: Batches) -> None:
    loss = next_token_loss(module, batches[0])
    weight = module.get_parameter("blocks.1.up.weight").requires_grad_(False)
    loss.backward()
    weight.requires_grad_(True)


def doubled(module: nn.Module, batches: Batches) -> None:
    module.get_parameter("blocks.1.up.weight").register_hook(lambda gradient: 2 * gradient)
    once(module, batches)


def tripled_late(module: nn.Module, batches: Batches) -> None:
    """The hook comes after the forward."""

    def triple(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(3)

    loss = next_token_loss(module, batches[0])
    module.get_parameter("blocks.1.up.weight").register_post_accumulate_grad_hook(triple)
    loss.backward()


WAYS = {
    "once": (once, 10),
    "two forwards": (two_forwards, 20),
    "two backwards": (two_backwards, 20),
    "same graph again": (same_graph_again, 20),
    "autocast": (autocast, 0),
    "differentiable": (differentiable, 0),
    "some inputs": (some_inputs, 1),
    "checkpointed": (checkpointed(reentrant=False), 10),
    "checkpointed, reentrant": (checkpointed(reentrant=True), 10),
    "written in place": (written_in_place, 10),
    "frozen late": (frozen_late, 9),
    "doubled": (doubled, 9),
    "tripled late": (tripled_late, 9),
}


def gradients(model: ShardedModel) -> dict[str, Tensor]:
    """Of a model that has one rank."""
    return {
        placement.param.name: shard.grad[placement.span.start : placement.span.stop].view(
            placement.param.shape
        )
        for shard in model.flat_shards()
        if shard.grad is not None
        for placement in shard.layout.placements
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_gradients_are_those_of_the_plain_module(way: str) -> None:
    run, num_written = WAYS[way]
    batches = token_batches(1, 1, micro_steps=2)[0][0]
    plain = make_net(tied=False)
    run(plain, batches)
    model = shard_model(direct_net(), "no_shard")
    writes = count_writes(model)
    run(model.module, batches)
    found = gradients(model)
    for name, param in plain.named_parameters():
        expected = torch.zeros_like(param) if param.grad is None else param.grad
        torch.testing.assert_close(found[name], expected, msg=f"{way}: {name}")
    assert len(writes) == num_written


def test_held_gradients_are_added_to() -> None:
    batches = token_batches(1, 1, micro_steps=2)[0][0]
    plain = make_net(tied=False)
    two_backwards(plain, batches)
    model = shard_model(direct_net(), "no_shard")
    backward_window(model, batches, (False, True))
    for name, found in gradients(model).items():
        torch.testing.assert_close(found, plain.get_parameter(name).grad, msg=name)


def test_autograd_gives_gradients_that_it_is_asked_for() -> None:
    batch = token_batches(1, 1)[0][0][0]
    plain, net = make_net(tied=False), direct_net()
    model = shard_model(net, "no_shard")
    name = "blocks.2.up.weight"
    found = torch.autograd.grad(next_token_loss(model, batch), [net.get_parameter(name)])
    expected = torch.autograd.grad(next_token_loss(plain, batch), [plain.get_parameter(name)])
    torch.testing.assert_close(found, expected)


def test_a_failed_backward_leaves_nothing_behind() -> None:
    batches = token_batches(1, 1, micro_steps=2)[0][0]

    def fail(gradient: Tensor) -> None:
        raise ZeroDivisionError

    plain, net = make_net(tied=False), direct_net()
    model = shard_model(net, "no_shard")
    handle = net.get_parameter("blocks.1.norm.weight").register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        next_token_loss(model, batches[0]).backward()
    handle.remove()
    model.drop_gradients()
    once(model, batches)
    once(plain, batches)
    for name, found in gradients(model).items():
        torch.testing.assert_close(found, plain.get_parameter(name).grad)


def test_the_module_is_as_before_when_it_is_unwrapped() -> None:
    net = shard_model(direct_net(), "no_shard").unwrap()
    once(net, token_batches(1, 1)[0][0])
    assert all(param.grad is not None for param in net.parameters())


def test_a_replaced_weight_has_its_own_gradient() -> None:
    batch = token_batches(1, 1)[0][0][0]
    plain, model = make_net(tied=False), shard_model(direct_net(), "no_shard")
    name, found = "blocks.1.up.weight", []
    for module in (plain, model.module):
        other = torch.ones_like(plain.get_parameter(name), requires_grad=True)
        torch.func.functional_call(module, {name: other}, batch[:, :-1]).sum().backward()
        found.append(other.grad)
    torch.testing.assert_close(*found)
    assert not gradients(model)[name].any()


def test_an_output_without_gradient_is_none() -> None:
    batch = token_batches(1, 1)[0][0][0]
    model = shard_model(direct_net(), "no_shard")
    block = model.module.get_submodule("blocks.2")
    hidden = block.get_submodule("up")

    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> None:
            return None

    hidden.register_forward_hook(lambda module, args, out: Cut.apply(out))
    writes = count_writes(model)
    next_token_loss(model, batch).backward()
    assert len(writes) == 9
    assert not gradients(model)["blocks.2.up.weight"].any()


def test_a_checkpointed_block_does_not_compute_its_last_product_again() -> None:
    counts = []
    for net in (make_net(tied=False), direct_net()):
        model = shard_model(net, "no_shard")
        with FlopCounterMode(display=False) as counter:
            checkpointed(reentrant=False)(model.module, token_batches(1, 1)[0][0])
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]


def test_a_copy_of_a_layer_is_a_layer_of_its_own() -> None:
    layer = shard_model(direct_net(), "no_shard").module.get_submodule("blocks.0.up")
    copied = deepcopy(layer)
    copied(torch.ones(2, 13)).sum().backward()
    assert copied.get_parameter("weight").grad is not None
    assert "_attached" in layer.__dict__
    assert "_attached" not in copied.__dict__


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forward_mode_is_that_of_torch() -> None:
    layer = shard_model(direct_net(), "no_shard").module.get_submodule("blocks.0.up")
    x, tangent = torch.ones(2, 13), torch.full((2, 13), 2.0)
    with forward_ad.dual_level():
        made = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, tangent)))
    torch.testing.assert_close(made.tangent, tangent @ layer.get_parameter("weight").t())


def test_a_weight_with_a_hook_is_not_planned_to_be_written() -> None:
    net = direct_net()
    net.get_parameter("blocks.1.up.weight").register_hook(lambda gradient: gradient)
    written = [
        param.name for unit in divide_module(net, None) for param in unit.params if param.direct
    ]
    assert len(written) == 9
    assert "blocks.1.up.weight" not in written


def test_what_torch_cannot_add_is_refused() -> None:
    with pytest.raises(EngineError, match="cannot add products of torch.bfloat16"):
        accumulation(torch.bfloat16, torch.float32, torch.device("cpu"))
    with pytest.raises(EngineError, match="cannot add products"):
        shard_model(direct_net(), "no_shard", precision=Precision(torch.bfloat16))


def test_only_plain_linear_layers_are_made_direct() -> None:
    class Own(nn.Linear):
        pass

    module = nn.Sequential(nn.Linear(2, 2), Own(2, 2), nn.Linear(2, 2))
    module[2].forward = lambda x: x
    use_direct_linears(module)
    assert [type(each) for each in module] == [DirectLinear, Own, nn.Linear]
