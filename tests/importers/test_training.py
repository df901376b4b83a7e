"""A recipe from another tool's file trains what the file trains, or names what it does not."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from fsdpctl.config.compose import compose_config
from fsdpctl.config.schema import KEYS, LrSchedulerConfig
from fsdpctl.errors import UsageError
from fsdpctl.importers.axolotl import read_axolotl
from fsdpctl.importers.convert import ConvertedRecipe, recipe_text, to_recipe
from fsdpctl.importers.source_config import SourceConfig
from fsdpctl.importers.translation import Translation, table
from fsdpctl.importers.trl import read_trl
from fsdpctl.training.learning_rate import lr_factor
from tests.training.test_learning_rate import rates_of_transformers

Reader = Callable[[SourceConfig], Translation]
AXOLOTL: dict[str, Any] = {
    "base_model": "meta-llama/Llama-3.1-8B", "learning_rate": 1e-3, "micro_batch_size": 1,
    "adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True,
    "datasets": [{"path": "rows.jsonl", "type": "chat_template"}],
}  # fmt: skip
TRL: dict[str, Any] = {
    "model_name_or_path": "meta-llama/Llama-3.1-8B", "dataset_name": "rows.jsonl", "use_peft": True,
}  # fmt: skip
TOOLS: dict[str, tuple[Reader, dict[str, Any], dict[str, str]]] = {
    "axolotl": (read_axolotl, AXOLOTL, table("defaults", "transformers", "axolotl")),
    "TRL": (read_trl, TRL, table("defaults", "transformers", "trl")),
}  # fmt: skip
_ZERO = {"zero_optimization": {"stage": 2}}
_STOPS = {"val_set_size": 0.1, "early_stopping_patience": 2}
_BEST = {"train.patience": "3", "checkpoint.keep_best": "true", "train.eval_batches": "0"}
_COLUMN = {"path": "rows.jsonl", "type": "completion"}
CASES = [(tool, key) for tool, (_, _, table) in TOOLS.items() for key in table]


@pytest.fixture(autouse=True)
def beside_data(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    monkeypatch.chdir(tmp_path)


def converted(tool: str, content: dict[str, Any], **typed: str) -> ConvertedRecipe:
    return to_recipe(TOOLS[tool][0](SourceConfig(Path("run.yml"), content)), typed, 1)


def settings(tool: str, **changes: Any) -> dict[str, str]:
    """Return the recipe of a tool's file; None removes a key."""
    content = {key: each for key, each in (TOOLS[tool][1] | changes).items() if each is not None}
    return dict(converted(tool, content).settings)


def keys_of(recipe: ConvertedRecipe) -> dict[str, str]:
    """Return the keys of the file that a recipe names, with their values."""
    return {key.strip(): row.value for row in recipe.rows for key in row.key.split(",")}


@pytest.mark.parametrize(("tool", "key"), CASES)
def test_a_recipe_has_the_tools_default_of_each_key_that_its_file_leaves_out(tool, key):
    content = {name: value for name, value in TOOLS[tool][1].items() if name != key}
    default = TOOLS[tool][2][key]
    recipe = converted(tool, content)
    if tool == "axolotl" and not default:  # `train` refuses the recipe and asks for the setting
        name, why = next(each for each in recipe.missing if each[1].startswith(key))
        assert why == f"{key}: required by axolotl; set {name}"
        assert f"\n{name}: ???\n" in recipe_text(recipe, "run.yml")
        return
    assert keys_of(recipe)[key] == "(not set)"
    for row in recipe.rows:
        name, _, text = row.settings[0].partition("=")
        assert name not in KEYS or KEYS[name].parse(text) is not None or text in ("none", "auto")


def test_defaults_of_transformers_are_those_of_its_arguments():
    fields = TrainingArguments.__dataclass_fields__
    names = ("eval_strategy", "lr_scheduler_type", "warmup_steps", "num_train_epochs")
    of_trl = table("defaults", "transformers", "trl")
    for key in (*table("defaults", "transformers"), *names):
        text = of_trl[key]
        theirs = fields[key].default
        assert theirs == (text if isinstance(theirs, str) else float(text))


