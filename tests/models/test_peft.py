"""PEFT adapters give PEFT's logits in training, exported and merged, or are refused by name."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdpctl.checkpoint.consolidate import consolidate
from fsdpctl.checkpoint.initial_weights import initial_weights
from fsdpctl.checkpoint.load import load_weights
from fsdpctl.checkpoint.peft import write_peft
from fsdpctl.config.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_settings, notes_on_adapters
from fsdpctl.errors import UsageError
from fsdpctl.models.build_model import build_model
from fsdpctl.resolve.vocabulary import with_vocabulary
from fsdpctl.training.assemble import make_model
from tests.models.decoders import CPU, compose, load_decoder, save_decoder, saved

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
LENGTH, ALL = 8, "all-linear"


def tokens() -> Tensor:
    return torch.arange(3, 3 + 2 * LENGTH).view(2, LENGTH)


def decoder(base: Path, rows: int | None) -> Any:
    """Return the decoder, with another number of rows in its embeddings if it is set."""
    model: Any = load_decoder(base)
    if rows is not None:
        model.resize_token_embeddings(rows)
    return model


def write_adapters(base: Path, folder: Path, rows: int | None = None, **kwargs: Any) -> Any:
    """Write adapters with drawn values, and return PEFT's model from their directory."""
    torch.manual_seed(0)
    settings = {"r": 4, "lora_alpha": 12, "target_modules": ALL, "task_type": "CAUSAL_LM"} | kwargs
    model = peft.get_peft_model(decoder(base, rows), peft.LoraConfig(**settings))
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(torch.randn_like(param), alpha=0.03)
    model.save_pretrained(folder)
    return peft.PeftModel.from_pretrained(decoder(base, rows), folder)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    for family in ("llama", "falcon", "gpt2"):
        save_decoder(family, folder / family)
    save_decoder("llama", folder / "tied", tie_word_embeddings=True)
    return folder


@pytest.mark.parametrize(("family", "options"), [
    ("llama", {"init_lora_weights": True, "target_modules": ["q_proj", "v_proj"]}),
    ("llama", {"init_lora_weights": False, "use_rslora": True}),
    ("llama", {"init_lora_weights": "gaussian", "target_modules": r".*(q|v)_proj"}),
    ("llama", {"init_lora_weights": "orthogonal", "target_modules": ["q_proj", "absent"]}),
    ("falcon", {"init_lora_weights": True}),
    ("gpt2", {"init_lora_weights": True, "fan_in_fan_out": True}),
    ("gpt2", {"target_modules": ["attn.c_proj"], "fan_in_fan_out": False}),
    ("llama", {"modules_to_save": ["model.embed_tokens", "lm_head", "absent"]}),
    ("llama", {"modules_to_save": ["norm", "q_proj"]}),
    ("llama", {"modules_to_save": ["embed_tokens", "lm_head"], "rows": 320}),
    ("gpt2", {"modules_to_save": ["wte"], "fan_in_fan_out": True}),  # unties the head
    ("gpt2", {"modules_to_save": ["wte"], "fan_in_fan_out": True, "ensure_weight_tying": True}),
    ("gpt2", {"modules_to_save": ["lm_head"], "fan_in_fan_out": True, "ensure_weight_tying": True}),
    ("tied", {"modules_to_save": ["lm_head"], "ensure_weight_tying": True}),
    ("tied", {"modules_to_save": ["embed_tokens", "lm_head"], "rows": 320}),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*(fan_in_fan_out|tie|embedding).*:UserWarning")
@torch.no_grad()
def test_logits_are_those_of_peft(bases, tmp_path, family, options):
    expected = write_adapters(bases / family, tmp_path / "adapters", **options)(tokens()).logits
    args = [f"model.lora.path={tmp_path / 'adapters'}"]
    if isinstance(options.get("target_modules"), str):
        args.append("model.lora.targets=q_proj,v_proj")
    config = with_vocabulary(compose(bases / family, *args))
    model = make_model(config, CPU, strategy="no_shard", empty=True)
    load_weights(initial_weights(config.model, build_model(config.model), 0), model)
    model.train(False)
    assert (model(tokens()) - expected).abs().max() <= 1e-5
    reader = saved(model, config, tmp_path / "step")
    consolidate(reader, tmp_path / "merged", merge=True)
    assert (load_decoder(tmp_path / "merged")(tokens()).logits - expected).abs().max() <= 1e-5
    write_peft(reader, tmp_path / "again")
    base = decoder(bases / family, options.get("rows"))
    again = peft.PeftModel.from_pretrained(base, tmp_path / "again")
    assert (again(tokens()).logits - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "mica"])
def test_adapters_of_a_changed_base_are_refused(bases, tmp_path, init):
    write_adapters(bases / "llama", tmp_path / "adapters", init_lora_weights=init)
    with pytest.raises(UsageError, match=f"init_lora_weights={init}: not supported, because"):
        adapter_settings(str(tmp_path / "adapters"))


PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}
OTHER: dict[str, Any] = {
    "use_dora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 2},
    "layers_to_transform": 0,
    "lora_bias": True, "trainable_token_indices": [1], "layer_replication": [[0, 2]],
    "exclude_modules": ["lm_head"], "bias": "all", "megatron_config": {"a": 1},
    "alora_invocation_tokens": [1], "use_qalora": True, "arrow_config": {"top_k": 3},
    "use_bdlora": {"nblocks": 2}, "velora_config": {"num_groups": 2}, "kasa_config": {"beta": 1},
    "monteclora_config": {"samples": 2}, "init_lora_weights": "corda", "a_key_of_tomorrow": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_settings_that_are_not_known_are_refused_by_name(tmp_path, name):
    file = tmp_path / ADAPTER_CONFIG
    file.write_text(json.dumps(PLAIN | {name: OTHER[name]}))
    with pytest.raises(UsageError, match=rf"^model\.lora\.path=.*: {name}="):
        adapter_settings(str(tmp_path))
    empty: tuple[object, ...] = (None, False, {}, [])
    for unset in empty:
        if name not in ("bias", "init_lora_weights"):
            file.write_text(json.dumps(PLAIN | {name: unset}))
            adapter_settings(str(tmp_path))


def test_fields_that_a_file_lacks_have_the_defaults_of_peft(tmp_path):
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps({"peft_type": "LORA"}))
    usual, settings = peft.LoraConfig(), adapter_settings(str(tmp_path))
    results = (
        settings["model.lora.rank"],
        settings["model.lora.alpha"],
        settings["model.lora.dropout"],
    )
    assert tuple(map(float, results)) == (usual.r, usual.lora_alpha, usual.lora_dropout)


