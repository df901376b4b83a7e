"""Layers with adapters, and trained parameters; a wrong setting is refused in one line."""

import json
import math

import pytest
import torch

from fsdpctl.config.compose import compose_config
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.serialize import config_from_settings, config_to_yaml, to_settings
from fsdpctl.errors import UsageError
from fsdpctl.models.build_model import build_model, initialize_parameter
from fsdpctl.resolve.machine import assign_ranks
from fsdpctl.resolve.rules import validate
from tests.commands.run import invoke

SMALL = ["model.vocab_size=64", "model.num_layers=2"]


def config(*args: str) -> ModelConfig:
    return validate(assign_ranks(compose_config([*SMALL, *args]).config)).model


def trained(*args: str) -> set[str]:
    params = build_model(config(*args)).named_parameters()
    return {name for name, param in params if param.requires_grad}


def test_only_adapters_are_trained_and_the_head_has_none():
    names = trained("model.lora.rank=2", "model.overrides.tie_word_embeddings=false")
    assert len(names) == 2 * 7 * 2
    assert all(".lora_" in name and "lm_head" not in name for name in names)
    names = trained("model.lora.rank=2", "model=gpt2")
    assert len(names) == 2 * 4 * 2


def test_targets_and_trainable_are_searched_for_in_names():
    names = trained("model.lora.rank=2", r"model.lora.targets=1\..*(q|v)_proj$")
    layers = {name.rsplit(".", 2)[0] for name in names}
    assert layers == {f"model.layers.1.self_attn.{each}_proj" for each in "qv"}
    assert trained("model.trainable=^model.norm") == {"model.norm.weight"}


Q_AND_V = ["q_proj", "v_proj"]


def adapted(text: str) -> list[str]:
    """Return the last parts of the names of adapted layers."""
    names = trained("model.lora.rank=2", f"model.lora.targets={text}")
    return sorted({name.split(".")[-3] for name in names})


@pytest.mark.parametrize("text", [
    "[q_proj,v_proj]", "[ 'q_proj' , \"v_proj\" ]", '["q_proj", "v_proj"]', "q_proj,v_proj",
    "q_proj, v_proj", "'q_proj','v_proj'", "[q_proj,v_proj,]", "self_attn.q_proj,v_proj",
    "q_proj|v_proj", "(q|v)_proj", "[qv]_proj", "[q|v]_proj",
    "(?P<one>q|absent|v)_proj", "(?i:Q|V)_proj", r"(^|\.)(q_proj|v_proj)$",
    r"layers\.\d{1,2}\..*(q|v)_proj", r".*(?<!k|o)_attn\.(?:q|v)_proj",
])  # fmt: skip
def test_lists_and_patterns_select_their_layers(text):
    assert adapted(text) == Q_AND_V


@pytest.mark.parametrize("text", ["all-linear", "All_Linear", '"all-linear"', "[all-linear]"])
def test_all_linear_has_the_spellings_of_other_tools(text):
    assert adapted(text) == adapted("all_linear")


def test_a_list_of_parameters_has_parts_of_their_names(tmp_path):
    plain = trained("model.trainable=norm|mlp")
    assert trained("model.trainable=[layers.1]") == trained(r"model.trainable=layers\.1\.")
    assert trained("model.trainable=[norm,mlp]") == trained("model.trainable=norm, mlp") == plain
    file = tmp_path / "recipe.yaml"
    file.write_text("model: {name: llama_tiny, trainable: [norm, mlp]}\n")
    assert compose_config([], str(file)).config.model.trainable == "[norm, mlp]"