# Keys in the schemas of axolotl 0.21.0 and of TRL 1.16 with transformers 5.24 that affect training,
# without keys that only matter with other keys, and without keys of validation.
DECIDING = {
    "axolotl": (
        "reinit_weights num_labels lora_modules_to_save lora_rank_pattern lora_alpha_pattern "
        "peft_layers_to_transform peft_use_dora peft_layer_replication peft_init_lora_weights "
        "peft_trainable_token_indices relora lisa_n_layers unfrozen_parameters "
        "freeze_mm_modules fix_untrained_tokens resize_token_embeddings_to_32x shrink_embeddings "
        "qat test_datasets streaming shuffle_merged_datasets shuffle_before_merging_datasets "
        "dataset_shard_num dataset_shard_idx dataset_exact_deduplication skip_prepare_dataset "
        "min_sample_len max_prompt_len sample_packing_sequentially multipack_real_batches "
        "batch_flattening curriculum_sampling group_by_length pretraining_sample_concatenation "
        "use_pose chat_template chat_template_jinja chat_template_kwargs eot_tokens "
        "default_system_message tokens added_tokens_overrides tokenizer_config tokenizer_legacy "
        "processor_type role_boundaries dataloader_drop_last rl reward_model "
        "process_reward_model trainer_cls plugins use_dft use_eaft balance_labels "
        "neftune_noise_alpha noisy_embedding_alpha scaling_softmax auto_find_batch_size "
        "embedding_lr embedding_lr_scale lr_groups loraplus_lr_ratio lr_quadratic_warmup "
        "cosine_min_lr_ratio cosine_constant_lr_ratio warmup_steps jagged_restart_steps optimizer "
        "optim_args optim_target_modules adam_epsilon2 adam_beta3 dion_lr qgalore_rank fp8 "
        "fp32_norms early_stopping_patience loss_watchdog_threshold resume_from_checkpoint "
        "load_best_model_at_end"
    ),
    "TRL": (
        "lora_target_parameters lora_modules_to_save use_rslora model_init_kwargs dataset_config "
        "dataset_train_split dataset_streaming streaming test_split_size dataset_text_field "
        "dataset_kwargs eos_token chat_template_path shuffle_dataset packing_strategy padding_free "
        "completion_only_loss train_sampling_strategy dataloader_drop_last accelerator_config "
        "data_seed label_names remove_unused_columns loss_type router_aux_loss_coef "
        "label_smoothing_factor neftune_noise_alpha average_tokens_across_devices "
        "auto_find_batch_size lr_scheduler_kwargs optim optim_args optim_target_modules "
        "load_best_model_at_end resume_from_checkpoint"
    ),
}


@pytest.mark.parametrize(("tool", "key", "value"), [
    *((tool, key, "0.125") for tool, key in CASES),
    *((tool, key, "x") for tool, keys in DECIDING.items() for key in keys.split()),
])  # fmt: skip
def test_a_key_that_changes_the_training_is_followed_or_named(tool, key, value):
    try:
        recipe = converted(tool, {**TOOLS[tool][1], key: value})
        is_followed = keys_of(recipe).get(key, "(not set)") != "(not set)"
        lines = [each for each in recipe.left_out if not each.startswith("not needed")]
        lines += [why for _, why in recipe.missing]
    except UsageError as error:
        is_followed, lines = False, [str(error)]
    assert is_followed or any(key in each for each in lines)


def rates(args: dict[str, str], steps: int) -> list[float]:
    """Return the learning rates of a recipe over its peak."""
    values: dict[str, Any] = {"warmup_steps": None, "name": args["lr_scheduler"]}
    for name, text in args.items():
        if name.startswith("lr_scheduler."):
            values[name.partition(".")[2]] = KEYS[name].parse(text)
    return [lr_factor(LrSchedulerConfig(**values), step, steps) for step in range(steps)]


SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("linear", {}), ("cosine", {}), ("constant", {}), ("constant_with_warmup", {}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.3}), ("cosine_with_min_lr", {"min_lr": 2e-4}),
    ("warmup_stable_decay", {"num_decay_steps": 8}),
    ("warmup_stable_decay", {"num_decay_steps": 8, "decay_type": "1-sqrt", "min_lr_ratio": 0.2}),
]  # fmt: skip


