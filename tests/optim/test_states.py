"""8-bit optimizer states and 24-bit weights: codes, and the same bits on any number of ranks."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fsdpctl.checkpoint.load import load_into
from fsdpctl.checkpoint.manifest import REMAINDER
from fsdpctl.checkpoint.publish import CheckpointMetadata
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.save import take_snapshot, write_checkpoint
from fsdpctl.checkpoint.training_progress import Progress
from fsdpctl.comm.quantized_states import get_moment, new_moment
from fsdpctl.engine.build import Sharding
from fsdpctl.engine.shard_model import shard_model
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.plan.owner_map import OWNER_MAPS
from fsdpctl.plan.precision import Precision
from tests.checkpoint.test_round_trip import whole_tensors
from tests.distributed import distributed, in_turn
from tests.fused import fused_by

WIDTH, VOCAB, ROWS = 65, 71, 4  # of odd sizes, so that blocks end within parameters
STEPS = 4
SLOW = pytest.mark.slow


class Net(nn.Module):
    """A network with compressed states of matrices, but not of vectors and of a small matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        logits: Tensor = self.head(hidden * self.scale)
        return logits.square().mean()


def make_model(strategy: str, kind: str = "int8") -> tuple[ShardedModel, ShardedAdamW]:
    """Return a model and its optimizer: with "int8" moments, or "24-bit" weights, or both."""
    bf16, owners = torch.bfloat16, strategy.partition(" ")[2] or "even"
    precision = Precision()
    if "24-bit" in kind:
        precision = Precision(bf16, torch.float32, bf16, has_remainders=True)
    sharding = Sharding(strategy.split()[0], owner_map=owners, precision=precision)
    model = shard_model(Net(), sharding)
    dtype = torch.int8 if "int8" in kind else None
    return model, ShardedAdamW(model, lr=0.02, state_dtype=dtype)


