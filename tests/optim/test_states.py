"""Optimizer states in 8 bits: their codes, and the same bits on any ranks."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fsdpctl.checkpoint.load import load_checkpoint
from fsdpctl.checkpoint.manifest import Progress
from fsdpctl.checkpoint.publish import About
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.save import take_snapshot, write_checkpoint
from fsdpctl.codes import moment_of, new_moment
from fsdpctl.engine.model import ShardedModel
from fsdpctl.engine.shard import shard_model
from fsdpctl.optim.adamw import ShardedAdamW
from tests.checkpoint.test_round_trip import whole_tensors
from tests.distributed import distributed

WIDTH, WORDS, ROWS = 65, 71, 4  # of odd sizes, so that blocks end within parameters
STEPS = 4


class Net(nn.Module):
    """Matrices whose states are compressed, vectors and a small matrix whose are not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        logits: Tensor = self.head(hidden * self.scale)
        return logits.square().mean()


def made(strategy: str) -> tuple[ShardedModel, ShardedAdamW]:
    model = shard_model(Net(), strategy)
    return model, ShardedAdamW(model, lr=0.02, state_dtype=torch.int8)


def train(model: ShardedModel, optimizer: ShardedAdamW, steps: range) -> list[float]:
    """Some words are in no batch, so that their gradients are exactly zero."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + model.collectives.rank)
        loss = model(torch.randint(WORDS // 2, (ROWS, 8), generator=generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def save(model: ShardedModel, optimizer: ShardedAdamW, folder: Path) -> dict[str, Tensor]:
    snapshot = take_snapshot(model, optimizer, model.collectives.rank, About(Progress(STEPS)))
    write_checkpoint(folder, snapshot, model.collectives)
    return whole_tensors(folder)


@distributed(timeout=90)
def train_alike(rank: int, world_size: int, folder: Path) -> None:
    """With parameters in parts and unsharded, weights, codes and scales have the same bits."""
    found = []
    for strategy in ("no_shard", "full_shard", "shard_optimizer"):
        model, optimizer = made(strategy)
        losses = train(model, optimizer, range(STEPS))
        found.append((losses, save(model, optimizer, folder / strategy)))
    (losses, expected), *others = found
    names = {key.partition("/")[0] for key in expected}
    assert {"exp_avg.codes", "exp_avg.scales", "exp_avg_sq.codes", "exp_avg"} < names
    assert expected["exp_avg.codes/layers.1.weight"].dtype == torch.int8
    assert "exp_avg/head.weight" in expected  # too small
    assert not any(value.float().isnan().any() for value in expected.values())
    for other_losses, other in others:
        assert other_losses == losses
        assert other.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(other[key], value), key


@distributed(timeout=90)
def go_on(rank: int, world_size: int, folder: Path) -> None:
    """A checkpoint of other ranks is loaded and saved again without a change."""
    model, optimizer = made("full_shard")
    load_checkpoint(CheckpointReader(folder / "no_shard"), model, optimizer)
    again = save(model, optimizer, folder / f"again-{world_size}")
    expected = whole_tensors(folder / "no_shard")
    assert again.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(again[key], value), key
    assert all(loss == loss for loss in train(model, optimizer, range(STEPS, STEPS + 2)))


def test_bits_do_not_depend_on_ranks(tmp_path):
    train_alike(world_size=3, folder=tmp_path)
    go_on(world_size=2, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_bits_do_not_depend_on_more_ranks(tmp_path, ranks):
    train_alike(world_size=ranks, folder=tmp_path)
    for others in (1, 3):
        go_on(world_size=others, folder=tmp_path)


@distributed(timeout=90)
def resume(rank: int, world_size: int, folder: Path) -> None:
    """An interrupted run has the bits of one that was not."""
    model, optimizer = made("full_shard")
    train(model, optimizer, range(2))
    save(model, optimizer, folder / "early")
    losses = train(model, optimizer, range(2, 6))
    expected = save(model, optimizer, folder / "late")
    model, optimizer = made("full_shard")
    load_checkpoint(CheckpointReader(folder / "early"), model, optimizer)
    assert train(model, optimizer, range(2, 6)) == losses
    found = save(model, optimizer, folder / "resumed")
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_a_resumed_run_has_the_same_bits(tmp_path):
    resume(world_size=2, folder=tmp_path)


def numbers(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(64 * 50, generator=generator)
    return {
        "normal": normal,
        "wide": normal * torch.exp(4 * torch.randn(normal.shape, generator=generator)),
        "sparse": normal * (torch.rand(normal.shape, generator=generator) > 0.9),
        "zeros": torch.zeros(128),
        "denormal": normal * 1e-40,
        "huge": normal * 1e18,
        "one": torch.nn.functional.pad(torch.tensor([3.0]), (0, 63)),
    }[kind]


@pytest.mark.parametrize("kind", ["normal", "wide", "sparse", "zeros", "denormal", "huge", "one"])
def test_codes_stay_near_their_numbers(kind):
    values = numbers(kind)
    for name, dtype in (("exp_avg", torch.int8), ("exp_avg_sq", torch.uint8)):
        signed = dtype == torch.int8
        given = values if signed else values.abs()  # square roots of the second moment
        moment = moment_of(new_moment(name, len(given), given, dtype), name)
        moment.write(given.clone(), torch.empty_like(given))
        found = torch.empty_like(given)
        moment.read(found, torch.empty_like(given))
        found = found if signed else found.sqrt()
        assert moment.scales is not None
        scales = moment.scales.float().repeat_interleave(64)
        blocks = given.view(-1, 64).abs().amax(1).repeat_interleave(64)
        assert torch.isfinite(found).all()
        assert (scales >= blocks).all()
        assert (scales <= blocks * 1.01 + 1e-38).all() or kind == "denormal"
        if kind != "denormal":
            assert ((found - given).abs() <= scales / 64).all()
        if not signed:
            assert ((moment.values > 0) == (given > 0)).all() or kind == "denormal"


def test_a_skipped_step_changes_nothing():
    model, optimizer = made("full_shard")
    train(model, optimizer, range(2))
    before = {
        (number, name): value.clone()
        for number, (_, state) in enumerate(optimizer.run_states())
        for name, value in state.items()
    }
    weights = model.state_dict()
    model(torch.zeros(ROWS, 8, dtype=torch.int64)).backward()
    optimizer.step(found_inf=torch.ones(()))
    for number, (_, state) in enumerate(optimizer.run_states()):
        for name, value in state.items():
            assert torch.equal(value, before[number, name])
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_no_update_exceeds_adams_bound():
    betas = (0.9, 0.95)
    model, optimizer = made("full_shard")
    ratio = betas[0] ** 2 / betas[1]
    before = model.state_dict()
    for step in range(1, 9):
        optimizer.zero_grad()
        loss = model(torch.full((ROWS, 8), step % 3))  # most rows have no gradient
        (loss * 10.0 ** (4 - step)).backward()
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        optimizer.step()
        bound = (
            (1 - betas[0]) / (1 - betas[1]) ** 0.5
            * ((1 - ratio**step) / (1 - ratio)) ** 0.5
            * (1 - betas[1] ** step) ** 0.5 / (1 - betas[0] ** step)
        )  # fmt: skip
        after = model.state_dict()
        largest = max(float((after[n] - before[n]).abs().max()) for n in after)
        assert largest <= 0.02 * bound * (1 + 1e-4) + 1e-6, step
        before = after