@pytest.mark.parametrize("warmup", [0, 5, 0.15])
@pytest.mark.parametrize(("name", "more"), SCHEDULES)
@pytest.mark.parametrize("tool", ["axolotl", "TRL"])
def test_rates_are_those_of_transformers_in_each_step(tool, name, more, warmup):
    steps = 30
    kind = {"axolotl": "lr_scheduler", "TRL": "lr_scheduler_type"}[tool]
    key = "warmup_ratio" if 0 < warmup < 1 else "warmup_steps"
    # axolotl rounds 4.5 steps down, transformers rounds up.
    count = {"axolotl": 4, "TRL": 5}[tool] if key == "warmup_ratio" else int(warmup)
    options = {kind: name, "lr_scheduler_kwargs": more or None, key: warmup, "max_steps": steps}
    result = rates(settings(tool, learning_rate=1e-3, **options), steps)
    expected = rates_of_transformers(name, count, steps, more, lr=1e-3)
    assert result == pytest.approx([each / 1e-3 for each in expected], abs=1e-9)


@pytest.mark.parametrize(("steps", "count"), [(30, 0), (60, 1), (2000, 60), (9000, 100)])
def test_a_warmup_without_a_key_is_axolotls_share_with_its_limit(steps, count):
    values = settings("axolotl")
    assert (values["lr_scheduler.warmup_ratio"], values["lr_scheduler.warmup_steps"]) == (
        "0.03", "100",
    )  # fmt: skip
    assert rates(values, steps).index(1.0) == count
    known = settings("axolotl", max_steps=steps)["lr_scheduler.warmup_steps"]
    assert int(known) == (2 if count == 1 else count)  # axolotl makes one step two


@pytest.mark.parametrize(("tool", "changes", "message"), [
    ("axolotl", {"plugins": ["axolotl.integrations.diffusion.DiffusionPlugin"]}, "Diffusion"),
    ("axolotl", {"plugins": ["a.b.KDPlugin"], "kd_alpha": 0.5}, "KDPlugin"),
    ("axolotl", {"processor_type": "AutoProcessor"}, "processor_type"),
    *(("axolotl", {key: True}, key) for key in ("use_dft", "use_eaft")),
    ("axolotl", {"optimizer": "lion"}, "optimizer: lion: expected AdamW"),
    ("axolotl", {"val_set_size": 500}, "val_set_size: 500: a number of samples"),
    ("TRL", {"loss_type": "dft"}, "loss_type: dft: not the loss of fsdpctl"),
    ("TRL", {"truncation_mode": "keep_end"}, "truncation_mode: keep_end"),
    ("axolotl", {"lora_target_modules": ["lm_head"]}, "lm_head: adapters of this layer"),
    ("axolotl", {"lora_target_linear": None, "lora_target_modules": ["q_proj", "lm_head"]},
     "lm_head: adapters of this layer"),
    ("axolotl", {"lora_target_linear": None, "lora_target_modules": "embed_tokens"},
     "embed_tokens: adapters of this layer"),
    ("TRL", {"lora_target_modules": ["q_proj", "model.embed_tokens"]},
     "embed_tokens: adapters of this layer"),
    ("axolotl", {"plugins": ["my.LigerKD"]}, "plugins: LigerKD"),
    ("TRL", {"optim": "galore_adamw_8bit"}, "optim: galore_adamw_8bit: expected AdamW"),
    ("TRL", {"max_steps": "${N}"}, "max_steps: .*expected a whole number; set train.steps"),
    ("TRL", {"lr_scheduler_type": "cosine_with_min_lr"}, "requires min_lr"),
    *(("axolotl", {"max_steps": 9, "warmup_ratio": text}, "warmup_ratio: .*; set lr_scheduler.warm")
      for text in ("x", "1e999", ["a"])),
    ("TRL", {"lr_scheduler_type": "one_cycle"}, "one_cycle: not supported; expected linear"),
    ("axolotl", {"lr_scheduler": "rex"}, "rex: not supported; .*; set lr_scheduler"),
    ("axolotl", {**_STOPS, "metric_for_best_model": "accuracy"},
     "metric_for_best_model: accuracy: fsdpctl compares validation losses.*; set train.patience"),
    ("axolotl", {**_STOPS, "greater_is_better": True}, "greater_is_better: true: fsdpctl compares"),
    ("axolotl", {"deepspeed": {"scheduler": {"type": "WarmupLR"}, **_ZERO}},
     "scheduler.type: WarmupLR: schedules of DeepSpeed"),
])  # fmt: skip
def test_what_trains_something_else_is_refused_unless_it_is_typed(tool, changes, message):
    content = {**TOOLS[tool][1], **changes}
    with pytest.raises(UsageError, match=message) as refusal:
        converted(tool, content)
    if name := re.search(r"; set ([a-z_.]+)$", str(refusal.value)):
        assert converted(tool, content, **{name[1]: "1"}).settings


