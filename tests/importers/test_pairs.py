"""A training file and the configuration of accelerate that launches it are one run."""

import json
from pathlib import Path
from typing import Any

import pytest

from fsdpctl.errors import UsageError
from fsdpctl.estimate.imported_config import import_config
from fsdpctl.importers.convert import ConvertedRecipe, to_recipe
from fsdpctl.importers.readers import read_other_tool
from tests.commands.run import invoke

TRL = {
    "model_name_or_path": "gpt2", "dataset_name": "a/b", "max_steps": 9, "learning_rate": 1e-4,
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_length": 64,
    "assistant_only_loss": True,
}  # fmt: skip
AXOLOTL = {
    "base_model": "gpt2", "micro_batch_size": 4, "gradient_accumulation_steps": 2,
    "sequence_len": 64, "num_epochs": 1, "learning_rate": 1e-4,
    "datasets": [{"path": "a/b", "type": "chat_template"}],
}  # fmt: skip
FSDP = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16",
    "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False},
    "num_machines": 2, "num_processes": 8, "gradient_accumulation_steps": 5,
}  # fmt: skip
ZERO = {
    "distributed_type": "DEEPSPEED", "num_processes": 8, "mixed_precision": "fp16",
    "deepspeed_config": {"zero_stage": 3, "gradient_clipping": 0.25},
}  # fmt: skip
TRAININGS = {"trl": TRL, "axolotl": AXOLOTL}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)


def written(name: str, content: dict[str, Any]) -> Path:
    Path(name).write_text(json.dumps(content))  # JSON is YAML
    return Path(name)


def pair(training: dict[str, Any], launch: dict[str, Any]) -> ConvertedRecipe:
    files = [written("run.yaml", training), written("launch.yml", launch)]
    results = [to_recipe(read_other_tool(*each), {}, 1) for each in (files, files[::-1])]
    assert results[0] == results[1]  # in any order
    return results[0]


@pytest.mark.parametrize("tool", TRAININGS)
@pytest.mark.parametrize(("launch", "strategy", "ranks"), [
    (FSDP, "shard_grad_op", ("4", "2")), (ZERO, "full_shard", ("8", "1")),
    ({"distributed_type": "MULTI_GPU", "num_processes": 2}, "no_shard", ("2", "1")),
    ({"compute_environment": "LOCAL_MACHINE"}, "no_shard", ("1", None)),
])  # fmt: skip
def test_a_pair_has_the_training_of_one_file_and_ranks_of_the_other(tool, launch, strategy, ranks):
    args = dict(pair(TRAININGS[tool], launch).settings)
    alone = dict(to_recipe(read_other_tool(Path("run.yaml")), {}, 1).settings)
    assert (args["launch.nproc_per_node"], args.get("launch.nnodes")) == ranks
    count = int(ranks[0]) * int(ranks[1] or 1)
    assert (args["strategy"], args["train.global_batch_size"]) == (strategy, str(8 * count))
    changed = ("strategy", "launch", "train.global_batch_size", "precision")
    assert {k: v for k, v in args.items() if not k.startswith(changed)} == {
        k: v for k, v in alone.items() if not k.startswith(changed)
    }


@pytest.mark.parametrize(("launch", "lines"), [
    (FSDP, ["gradient_accumulation_steps=5"]),
    (ZERO, ["deepspeed_config.gradient_clipping=0.25", "mixed_precision=fp16"]),
    ({**ZERO, "deepspeed_config": {"deepspeed_config_file": "zero.json"}},
     ["train_micro_batch_size_per_gpu=3", "communication_data_type=fp32", "fp16.enabled=true"]),
])  # fmt: skip
@pytest.mark.parametrize("tool", TRAININGS)
def test_what_the_training_file_decides_is_named(tool, launch, lines):
    options = {"zero_optimization": {"stage": 3}, "fp16": {"enabled": True},
             "train_micro_batch_size_per_gpu": 3, "communication_data_type": "fp32",
             "gradient_accumulation_steps": "auto"}  # fmt: skip
    written("zero.json", options)
    left_out = pair(TRAININGS[tool], launch).left_out
    for line in lines:
        assert any(each.startswith(f"{line}: ") for each in left_out)