def train(
    model: ShardedModel, optimizer: ShardedAdamW, steps: range, *, alike: bool = False
) -> list[float]:
    """Train; some tokens are in no batch, so that their gradients are exactly zero.

    If ranks are `alike`, all have the same batches.
    """
    losses = []
    for step in steps:
        rank = 0 if alike else model.collectives.rank
        generator = torch.Generator().manual_seed(100 * step + rank)
        loss = model(torch.randint(VOCAB // 2, (ROWS, 8), generator=generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def save(model: ShardedModel, optimizer: ShardedAdamW, folder: Path) -> dict[str, Tensor]:
    metadata = CheckpointMetadata(Progress(STEPS))
    snapshot = take_snapshot(model, optimizer, model.collectives.rank, metadata)
    write_checkpoint(folder, snapshot, model.collectives)
    return whole_tensors(folder)


def assert_same(result: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert result.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(result[key], value), key


EXPECTED = {  # states of a large matrix
    "int8": {"exp_avg.codes", "exp_avg.scales", "exp_avg_sq.codes", "exp_avg_sq.scales"},
    "24-bit": {REMAINDER, "exp_avg", "exp_avg_sq"},
    "int8 24-bit": {REMAINDER, "exp_avg.codes", "exp_avg.scales"},
}
FEW = ["no_shard", "full_shard", "shard_optimizer"]
MANY = [*FEW, "shard_grad_op", *(f"shard_optimizer {each}" for each in OWNER_MAPS[1:])]


@distributed(timeout=120)
@in_turn(kind=list(EXPECTED))
def train_alike(rank: int, world_size: int, folder: Path, kind: str, strategies: list[str]) -> None:
    """Sharded and unsharded parameters have the same bits of weights, codes and scales."""
    results = []
    for strategy in strategies if world_size > 1 else FEW:
        model, optimizer = make_model(strategy, kind)
        losses = train(model, optimizer, range(STEPS))
        results.append((losses, save(model, optimizer, folder / f"{strategy} {kind}")))
    (losses, expected), *others = results
    names = {key.partition("/")[0] for key in expected if key.endswith("/layers.1.weight")}
    assert names > EXPECTED[kind]
    assert "exp_avg/head.weight" in expected  # too small for codes
    if "int8" in kind:
        assert expected["exp_avg.codes/layers.1.weight"].dtype == torch.int8
    assert not any(value.float().isnan().any() for value in expected.values())
    for other_losses, other in others:
        assert other_losses == losses
        assert_same(other, expected)


@distributed(timeout=90)
@in_turn(kind=list(EXPECTED))
def save_again(rank: int, world_size: int, folder: Path, kind: str) -> None:
    """A checkpoint of other ranks is loaded and saved again without a change."""
    model, optimizer = make_model("full_shard", kind)
    load_into(CheckpointReader(folder / f"no_shard {kind}"), model, optimizer)
    again = save(model, optimizer, folder / f"again-{world_size} {kind}")
    assert_same(again, whole_tensors(folder / f"no_shard {kind}"))
    assert all(loss == loss for loss in train(model, optimizer, range(STEPS, STEPS + 2)))


@pytest.mark.parametrize(
    ("ranks", "strategies", "others"),
    [(3, FEW, [2]), *(pytest.param(n, MANY, [1, 2, 3], marks=SLOW) for n in (1, 2, 3, 5))],
)
def test_bits_do_not_depend_on_ranks(tmp_path, ranks, strategies, others):
    train_alike(world_size=ranks, folder=tmp_path, strategies=strategies)
    for each in others:
        save_again(world_size=each, folder=tmp_path)


@distributed(timeout=90)
@in_turn(kind=list(EXPECTED), strategy=["full_shard", "shard_optimizer"])
def train_same(rank: int, world_size: int, folder: Path, kind: str, strategy: str) -> None:
    """Means of equal gradients over a power of two are exact."""
    model, optimizer = make_model(strategy, kind)
    losses = train(model, optimizer, range(STEPS), alike=True)
    result = save(model, optimizer, folder / f"{world_size} {strategy} {kind}")
    assert_same(result, whole_tensors(folder / f"1 {strategy} {kind}"))
    file = folder / f"losses {strategy} {kind}"
    if world_size == 1:
        file.write_text(str(losses))
    assert file.read_text() == str(losses)


@pytest.mark.slow
def test_the_same_batches_give_the_same_bits_on_one_two_and_four_ranks(tmp_path):
    for ranks in (1, 2, 4):
        train_same(world_size=ranks, folder=tmp_path)


def test_moments_are_converted_once_when_another_dtype_resumes(tmp_path):
    """Numbers become codes, and codes the numbers that they encode; nothing else changes."""
    stages = []
    for number, dtype in enumerate((torch.float32, torch.int8, torch.float32)):
        model = shard_model(Net(), "full_shard")
        optimizer = ShardedAdamW(model, lr=0.02, state_dtype=dtype)
        if number:
            load_into(CheckpointReader(tmp_path / str(number - 1)), model, optimizer)
        else:
            train(model, optimizer, range(STEPS))
        stages.append(save(model, optimizer, tmp_path / str(number)))
    first, coded, last = stages
    assert first.keys() == last.keys()
    for key, value in first.items():
        kind, _, name = key.partition("/")
        if (codes := coded.get(f"{kind}.codes/{name}")) is None:
            assert torch.equal(last[key], value)
            continue
        scales = coded[f"{kind}.scales/{name}"].float().repeat_interleave(64)[: value.numel()]
        root = kind == "exp_avg_sq"
        wanted, results = (each.sqrt() if root else each for each in (value, last[key]))
        assert ((results - wanted).abs().view(-1) <= scales / 64).all(), key
        assert not torch.equal(last[key], value)
        assert ((codes != 0) == (last[key] != 0)).all()


@pytest.mark.filterwarnings("ignore")  # torch warns about its own code
@pytest.mark.parametrize(("kind", "backend"), [
    ("int8", "eager"),
    *(pytest.param(kind, "inductor", marks=SLOW) for kind in EXPECTED),
])  # fmt: skip
@distributed(world_size=2, timeout=300)
def test_fused_steps_have_the_same_bits_and_few_graphs(rank, world_size, tmp_path, kind, backend):
    results = []
    for name, strategy in (("eager", "full_shard"), ("fused", "full_shard"), ("all", "no_shard")):
        model, optimizer = make_model(strategy, kind)
        is_fused = nullcontext() if name == "eager" else fused_by(backend)
        with is_fused as graphs:
            losses = train(model, optimizer, range(STEPS))
            assert graphs is None or 1 <= graphs() <= 1 + ("int8" in kind)
        results.append((losses, save(model, optimizer, tmp_path / name)))
    (losses, expected), *others = results
    for other_losses, other in others:
        assert other_losses == losses
        assert_same(other, expected)


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
        inputs = values if signed else values.abs()  # square roots of the second moment
        moment = get_moment(new_moment(name, len(inputs), inputs, dtype), name)
        moment.write(inputs.clone(), torch.empty_like(inputs))
        result = torch.empty_like(inputs)
        moment.read(result, torch.empty_like(inputs))
        result = result if signed else result.sqrt()
        assert moment.scales is not None
        scales = moment.scales.float().repeat_interleave(64)
        blocks = inputs.view(-1, 64).abs().amax(1).repeat_interleave(64)
        assert torch.isfinite(result).all()
        assert (scales >= blocks).all()
        assert (scales <= blocks * 1.01 + 1e-38).all() or kind == "denormal"
        if kind != "denormal":
            assert ((result - inputs).abs() <= scales / 64).all()
        if not signed:
            assert ((moment.values > 0) == (inputs > 0)).all() or kind == "denormal"


def test_a_skipped_step_changes_nothing():
    model, optimizer = make_model("full_shard")
    train(model, optimizer, range(2))
    before = [{k: v.clone() for k, v in state.items()} for _, state in optimizer.span_states()]
    weights = model.state_dict()
    model(torch.zeros(ROWS, 8, dtype=torch.int64)).backward()
    optimizer.step(found_inf=torch.ones(()))
    for expected, (_, state) in zip(before, optimizer.span_states(), strict=True):
        assert_same(state, expected)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_no_update_exceeds_adams_bound():
    betas = (0.9, 0.95)
    model, optimizer = make_model("full_shard")
    ratio = betas[0] ** 2 / betas[1]
    before = model.state_dict()
    for step in range(1, 9):
        optimizer.zero_grad()
        # Most rows have no gradient.
        (model(torch.full((ROWS, 8), step % 3)) * 10.0 ** (4 - step)).backward()
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