@pytest.mark.parametrize(("tool", "changes"), [
    ("axolotl", {"train_on_eos": "none"}), ("axolotl", {"shuffle_merged_datasets": False}),
    ("TRL", {"average_tokens_across_devices": False}),
])  # fmt: skip
def test_a_value_that_turns_a_default_off_changes_the_training(tool, changes):
    def named(more: dict[str, Any]) -> list[str]:
        lines = converted(tool, {**TOOLS[tool][1], **more}).left_out
        return [line for line in lines if line.startswith("changes the training")]

    assert next(iter(changes)) in named(changes)[0]
    assert named({"group_by_length": False, "neftune_noise_alpha": 0.0}) == []


@pytest.mark.parametrize(("changes", "rows", "train_on"), [
    ({}, {"messages": []}, "all"), ({"assistant_only_loss": True}, {"messages": []}, "assistant"),
    ({}, {"prompt": "a", "completion": "b"}, "assistant"),
    ({"completion_only_loss": False}, {"prompt": "a", "completion": "b"}, "all"),
    ({}, {"text": "a"}, "all"),
])  # fmt: skip
def test_the_tokens_that_trl_trains_on_depend_on_its_rows(changes, rows, train_on):
    Path("rows.jsonl").write_text(json.dumps(rows) + "\n")
    assert settings("TRL", **changes)["data.train_on"] == train_on


def test_held_out_files_are_validated_on():
    Path("held.jsonl").write_text("{}\n")
    values = settings("axolotl", test_datasets=[{"path": "held.jsonl", "type": "chat_template"}])
    assert (values["data.val_path"], settings("TRL")["data.val_fraction"]) == ("held.jsonl", "0")
    values = settings("TRL", dataset_name="a/b", dataset_config="c", eval_strategy="steps")
    assert values["data.val_path"] == "hf://a/b:c/test"
    part = {**TRL, "dataset_name": "a/b", "eval_strategy": "epoch", "dataset_test_split": "x[:9]"}
    recipe = converted("TRL", part)
    assert dict(recipe.settings)["data.val_fraction"] == "0"
    assert any(line.endswith("set data.val_path=hf://a/b/x") for line in recipe.left_out)
    assert settings("TRL", eval_strategy="steps")["data.val_fraction"] == "0"  # a file


