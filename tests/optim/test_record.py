"""With the step record, the gradient is that of the mean over all target tokens."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fsdpctl.engine.shard_model import shard_model
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.optim.record import record_step, sum_of_squares
from fsdpctl.plan.precision import Precision
from fsdpctl.plan.strategy import STRATEGIES
from tests.distributed import distributed
from tests.engine.models import OddNet, gradients_beside, make_net
from tests.matrix import WHOLE, fast

IGNORED = -100
MICRO_STEPS = 2
NOMINAL = 3 * 5 * MICRO_STEPS  # targets of a rank if none is ignored


def unequal_batches(ranks: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Return inputs and targets by rank and micro-batch; one micro-batch has no target."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for rank in range(ranks):
        of_rank = []
        for micro_step in range(MICRO_STEPS):
            tokens = torch.randint(0, 17, (3, 6), generator=generator)
            targets = tokens[:, 1:].clone().flatten()
            targets[torch.rand(15, generator=generator) < 0.3 * (rank + micro_step)] = IGNORED
            if (rank, micro_step) == (1, 0):
                targets[:] = IGNORED
            of_rank.append((tokens[:, :-1], targets))
        batches.append(of_rank)
    return batches


def summed_loss(net: OddNet | ShardedModel, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = net(tokens).flatten(0, 1)
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def global_mean_gradients(ranks: int) -> tuple[dict[str, Tensor], float]:
    """Return the weights of one process over all tokens, and the norm of its gradient."""
    net = make_net(tied=True, dtype=torch.float64)
    batches = [batch for of_rank in unequal_batches(ranks) for batch in of_rank]
    count = sum(int((targets != IGNORED).sum()) for _, targets in batches)
    (torch.stack([summed_loss(net, *batch) for batch in batches]).sum() / count).backward()
    grads = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return grads, float(torch.stack([g.norm() for g in grads.values()]).norm())


@WHOLE
@pytest.mark.parametrize("world_size", fast(2, slow=[4]))
@distributed()
def test_the_gradient_is_that_of_the_mean_over_all_target_tokens(rank, world_size, whole):
    expected, norm = global_mean_gradients(world_size)
    strategies = list(STRATEGIES) if whole else ["no_shard", "full_shard", "hybrid_shard"]
    for strategy in strategies:
        for holds in (False, True):
            net = make_net(tied=True, dtype=torch.float64)
            copy = 2 if STRATEGIES[strategy].replicates else None
            model = shard_model(net, strategy, dp_shard_size=copy)
            loss_sum, count = torch.zeros((), dtype=torch.float64), 0
            for number, (tokens, targets) in enumerate(unequal_batches(world_size)[rank]):
                last = number == MICRO_STEPS - 1
                with model.no_sync() if holds and not last else nullcontext():
                    loss = summed_loss(model, tokens, targets)
                    (loss / NOMINAL).backward()
                loss_sum += loss.detach()
                count += int((targets != IGNORED).sum())
            record = record_step(
                model, loss_sum=loss_sum, tokens=torch.tensor(count),
                nominal_tokens=NOMINAL * world_size, max_grad_norm=0.0,
            )  # fmt: skip
            assert record.stats().grad_norm == pytest.approx(norm, rel=1e-12)
            for ours, theirs, _ in gradients_beside(model, expected):
                assert float((ours / record.grad_scale - theirs).abs().max()) <= 1e-12


def test_the_norm_of_bf16_gradients_is_not_rounded_to_bf16() -> None:
    net = make_net(tied=False).bfloat16()
    model = shard_model(net, "no_shard", precision=Precision(master_dtype=torch.bfloat16))
    model(torch.zeros((3, 5), dtype=torch.int64)).square().mean().backward()
    grads = [grad for shard in model.flat_shards() if (grad := shard.owned_grad) is not None]
    exact = torch.cat([grad.double() for grad in grads])
    assert {grad.dtype for grad in grads} == {torch.bfloat16}
    assert float(sum_of_squares(model)) == pytest.approx(float(exact.square().sum()), rel=1e-5)
