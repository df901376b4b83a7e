"""Composition of settings, recipes and options; errors of one line."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpctl.config.compose import compose_config
from fsdpctl.config.options import first_comment, options_of
from fsdpctl.config.recipe import read_recipe, recipe_names
from fsdpctl.config.schema import GROUPS, KEYS
from fsdpctl.config.serialize import config_from_settings, config_to_yaml, to_settings
from fsdpctl.errors import UsageError
from fsdpctl.io.packages import package_folder
from fsdpctl.resolve.auto_values import Stage, fill_auto
from fsdpctl.resolve.machine import assign_ranks

ODD = "a b,c~{d}(e)[f]=g#h&i;j!k'l$m\"日本:%@*?\\"


def test_the_default_is_a_fully_sharded_toy_model_on_the_standard_library():
    config = compose_config([]).config
    assert (config.model.name, config.strategy.name, config.data.name) == (
        "llama_tiny", "full_shard", "python_stdlib",
    )  # fmt: skip
    assert config.launch.nproc_per_node is None


@pytest.mark.parametrize("value", [ODD, " x ", "=", "null", "true", "1e3", "${model.name}", "- a"])
def test_text_is_taken_literally(value):
    config = compose_config([f"data.path={value}"]).config
    assert (config.data.path, config_from_settings(to_settings(config))) == (value, config)


@pytest.mark.slow
@settings(max_examples=15)
@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Zl", "Zp"]), min_size=1))
def test_any_text_survives_the_resolved_file(tmp_path_factory, value):
    if value.startswith("~"):
        return
    config = compose_config([f"data.path={value}"]).config
    file = tmp_path_factory.mktemp("run") / "config.yaml"
    file.write_text(config_to_yaml(config), encoding="utf-8")
    assert config_from_settings(dict(read_recipe(file))) == config
    assert compose_config([], str(file)).config == config


def test_a_leading_tilde_is_the_home_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert compose_config(["data.path=~/x"]).config.data.path == "/home/someone/x"
    assert compose_config(["data.path=a/~"]).config.data.path == "a/~"


@pytest.mark.parametrize(("text", "steps"), [("1e3", 1000), ("10_000", 10000), ("7.0", 7)])
def test_whole_numbers_may_be_written_in_several_ways(text, steps):
    assert compose_config([f"train.steps={text}"]).config.train.steps == steps


@pytest.mark.parametrize(("setting", "parts"), [
    ("train.steps=1.5", ["train.steps=1.5", "whole number"]),
    ("train.steps=nan", ["train.steps=nan"]), ("train.steps=inf", ["train.steps=inf"]),
    ("train.steps=", ["train.steps="]), ("optimizer.lr=fast", ["optimizer.lr=fast", "number"]),
    ("train.compile=maybe", ["true or false"]),
    ("num_layers=3", ["did you mean model.num_layers?"]),
    ("+train.extra=3", ["+train.extra", "adding and removing keys is not supported"]),
    ("~optimizer", ["adding and removing keys is not supported"]),
    ("model@x=llama_tiny", ["adding and removing keys is not supported"]),
    ("hydra.run.dir=x", ["settings of Hydra are not supported"]),
    ("strategy=full_shart", ["did you mean full_shard?", "no_shard"]),
    ("strategy=zero4", ["did you mean zero3?", "full_shard"]),
    ("learning_rate=1", ["use optimizer.lr"]),
    ("accumulation=4", ["no such option", "every, last"]),
    ("model.lora=true", ["section", "fsdpctl list model"]),
    ("model.lora.ranks=3", ["did you mean model.lora.rank?"]),
    ("model.lora.rank=0", ["a whole number from 1"]),
    ("model.lora.path=x", ["only valid with model=hf"]), ("train=3", ["section"]),
    ("steps", ["KEY=VALUE", "train.steps"]), ("=3", ["KEY=VALUE"]), ("", ["KEY=VALUE"]),
    ("data.path=caf\udce9", ["not valid UTF-8", "set PYTHONUTF8=1"]),
    ("--resume=x", ["`fsdpctl train` has this option"]),
    ("train.seed=99999999999999999999", ["train.seed"]), ("train.epochs=0", ["train.epochs"]),
    ("--lr=3", ["KEY=VALUE", "optimizer.lr"]), ("checkpoint.interval=5", ["use checkpoint.every"]),
    ("float8.recipe=rowwise", ["support fp8"]), ("fsdp_size=8", ["use strategy.dp_shard_size"]),
    ("comm.init_timeout_seconds=9", ["not needed: launch.timeout"]),
    ("parallelism_config_tp_size=2", ["does not support tensor parallelism"]),
    ("load-in-4bit=true", ["model.base_dtype=nf4"]), ("fp16=true", ["precision=bf16"]),
    ("tf32=true", ["use precision=tf32"]),
    ("parallelism.enable_async_tensor_parallel=true", ["not support tensor parallelism"]),
    ("trust_remote_code=true", ["which it never executes"]),
    ("special_tokens.pad_token=x", ["not needed: padding"]),
    ("liger_rope=true", ["does not support third-party kernels"]),
    ("--tensor-model-parallel-size", ["does not support tensor parallelism"]),
    ("--use-qlora", ["model.base_dtype=nf4"]), ("Train.Steps=2", ["use train.steps"]),
    ("data.path=", ["data.path=: empty; expected a path"]),
    ("data.packing=x", ["expected true, false or auto"]),
    ("model=llama4", ["no such option; model=hf model.path=DIR loads another model (gpt2,"]),
    ("tt.toml", ["TOML files, such as torchtitan's, are not read"]),
    ("job.config_file=tt.toml", ["TOML files, such as torchtitan's, are not read"]),
    ("launch.nproc_per_node=0", ["from 1"]),
    ("--activation_checkpoint.mode=full", ["use activation_checkpointing"]),
])  # fmt: skip
def test_errors_are_one_line_with_a_suggestion(setting, parts):
    with pytest.raises(UsageError) as caught:
        compose_config([setting])
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("setting", [
    "lr_scheduler.warmup_ratio=0", "lr_scheduler.warmup_ratio=1", "train.max_skips=0",
    "launch.time_limit=1", "optimizer.weight_decay=0", "data.val_fraction=0",
    "checkpoint.keep_last=0", "train.eval_every=0",
])  # fmt: skip
def test_the_least_values_that_make_sense_are_allowed(setting):
    name, _, text = setting.partition("=")
    assert compose_config([setting]).config.value(name) == float(text)


def test_only_one_key_sets_the_length():
    train = compose_config(["train.tokens=1e6"]).config.train
    assert (train.steps, train.epochs, train.tokens) == (None, None, 1_000_000)


def test_a_setting_of_a_recipe_can_be_unset(tmp_path):
    folder = [f"model.path={tmp_path}"]
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert compose_config(folder, "finetune_chat").config.model.lora.rank == 16
    whole = compose_config([*folder, "model.lora.rank=none"], "finetune_chat").config
    assert whole.model.lora.rank is None
    with pytest.raises(UsageError, match="model.num_layers=none: expected a whole number"):
        compose_config(["model.num_layers=none"])


def test_only_one_key_sets_the_batch_size():
    with pytest.raises(UsageError, match="set the size of a step with one of them"):
        compose_config(["train.global_batch_size=3", "train.global_batch_tokens=100"])
    config = compose_config(["train.global_batch_tokens=1000", "train.seq_len=300"]).config
    assert fill_auto(assign_ranks(config), Stage.DATA).train.global_batch_size == 3
    short = compose_config(["train.global_batch_tokens=299", "train.seq_len=300"]).config
    with pytest.raises(UsageError, match=r"fewer than the train.seq_len=300 of one sample"):
        fill_auto(assign_ranks(short), Stage.DATA)


@pytest.fixture
def recipe(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "model: llama_tiny\nmodel.num_layers: 3\nstrategy: no_shard\ntrain:\n  epochs: 2\n"
        "data: {name: text, path: 'a, b'}\nlr_scheduler.warmup_steps: 1_0\n"
    )
    return str(file)


def test_a_recipe_has_the_settings_of_the_command_line(recipe):
    config = compose_config([], recipe).config
    assert (config.model.num_layers, config.strategy.name) == (3, "no_shard")
    assert (config.train.steps, config.train.epochs) == (None, 2)
    assert (config.data.name, config.data.path) == ("text", "a, b")


def test_an_option_on_the_command_line_drops_the_recipes_values_of_its_group(recipe):
    composed = compose_config(["model=llama3_1b"], recipe)
    assert composed.config.model == compose_config(["model=llama3_1b"]).config.model
    assert (composed.config.model.num_layers, composed.ignored_keys) == (16, ("model.num_layers",))


def test_adapters_and_the_base_of_a_recipe_are_for_any_model():
    composed = compose_config(["model=llama3_1b", "data=text", "data.path=a"], "qlora_70b_8x24gb")
    model = composed.config.model
    assert (model.num_layers, model.lora.rank, model.base_dtype) == (16, 16, "nf4")
    assert composed.ignored_keys == ()


def test_a_recipes_key_that_is_typed_is_not_called_ignored():
    typed = ["model=llama3_1b", "model.max_seq_len=64", "train.seq_len=64"]
    factor = "model.overrides.rope_scaling.factor"
    composed = compose_config([*typed, f"{factor}=2"], "llama3_8b_512k_8xh100")
    assert (composed.config.model.max_seq_len, composed.ignored_keys) == (64, ())
    composed = compose_config(typed, "llama3_8b_512k_8xh100")
    assert composed.ignored_keys == (factor,)


def test_the_command_line_overrides_the_recipe(recipe):
    config = compose_config(["model.num_layers=5", "train.steps=7"], recipe).config
    assert (config.model.num_layers, (config.train.steps, config.train.epochs)) == (5, (7, None))


@pytest.mark.parametrize(("content", "part"), [
    ("- a\n", "mapping"), ("train.steps: [1, 2]\n", "expected a plain value"),
    ("a: b: c\n", "not YAML"), ("train.steps: null\n", "whole number"),
    ("a: &a {b: *a}\n", "not YAML"), ("train.steps: 3\ntrain: {steps: 4}\n", "set twice"),
    ("train.stepz: 3\n", "did you mean train.steps?"), ("defaults: {model: x}\n", "defaults.model"),
    ("base_model: x\nlr: 1\n", "axolotl; pass it as --from"),
    ("distributed_type: FSDP\n", "a file of accelerate"),
    ("optimizer: adamw8bit\n", "(adamw, muon, sgd)$"),
])  # fmt: skip
def test_an_invalid_recipe_is_rejected(tmp_path, content, part):
    file = tmp_path / "r.yaml"
    file.write_text(content)
    with pytest.raises(UsageError) as caught:
        compose_config([], str(file))
    assert part in f"{caught.value}$"
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


def test_an_unknown_recipe_lists_the_existing_ones():
    with pytest.raises(UsageError, match="quick"):
        compose_config([], "quik")
    with pytest.raises(UsageError, match="TOML files, such as torchtitan's, are not read"):
        compose_config([], "tt.toml")


@pytest.mark.parametrize("group", GROUPS)
def test_every_option_composes_and_has_a_description(group, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for option in options_of(group):
        path = [f"model.path={tmp_path}"] if option == "hf" else []
        assert compose_config([f"{group}={option}", *path]).config.value(group) == option
        assert first_comment(package_folder("conf") / group / f"{option}.yaml")


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_composes_and_is_short(name, tmp_path):
    file = package_folder("recipes") / f"{name}.yaml"
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    needed = [f"model.path={tmp_path}"] if "model: hf" in file.read_text() else []
    assert compose_config(needed, name).recipe == name
    assert first_comment(file)
    assert len(file.read_text().splitlines()) <= 25


def test_every_key_has_a_meaning_and_its_default_is_allowed():
    for key in KEYS.values():
        assert key.meaning
        text = key.text(key.default)
        assert not text or key.parse(text) == key.default