@pytest.mark.parametrize(("tool", "keys", "strategy"), [
    ("trl", {"fsdp": "full_shard auto_wrap"}, "full_shard"),
    ("trl", {"fsdp": ["shard_grad_op", "auto_wrap"], "fsdp_config": {"version": 2}},
     "shard_grad_op"),
    ("axolotl", {"fsdp_config": {"reshard_after_forward": True}, "fsdp_version": 2}, "full_shard"),
    ("axolotl", {"deepspeed": {"zero_optimization": {"stage": 2}}}, "shard_grad_op"),
])  # fmt: skip
def test_sharding_of_the_training_file_takes_precedence(tool, keys, strategy):
    launch = {**FSDP, "fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}}
    recipe = pair({**TRAININGS[tool], **keys}, launch)
    values = dict(recipe.settings)
    assert (values["strategy"], values["launch.nnodes"]) == (strategy, "2")
    assert "distributed_type=FSDP: run.yaml sets it" in recipe.left_out
    assert any(each.startswith("fsdp_config.fsdp_sharding_strategy") for each in recipe.left_out)


@pytest.mark.parametrize(("value", "precision"), [("bf16", "bf16"), ("no", "fp32")])
def test_the_precision_is_accelerates_if_the_training_file_has_none(value, precision):
    for training in TRAININGS.values():
        result = pair({**training, "bf16": False}, {**ZERO, "mixed_precision": value})
        assert dict(result.settings)["precision"] == precision


def test_errors_name_the_file_that_has_the_key():
    for launch in ({"distributed_type": "MEGATRON_LM"}, {**FSDP, "num_processes": 3}):
        with pytest.raises(UsageError, match=r"^launch\.yml: "):
            pair(TRL, launch)
    with pytest.raises(UsageError, match=r"^run\.yaml: fsdp: half_shard: expected full_shard"):
        pair({**TRL, "fsdp": "half_shard"}, FSDP)


@pytest.mark.parametrize(("second", "message"), [
    (TRL, "a file of TRL; with run.yaml, of axolotl, expected one of accelerate"),
    (None, "launch.yml: "), ({"model": "gpt2"}, "a recipe of fsdpctl"),
])  # fmt: skip
def test_another_second_file_is_refused(second, message):
    written("run.yaml", AXOLOTL)
    if second is not None:
        written("launch.yml", second)
    for args in (["convert", "run.yaml", "launch.yml"],
                  ["train", "--from", "run.yaml", "--from", "launch.yml"]):  # fmt: skip
        code, out = invoke(*args)
        assert (code, message in out) == (2, True)


def test_convert_prints_what_it_leaves_out_beside_the_recipe():
    written("run.yaml", {**TRL, "dataloader_drop_last": True})
    written("launch.yml", FSDP)
    _, out = invoke("convert", "run.yaml", "launch.yml", "--out", "recipe.yaml")
    assert "left out: changes the training, without a counterpart: dataloader_drop_last" in out
    assert "gradient_accumulation_steps=5: run.yaml sets it" in out
    assert "not needed" not in out
    text = Path("recipe.yaml").read_text()
    assert text.startswith("# Converted from run.yaml and launch.yml (TRL)")
    files = ("--from", "run.yaml", "--from", "launch.yml", "--from", "a.yaml")
    assert invoke("train", *files)[1].startswith("a.yaml: expected a training file, and at most")


def test_pairs_of_estimates_are_a_file_and_accelerates_after_it(monkeypatch):
    from fsdpctl.commands.estimate import _group_files as group

    names = ("run.yaml", "launch.yml", "other.yaml")
    run, launch, other = map(written, names, (TRL, FSDP, AXOLOTL))
    assert (group([run, launch]), group([launch, run])) == ([(run, launch)], [(launch, run)])
    assert group([run, other]) == [(run,), (other,)]
    assert group([run, other, launch]) == [(run,), (other, launch)]
    assert group([launch, run, other]) == [(launch,), (run,), (other,)]
    assert group([run, launch, launch]) == [(run, launch), (launch,)]
    assert group([Path()]) == [(launch,), (other,), (run,)]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    imported = import_config(read_other_tool(run, launch), ["model=gpt2"]).composed.config
    assert (imported.strategy.name, imported.engine.name) == ("shard_grad_op", "fsdp2")
    assert (imported.num_ranks, imported.train.global_batch_size) == (8, 64)
