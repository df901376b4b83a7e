"""Our models compute what transformers computes from the directory that we write."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdpctl.checkpoint.consolidate import consolidate
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.run_checkpoints import find_checkpoint
from fsdpctl.config.compose import compose_config
from fsdpctl.data.tokenizer import ByteTokenizer
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.resolve.run_plan import stored_config
from fsdpctl.training.assemble import make_model
from tests.models.decoders import saved

SMALL = ["model.num_layers=2", "model.hidden_size=32", "model.intermediate_size=48",
         "model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=auto",
         "model.vocab_size=256", "model.overrides.initializer_range=0.1",
         "data.tokenizer=bytes"]  # fmt: skip
VARIANTS = {
    "tied": [],
    "untied": ["model.overrides.tie_word_embeddings=false"],
    "llama3 rope": ["model.overrides.rope_theta=500",
     *(f"model.overrides.rope_scaling.{word}" for word in (
     "rope_type=llama3", "original_max_position_embeddings=16", "factor=4",
     "low_freq_factor=1", "high_freq_factor=4", ))],
    "qwen3": ["model.overrides.model_type=qwen3", "model.head_dim=16",
     "model.overrides.rope_theta=1000000"],
}  # fmt: skip


def make_checkpoint(path: Path, args: Sequence[str] = ()) -> tuple[ShardedModel, CheckpointReader]:
    known = {arg.split("=")[0]: arg for arg in [*SMALL, *args]}
    config = stored_config(compose_config(list(known.values())).config)
    model = make_model(config, torch.device("cpu"))
    return model, saved(model, config, path / "step-00000001", ByteTokenizer().files())


@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_gives_the_same_logits(tmp_path, variant):
    model, reader = make_checkpoint(tmp_path, VARIANTS[variant])
    consolidate(reader, tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    tokens = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = (model(tokens) - theirs(tokens).logits).abs().max()
    assert difference <= 1e-5


def test_the_byte_tokenizer_opens_in_transformers(tmp_path):
    consolidate(make_checkpoint(tmp_path)[1], tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "def f(x):\n\treturn 'héllo 日本 🙂'  # \x7f\n\n"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_large_models_are_split_and_cast(tmp_path):
    _, reader = make_checkpoint(tmp_path)
    result = consolidate(reader, tmp_path / "hf", dtype="bfloat16", max_file_bytes=20_000)
    assert result.num_files > 2
    assert (tmp_path / "hf" / "model.safetensors.index.json").is_file()
    for file in (tmp_path / "hf").glob("*.safetensors"):
        assert {values.dtype for values in load_file(file).values()} == {torch.bfloat16}
        assert file.stat().st_mode & 0o777 == 0o644
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").dtype == torch.bfloat16


def test_an_existing_destination_is_kept_unless_told_otherwise(tmp_path):
    _, reader = make_checkpoint(tmp_path)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "precious").write_text("x")
    with pytest.raises(UsageError, match="already exists"):
        consolidate(reader, tmp_path / "hf")
    assert (tmp_path / "hf" / "precious").read_text() == "x"
    with pytest.raises(UsageError, match="not an earlier export"):
        consolidate(reader, tmp_path / "hf", overwrite=True)
    with pytest.raises(UsageError, match="conflicts with the checkpoint"):
        consolidate(reader, tmp_path / "step-00000001" / "hf")
    (tmp_path / "hf" / "precious").unlink()
    consolidate(reader, tmp_path / "hf")
    with pytest.raises(UsageError, match="already exists"):
        consolidate(reader, tmp_path / "hf")
    (tmp_path / "link").symlink_to("hf")
    (tmp_path / "hf" / "generation_config.json").touch()  # of an export of another model
    consolidate(reader, tmp_path / "link", overwrite=True)
    assert not (tmp_path / "hf" / "generation_config.json").exists()
    file = tmp_path / "hf" / "model.safetensors"
    weights = file.read_bytes()
    save_file(load_file(file), file)
    with pytest.raises(UsageError, match="not an earlier export"):  # it is a model of the user
        consolidate(reader, tmp_path / "hf", overwrite=True)
    file.write_bytes(weights)
    (tmp_path / "hf" / "notes.txt").touch()
    with pytest.raises(UsageError, match="not an earlier export"):
        consolidate(reader, tmp_path / "hf", overwrite=True)
    (tmp_path / "hf" / "notes.txt").unlink()
    (tmp_path / "link").unlink()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["hf", "step-00000001"]


def test_a_damaged_checkpoint_gives_no_directory(tmp_path):
    make_checkpoint(tmp_path)
    file = tmp_path / "step-00000001" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="rank-00000.safetensors: corrupted"):
        consolidate(CheckpointReader(find_checkpoint(tmp_path)), tmp_path / "hf")
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000001"]
