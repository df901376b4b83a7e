"""Checkpoints of runs that train a part of a model: the saved tensors take precedence."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fsdpctl.checkpoint.consolidate import consolidate
from fsdpctl.checkpoint.initial_weights import BaseWeights, open_pretrained, open_with_base
from fsdpctl.checkpoint.load import load_into, load_weights
from fsdpctl.checkpoint.manifest import BUFFER, PARAMETER, BaseInfo
from fsdpctl.checkpoint.pretrained import open_weights
from fsdpctl.checkpoint.publish import CheckpointMetadata
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.save import take_snapshot, write_checkpoint
from fsdpctl.checkpoint.tensor_source import Overlay, weight_bytes
from fsdpctl.checkpoint.training_progress import Progress
from fsdpctl.comm.mesh import collectives_for
from fsdpctl.config.serialize import to_settings
from fsdpctl.engine.shard_model import shard_model
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.optim.adamw import ShardedAdamW
from tests.distributed import distributed
from tests.models.decoders import CPU, compose, load, save_decoder


class Counting(nn.Module):
    """A module whose forward changes persistent buffers of two dtypes, as norms do."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.norm, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.register_buffer("largest", torch.zeros(4))
        self.frozen.requires_grad_(False)

    def forward(self, batch: Tensor) -> Tensor:
        hidden = self.norm(self.frozen(batch))
        self.largest.copy_(torch.maximum(self.largest, hidden.detach().amax(dim=0)))
        result: Tensor = self.head(hidden)
        return result.square().mean()


def save(folder: Path, model: ShardedModel, options: CheckpointMetadata) -> CheckpointReader:
    snapshot = take_snapshot(model, None, model.collectives.rank, options)
    write_checkpoint(folder, snapshot, model.collectives)
    return CheckpointReader(folder)


def differing(one: nn.Module, other: nn.Module) -> list[str]:
    mine, theirs = one.state_dict(), other.state_dict()
    return [name for name in mine if not torch.equal(mine[name], theirs[name])]


@distributed(world_size=2)
def test_buffers_come_from_the_checkpoint_and_frozen_parameters_from_the_base(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = shard_model(Counting(), "full_shard")
    base = save(tmp_path / "base", model, CheckpointMetadata())
    optimizer = ShardedAdamW(model, lr=0.1)
    for _ in range(3):
        model(torch.randn(8, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    part = save(tmp_path / "part", model, CheckpointMetadata(base=BaseInfo("base", "0", "0")))
    assert "frozen.weight" not in part.names(PARAMETER)
    assert set(part.names(BUFFER)) == {
        "largest", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"
    }  # fmt: skip
    weights = Overlay(part, base)
    assert weights.names(BUFFER) == base.names(BUFFER)
    assert weight_bytes(weights) == weight_bytes(base)
    torch.manual_seed(1)
    resumed, evaluated = (shard_model(Counting(), name) for name in ("no_shard", "full_shard"))
    load_into(part, resumed, None, weights)
    load_weights(weights, evaluated)
    for other in (resumed, evaluated):
        assert not differing(model, other)
        assert int(other.state_dict()["norm.num_batches_tracked"]) == 3


def test_a_partial_run_resumes_evaluates_and_exports_its_biases(tmp_path: Path) -> None:
    save_decoder("deepseek_v3", tmp_path / "base")
    config = compose(tmp_path / "base", "model.trainable=experts")
    model, ranks = load(config), collectives_for(CPU)
    biases = model.persistent_buffers()
    for buffer in biases.values():
        buffer.fill_(0.5)
    expected = model.state_dict()
    assert biases
    assert all(name.endswith("e_score_correction_bias") for name in biases)
    base = BaseWeights.new(tmp_path / "base", open_weights(config.model), ranks)
    options = CheckpointMetadata(Progress(1), to_settings(config), base=base.verify(ranks))
    reader = save(tmp_path / "step-00000001", model, options)
    resumed, evaluated = load(config), load(config)
    load_into(reader, resumed, None, open_with_base(reader, ranks)[0])
    weights, _ = open_pretrained(config.model, reader.folder, ranks)
    load_weights(weights, evaluated)
    for other in (resumed, evaluated):
        assert all(torch.equal(expected[name], state) for name, state in other.state_dict().items())
    consolidate(reader, tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert all(torch.equal(exported[name], expected[name]) for name in biases)
    plain = load_file(tmp_path / "base" / "model.safetensors")
    assert not any(plain[name].any() for name in biases)
