"""SGD over flat shards is torch's SGD in one process."""

import copy
from pathlib import Path

import pytest
import torch

from fsdpctl.checkpoint.api import load_checkpoint, save_checkpoint
from fsdpctl.config.compose import compose_config
from fsdpctl.engine.build import Precision, Sharding
from fsdpctl.engine.model import ShardedModel
from fsdpctl.engine.shard import shard_model
from fsdpctl.errors import UsageError
from fsdpctl.optim.sgd import ShardedSGD
from fsdpctl.plan.strategy import STRATEGIES
from fsdpctl.resolve.place import place
from fsdpctl.resolve.rules import checked
from tests.distributed import distributed
from tests.engine.models import make_net, next_token_loss, one_step, token_batches
from tests.engine.test_parity import largest_difference
from tests.matrix import fast

STEPS, LR, DECAY = 4, 0.05, 0.1
BF16, F32 = torch.bfloat16, torch.float32
NARROW = [
    Precision(BF16, BF16, BF16), Precision(F32, F32, BF16), Precision(F32, F32, torch.float16),
]  # fmt: skip


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
    momenta = [states["momentum_buffer"] for _, states in optimizer.run_states()]
    assert momenta
    assert not any(each.any() for each in momenta)


def narrow(precision: Precision, strategy: str, width: int) -> ShardedModel:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, width))
    return shard_model(module, Sharding(strategy, precision=precision))


def train(model: ShardedModel, optimizer: torch.optim.Optimizer, rank: int, **scalars) -> None:
    generator = torch.Generator().manual_seed(rank)
    (width,) = {param.shape[-1] for param in model.module.parameters() if param.ndim > 1}
    for _ in range(STEPS):
        batch = torch.randn(8, width, generator=generator)
        model(batch.to(next(model.module.parameters()).dtype)).square().mean().backward()
        optimizer.step(**scalars)
        optimizer.zero_grad()


@pytest.mark.parametrize("precision", NARROW)
@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.0}, {"momentum": 0.9}, {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.0, "weight_decay": 0.1, "maximize": True},
        {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    ],
)  # fmt: skip
def test_masters_of_16_bits_have_the_bits_of_torch(precision, options):
    """Of tensors of full vectors; torch rounds the elements behind these once more."""
    model = narrow(precision, "no_shard", 64)
    names = [name for name, _ in model.module.named_parameters()]
    optimizer = ShardedSGD(model, lr=LR, param_groups=[{"names": names, **options}])
    plain = {name: value.clone().requires_grad_() for name, value in model.state_dict().items()}
    before = {name: value.detach().clone() for name, value in plain.items()}
    reference = torch.optim.SGD(list(plain.values()), lr=LR, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        model(torch.ones(2, 64, dtype=precision.param_dtype)).sum().backward()
        for run, _ in optimizer.runs:
            gradient = run.gradient()
            assert gradient is not None
            for piece in run.shard.layout.pieces(run.span):
                within = piece.in_flat.shift(-run.span.start)
                drawn = torch.randn(piece.param.shape, generator=generator).to(gradient.dtype)
                gradient[within.start : within.stop] = drawn.view(-1)
                plain[piece.param.name].grad = drawn
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
    found = model.state_dict()
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    assert all((found[name] != before[name]).float().mean() > 0.9 for name in plain)


@distributed(world_size=2, timeout=120)
def test_masters_of_16_bits_have_the_same_bits_wherever_shards_end(
    rank: int, world_size: int
) -> None:
    for precision in NARROW:
        for scalars in ({}, {"grad_scale": torch.tensor(1.7), "found_inf": torch.zeros(())}):
            found = []
            for strategy in ("no_shard", "full_shard", "shard_grad_op"):
                model = narrow(precision, strategy, 37)
                train(model, ShardedSGD(model, lr=LR, weight_decay=DECAY), rank, **scalars)
                found.append(model.state_dict())
            for name, values in found[0].items():
                assert all(torch.equal(values, other[name]) for other in found)


@pytest.mark.parametrize("reduced", [BF16, F32])
def test_masters_of_24_bits_are_rejected(reduced):
    model = narrow(Precision(BF16, reduced, BF16, has_remainders=True), "full_shard", 8)
    with pytest.raises(UsageError, match="ShardedSGD: master weights of 24 bits"):
        ShardedSGD(model, lr=LR)


@pytest.mark.parametrize("precision", NARROW)
def test_a_skipped_step_changes_no_masters_of_16_bits(precision):
    model = narrow(precision, "full_shard", 37)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer := ShardedSGD(model, lr=LR), 0, found_inf=torch.ones(()))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(each["momentum_buffer"].any() for _, each in optimizer.run_states())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optimizer=sgd"], "optimizer.lr=auto: not supported with optimizer=sgd"),
        (
            ["optimizer=sgd", "optimizer.lr=0.1", "optimizer.beta1=0.8"],
            "only valid with optimizer=adamw",
        ),
        (["optimizer.momentum=0.5"], "only valid with optimizer=sgd"),
    ],
)
def test_options_of_other_optimizers_are_rejected(words, said):
    with pytest.raises(UsageError, match=said):
        checked(place(compose_config(words).config))
