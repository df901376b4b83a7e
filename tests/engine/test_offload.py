"""States in host memory: the bits of the step, its order behind the next forward, and failures."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fsdpctl.engine.build import Sharding
from fsdpctl.engine.precision import Precision
from fsdpctl.engine.shard import shard_model
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.optim.record import record_step
from tests.distributed import distributed, in_turn
from tests.engine.models import make_net, next_token_loss

STEPS = 4
BF16 = Precision(torch.bfloat16)


def _tokens(rank: int, step: int, part: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
    return torch.randint(17, (2, 9), generator=generator)


def _trained(  # noqa: PLR0913  # the options of a case
    rank: int,
    offload: str,
    *,
    strategy: str = "full_shard",
    precision: Precision = Precision(),
    size: int | None = None,
    holds: bool = False,
    skipped: int | None = None,
    module: Callable[[], nn.Module] = lambda: make_net(tied=True),
) -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:
    """Losses, weights and states after a few steps of two micro-batches with clipping."""
    sharding = Sharding(strategy, dp_shard_size=size, precision=precision, offload=offload)
    model = shard_model(module(), sharding)
    model.overlap_param_gather = True
    optimizer = ShardedAdamW(model, lr=0.05)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.3, total_iters=STEPS)
    losses = []
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for part in range(2):
            with model.no_sync() if holds and part == 0 else nullcontext():
                loss = next_token_loss(model, _tokens(rank, step, part))
                (loss / 2).backward()
            total += loss.detach()
        model.sync_gradients()
        record = record_step(
            model,
            loss_sum=total if step != skipped else total * torch.nan,
            tokens=torch.tensor(2),
            nominal_tokens=2 * model.collectives.size,
            max_grad_norm=0.5,
        )
        optimizer.step(grad_scale=record.grad_scale, found_inf=record.found_inf)
        optimizer.zero_grad()
        scheduler.step()
        losses.append(float(total))
    states = {
        f"{index} {name}": values.clone()
        for index, (_, state) in enumerate(optimizer.run_states())
        for name, values in state.items()
    }
    return losses, model.state_dict(), states


def _check_alike(rank: int, mode: str, **case: Any) -> None:
    expected, found = (_trained(rank, offload, **case) for offload in ("none", mode))
    assert expected[0] == found[0]
    for before, after in zip(expected[1:], found[1:], strict=True):
        assert before.keys() == after.keys()
        for name, values in before.items():
            assert torch.equal(values, after[name]), name


@distributed(2)
@in_turn(
    mode=["states", "all"],
    strategy=["full_shard", "shard_grad_op", "shard_optimizer"],
    precision__holds__skipped=[(Precision(), False, None), (BF16, True, 1)],
)
def test_same_bits(
    rank: int,
    world_size: int,
    strategy: str,
    precision: Precision,
    holds: bool,
    skipped: int | None,
    mode: str,
) -> None:
    _check_alike(rank, mode, strategy=strategy, precision=precision, holds=holds, skipped=skipped)
