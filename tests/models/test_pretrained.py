"""Models that transformers saved are loaded, trained, and exported for transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from fsdpctl.checkpoint.consolidate import consolidate
from fsdpctl.checkpoint.pretrained import find_tokenizer, read_model_assets
from fsdpctl.comm.mesh import collectives_for
from fsdpctl.config.compose import compose_config
from fsdpctl.config.decoder_config import config_dict, read_hf_config
from fsdpctl.data.tokenizer import open_tokenizer
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.training.assemble import make_optimizer
from tests.distributed import distributed
from tests.matrix import fast
from tests.models import decoders
from tests.models.decoders import CPU, compose, saved
from tests.models.families import FAMILIES, FEW, OTHERS, save_model, tokens


def load(path: Path) -> ShardedModel:
    return decoders.load(compose(path))


def export(model: ShardedModel, path: Path, folder: Path, dtype: str | None = None) -> None:
    """Save a checkpoint and consolidate it, as a run of the model in `path` does."""
    reader = saved(model, compose(path), folder / "step-00000001", read_model_assets(path))
    if model.collectives.rank == 0:
        consolidate(reader, folder / "hf", dtype=dtype)


@torch.no_grad()
def difference(ours: ShardedModel, theirs: torch.nn.Module) -> float:
    return float((ours(tokens()) - theirs(tokens()).logits).abs().max())


def edited(folder: Path, **kwargs: object) -> Path:
    """Change the config.json of a directory; return the directory."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | kwargs))
    return folder


def weights(folder: Path) -> dict[str, Tensor]:
    results: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        results.update(load_file(file))
    return results


@pytest.mark.parametrize("family", fast(*FEW, slow=OTHERS))
def test_in_and_out_is_byte_identical_and_computes_the_same(family, tmp_path):
    theirs = save_model(family, tmp_path / "in")
    ours = load(tmp_path / "in")
    assert difference(ours, theirs) <= 1e-5
    export(ours, tmp_path / "in", tmp_path)
    before, after = weights(tmp_path / "in"), weights(tmp_path / "hf")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    for name in ("eos_token_id", "bos_token_id", "vocab_size", "model_type", "architectures"):
        assert written.get(name) == config.get(name)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@distributed(world_size=2)