@pytest.mark.parametrize(("tool", "changes", "expected"), [
    ("axolotl", {"max_steps": "1_000"}, {"train.steps": "1000"}),
    ("TRL", {"max_steps": "100.0"}, {"train.steps": "100"}),
    ("TRL", {"max_steps": -1}, {"train.epochs": "3"}),
    ("TRL", {"max_steps": 100, "save_steps": 0.25}, {"checkpoint.every": "25"}),
    ("axolotl", {"max_steps": 100, "num_epochs": 2, "evals_per_epoch": 4, "saves_per_epoch": 1,
     "val_set_size": 0.1}, {"train.eval_every": "13", "checkpoint.every": "50"}),
    ("TRL", {"warmup_ratio": 0.1, "warmup_steps": 5}, {"lr_scheduler.warmup_steps": "5"}),
    ("TRL", {"warmup_ratio": 0.1, "warmup_steps": 0}, {"lr_scheduler.warmup_ratio": "0.1"}),
    ("TRL", {"use_rslora": True}, {"model.lora.rslora": "true"}),
    ("TRL", {"router_aux_loss_coef": 0.01}, {"model.router_aux_loss": None}),
    ("TRL", {"lr_scheduler_type": "cosine_with_min_lr",
     "lr_scheduler_kwargs": '{"min_lr_rate": 0.2}'}, {"lr_scheduler.min_lr_ratio": "0.2"}),
    ("axolotl", {"deepspeed": {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.2}},
     {"optimizer.max_grad_norm": "0.2"}),
    ("TRL", {"report_to": "wandb"}, {"log.trackers": "wandb"}),
    ("TRL", {"report_to": "none"}, {"log.trackers": None}),
    ("axolotl", {"report_to": "all"}, {"log.trackers": "tensorboard,wandb"}),
    ("TRL", {"report_to": ["tensorboard", "mlflow"], "env": {"WANDB_PROJECT": "x"}},
     {"log.trackers": "tensorboard,mlflow", "log.project": "x"}),
    ("TRL", {"report_to": "trackio", "project": "x"},
     {"log.trackers": "trackio", "log.project": "x"}),
    ("axolotl", {"use_wandb": True, "mlflow_experiment_name": "x", "trackio_project_name": ""},
     {"log.trackers": "wandb,mlflow", "log.project": "x"}),
    ("axolotl", {"wandb_project": "x", "use_wandb": False}, {"log.trackers": None}),
    ("axolotl", {"test_datasets": "null"}, {"data.val_fraction": "0"}),
    ("axolotl", {"max_steps": 9, "num_epochs": 1}, {"train.steps": "9", "train.epochs": None}),
    ("TRL", {"fp16": True, "bf16": False}, {"precision": "bf16"}),
    ("axolotl", {"datasets": None, "sample_packing": True,
     "pretraining_dataset": [{"path": "rows.jsonl", "type": "pretrain"}]},
     {"data": "text", "data.packing": None}),
    *((tool, {"lora_modules_to_save": ["embed_tokens", "lm_head"]},
       {"model.lora.also": "[embed_tokens,lm_head]"}) for tool in TOOLS),
    ("axolotl", {"tokens": ["<a>", "[b]"], "special_tokens": {"additional_special_tokens": ["c"]}},
     {"data.new_tokens": '["<a>", "[b]", "c"]'}),
    ("axolotl", {"overrides_of_model_config": {"rope_theta": 1e6,
     "rope_scaling": {"rope_type": "yarn", "short_factor": [1.0, 2.0]}}},
     {"model.overrides.rope_theta": "1000000.0", "model.overrides.rope_scaling.rope_type": "yarn",
      "model.overrides.rope_scaling.short_factor": '["1.0", "2.0"]'}),
    ("axolotl", {"deepspeed": {"optimizer": {"params": {"betas": [0.8, 0.9]}}, **_ZERO}},
     {"optimizer.beta1": "0.8", "optimizer.beta2": "0.9", "optimizer.max_grad_norm": "0"}),
    ("axolotl", {"deepspeed": {"gradient_clipping": "auto", **_ZERO}},
     {"optimizer.max_grad_norm": "1.0"}),
    ("axolotl", {"early_stopping_patience": 3, "val_set_size": 0.1}, _BEST),
    ("TRL", {"early_stopping_patience": 3, "dataset_name": "a/b", "eval_strategy": "steps",
     "metric_for_best_model": "eval_loss", "greater_is_better": False, "eval_steps": 5},
     _BEST | {"train.eval_every": "5"}),
    ("TRL", {"load_best_model_at_end": True, "dataset_name": "a/b", "eval_strategy": "steps"},
     {"checkpoint.keep_best": "true", "train.patience": None, "train.eval_every": "10"}),
    ("axolotl", {"save_strategy": "best", "val_set_size": 0.1, "metric_for_best_model": "loss"},
     {"checkpoint.keep_best": "true", "checkpoint.every": "0"}),
    ("axolotl", {"save_strategy": "no", "load_best_model_at_end": False, "val_set_size": 0.1},
     {"checkpoint.keep_best": None, "checkpoint.every": "0"}),
    ("axolotl", {"save_strategy": "epoch", "save_steps": 7}, {"checkpoint.every": "7"}),
])  # fmt: skip
def test_values_are_read_in_every_form_that_the_tool_reads(tool, changes, expected):
    values = settings(tool, **changes)
    assert {key: values.get(key) for key in expected} == expected