@pytest.mark.parametrize(("args", "said"), [
    (["model.trainable=q_prj"], "model.trainable=q_prj: matches no parameter name; "
     "did you mean q_proj?"),
    (["model.trainable=["], "model.trainable=[: not a regular expression"),
    (["model.trainable=norm", "model.lora.rank=2"], "conflicts with model.lora.rank"),
    (["model.lora.alpha=2"], "requires a rank, such as model.lora.rank=16"),
    (["model.lora.rank=2", "model.lora.targets=q_prj"], "did you mean q_proj?"),
    (["model.lora.rank=2", "model.lora.targets=("], "not a regular expression"),
    (["model.lora.rank=2", "model.lora.targets=lm_head"], "layers except the output head are"),
    (["model.lora.rank=2", "model.lora.targets=embed"], "matches no linear layer"),
    *(
        (["model.lora.rank=2", f"model.lora.targets={text}"], error)
        for text, error in [
            ("[q_proj,lm_head]", ": lm_head matches no linear layer"),
            ("q_proj,q_prj", ": q_prj matches no linear layer; did you mean q_proj?"),
            ("query_key_value", "linear layers except the output head are q_proj, k_proj"),
            ("all", "did you mean all_linear?"),
            ("[qv]", ": qv matches no linear layer"),
            ("[q_proj|v_proj]", "q_proj|v_proj in a list; expected names such as q_proj,"),
            ("q_.*,v_proj", "q_.* in a list; expected names such as q_proj,v_proj, or a regular"),
            ("(q_proj,v_proj)", "(q_proj in a list; expected names such as q_proj,v_proj, or"),
            ("q_proj v_proj", "q_proj v_proj in a list; expected names such as q_proj,v_proj,"),
            ("q_proj;v_proj", "q_proj;v_proj in a list; expected names such as q_proj,v_proj"),
            ("[]", "empty; expected names"),
        ]
    ),
    (["model.lora.rank=2", "model.lora.also=lm_haed"], "did you mean lm_head?"),
    (["model.lora.rank=2", "model.lora.also=layers"], "no layer is left for adapters"),
    (["model.lora.also=lm_head"], "requires a rank, such as model.lora.rank=16"),
    (["model.trainable=[norm,foo]"], "[norm,foo]: foo matches no parameter name"),
])  # fmt: skip
def test_invalid_selections_of_parameters_are_rejected(args, said):
    with pytest.raises(UsageError) as caught:
        trained(*args)
    assert said in str(caught.value)


def test_adapters_are_initialized_as_in_peft():
    model = config("model.lora.rank=64")
    down = torch.empty(64, 100)
    initialize_parameter("a.lora_A.weight", down, seed=0, config=model)
    again, other = torch.empty(64, 100), torch.empty(64, 100)
    initialize_parameter("a.lora_A.weight", again, seed=0, config=model)
    initialize_parameter("b.lora_A.weight", other, seed=0, config=model)
    assert torch.equal(down, again)
    assert not torch.equal(down, other)
    assert 0.099 < down.abs().max() <= 0.1
    up = torch.ones(100, 64)
    initialize_parameter("a.lora_B.weight", up, seed=0, config=model)
    assert not up.any()


def test_the_output_of_an_adapter_is_scaled():
    assert config("model.lora.rank=4").lora.scale == 2
    assert config("model.lora.rank=4", "model.lora.alpha=12").lora.scale == 3
    wide = config("model.lora.rank=8", "model.lora.alpha=16", "model.lora.rslora=true")
    assert wide.lora.scale == 16 / math.sqrt(8)


def test_modules_are_trained_whole_by_the_ends_of_their_names():
    names = trained("model.lora.rank=2", "model.lora.also=norm,layers.0.mlp,lm_head")
    whole = {name for name in names if ".lora_" not in name}
    mlp = {f"model.layers.0.mlp.{each}_proj.weight" for each in ("gate", "up", "down")}
    assert whole == {"model.norm.weight", "model.embed_tokens.weight", *mlp}  # a tied head
    assert not any("layers.0.mlp" in name for name in names - whole)
    model = config("model.lora.rank=2", "model.base_dtype=nf4", "model.lora.also=layers.0.mlp")
    params = dict(build_model(model).named_parameters())
    assert all(params[name].is_floating_point() for name in mlp)


def test_adapter_settings_are_saved_only_if_they_are_used():
    with_them = compose_config([*SMALL, "model.lora.rank=4", "model.lora.targets=q|v"]).config
    assert config_from_settings(to_settings(with_them)) == with_them
    assert "model.lora.targets: q|v\n" in config_to_yaml(with_them)
    assert not [name for name in to_settings(compose_config(SMALL).config) if "lora" in name]


def test_a_recipe_may_nest_them(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("model: {name: llama_tiny, lora: {rank: 4, targets: mlp}}\n")
    lora = compose_config([], str(file)).config.model.lora
    assert (lora.rank, lora.targets) == (4, "mlp")


def test_the_estimate_shows_the_trained_parameters():
    args = ["estimate-memory", *SMALL, "launch.nproc_per_node=2", "launch.device=cpu"]
    code, out = invoke(*args, "model.lora.rank=4", "--json")
    assert code == 0, out
    content = json.loads(out[out.index("{") :])  # after a note, on a machine with one core
    params = build_model(config("model.lora.rank=4")).parameters()
    expected = sum(param.numel() for param in params if param.requires_grad)
    assert content["num_trained_parameters"] == expected
    code, out = invoke(*args, "model.lora.rank=4", "engine=fsdp2")
    assert (code, out) == (2, "model.lora.rank=4: requires engine=fsdpctl, got engine=fsdp2")
