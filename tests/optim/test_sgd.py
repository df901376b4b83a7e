"""SGD over flat shards is torch's SGD in one process."""

import copy
from pathlib import Path

import pytest
import torch

from fsdpctl.checkpoint.api import load_checkpoint, save_checkpoint
from fsdpctl.config.compose import compose_config
from fsdpctl.engine.shard_model import shard_model
from fsdpctl.errors import UsageError
from fsdpctl.optim.sgd import ShardedSGD
from fsdpctl.plan.precision import Precision
from fsdpctl.plan.strategy import STRATEGIES
from fsdpctl.resolve.machine import assign_ranks
from fsdpctl.resolve.rules import validate
from tests.distributed import distributed
from tests.engine.models import make_net, next_token_loss, one_step, token_batches
from tests.engine.test_parity import largest_difference
from tests.matrix import fast

STEPS, LR, DECAY = 4, 0.05, 0.1


def expected(momentum: float, ranks: int) -> dict[str, torch.Tensor]:
    module = make_net(tied=True, dtype=torch.float64)
    named = dict(module.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in named.values() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=LR, momentum=momentum)
    for of_ranks in token_batches(STEPS, ranks):
        for (batch,) in of_ranks:
            (next_token_loss(module, batch) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return copy.deepcopy(module.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("momentum", fast(0.9, slow=[0.0]))
@distributed(world_size=2, timeout=120)
def test_every_strategy_equals_one_process(rank: int, world_size: int, momentum: float) -> None:
    wanted = expected(momentum, world_size)
    for strategy in STRATEGIES:
        model = shard_model(make_net(tied=True, dtype=torch.float64), strategy)
        optimizer = ShardedSGD(model, lr=LR, momentum=momentum, weight_decay=DECAY)
        for of_ranks in token_batches(STEPS, world_size):
            one_step(model, optimizer, of_ranks[rank][0])
        assert largest_difference(model.state_dict(), wanted) <= 1e-12, strategy


@distributed(world_size=2)
def test_it_resumes_from_a_checkpoint(rank: int, world_size: int, tmp_path: Path) -> None:
    batches = token_batches(STEPS, world_size)
    wanted = expected(0.9, world_size)
    model = shard_model(make_net(tied=True, dtype=torch.float64), "full_shard")
    optimizer = ShardedSGD(model, lr=LR, weight_decay=DECAY)
    for of_ranks in batches[:2]:
        one_step(model, optimizer, of_ranks[rank][0])
    save_checkpoint(tmp_path / "c", model, optimizer)
    again = shard_model(make_net(tied=True, dtype=torch.float64), "shard_optimizer")
    optimizer = ShardedSGD(again, lr=LR, weight_decay=DECAY)
    load_checkpoint(tmp_path / "c", again, optimizer)
    for of_ranks in batches[2:]:
        one_step(again, optimizer, of_ranks[rank][0])
    assert largest_difference(again.state_dict(), wanted) <= 1e-12


def test_a_first_step_that_is_skipped_leaves_momenta_of_zero():
    model = shard_model(make_net(tied=False))
    optimizer = ShardedSGD(model, lr=LR)
    next_token_loss(model, token_batches(1, 1)[0][0][0]).backward()
    optimizer.step(found_inf=torch.ones(()))
    momenta = [states["momentum_buffer"] for _, states in optimizer.span_states()]
    assert momenta
    assert not any(each.any() for each in momenta)


@pytest.mark.parametrize(("dtype", "split", "error"), [
    (torch.float16, False, "16 bits on a CPU"), (torch.bfloat16, False, "16 bits on a CPU"),
    (torch.bfloat16, True, "24 bits"),
])  # fmt: skip
def test_masters_of_other_than_32_bits_are_rejected(dtype, split, error):
    precision = Precision(torch.bfloat16, torch.float32, dtype, has_remainders=split)
    model = shard_model(make_net(tied=False), precision=precision)
    message = f"ShardedSGD: master weights of {error} are not supported"
    with pytest.raises(UsageError, match=message):
        ShardedSGD(model, lr=LR)


@pytest.mark.parametrize(("args", "error"), [
    ("optimizer=sgd", "optimizer.lr=auto: not supported with optimizer=sgd"),
    ("optimizer=sgd optimizer.lr=0.1 optimizer.beta1=0.8", "only valid with optimizer=adamw"),
    ("optimizer.momentum=0.5", "only valid with optimizer=sgd"),
    ("optimizer=sgd optimizer.lr=0.1 precision=bf16_true launch.device=cpu",
     "master_dtype=bfloat16: .*; set precision.master_dtype=float32"),
])  # fmt: skip
def test_options_of_other_optimizers_are_rejected(args, error):
    with pytest.raises(UsageError, match=error):
        validate(assign_ranks(compose_config(args.split()).config))
