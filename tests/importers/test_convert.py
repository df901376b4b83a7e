"""Recipes converted from other tools' configurations."""

from pathlib import Path

import pytest

from fsdpctl.config.recipe import read_recipe
from fsdpctl.errors import UsageError
from fsdpctl.importers.convert import ConvertedRecipe, recipe_text, to_recipe
from fsdpctl.importers.readers import read_other_tool

FILES = Path(__file__).parent / "files"


@pytest.fixture(autouse=True)
def beside_data(tmp_path, monkeypatch):
    """Run beside a file of chats, with an empty Hugging Face cache."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "chats.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)


def converted(name: str) -> ConvertedRecipe:
    return to_recipe(read_other_tool(FILES / name), {}, 8)


@pytest.mark.parametrize("name", [each.name for each in FILES.iterdir()])
def test_a_recipe_has_the_training_of_the_file(name, tmp_path):
    recipe = converted(name)
    names = [key for key, _ in recipe.settings]
    assert not [key for key in names if key.startswith(("engine", "cluster", "train.loss_chunk"))]
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe_text(recipe, name))
    # `train` reads the recipe and requires the missing values.
    added = [("model", "hf")] if "model" not in names else []
    assert [each for each in read_recipe(file) if each[1] != "???"] == [*recipe.settings, *added]


def test_what_is_missing_and_left_out_stands_in_comments():
    text = recipe_text(converted("axolotl-qlora.yml"), "axolotl-qlora.yml")
    assert text.startswith("# Converted from axolotl-qlora.yml (axolotl) by fsdpctl.")
    assert "\n# MISSING: " in text
    assert "unknown: a_key_of_tomorrow" in text
    assert "the estimate" not in text
    assert max(map(len, text.splitlines())) <= 100
    text = recipe_text(converted("accelerate-deepspeed.yaml"), "accelerate-deepspeed.yaml")
    assert "# deepspeed_config.gradient_accumulation_steps: 8; 1 * 8 * 4 ranks in" in text
    assert "# (micro-batch): (not set); set it as in the script" in text


def test_the_command_line_takes_precedence():
    typed = {"strategy": "no_shard", "train.global_batch_size": "7", "data.path": "chats.jsonl"}
    recipe = to_recipe(read_other_tool(FILES / "axolotl-full.yaml"), typed, 8)
    values = dict(recipe.settings)
    assert {key: values[key] for key in typed} == typed
    assert not [key for key in values if key.startswith("strategy.")]
    assert recipe.required == []
    text = recipe_text(recipe, "axolotl-full.yaml")
    for name, key in (("checkpoint.every", "saves_per_epoch"), ("train.eval_every", "evals_")):
        assert dict(recipe.missing)[name].startswith(key)
        assert f"{name}: ???" not in text  # the key has a default
        assert key not in text.partition("not needed")[2]


def test_replicas_are_those_of_the_file(tmp_path):
    file = tmp_path / "file.yaml"
    options = "{fsdp_version: 2, fsdp_reshard_after_forward: false}"
    start = f"distributed_type: FSDP\nfsdp_config: {options}\nparallelism_config:\n"
    for replicate, shard, expected in (
        (2, 4, ("hybrid_shard_grad_op", "4")),
        (1, 8, ("shard_grad_op", None)),
        (8, 1, ("no_shard", None)),
    ):
        degrees = {"dp_replicate_size": replicate, "dp_shard_size": shard}
        lines = (f"  parallelism_config_{name}: {size}\n" for name, size in degrees.items())
        file.write_text(start + "".join(lines))
        result = dict(to_recipe(read_other_tool(file), {}, 1).settings)
        assert (result["strategy"], result.get("strategy.dp_shard_size")) == expected
    typed = {"launch.nproc_per_node": "3"}
    with pytest.raises(UsageError, match="8: does not divide the 3 ranks; set the number"):
        to_recipe(read_other_tool(file), typed, 1)


def test_data_that_no_key_names_is_not_said_to_be_absent(tmp_path):
    file = tmp_path / "file.yaml"
    file.write_text("base_model: Qwen/Qwen3-8B\nmicro_batch_size: 1\nlearning_rate: 1e-4\n")
    missing = dict(to_recipe(read_other_tool(file), {}, 1).missing)
    assert missing["data.path"] == "(data): not set; set data.path=FILE"


@pytest.mark.parametrize(("text", "path", "missing"), [
    ("datasets: [{path: a/b, split: x, name: c, revision: r}, {path: a/d}]",
     "hf://a/b@r:c/x,hf://a/d/train", ""),
    ("datasets: [{path: a/b, name: c, split: 'train[:9%]+test'}, {path: a/d}]", None,
     "datasets: a/b: train[:9%]+test: part of a split, or a sum of splits, is not supported; for "
     "all rows, set data.path=hf://a/b:c/train,hf://a/b:c/test,hf://a/d/train"),
    ("datasets: [{path: a/b.jsonl, split: 'train[:9%]'}, {path: a/d, split: 'x[:1]'}]", None,
     "datasets: a/b.jsonl: not found here, nor a name on the Hub; set data.path=FILE"),
    ("datasets: [{path: tests/b}]", None,
     "datasets: tests/b: not found here, nor a name on the Hub; set data.path=FILE"),
])  # fmt: skip
def test_names_of_data_on_the_hub_are_kept(text, path, missing, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tests").mkdir()
    Path("a.yml").write_text(f"base_model: x/y\nadapter: lora\n{text}\n")
    recipe = to_recipe(read_other_tool(Path("a.yml")), {}, 1)
    assert dict(recipe.settings).get("data.path") == path
    assert dict(recipe.missing).get("data.path", "") == missing
    assert not [each for each in recipe.left_out if "datasets" in each]
