"""Values that settings merge into a model's config.json."""

import json
from pathlib import Path

import pytest

from fsdpctl.config.compose import compose_config
from fsdpctl.config.decoder_config import config_dict, read_hf_config
from fsdpctl.config.overrides import read_run_config
from fsdpctl.config.schema import Config
from fsdpctl.config.serialize import config_from_settings, config_to_yaml, to_settings
from fsdpctl.errors import UsageError

ROPE = "model.overrides.rope_scaling"
LLAMA: dict[str, object] = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip
FORMS: list[dict[str, object]] = [  # earlier versions of transformers, and this version
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
]


def rope(*settings: str, form: int, folder: Path) -> dict[str, object]:
    (folder / "config.json").write_text(json.dumps(LLAMA | FORMS[form]))
    settings = ("model=hf", f"model.path={folder}", *settings)
    content = config_dict(compose_config(settings).config.model)
    parameters: dict[str, object] = read_hf_config(content, "").rope_parameters
    return parameters


@pytest.mark.parametrize("form", [0, 1])
def test_rotary_embeddings_have_either_name(tmp_path, form):
    known = {"rope_theta": 5e5, "rope_type": "linear"}
    assert rope(form=form, folder=tmp_path) == {**known, "factor": 2}
    assert rope(f"{ROPE}.factor=4", form=form, folder=tmp_path) == {**known, "factor": 4}
    settings = ["model.overrides.rope_parameters.factor=8", "model.overrides.rope_theta=1e4"]
    assert rope(*settings, form=form, folder=tmp_path) == {**known, "factor": 8, "rope_theta": 1e4}
    off = rope(f"{ROPE}=null", form=form, folder=tmp_path)
    assert (off["rope_type"], off["rope_theta"]) == ("default", 5e5)


def longer() -> Config:
    return compose_config([f"{ROPE}.factor=32", "model.max_seq_len=4096"], "llama3_8b_32k").config


def test_a_typed_value_is_merged_into_that_of_the_recipe(tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text(
        "model: qwen3_4b\nmodel.overrides: {rope_scaling: {rope_type: yarn, factor: 2}, "
        "layer_types: [full_attention, sliding_attention], sliding_window: 64}\n"
    )
    settings = [f"{ROPE}.factor=4", "model.num_layers=2"]
    content = config_dict(compose_config(settings, str(file)).config.model)
    assert content["rope_scaling"] == {"rope_type": "yarn", "factor": 4}
    assert content["layer_types"] == ["full_attention", "sliding_attention"]
    assert (content["num_hidden_layers"], content["sliding_window"]) == (2, 64)


def test_a_configuration_with_overrides_is_read_again(tmp_path):
    config = longer()
    assert config_dict(config.model)["rope_scaling"]["factor"] == 32
    assert config_from_settings(to_settings(config)) == config
    file = tmp_path / "config.yaml"
    file.write_text(config_to_yaml(config))
    assert compose_config([], str(file)).config == config
    file.write_text(file.read_text().replace('"rope_theta":500000.0', '"rope_theta":7.0'))
    with pytest.raises(UsageError, match="model.config_json: differs from that of model=llama3_8b"):
        compose_config([], str(file))


@pytest.mark.parametrize(("settings", "part"), [
    ("rope_scaling.factor=32", "the model has no scaling; expected model.overrides.rope_scaling."),
    ("rms_norm_ep=1", "rms_norm_ep: no such key; did you mean rms_norm_eps?"),
    ("rope_scaling.facto=1", "rope_scaling.facto: no such key; did you mean factor?"),
    ("rope_scaling=1 model.overrides.rope_scaling.factor=2", "conflicts with another"),
    ("hidden_act=3", "hidden_act 3: expected text"),
    ("rms_norm_eps=x", "rms_norm_eps x: expected a number"),
    ("model_type=lama", "model_type lama: not a causal decoder"),
    ("_attn_implementation=x", "no such key"),
    ("num_hidden_layers=3 model.num_layers=2 model.overrides.pad_token_id=3e9", "3000000000"),
])  # fmt: skip
def test_what_transformers_does_not_know_is_refused(settings, part):
    with pytest.raises(UsageError, match="^model") as caught:
        compose_config(f"model.overrides.{settings}".split())
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sizes_of_weights_cannot_be_changed(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    settings = ["model=hf", f"model.path={tmp_path}", "model.overrides.hidden_size=64"]
    with pytest.raises(UsageError, match="model.hidden_size=64: conflicts with the weights"):
        compose_config(settings)
    assert compose_config([*settings, "model.init=random"]).config.model.hidden_size == 64
    longer = compose_config([*settings[:2], "model.max_seq_len=99"]).config.model
    assert config_dict(longer)["max_position_embeddings"] == longer.max_seq_len == 99


def test_a_config_json_is_not_typed():
    with pytest.raises(UsageError, match="model.config_json: no such key; set model.overrides"):
        compose_config(["model.config_json={}"])


def test_a_run_reads_its_overrides(tmp_path):
    """Every rank reads them from the file that its launcher writes."""
    settings = ["model=llama3_1b", f"{ROPE}.factor=8", "model.overrides.tie_word_embeddings=false"]
    config = compose_config(settings).config
    (tmp_path / "config.yaml").write_text(config_to_yaml(config))
    assert config_from_settings(read_run_config(tmp_path / "config.yaml")) == config