def test_the_defaults_of_the_installed_peft_are_accepted(tmp_path):
    peft.LoraConfig(**PLAIN | {"peft_type": None}).save_pretrained(tmp_path)
    content = json.loads((tmp_path / ADAPTER_CONFIG).read_text())
    assert {each.name for each in fields(peft.LoraConfig)} - {"runtime_config"} <= content.keys()
    assert adapter_settings(str(tmp_path))["model.lora.rank"] == "4"


def test_a_linked_adapter_config_is_refused(tmp_path):
    (tmp_path / "elsewhere.json").write_text(json.dumps(PLAIN))
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / ADAPTER_CONFIG).symlink_to("../elsewhere.json")
    with pytest.raises(UsageError, match="links to .*, outside its directory"):
        adapter_settings(str(tmp_path / "adapters"))


def test_adapters_without_a_model_are_named(tmp_path):
    (tmp_path / ADAPTER_WEIGHTS).write_bytes(b"")
    with pytest.raises(UsageError, match="without a model; set model.path to their base model"):
        compose(tmp_path)


def test_layers_whose_weights_are_read_directly_get_no_adapter(tmp_path):
    save_decoder("jamba", tmp_path)
    args = ("model.lora.rank=2", "model.lora.targets=[dt_proj,in_proj]")
    with pytest.raises(UsageError, match=r"\[dt_proj,in_proj\]: dt_proj: not supported, because"):
        build_model(compose(tmp_path, *args).model)
    module = build_model(compose(tmp_path, "model.lora.rank=2", "model.base_dtype=nf4").model)
    left = [name for name, p in module.named_parameters() if "dt_proj" in name]
    assert not any("lora_" in name for name in left)
    assert all(module.get_parameter(name).is_floating_point() for name in left)


def test_adapters_beside_the_weights_get_a_note(bases, tmp_path):
    assert not notes_on_adapters(str(bases / "llama"), None)
    write_adapters(bases / "llama", tmp_path)
    assert not notes_on_adapters(str(tmp_path), str(tmp_path))
    (line,) = notes_on_adapters(str(tmp_path), None)
    assert f"set model.lora.path={tmp_path}" in line
