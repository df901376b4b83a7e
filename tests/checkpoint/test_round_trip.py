"""A checkpoint is loaded as it was saved, whichever ranks save and load it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fsdpctl.checkpoint.load import load_into
from fsdpctl.checkpoint.manifest import PARAMETER, BaseInfo
from fsdpctl.checkpoint.publish import CheckpointMetadata
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.save import take_snapshot, write_checkpoint
from fsdpctl.checkpoint.staging import TORCH_DTYPES, tensor_from_bytes
from fsdpctl.checkpoint.training_progress import Progress
from fsdpctl.engine.shard_model import shard_model
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.errors import CheckpointError, FsdpctlError
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.plan.strategy import STRATEGIES
from tests.distributed import distributed
from tests.engine.models import make_net, next_token_loss, token_batches
from tests.engine.test_parity import largest_difference
from tests.matrix import fast

CPU = torch.device("cpu")


def trained(strategy: str, steps: int = 2) -> tuple[ShardedModel, ShardedAdamW]:
    """Return a model that is the same on any number of ranks: all ranks see the same data."""
    copy = 2 if STRATEGIES[strategy].replicates else None
    model = shard_model(make_net(tied=True), strategy, dp_shard_size=copy)
    optimizer = ShardedAdamW(model, lr=1e-2)
    train_on(model, optimizer, steps)
    return model, optimizer


def train_on(model: ShardedModel, optimizer: ShardedAdamW, steps: int) -> None:
    for of_ranks in token_batches(steps, 1):
        next_token_loss(model, of_ranks[0][0]).backward()
        optimizer.step()
        optimizer.zero_grad()


def save(folder: Path, model: ShardedModel, optimizer: ShardedAdamW) -> None:
    progress = Progress(step=2, samples=10, data_fingerprint="abc")
    ranks = model.collectives
    options = CheckpointMetadata(progress, {"model": "odd"}, {"tokenizer.json": b"{}" * 200})
    write_checkpoint(folder, take_snapshot(model, optimizer, ranks.rank, options), ranks)


def whole_tensors(folder: Path) -> dict[str, Tensor]:
    reader = CheckpointReader(folder)
    results = {}
    for key in reader.manifest.tensors:
        info = reader.info(key)
        results[key] = torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype])
        for span, data in reader.read(key):
            results[key].view(-1)[span.start : span.stop] = tensor_from_bytes(data, info.dtype)
    return results


@distributed()
def saves(rank: int, world_size: int, folder: Path) -> None:
    save(folder, *trained("full_shard"))


@distributed()
def saves_again(rank: int, world_size: int, source: Path, folder: Path, strategy: str) -> None:
    model, optimizer = trained(strategy, steps=0)
    assert load_into(CheckpointReader(source), model, optimizer).samples == 10
    save(folder, model, optimizer)


CHAIN = [
    ("no_shard", 3), ("shard_grad_op", 1), ("full_shard", 4), ("hybrid_shard_optimizer", 4),
    ("no_shard", 2),
]  # fmt: skip


@pytest.mark.slow
def test_a_checkpoint_survives_any_change_of_ranks_and_strategy_bit_for_bit(tmp_path):
    saves(world_size=2, folder=tmp_path / "0")
    for number, (strategy, ranks) in enumerate(CHAIN):
        source, folder = tmp_path / f"{number}", tmp_path / f"{number + 1}"
        saves_again(world_size=ranks, source=source, folder=folder, strategy=strategy)
    first, last = whole_tensors(tmp_path / "0"), whole_tensors(folder)
    assert (first.keys(), any(key.startswith("exp_avg/") for key in first)) == (last.keys(), True)
    assert all(torch.equal(first[key], last[key]) for key in first)


@pytest.mark.parametrize(
    ("strategy", "world_size"), [("full_shard", 2), ("no_shard", 2), ("hybrid_shard_optimizer", 4)]
)
@distributed()
def test_training_resumes_bit_for_bit(rank, world_size, strategy, tmp_path):
    model, optimizer = trained(strategy)
    save(tmp_path / "c", model, optimizer)
    train_on(model, optimizer, 3)
    resumed, its_optimizer = trained(strategy, steps=0)
    assert load_into(CheckpointReader(tmp_path / "c"), resumed, its_optimizer).samples == 10
    train_on(resumed, its_optimizer, 3)
    assert largest_difference(model.state_dict(), resumed.state_dict()) == 0.0


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "step-00000002"
    saves(world_size=2, folder=folder)
    return folder


def test_files_are_safetensors_that_other_tools_can_read(checkpoint):
    for file in checkpoint.glob("*.safetensors"):
        assert file.stat().st_mode & 0o777 == 0o644
        for key, values in load_file(file).items():
            assert 0 < values.numel() <= CheckpointReader(checkpoint).info(key).numel
    assert not list(checkpoint.parent.glob("*.tmp-*"))


def read_everything(folder: Path) -> None:
    for _ in CheckpointReader(folder).verify():
        pass


@pytest.mark.parametrize("flips", fast(15, slow=[70]))
def test_every_flipped_byte_is_detected(checkpoint, flips):
    read_everything(checkpoint)
    generator = torch.Generator().manual_seed(0)
    for file in sorted(checkpoint.iterdir()):
        content = file.read_bytes()
        for _ in range(flips):
            position = int(torch.randint(len(content), (1,), generator=generator))
            flip = int(torch.randint(1, 256, (1,), generator=generator))
            flipped = bytes([content[position] ^ flip])
            file.write_bytes(content[:position] + flipped + content[position + 1 :])
            with pytest.raises(CheckpointError, match=r"step-00000002"):
                read_everything(checkpoint)
        file.write_bytes(content)
    read_everything(checkpoint)


def test_missing_truncated_swapped_and_additional_files_are_detected(checkpoint):
    files = sorted(checkpoint.iterdir())
    for file in files:
        content = file.read_bytes()
        file.unlink()
        with pytest.raises(CheckpointError, match=file.name):
            read_everything(checkpoint)
        for size in (0, 5, 100, len(content) - 1):
            file.write_bytes(content[:size])
            with pytest.raises(CheckpointError, match=file.name):
                read_everything(checkpoint)
        file.write_bytes(content)
    one, two = (file for file in files if file.suffix == ".safetensors")
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second), two.write_bytes(first)
    with pytest.raises(CheckpointError, match="does not match manifest.json"):
        read_everything(checkpoint)
    one.write_bytes(first), two.write_bytes(second)
    (checkpoint / "extra.safetensors").write_bytes(first)
    with pytest.raises(CheckpointError, match=r"extra.safetensors: does not belong"):
        read_everything(checkpoint)


@distributed(world_size=2)
def test_a_failed_save_leaves_nothing_and_is_an_error_on_every_rank(rank, world_size, tmp_path):
    model, optimizer = trained("full_shard")
    blocked = tmp_path / "file"
    if rank == 0:
        blocked.write_text("in the way")
    model.collectives.barrier()
    with pytest.raises(FsdpctlError, match="could not be written"):
        save(blocked / "step-00000002", model, optimizer)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@distributed(world_size=2)
def test_empty_parameters_and_buffers_survive(rank: int, world_size: int, tmp_path: Path) -> None:
    def make() -> torch.nn.Module:
        module = torch.nn.Linear(3, 3)
        module.register_parameter("nothing", torch.nn.Parameter(torch.zeros(0, 4)))
        module.register_buffer("seen", torch.tensor([[1.0, 2.0]]).t())
        return module

    model = shard_model(make(), "full_shard")
    save(tmp_path / "c", model, ShardedAdamW(model))
    other = shard_model(make(), "no_shard")
    load_into(CheckpointReader(tmp_path / "c"), other, None)
    states = (each.state_dict().items() for each in (model, other))
    assert largest_difference(*({k: x for k, x in each if x.numel()} for each in states)) == 0.0
    assert other.state_dict()["nothing"].shape == (0, 4)


def test_frozen_parameters_are_saved_unless_a_base_has_them(tmp_path: Path) -> None:
    net = make_net(tied=False)
    net.embed.requires_grad_(False)
    model = shard_model(net, "full_shard")
    saved = []
    for name, base in (("whole", None), ("rest", BaseInfo("base", "0", "0"))):
        snapshot = take_snapshot(model, None, 0, CheckpointMetadata(base=base))
        write_checkpoint(tmp_path / name, snapshot, model.collectives)
        saved.append(set(CheckpointReader(tmp_path / name).names(PARAMETER)))
    whole, rest = saved
    assert (whole, whole - rest) == (set(net.state_dict()), {"embed.weight"})


@distributed(world_size=2)
def test_a_checkpoint_of_a_different_model_is_rejected(rank, world_size, tmp_path):
    model, optimizer = trained("full_shard")
    save(tmp_path / "c", model, optimizer)
    other = shard_model(make_net(tied=False), "full_shard")
    with pytest.raises(CheckpointError, match=r"model/head.weight not found"):
        load_into(CheckpointReader(tmp_path / "c"), other, None)
