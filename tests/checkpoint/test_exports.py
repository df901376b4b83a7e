"""Checkpoints of models of transformers: their buffers, and the dtypes that exports keep."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor

from fsdpctl.checkpoint.consolidate import consolidate, write_sharded_weights
from fsdpctl.checkpoint.load import check_weights
from fsdpctl.checkpoint.pretrained import open_weights, read_model_assets
from fsdpctl.checkpoint.publish import CheckpointMetadata
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.config.compose import compose_config
from fsdpctl.config.serialize import only_model_settings, to_settings
from fsdpctl.errors import CheckpointError
from fsdpctl.models.build_model import build_model
from tests.models.decoders import compose, load, load_decoder, save_decoder


def tensors(folder: Path) -> dict[str, Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def sharded(family: str, folder: Path) -> CheckpointReader:
    """Convert a tiny decoder, as `fsdpctl shard-checkpoint` does."""
    save_decoder(family, folder / "in")
    file = folder / "in" / "model.safetensors"
    save_file({name: _at_router(name, each) for name, each in load_file(file).items()}, file)
    config = compose_config(["model=hf", f"model.path={folder / 'in'}"]).config
    settings = only_model_settings(to_settings(config))
    options = CheckpointMetadata(config=settings, attachments=read_model_assets(folder / "in"))
    weights = open_weights(config.model)
    check_weights(weights, build_model(config.model))
    write_sharded_weights(weights, folder / "c", num_files=2, metadata=options)
    return CheckpointReader(folder / "c")


def _at_router(name: str, values: Tensor) -> Tensor:
    """Give the biases of routers the values that they have in published models."""
    drawn = 34.5 + 0.1 * torch.rand(values.shape, generator=torch.Generator().manual_seed(1))
    return drawn.to(values.dtype) if "e_score_correction_bias" in name else values


@pytest.mark.parametrize("family", ["deepseek_v3", "apertus", "deepseek_v4", "minimax"])
def test_a_sharded_model_has_every_buffer_and_computes_the_same(family, tmp_path):
    reader = sharded(family, tmp_path)
    consolidate(reader, tmp_path / "out")
    before, after = tensors(tmp_path / "in"), tensors(tmp_path / "out")
    assert reader.names("buffer")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    model = load(compose(tmp_path / "c"))  # as `train` loads it
    theirs = load_decoder(tmp_path / "in").state_dict()
    for name, each in model.persistent_buffers().items():
        assert torch.equal(each, theirs[name]), name


def test_a_model_without_one_of_its_buffers_is_named_before_it_is_converted(tmp_path):
    save_decoder("deepseek_v3", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if "correction" not in k}, file)
    config = compose(tmp_path)
    with pytest.raises(CheckpointError, match="e_score_correction_bias"):
        check_weights(open_weights(config.model), build_model(config.model))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("family", "float32_names"), [
    ("deepseek_v3", "e_score_correction_bias"),  # a buffer in transformers' list for any dtype
    ("ernie4_5_moe", "mlp.gate.weight"),  # parameters in the same list
    ("olmo_hybrid", "A_log"),  # created in float32
    ("gpt_oss", "input_layernorm.weight"),  # in transformers' list for float16
])  # fmt: skip
def test_tensors_kept_in_float32_are_exported_in_float32(family, float32_names, dtype, tmp_path):
    consolidate(sharded(family, tmp_path), tmp_path / "out", dtype=dtype)
    make: Any = hf.AutoModelForCausalLM
    theirs = make.from_pretrained(tmp_path / "in", dtype=getattr(torch, dtype))
    theirs.save_pretrained(tmp_path / "theirs")
    before, ours = tensors(tmp_path / "in"), tensors(tmp_path / "out")
    wide = {name for name, each in ours.items() if each.dtype == torch.float32}
    expected = tensors(tmp_path / "theirs")
    assert {name for name, each in expected.items() if each.dtype == torch.float32} <= wide
    assert any(float32_names in name for name in wide)
    assert len(wide) < len(ours) / 2
    assert all(torch.equal(ours[name], before[name]) for name in wide)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype


def test_other_models_have_one_dtype(tmp_path):
    for family in ("falcon", "bloom"):
        consolidate(sharded(family, tmp_path / family), tmp_path / family / "o", dtype="bfloat16")
        (dtype,) = {each.dtype for each in tensors(tmp_path / family / "o").values()}
        assert dtype == torch.bfloat16