@pytest.mark.parametrize(("tool", "changes", "name", "why"), [
    ("TRL", {"learning_rate": "${LR}"}, "optimizer.lr", "learning_rate: ${LR}: a variable"),
    ("axolotl", {"num_epochs": "${E}"}, "train.epochs", "num_epochs: ${E}: a variable"),
    ("TRL", {"optim": "stable_adamw"}, "optimizer", "optim: stable_adamw: unknown optimizer"),
    ("axolotl", {"lora_target_linear": None}, "model.lora.targets", "lora_target_modules: requ"),
    ("axolotl", {"lora_target_linear": None, "lora_target_modules": r"layers\.\d+\.q_proj",
     "lora_target_parameters": ["experts.gate_up_proj"]}, "model.lora.targets", "lora_target_mod"),
    ("TRL", {"max_length": None}, "train.seq_len", "max_length: null: TRL does not shorten"),
    ("TRL", {"dataset_name": "org/rows"}, "data.train_on", "dataset_name: TRL trains on the com"),
    ("TRL", {"dataset_name": "a/b", "eval_strategy": "epoch", "load_best_model_at_end": True},
     "train.eval_every", "eval_strategy: epoch: the number of steps"),
    ("TRL", {"dataset_text_field": "content"}, "data.path", "dataset_text_field: content"),
    ("axolotl", {"datasets": [_COLUMN | {"field": "content"}]}, "data.path",
     "datasets[].field: content"),
    ("axolotl", {"datasets": [_COLUMN, _COLUMN | {"type": "chat_template"}]}, "data.path",
     "datasets[].type: completion"),
    *(("axolotl", {"datasets": [_COLUMN | {"type": kind}]}, "data.path",
       f"datasets[].type: {kind}: has its own prompts")
      for kind in ("jeopardy", "alpaca:chat", "{'field_instruction': 'a'}")),
])  # fmt: skip
def test_a_recipe_without_a_value_that_decides_is_not_accepted_by_train(tool, changes, name, why):
    if "data" in name and "_name" not in str(changes):
        text = '{"content": "a", "instruction": "b", "output": "c", "text": ""}'
        Path("rows.jsonl").write_text(text)
    content = {**TOOLS[tool][1], **changes}
    recipe = converted(tool, content)
    assert dict(recipe.missing)[name].startswith(why)
    assert name not in dict(recipe.settings)
    is_marked = f"\n{name}: ???\n" in recipe_text(recipe, "run.yml")
    assert is_marked == (name not in ("data.path", "train.eval_every"))
    assert name in dict(converted(tool, content, **{name: "adamw"}).settings)


