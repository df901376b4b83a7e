"""Published models are known by their names on the Hub, with sizes that add up."""

import pytest

from fsdpctl.config.compose import compose_config
from fsdpctl.config.hub import hub_models
from fsdpctl.errors import UsageError
from fsdpctl.models.build_model import build_base_model
from fsdpctl.resolve.prepare import prepare
from tests.commands.run import invoke

MODELS = hub_models()
DISTINCT = {id(entry): name for name, entry in reversed(MODELS.items())}


def config_of(name: str):
    return compose_config(["model=hf", f"model.path={name}", "model.init=random"]).config


def accepts(public: int | str, count: int) -> bool:
    """Return whether a sum is the published number, rounds to it or is within 1% of it."""
    if isinstance(public, int):
        return count == public
    digits, unit = public.rstrip("BM"), 1e9 if public.endswith("B") else 1e6
    last = 10.0 ** -len(digits.partition(".")[2]) * unit
    published = float(digits) * unit
    return abs(count - published) <= max(0.01 * published, last / 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTINCT.values())
def test_parameters_add_up_to_the_public_number(name):
    module = build_base_model(config_of(name).model)
    count = sum(param.numel() for param in module.parameters())
    assert accepts(MODELS[name]["parameters"], count), count


def test_the_table_has_models_by_every_name():
    assert len(MODELS) > 500
    assert len(DISTINCT) > 250
    for name in ("Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-v0.1", "openai/gpt-oss-20b"):
        entry = MODELS[name]
        assert entry["config"]["model_type"]
        assert entry["source"]
    assert config_of("Qwen/Qwen3-0.6B@main").model.num_layers == 28


def test_training_needs_the_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    settings = ["model=hf", "model.path=Qwen/Qwen3-0.6B", "launch.device=cpu"]
    with pytest.raises(UsageError, match="run `hf download Qwen/Qwen3-0.6B`"):
        prepare(compose_config(settings))


@pytest.mark.slow
def test_an_estimate_names_the_active_parameters():
    code, output = invoke(
        "estimate-memory", "model=hf", "model.path=Qwen/Qwen3-30B-A3B", "cluster=h100",
        "launch.nproc_per_node=8", "precision=bf16", "activation_checkpointing=full",
    )  # fmt: skip
    assert (code, "30,532,122,624 parameters, 3,353,032,704 active" in output) == (0, True), output