def test_after_training_transformers_computes_what_we_compute(rank, world_size, family, tmp_path):
    if rank == 0:
        save_model(family, tmp_path / "in")
    collectives_for(CPU).barrier()
    model = load(tmp_path / "in")
    optimizer = make_optimizer(compose(tmp_path / "in", "optimizer.lr=1e-2"), model)
    before = model(tokens()).detach().clone()
    for _ in range(3):
        batch = tokens()[rank : rank + 1]
        model(batch[:, :-1], batch[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    export(model, tmp_path / "in", tmp_path)
    collectives_for(CPU).barrier()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    assert (model(tokens()) - before).abs().max() > 1e-2
    assert difference(model, theirs) <= 1e-5


def test_a_directory_in_two_files_with_bf16_keeps_its_bytes(tmp_path):
    save_model("llama", tmp_path / "in", torch.bfloat16, max_shard_size="60KB")
    assert (tmp_path / "in" / "model.safetensors.index.json").is_file()
    export(load(tmp_path / "in"), tmp_path / "in", tmp_path, "bfloat16")
    before, after = weights(tmp_path / "in"), weights(tmp_path / "hf")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_decoder_without_its_head_and_old_constants_are_understood(tmp_path):
    theirs = save_model("gpt2", tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    saved = {name.removeprefix("transformer."): each for name, each in load_file(file).items()}
    saved["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file(saved, file)
    assert difference(load(tmp_path / "in"), theirs) <= 1e-5


def test_a_tied_head_alone_is_the_embedding(tmp_path):
    theirs = save_model("llama tied", tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    saved = load_file(file)
    saved["lm_head.weight"] = saved.pop("model.embed_tokens.weight")
    save_file(saved, file)
    assert difference(load(tmp_path / "in"), theirs) <= 1e-5


def test_what_is_missing_or_too_much_is_named(tmp_path):
    save_model("llama", tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    saved = load_file(file)
    norm = saved.pop("model.norm.weight")
    save_file(saved, file)
    with pytest.raises(CheckpointError, match=r"model.norm.weight not found"):
        load(tmp_path / "in")
    save_file({**saved, "model.norm.weight": norm, "model.extra.weight": norm + 1}, file)
    with pytest.raises(CheckpointError, match=r"the model has no model.extra.weight"):
        load(tmp_path / "in")
    save_file({**saved, "model.norm.weight": norm}, file)
    with pytest.raises(CheckpointError, match=r"expected shape \[64\], got \[48\]"):
        load(edited(tmp_path / "in", hidden_size=64))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model.safetensors"):
        load(tmp_path / "in")
    file.unlink()
    with pytest.raises(UsageError, match="model.init=random"):
        load(tmp_path / "in")


def test_paths_that_hold_no_model_are_answered_with_the_way(tmp_path):
    for typed in (["model=hf", "model.path=org/name"], ["model=org/name"]):
        with pytest.raises(UsageError, match="hf download org/name`"):
            compose_config(typed)
    for _ in ("empty", "checkpoints of no run"):
        with pytest.raises(UsageError, match="no model found; expected config.json"):
            compose(tmp_path)
        (tmp_path / "checkpoints").mkdir(exist_ok=True)
    with pytest.raises(UsageError, match="model.path is required"):
        compose_config(["model=hf"])
    with pytest.raises(UsageError, match="only valid with model=hf"):
        compose_config([f"model.path={tmp_path}"])


@pytest.mark.parametrize("other", ["config.yaml", "checkpoints/"])
def test_half_a_run_in_a_models_directory_does_not_make_it_a_run(other, tmp_path):
    save_model("llama", tmp_path / "in")
    if other.endswith("/"):
        (tmp_path / "in" / other).mkdir()
    else:
        (tmp_path / "in" / other).write_text("model: {num_layers: 9}")
    assert compose(tmp_path / "in").model.num_layers == 3


def test_weights_are_read_from_where_transformers_reads_them(tmp_path):
    theirs = save_model("llama", tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    zeros = {name: torch.zeros_like(each) for name, each in load_file(file).items()}
    save_file(zeros, tmp_path / "in" / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(zeros, "model-00001-of-00001.safetensors")}
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(zeros, tmp_path / "in" / "z.safetensors")
    assert difference(load(tmp_path / "in"), theirs) <= 1e-5
    file.unlink()
    assert difference(load(tmp_path / "in"), theirs) > 1
    (tmp_path / "in" / "model.safetensors.index.json").unlink()
    with pytest.raises(UsageError, match=r"ambiguous weights in model-00001.*.safetensors, z"):
        load(tmp_path / "in")


def test_a_head_that_is_not_the_embedding_it_is_said_to_be_is_refused(tmp_path):
    save_model("llama", tmp_path / "in")
    edited(tmp_path / "in", tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match="but config.json ties them"):
        load(tmp_path / "in")


def test_quantized_weights_are_refused(tmp_path):
    save_model("llama", tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    saved = load_file(file)
    saved["model.norm.weight"] = saved["model.norm.weight"].to(torch.int8)
    save_file(saved, file)
    with pytest.raises(CheckpointError, match=r"model.norm.weight is I8; quantized weights"):
        load(tmp_path / "in")


def test_another_shape_than_the_weights_is_a_mistake_of_the_user(tmp_path):
    save_model("llama", tmp_path / "in")
    with pytest.raises(
        UsageError, match=r"layers=2: conflicts with the weights .* have 3; set mod"
    ):
        compose(tmp_path / "in", "model.num_layers=2")
    assert compose(tmp_path / "in", "model.num_layers=2", "model.init=random").model.num_layers == 2
    assert compose(tmp_path / "in", "model.num_layers=3").model.num_layers == 3


def test_a_tokenizer_that_is_not_read_is_not_replaced_by_bytes(tmp_path):
    save_model("llama", tmp_path / "in")
    assert find_tokenizer(tmp_path / "in") is None
    (tmp_path / "in" / "tokenizer.model").touch()
    assert find_tokenizer(tmp_path / "in") == str(tmp_path / "in")
    with pytest.raises(UsageError, match=r"tokenizer.json not found.*save_pretrained.*use bytes$"):
        open_tokenizer(str(tmp_path / "in"))


def test_old_and_incomplete_forms_of_rope(tmp_path):
    file = tmp_path / "config.json"
    options = json.loads(FAMILIES["llama 3.1"].to_json_string())
    rope = options.pop("rope_parameters")
    scaling = {**rope, "type": "llama3"}
    del scaling["rope_type"], scaling["original_max_position_embeddings"]
    old = {"rope_theta": 500.0, "rope_scaling": scaling}
    file.write_text(json.dumps(options | old | {"rope_parameters": {"rope_type": "default"}}))
    model = compose(tmp_path, "model.init=random").model
    rope = read_hf_config(config_dict(model), "").rope_parameters
    assert (rope["rope_type"], rope["rope_theta"]) == ("llama3", 500.0)
    assert rope["original_max_position_embeddings"] == 64
    del scaling["factor"]
    file.write_text(json.dumps(options | old))
    with pytest.raises(UsageError, match="factor"):
        compose(tmp_path)
    file.write_text(json.dumps(options | {"hidden_size": None}))
    with pytest.raises(UsageError, match="hidden_size"):
        compose(tmp_path)