@pytest.mark.parametrize(("tool", "changes", "key"), [
    ("axolotl", {"peft_layers_to_transform": [0]}, "peft_layers_to_transform"),
    ("axolotl", {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    ("TRL", {"chat_template_kwargs": {"a": 0}}, "chat_template_kwargs"),
    ("TRL", {}, "router_aux_loss_coef=(not set)"),
    ("TRL", {"report_to": ["wandb", "swanlab"]}, "report_to=wandb, swanlab: swanlab: not sup"),
    ("TRL", {"report_to": "wandb", "run_name": "x"}, "run_name=x: a run has the name of"),
    ("axolotl", {"early_stopping_patience": 2}, "nothing is held out; set data.val_path="),
    ("axolotl", {"early_stopping_threshold": 0.1}, "early_stopping_threshold=0.1"),
    ("TRL", {"load_best_model_at_end": True}, "load_best_model_at_end=true: nothing is held out"),
    *((tool, {"bf16": False, "fp16": True}, "fp16=true: trained in bf16") for tool in TOOLS),
    ("axolotl", {"deepspeed": {"curriculum_learning": {"enabled": True}, **_ZERO}},
     "curriculum_learning.enabled"),
    ("axolotl", {"chat_template": "llama3"}, "a template of axolotl; the tokenizer"),
    *(("axolotl", {"datasets": [_COLUMN | {"type": "chat_template", key: value}]},
       f"datasets[].{key}=") for key, value in {"shards": 10, "split": "train[:5%]",
       "roles_to_train": ["user"], "train_on_eos": "none", "field_messages": "talk"}.items()),
])  # fmt: skip
def test_values_that_turn_something_off_or_are_lists_are_named(tool, changes, key):
    lines = converted(tool, {**TOOLS[tool][1], **changes}).left_out
    assert [line for line in lines if key in line and not line.startswith("not needed")]


def test_values_that_are_the_same_here_are_not_named():
    same = {"ds_type": "json", "message_property_mappings": {"role": "from", "content": "value"}}
    for changes in ({"chat_template": "tokenizer_default"}, {"datasets": [_COLUMN | same]},
                    {"chat_template": "tokenizer_default_fallback_chatml"}):  # fmt: skip
        recipe = converted("axolotl", {**AXOLOTL, **changes})
        assert not [x for x in recipe.left_out if "own; the" in x or x.startswith("datasets[]")]
        assert "data.template" not in dict(recipe.missing)


@pytest.mark.parametrize(("family", "targets"), [
    ("gpt2", "c_attn"), ("gpt_neox", "query_key_value"), ("qwen3", "q_proj,v_proj"),
    ("mamba", None),
])  # fmt: skip
def test_adapters_of_trl_without_targets_have_those_of_peft(family, targets):
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps({"model_type": family}))
    recipe = converted("TRL", {**TRL, "model_name_or_path": "model"})
    assert dict(recipe.settings).get("model.lora.targets") == targets
    assert ("model.lora.targets" in dict(recipe.missing)) == (targets is None)


def test_a_value_that_is_missing_may_be_typed_over_a_written_recipe(tmp_path):
    file = tmp_path / "recipe.yaml"
    recipe = converted("TRL", {**TRL, "max_length": None, "use_peft": False})
    file.write_text(recipe_text(recipe, "run.yml"))
    typed = ["model=llama3_1b", "train.seq_len=64", "data.path=rows.jsonl"]
    assert compose_config(typed, str(file)).config.train.seq_len == 64
    with pytest.raises(UsageError, match=r"recipe.yaml: train.seq_len is missing: max_length: nu"):
        compose_config([typed[0], typed[2]], str(file))
    file.write_text("model: llama_tiny\ntrain: {seq_len: '???', steps: '???'}\n")
    with pytest.raises(UsageError, match=r"train.seq_len is missing; expected a whole number"):
        compose_config(["train.epochs=1"], str(file))
    composed = compose_config([typed[1], "train.epochs=1"], str(file))
    assert (composed.config.train.steps, composed.config.train.epochs) == (None, 1)


_ROWS = {
    "instruction and text": ({"instruction": "a", "output": "b", "text": "c"}, "text"),
    "turns and text": ({"conversations": [{"role": "user", "content": "a"}], "text": "c"}, "text"),
    "tools and text": ({"tools": ["a"], "text": "c"}, "text"),
    "text": ({"text": "c", "id": 1}, "chat"),
    "instruction": ({"instruction": "a", "output": "b"}, "chat"),
}  # fmt: skip


@pytest.mark.parametrize("kind", _ROWS)
@pytest.mark.parametrize("tool", ["axolotl", "TRL"])
def test_rows_with_text_are_read_as_the_tool_reads_them(tool, kind):
    row, option = _ROWS[kind]
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    entry = {"datasets": [_COLUMN]} if tool == "axolotl" else {}
    values = settings(tool, **entry)
    assert (values["data"], values["data.path"]) == (option, "rows.jsonl")
    assert ("data.train_on" in values) == (option == "chat")


@pytest.mark.parametrize("row", [
    {"prompt": "a", "completion": "b", "text": "c"}, {"messages": [], "text": "c"},
    {"conversations": [{"from": "human", "value": "a"}], "text": "c"},
])  # fmt: skip
def test_conversations_of_trl_take_precedence_over_text(row):
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    assert settings("TRL")["data"] == "chat"
    assert settings("axolotl", datasets=[_COLUMN])["data"] == "text"  # axolotl reads the column


@pytest.mark.parametrize("key", ["file", "data set"])
def test_a_chat_template_in_a_file_is_kept(key):
    Path("a.jinja").write_text("{{ messages }}")
    options = {"chat_template": "jinja", "chat_template_jinja": "a.jinja"}
    entry = {"path": "rows.jsonl", "type": "chat_template"}
    changes = options if key == "file" else {"datasets": [entry | options]}
    assert settings("axolotl", **changes)["data.template"] == "a.jinja"
    assert settings("TRL", chat_template_path="a.jinja")["data.template"] == "a.jinja"
    Path("folder").mkdir()
    Path("folder/chat_template.jinja").write_text("x")
    recipe = converted("TRL", {**TRL, "chat_template_path": "folder"})
    assert dict(recipe.settings)["data.template"] == "folder/chat_template.jinja"
    assert any("fsdpctl adds no tokens of that tokenizer" in line for line in recipe.left_out)
    options["chat_template_jinja"] = "{% for each in messages %}"
    missing = dict(converted("axolotl", {**AXOLOTL, **options}).missing)
    assert missing["data.template"].startswith("chat_template_jinja: {% for each")
    missing = dict(converted("TRL", {**TRL, "chat_template_path": "org/model"}).missing)
    assert missing["data.template"].startswith("chat_template_path: org/model: no Jinja file")
