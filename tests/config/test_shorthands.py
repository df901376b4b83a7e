"""Short forms of settings."""

import pytest

from fsdpctl.config.compose import compose_config
from fsdpctl.errors import UsageError


@pytest.mark.parametrize(("settings", "expected"), [
    (["cluster=4xa100_80"], ("a100_80", 4, 1)), (["cluster=16xh100"], ("h100", 8, 2)),
    (["cluster=1×T4"], ("t4", 1, 1)), (["cluster=8xH100"], ("h100", 8, 1)),
    (["cluster=A100_80"], ("a100_80", None, 1)), (["cluster=h100"], ("h100", None, 1)),
])  # fmt: skip
def test_a_number_of_gpus_of_a_cluster_sets_the_ranks(settings, expected):
    config = compose_config(settings).config
    launch = config.launch
    assert (config.cluster.name, launch.nproc_per_node, launch.nnodes) == expected


@pytest.mark.parametrize(("recipe", "settings", "expected"), [
    ("llama3_405b_16384xh100", ["cluster=8xh100"], (8, 1)),
    ("llama3_70b_64xh100", ["cluster=4xh100"], (4, 1)),
    ("llama3_405b_16384xh100", ["cluster=32xh200"], (8, 4)),
    ("llama3_405b_16384xh100", ["cluster=h200"], (None, 2048)),
    ("llama3_405b_16384xh100", ["cluster=h200", "launch.nnodes=3"], (None, 3)),
])  # fmt: skip
def test_a_number_of_gpus_replaces_the_nodes_of_a_recipe(recipe, settings, expected):
    launch = compose_config(settings, recipe).config.launch
    assert (launch.nproc_per_node, launch.nnodes) == expected


def test_nodes_on_the_command_line_override_the_number_of_gpus_of_a_recipe(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("cluster: 8xh100\n")
    launch = compose_config(["launch.nnodes=4"], str(recipe)).config.launch
    assert (launch.nproc_per_node, launch.nnodes) == (8, 4)


@pytest.mark.parametrize(("settings", "message"), [
    (["cluster=12xh100"], "a multiple of it: a node of h100 has 8 GPUs"),
    (["cluster=4xh100", "launch.nproc_per_node=2"], "conflicts with launch.nproc_per_node"),
    (["cluster=2x24"], "are a10, l4, rtx3090, rtx4090; set one, such as cluster=2xa10"),
    (["cluster=80GB"], "GPUs of that size are a100_80, h100, h100_pcie; set one"),
    (["cluster=8xA100"], "mean a100_40 or a100_80?"), (["cluster=A100-80g"], "mean a100_80?"),
    (["cluster=8xh100-80gb"], "mean h100?"), (["cluster=RTX-4090"], "mean rtx4090?"),
    (["cluster=4xnothing"], "no such option"),
    (["meta-llama/Llama-2-13b"], "unknown model; did you mean meta-llama/Llama-2-13b-hf"),
    (["Qwen/Qwen3-8C"], "unknown model; did you mean .*set model=Qwen/Qwen3-8C$"),
    (["train", "data/words.txt"], "train: expected KEY=VALUE"),
])  # fmt: skip
def test_mistakes_in_short_forms_are_named(settings, message):
    with pytest.raises(UsageError, match=message):
        compose_config(settings)


@pytest.mark.parametrize("settings", [["Qwen/Qwen3-8B"], ["model=Qwen/Qwen3-8B"]])
def test_a_name_on_the_hub_is_a_model(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    config = compose_config(settings).config.model
    assert (config.name, config.path, config.num_layers) == ("hf", "Qwen/Qwen3-8B", 36)


@pytest.mark.parametrize(("path", "option"), [
    ("a.txt", "text"), ("a.jsonl", "chat"), ("a.json.gz", "chat"), ("a.parquet", "chat"),
    ("a.bin", "tokens"), ("texts", "text"), ("chats", "chat"),
])  # fmt: skip
def test_the_kind_of_data_follows_from_its_path(path, option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, file in (("texts", "a.md"), ("chats", "a.jsonl"), ("chats", "b.parquet")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / file).write_text("a")
    assert compose_config([f"data.path={path}"]).config.data.name == option
    assert compose_config([f"data.path={path}", "data=text"]).config.data.name == "text"


def test_a_length_of_none_leaves_the_others():
    assert compose_config(["train.epochs=none", "train.steps=10"]).config.train.steps == 10
