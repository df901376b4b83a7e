"""Ranks whose backwards visit different parts of the model, or differ in number."""

import pytest
import torch
from torch import Tensor, nn

from fsdpctl.engine.shard_model import shard_model
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.plan.precision import Precision
from fsdpctl.plan.step_plan import Prefetch
from tests.distributed import distributed
from tests.engine.models import gradients_beside
from tests.matrix import fast

WIDTH, DEPTH = 24, 9


class Layer(nn.Module):
    """A plain block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x).tanh()


class Deep(nn.Module):
    """A module that returns every block's output; the graph may be cut in the middle."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))

    def forward(self, x: Tensor, cut: int) -> list[Tensor]:
        outputs = []
        for number, layer in enumerate(self.layers):
            x = layer(x.detach() if number == cut else x)
            outputs.append(x)
        return outputs


def loss_of(model: nn.Module, rank: int, uses: int, cut: int) -> Tensor:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank))
    loss: Tensor = model(x, cut)[uses].float().square().sum()
    return loss


def check_gradients(model: ShardedModel, expected: dict[str, Tensor], rtol: float = 1e-5) -> None:
    for grads, part, _ in gradients_beside(model, expected):
        torch.testing.assert_close(grads, part, rtol=rtol, atol=rtol / 10)


def mean_gradients(losses_of: list[list[tuple[int, int, int]]]) -> dict[str, Tensor]:
    """Return the gradients of one process that runs each rank's backwards."""
    net = Deep()
    for of_rank in losses_of:
        for each in of_rank:
            (loss_of(net, *each) / len(losses_of)).backward()
    zero = torch.zeros(())
    return {
        name: param.grad if param.grad is not None else zero.expand(param.shape)
        for name, param in net.named_parameters()
    }


@pytest.mark.slow
@pytest.mark.parametrize("strategy", fast("full_shard", slow=["shard_grad_op", "shard_optimizer"]))
@distributed(world_size=2, timeout=60)
def test_a_rank_may_skip_the_backward_of_many_blocks(rank, world_size, strategy):
    last, nowhere = DEPTH - 1, -1
    for uses, cut in ((1, nowhere), (last, 4), (last, last), (3, 2), (0, nowhere)):
        for depth in (0, 1, 2):
            prefetch = Prefetch(depth, depth)
            model = shard_model(Deep(), strategy, units=[Layer], prefetch=prefetch)
            mine = [(0, last, nowhere), (1, uses, cut)]
            loss_of(model, *mine[rank]).backward()
            check_gradients(model, mean_gradients([[each] for each in mine]))


@distributed(world_size=2, timeout=60)
def test_a_rank_may_hold_gradients_back_that_others_do_not_have(rank: int, world_size: int) -> None:
    """Without gathers, ranks may run different numbers of backwards."""
    last = DEPTH - 1
    of_ranks = [[(0, last, -1), (2, last, -1), (3, last, -1)], [(1, last, -1)]]
    expected = mean_gradients(of_ranks)
    for strategy in ("shard_optimizer", "no_shard"):
        for precision, rtol in ((Precision(), 1e-5), (Precision(torch.bfloat16), 0.05)):
            model = shard_model(Deep(), strategy, units=[Layer], precision=precision)
            *held, reduced = of_ranks[rank]
            with model.no_sync():
                for each in held:
                    loss_of(model, *each).backward()
            loss_of(model, *reduced).backward()
            if precision.param_dtype is None:
                check_gradients(model, expected, rtol)
            else:
                norm = sum(float(g.square().sum()) for g in expected.values()) ** 0.5
                for grads, part, _ in gradients_beside(model, expected):
                    assert (grads - part).norm() <= rtol * norm


@distributed(world_size=2)
def test_a_loss_of_root_parameters_alone_is_reduced(rank: int, world_size: int) -> None:
    class WithScale(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(5))

    model = shard_model(WithScale(), "full_shard", units=[Layer])
    model(torch.ones(1, WIDTH), -1)
    (model.module.get_parameter("scale") * (rank + 1.0)).sum().backward()
    of_all = {name: torch.zeros(each.shape) for name, each in WithScale().named_parameters()}
    of_all["scale"] += 1.5
    for grads, part, _ in gradients_beside(model, of_all):
        torch.testing.assert_close(grads, part)
