"""Translation of other tools' configurations."""

import json
from pathlib import Path

import pytest

from fsdpctl.config.compose import compose_config
from fsdpctl.config.selection import unset_names
from fsdpctl.errors import UsageError
from fsdpctl.estimate.imported_config import ImportedConfig, import_config
from fsdpctl.importers.convert import to_recipe
from fsdpctl.importers.readers import read_other_tool
from fsdpctl.importers.translation import Translation, settings_of
from tests.hostile import make_checkpoint, make_hugging_face

FILES = Path(__file__).parent / "files"
H100 = "cluster=h100"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    """Use an empty Hugging Face cache."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def read(name: str) -> Translation:
    return read_other_tool(FILES / name)


def import_file(source: str | Path, *typed: str) -> ImportedConfig:
    return import_config(read_other_tool(FILES / source), [H100, *typed])


# Settings for the memory of another program: an estimate adds them to the recipe.
PROGRAM = {
    "engine", "engine.program", "accumulation", "train.loss_chunk_tokens", "data.packing",
    "precision.reduce_dtype", "model.base_dtype", "model.max_seq_len",
}  # fmt: skip


def check_recipe(file: Path, *typed: str) -> None:
    """Check that a file's estimate has the settings of its recipe, and those of its program."""
    args = [H100, *typed]
    settings = dict(arg.split("=", 1) for arg in args)
    known = dict(to_recipe(read_other_tool(file), settings, 8).settings)
    recipe = [(name, text) for name, text in known.items() if name not in settings]
    alone = import_file(file, *typed, "engine.program=fsdpctl").composed.config
    expected = compose_config(args, converted=recipe).config
    assert (alone, unset_names(alone)) == (expected, unset_names(expected))
    whole = import_file(file, *typed)
    pairs = settings_of(whole.rows).items()
    added = [f"{x}={text}" for x, text in pairs if x in PROGRAM - settings.keys()]
    added = [each for each in added if each not in whole.overridden]
    assert compose_config([*args, *added], converted=recipe).config == whole.composed.config


def written(folder: Path, text: str, name: str = "file.yaml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


AXOLOTL = "base_model: meta-llama/Llama-3.1-8B\nmicro_batch_size: 1\nfsdp: [full_shard]\n"


def test_all_keys_of_an_axolotl_file_are_recognized():
    imported = import_file("axolotl-full.yaml")
    config, batches = imported.composed.config, imported.composed.config.train
    assert (config.model.name, batches.seq_len, batches.micro_batch_size) == ("hf", 4096, 2)
    assert (config.accumulation.name, batches.global_batch_size) == ("last", 2 * 4 * 8)
    assert (config.strategy.name, config.engine.name) == ("full_shard", "fsdp2")
    assert (config.precision.name, config.activation_checkpointing.name) == ("bf16", "full")
    assert (config.data.name, config.data.packing) == ("chat", None)
    assert (config.prefetch.name, batches.loss_chunk_tokens) == ("backward", 0)
    assert (imported.translation.unrecognized, imported.translation.not_estimated) == ([], [])
    assert {
        "learning_rate",
        "wandb_name",
        "datasets",
    } <= imported.translation.source.no_memory_effect


def test_the_translation_lists_what_the_estimate_excludes():
    imported = import_file("axolotl-qlora.yml")
    config, lora = imported.composed.config, imported.composed.config.model.lora
    assert (lora.rank, lora.alpha, lora.dropout, lora.rslora) == (32, 16, 0.05, True)
    assert lora.targets == "[q_proj,v_proj]"
    assert (config.strategy.name, config.engine.name) == ("shard_grad_op", "fsdpctl")
    assert imported.engine_reason
    assert config.accumulation.name == "every"  # FSDP 2 has no no_sync
    assert (config.train.loss_chunk_tokens, config.model.base_dtype) == (None, "nf4")
    assert (config.optimizer.name, config.optimizer.state_dtype) == ("adamw", "int8")
    assert config.activation_checkpointing.offload
    assert imported.translation.not_estimated == []
    notes = {row.key: row.note for row in imported.rows}
    assert "of the recomputed layer" in notes["liger_rms_norm"]
    assert config.strategy.offload == "all"
    assert "parameters" in notes["fsdp_config.offload_params"]
    assert imported.translation.unrecognized == ["a_key_of_tomorrow"]


def test_an_accelerate_file_needs_a_model_on_the_command_line():
    with pytest.raises(UsageError, match="names no model"):
        import_file("accelerate-fsdp.yaml")
    imported = import_file("accelerate-fsdp.yaml", "model=qwen3_4b", "train.micro_batch_size=2")
    config = imported.composed.config
    assert (config.launch.nproc_per_node, config.launch.nnodes) == (8, 2)
    assert (config.model.name, config.strategy.name) == ("qwen3_4b", "hybrid_shard")
    assert (config.prefetch.name, config.activation_checkpointing.name) == ("both", "full")
    assert (config.train.global_batch_size, imported.translation.unrecognized) == (2 * 16, [])


def test_the_deepspeed_file_that_a_configuration_names_is_read(tmp_path):
    inner = {
        "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}},
        "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": "auto",
    }  # fmt: skip
    (tmp_path / "zero2.json").write_text(json.dumps(inner))
    text = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n"
    file = written(tmp_path, f"{text}  deepspeed_config_file: zero2.json\n")
    config = import_file(file, "model=llama3_1b").composed.config
    assert (config.strategy.name, config.precision.name) == ("shard_grad_op", "bf16")
    assert config.train.micro_batch_size == 4
    file = written(tmp_path, AXOLOTL + "deepspeed: zero2.json\n")
    assert import_file(file).composed.config.strategy.name == "shard_grad_op"
    file = written(tmp_path, AXOLOTL + "deepspeed: zero7.json\n")
    with pytest.raises(UsageError, match="zero7.json: not found; add the ZeRO stage"):
        import_file(file)
    assert import_file(file, "strategy=zero1").composed.config.strategy.name == "shard_optimizer"


def test_the_command_line_overrides_the_file(tmp_path):
    typed = ["strategy=no_shard", "train.micro_batch_size=1", "model=llama3_1b", "precision=fp32"]
    imported = import_file("axolotl-qlora.yml", *typed)
    config = imported.composed.config
    assert (config.model.name, config.strategy.name) == ("llama3_1b", "no_shard")
    assert (config.train.micro_batch_size, config.train.global_batch_size) == (1, 4 * 2 * 8)
    assert config.model.lora.rank == 32  # adapters go with any model
    assert "strategy=shard_grad_op" in imported.overridden
    for arg, size in (("train.global_batch_size=256", 256), ("accumulation.steps=3", 2 * 3 * 8)):
        assert import_file("axolotl-full.yaml", arg).composed.config.train.global_batch_size == size
    kept_config = import_file("axolotl-full.yaml", "strategy=shard_grad_op").composed.config
    assert (kept_config.strategy.name, kept_config.engine.name) == ("shard_grad_op", "fsdp2")
    engines = {
        "strategy=shard_optimizer": ("fsdpctl", "transformers"),  # fully_shard has no such strategy
        "strategy=ddp": ("ddp", "transformers"), "engine=fsdpctl": ("fsdpctl", "fsdpctl"),
        "engine.program=fsdpctl": ("fsdpctl", "fsdpctl"),
    }  # fmt: skip
    for arg, expected in engines.items():
        engine = import_file("axolotl-full.yaml", arg).composed.config.engine
        assert (engine.name, engine.program) == expected
    typed = ["optimizer=adamw"]
    assert import_file("axolotl-qlora.yml", *typed).composed.config.strategy.offload == "none"
    imported = import_config(read("accelerate-fsdp.yaml"), ["model=qwen3_4b", "cluster=4xh100"])
    assert imported.composed.config.num_ranks == 4
    assert {"launch.nproc_per_node=8", "launch.nnodes=2"} <= imported.overridden
    with pytest.raises(UsageError, match=r"run\.yaml: has no data; set data\.path or model\.voc"):
        import_file(written(tmp_path, AXOLOTL, "run.yaml"), "model=llama_tiny")
    with pytest.raises(UsageError, match=r"^train\.seq_length:"):  # a mistake of the command line
        import_file("axolotl-full.yaml", "train.seq_length=3")


@pytest.mark.parametrize(("key", "dtype"), [("load_in_4bit", "nf4"), ("load_in_8bit", "int8")])
def test_a_model_on_the_command_line_keeps_the_quantized_base(tmp_path, key, dtype):
    text = AXOLOTL.replace("meta-llama/Llama-3.1-8B", "some/unknown")
    file = written(tmp_path, f"{text}adapter: lora\nlora_r: 8\n{key}: true\n")
    for arg, expected in (("model.lora.rank=4", dtype), ("model.base_dtype=auto", None)):
        model = import_file(file, "model=llama3_8b", arg).composed.config.model
        assert model.base_dtype == expected


@pytest.mark.parametrize(("arg", "reason"), [
    ("model.lora.rank=8", "model.lora.rank=8 requires it instead of fsdp2"),
    ("model.trainable=norm", "model.trainable=norm requires it instead of fsdp2"),
    ("train.context_parallel=2", "train.context_parallel=2 requires it instead of fsdp2"),
    ("optimizer.state_dtype=int8", "optimizer.state_dtype=int8 requires it instead of fsdp2"),
    ("strategy=shard_optimizer", "strategy=shard_optimizer not supported"),
])  # fmt: skip
def test_the_rules_decide_the_engine_of_a_file(arg, reason):
    imported = import_file("axolotl-full.yaml", arg)
    assert (imported.composed.config.engine.name, reason in imported.engine_reason) == (
        "fsdpctl",
        True,
    )
    assert "engine=fsdp2" in imported.overridden
    assert imported.composed.recipe == "axolotl-full"  # an error names the recipe
    typed_engine = import_file("axolotl-full.yaml", arg, "engine=fsdp2")
    assert (typed_engine.composed.config.engine.name, typed_engine.engine_reason) == ("fsdp2", "")


@pytest.mark.parametrize(("arg", "cluster"), [
    ("launch.nnodes=1", "h100"), ("launch.device=cpu", "local"), ("cluster=a10", "a10"),
])  # fmt: skip
def test_hardware_is_assumed_without_a_gpu(monkeypatch, arg, cluster):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    imported = import_config(read("axolotl-full.yaml"), [arg])
    assert imported.composed.config.cluster.name == cluster
    assert any("assumed" in row.note for row in imported.rows) == (cluster == "h100")


def test_models_are_found_in_directories_and_in_the_hub_cache(tmp_path):
    folder = make_hugging_face(make_checkpoint(tmp_path / "step-00000001"), tmp_path / "hf")
    text = AXOLOTL.replace("meta-llama/Llama-3.1-8B", str(folder)) + "sequence_len: 16\n"
    assert import_file(written(tmp_path, text)).composed.config.model.path == str(folder)
    snapshot = tmp_path / "hub" / "models--some--body" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text((folder / "config.json").read_text())
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    text = AXOLOTL.replace("meta-llama/Llama-3.1-8B", "some/body") + "sequence_len: 16\n"
    model = import_file(written(tmp_path, text)).composed.config.model
    assert (model.path, model.init) == (str(snapshot), "auto")
    text = AXOLOTL.replace("meta-llama/Llama-3.1-8B", str(tmp_path))
    with pytest.raises(UsageError, match=r"config\.json not found"):
        import_file(written(tmp_path, text))


def test_a_known_name_on_the_hub_stays_the_name_of_its_weights(tmp_path):
    text = "base_model: {}\nmicro_batch_size: 1\nsequence_len: 512\n"
    model = import_file(written(tmp_path, text.format("Qwen/Qwen3-4B"))).composed.config.model
    assert (model.name, model.path, model.init) == ("hf", "Qwen/Qwen3-4B", "auto")
    with pytest.raises(UsageError, match="add model=llama3_8b, or model=hf"):
        import_file(written(tmp_path, text.format("unsloth/Meta-Llama-3.1-8B-bnb-4bit")))


UNSHARDED = AXOLOTL.replace("fsdp: [full_shard]\n", "")
TRL = "model_name_or_path: gpt2\nuse_peft: true\nlora_target_modules: [c_attn]\n"
EXPERTS = (
    "base_model: Qwen/Qwen3-30B-A3B\nmicro_batch_size: 1\nadapter: qlora\nload_in_4bit: true\n"
    "lora_r: 8\nlora_target_modules: [q_proj, v_proj]\n"
    "lora_target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj]\n"
)
OF_EXPERTS = "[q_proj,v_proj,mlp.experts.gate_up_proj,mlp.experts.down_proj]"
DEGREES = (
    "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\n"
    "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false}\nparallelism_config: "
    "{parallelism_config_dp_replicate_size: 2, parallelism_config_dp_shard_size: 4, "
    "parallelism_config_tp_size: 1}\n"
)
_PARAMS = "{stage: 3, offload_param: {device: cpu}}"
_STATES = "}, offload_optimizer: {device: cpu}}"
PLUGIN = "plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]"
IN_8_BITS = {"optimizer": "adamw", "optimizer.state_dtype": "int8", "engine": "fsdpctl"}
RECOMPUTES = "gradient_checkpointing: true\ngradient_checkpointing"
SHARES = "context_parallel_size: 4\ngradient_accumulation_steps: 2\n"


@pytest.mark.parametrize(("base", "lines", "expected"), [
    (AXOLOTL, "", {"precision": "bf16", "activation_checkpointing": "none",
     "train.loss_chunk_tokens": 0}),
    (AXOLOTL, "bf16: false", {"precision": "fp32", "precision.reduce_dtype": "float32"}),
    (AXOLOTL, "bf16: true", {"precision.reduce_dtype": "bfloat16"}),
    (AXOLOTL, "bfloat16: true", {"precision": "bf16_true"}),
    (AXOLOTL, "attn_implementation: sdpa\nattention: x", {"model.attention": None}),
    (AXOLOTL, "fp16: true", {"precision": "bf16"}),
    (AXOLOTL, "optimizer: sgd", {"optimizer": "sgd", "engine": "fsdpctl"}),
    (AXOLOTL, "adapter: lora\nlora_r: 4", {"engine": "fsdpctl"}),
    (AXOLOTL, "gradient_checkpointing: true", {"activation_checkpointing": "full"}),
    (AXOLOTL, "gradient_checkpointing: offload_disk", {"activation_checkpointing": "full"}),
    (AXOLOTL, "gradient_checkpointing: offload", {"engine": "fsdpctl"}),
    (AXOLOTL, "gradient_checkpointing: true\nselective_checkpointing: true",
     {"activation_checkpointing": "selective"}),
    (AXOLOTL, "gradient_checkpointing: true\nselective_checkpointing: {offload: true}",
     {"activation_checkpointing": "full"}),
    ("model_name_or_path: Qwen/Qwen3-30B-A3B\nuse_peft: true\n",
     "lora_target_modules: [q_proj, v_proj]\nlora_target_parameters: "
     "[mlp.experts.gate_up_proj, mlp.experts.down_proj]", {"model.lora.targets": OF_EXPERTS}),
    ("model_name_or_path: openai/gpt-oss-20b\nuse_peft: true\n",
     "lora_target_parameters: [mlp.experts.down_proj]",
     {"model.lora.targets": "[mlp.experts.down_proj]"}),
    ("model_name_or_path: EleutherAI/pythia-14m\n", "use_peft: true",
     {"model.lora.targets": "query_key_value"}),
    (AXOLOTL, f"{RECOMPUTES}_kwargs: {{every_n_layers: 3}}",
     {"activation_checkpointing": "none", "activation_checkpointing.blocks": "full:11"}),
    (AXOLOTL, f"{RECOMPUTES}_kwargs: {{every_n_layers: 2, offload: true}}",
     {"activation_checkpointing.blocks": "offload:16", "activation_checkpointing.offload": False}),
    (AXOLOTL, f"{RECOMPUTES}_kwargs: {{every_n_layers: 1}}",
     {"activation_checkpointing": "full", "activation_checkpointing.blocks": None}),
    (AXOLOTL, f"{RECOMPUTES}_kwargs: {{offload: true}}",
     {"activation_checkpointing.offload": True}),
    (AXOLOTL, "optimizer: muon", {"optimizer": "adamw"}),
    (AXOLOTL, "batch_size: 8", {"train.global_batch_size": 8 * 8}),
    (AXOLOTL, "fsdp_config:\n  sharding_strategy: '2'", {"strategy": "shard_grad_op"}),
    (AXOLOTL, "fsdp_config:\n  fsdp_sharding_strategy: NO_SHARD", {"strategy": "no_shard"}),
    (AXOLOTL, "bf16: false\ntf32: true", {"precision": "tf32"}),
    (AXOLOTL, "bf16: true\ntf32: true", {"precision": "bf16"}),
    # The master weights of FSDP 2 are the weights as loaded.
    (AXOLOTL, "fsdp_version: 2", {"precision": "bf16_true"}),
    (AXOLOTL, "fsdp_config:\n  activation_checkpointing: true",
     {"activation_checkpointing": "full"}),
    (AXOLOTL, "dp_replicate_size: 4\ndp_shard_size: 2", {"strategy": "hybrid_shard"}),
    (AXOLOTL, "deepspeed:\n  zero_optimization:\n    stage: 1", {"strategy": "shard_optimizer"}),
    *((AXOLOTL, f"optimizer: {name}", IN_8_BITS) for name in (
        "adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "paged_adamw_8bit", "ao_adamw_8bit",
        "adamw_torch_fp8", "ao_adamw_fp8")),
    (AXOLOTL, PLUGIN, {"train.loss_chunk_tokens": None}),
    (AXOLOTL, f"{PLUGIN}\ncut_cross_entropy: false", {"train.loss_chunk_tokens": 0}),
    (AXOLOTL, f"{SHARES}tiled_mlp: true", {"train.context_parallel": 4, "engine": "fsdpctl",
     "train.mlp_chunk_tokens": None, "train.global_batch_size": 4}),
    (AXOLOTL, "context_parallel_size: 0", {"train.context_parallel": 1}),
    (AXOLOTL, "context_parallel: {size: 4, ring_size: 2}", {"train.context_parallel": 4}),
    (AXOLOTL, f"{SHARES}dp_shard_size: 2", {"launch.nproc_per_node": 8}),  # product of both degrees
    (UNSHARDED, "", {"strategy": "no_shard", "engine": "ddp", "precision": "bf16_true"}),
    (UNSHARDED, "adapter: lora\nlora_r: 8", {"precision": "bf16"}),
    (UNSHARDED, "optimizer: muon", {"optimizer": "muon", "strategy": "no_shard",
     "engine": "fsdpctl", "optimizer.momentum": 0.95}),
    *((UNSHARDED, f"fsdp_config:\n  {key}: 2", {"strategy": "full_shard", "engine": "fsdp2"})
      for key in ("fsdp_version", "version")),
    # axolotl 0.20 and transformers 5 use FSDP 2 unless a key is of FSDP 1.
    (UNSHARDED, "fsdp_config: {reshard_after_forward: true}", {"precision": "bf16_true"}),
    (UNSHARDED, "fsdp_config: {forward_prefetch: true}", {"precision": "bf16"}),
    *((UNSHARDED, f"layer_offloading: true\n{adapter}", {"strategy.offload": offload})
      for adapter, offload in {"adapter: lora": "params", "": "none"}.items()),
    *((EXPERTS, f"quantize_moe_experts: {str(packs).lower()}",
       {"model.quantize_experts": packs, "model.lora.targets": OF_EXPERTS})
      for packs in (False, True)),
    (AXOLOTL, "optimizer: adamw_torch", {"engine": "fsdp2",
     "engine.program": "transformers_foreach"}),
    # Longer samples than the model declares, and rows of a model that mixes their documents.
    (AXOLOTL, "sequence_len: 300000\nsample_packing: true\nlora_dropout: 0.1",
     {"train.seq_len": 300000, "model.max_seq_len": 300000, "data.packing": None,
      "model.lora.rank": None}),
    *((AXOLOTL.replace("fsdp: [full_shard]", f"deepspeed: {{zero_optimization: {zero}}}"),
       "adapter: lora\nlora_target_linear: true" * adapts, {"strategy.offload": offload})
      for zero, adapts, offload in ((_PARAMS, False, "none"), (_PARAMS, True, "params"),
                                    (_PARAMS.replace("}}", _STATES), False, "all"))),
    # TRL 1.16 computes all logits only for label smoothing.
    *(("model_name_or_path: gpt2\n", line, {"train.loss_chunk_tokens": chunk})
      for line, chunk in {
        "loss_type: nll": None, "loss_type: chunked_nll": None, "label_smoothing_factor: 0.1": 0,
        "use_peft: true\nlora_target_modules: [c_attn]": 256,
        "label_smoothing_factor: 0.0\nuse_liger_kernel: true": None}.items()),
    (TRL, "", {"model.base_dtype": "float32"}),
    (TRL, "fsdp: true\ngradient_accumulation_steps: 2", {"accumulation": "every"}),
    (TRL, "activation_checkpointing: false", {"activation_checkpointing": "none"}),
    (TRL, "activation_offloading: true", {"activation_checkpointing.offload": True}),
    (TRL, "bf16: false\ntf32: true", {"precision": "tf32"}),
    (TRL, "dtype: bfloat16", {"model.base_dtype": None}),
    (TRL, "bf16: false", {"model.base_dtype": None}),
    (TRL, "load_in_4bit: true", {"model.base_dtype": "nf4"}),
    (TRL, "use_liger_kernel: true", {"engine.program": "liger"}),
    (DEGREES, "", {"strategy": "hybrid_shard_grad_op", "strategy.dp_shard_size": 4}),
    (DEGREES.replace("dp_shard_size: 4", "cp_size: 4"), "", {"train.context_parallel": 4,
     "strategy": "hybrid_shard_grad_op", "strategy.dp_shard_size": 4}),  # ranks that share samples
    ((FILES / "accelerate-deepspeed.yaml").read_text(), "", {"strategy": "full_shard",
     "engine": "fsdpctl", "precision": "fp32", "strategy.offload": "states,gradients",
     "train.global_batch_size": 8 * 4}),
    ("compute_environment: LOCAL_MACHINE\n", "use_cpu: true",
     {"launch.nproc_per_node": 1, "launch.device": "cpu", "precision": "fp32"}),
])  # fmt: skip
def test_values_are_those_of_the_tools(tmp_path, base, lines, expected):
    args = ["strategy=ddp"] * ("_or_path" in base) + ["model=gpt2"] * ("base_model" not in base)
    file = written(tmp_path, f"{base}{lines}\n")
    imported = import_file(file, *args)
    assert {key: imported.composed.config.value(key) for key in expected} == expected
    if lines != "optimizer: muon" or base == UNSHARDED:  # others can't be trained
        check_recipe(file, *args)


def test_a_share_of_the_blocks_of_an_unknown_model_is_asked_for(tmp_path):
    base = AXOLOTL.replace("meta-llama/Llama-3.1-8B", "some/unknown")
    file = written(tmp_path, f"{base}{RECOMPUTES}_kwargs: {{every_n_layers: 2}}\n")
    with pytest.raises(UsageError, match="every_n_layers: 2: number of blocks unknown"):
        import_file(file, "model=llama_tiny", "model.vocab_size=64")
    args = (
        "model.vocab_size=64",
        "activation_checkpointing=none",
        "activation_checkpointing.blocks=full:1",
    )
    imported = import_file(file, "model=llama_tiny", *args)
    assert imported.composed.config.activation_checkpointing.blocks == "full:1"


@pytest.mark.parametrize("name", [each.name for each in FILES.iterdir()])
def test_the_estimate_of_a_file_is_that_of_its_recipe_and_of_its_program(name):
    for typed in (["strategy=full_shard", "train.micro_batch_size=1"], ["optimizer=adamw"]):
        check_recipe(FILES / name, "model=llama3_1b", *typed)


@pytest.mark.parametrize(("text", "targets"), [
    (r"model.language_model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|q|v)_proj",
     "[q_proj,v_proj,up_proj,down_proj]"),
    (r".*\.self_attn\.(q|k)_proj", "[q_proj,k_proj]"), ("q_proj", "[q_proj]"),
    ("(q|k)_proj", None),  # matches whole names
    (r"(?!.*vision)model\.layers\.\d+\..*\.(?:q|up)_proj", "[q_proj,up_proj]"), ("(q", None),
])  # fmt: skip
@pytest.mark.parametrize("tool", ["axolotl", "trl"])
def test_expressions_of_layers_become_names(tmp_path, tool, text, targets):
    trl = "use_peft: true\nmodel_name_or_path: x\nper_device_train_batch_size: 1\n"
    head = f"{AXOLOTL}adapter: lora\n" if tool == "axolotl" else trl
    result = read_other_tool(written(tmp_path, f"{head}lora_target_modules: '{text}'\n"))
    assert result.settings.get("model.lora.targets") == targets
    assert any(name == "model.lora.targets" for name, _ in result.missing) == (targets is None)


@pytest.mark.parametrize(("lines", "part"), [
    ("rl: dpo", "rl: dpo: trains on preferences"),
    ("tensor_parallel_size: 2", "does not support tensor parallelism"),
    ("context_parallel_size: few", "expected a whole number"),
    ("cp_size: few", "train.context_parallel=few"), ("seq_length: -1", "train.seq_len=-1"),
    ("qat:\n  weight_dtype: int4", "quantization-aware training needs more memory"),
    ("adapter: mixlora", "expected lora or qlora"),
    ("attn_implementation: eager", "attn_implementation: eager: eager attention stores"),
    ("nvfp4_merge_aware: true", "quantization-aware"), ("diffusion_lm: {t_eps: 1}", "masked diff"),
    (f"{RECOMPUTES}_kwargs: {{every_n_layers: 2}}\nselective_checkpointing: true",
     "saves other outputs than fsdpctl"),
    (f"{RECOMPUTES}_kwargs: {{every_n_layers: 0}}", "expected at least 1, got 0"),
    ("gradient_checkpointing: true\nselective_checkpointing: {save_matmul_min_k: 9}",
     "saves other outputs than fsdpctl; add activation_checkpointing=selective"),
    ("optimizer: ademamix", "unknown optimizer states"),
    ("unfrozen_parameters: ['.*']", "model.trainable=REGEX"),
    ("sequence_len: many", "train.seq_len=many"),
    ("gradient_accumulation_steps: 0", "expected at least 1, got 0"),
    ("gradient_accumulation_steps: few", "expected a whole number"),
    ("fsdp_config:\n  fsdp_sharding_strategy: HALF", "expected full_shard"),
    ("fsdp_config:\n  fsdp_auto_wrap_policy: NO_WRAP", "gathers the whole model at once"),
    ("dp_replicate_size: 3", "does not divide the 8 ranks"),
    ("deepspeed:\n  zero_optimization:\n    stage: 5", "expected 0 to 3"),
    ("sequence_len: 8\nsequence_len: 9", "appears twice"),
])  # fmt: skip
def test_training_that_cannot_be_estimated_is_rejected(tmp_path, lines, part):
    file = written(tmp_path, f"{AXOLOTL}{lines}\n")
    with pytest.raises(UsageError) as caught:
        import_file(file)
    assert part in str(caught.value)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "text", "part"), [
    ("run.py", "import os; os._exit(9)", "expected the YAML file of axolotl"),
    ("run.toml", "x = 1", "TOML files, such as torchtitan's, are not read"),
    ("run.yaml", "model: llama3_8b\nstrategy: full_shard\n", "--recipe"),
    *(("run.yaml", f"{text}\n", "a file of LLaMA-Factory") for text in (
        "model_name_or_path: x\nstage: sft", "model_name_or_path: x\ntemplate: qwen3",
        "model: x\npeft_config: {name: lora}")),
    ("run.yaml", "step_scheduler: {max_steps: 1}\nfsdp_config: {}\n", "a file of NeMo Automodel"),
    ("run.yaml", "- a\n- b\n", "expected a mapping"),
    ("run.yaml", "distributed_type: MEGATRON_LM\n", "expected NO, FSDP"),
    ("run.yaml", "compute_environment: AMAZON_SAGEMAKER\n", "expected LOCAL_MACHINE"),
    ("run.yaml", "distributed_type: FSDP\nnum_processes: 3\nnum_machines: 2\n",
     "same number of ranks"),
    ("run.yaml", "distributed_type: FSDP\nparallelism_config:\n"
     "  parallelism_config_tp_size: 2\n", "tensor parallelism"),
    ("gone.yaml", None, "No such file"),
])  # fmt: skip
def test_unsupported_files_are_rejected(tmp_path, name, text, part):
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError) as caught:
        import_file(file)
    assert part in str(caught.value)
    assert str(caught.value).startswith(str(file))


def test_files_are_never_executed(tmp_path):
    mark = tmp_path / "mark"
    text = f"{AXOLOTL}foo: !!python/object/apply:os.system ['touch {mark}']\n"
    import_file(written(tmp_path, text))
    assert not mark.exists()


@pytest.mark.parametrize(("lines", "left_out"), [
    ("optimizer: ao_adamw_4bit", {"optimizer"}), ("optimizer: lion_8bit", {"optimizer"}),
    ("load_in_4bit: true", {"load_in_4bit"}), ("load_in_8bit: true", {"load_in_8bit"}),
    ("adapter: lora\nlora_r: 4\nload_in_8bit: true", set()),
    ("liger_glu_activation: true", {"liger_glu_activation"}),
    ("liger_glu_activation: true\ngradient_checkpointing: true", set()),
    ("adapter: lora\nlora_mlp_kernel: true\ngradient_checkpointing: true", set()),
    ("adapter: lora\nload_in_4bit: true\nbnb_config_kwargs:\n  x: 1", set()),
    ("adapter: lora\ngptq: true", set()),
    ("activation_offloading: true", {"activation_offloading"}),
    ("ple_cpu_offload: true\nuse_sonicmoe: true", {"ple_cpu_offload", "use_sonicmoe"}),
    ("adapter: lora\nnonexpert_quantization: nvfp4", {"nonexpert_quantization"}),
    ("activation_offloading: true\ngradient_checkpointing: true", set()),
    ("gradient_checkpointing: offload_disk", set()),
    ("deepspeed:\n  zero_optimization:\n    stage: 0\n    offload_optimizer:\n      device: cpu",
     {"deepspeed.zero_optimization.offload_optimizer.device"}),
    ("deepspeed:\n  zero_optimization:\n    stage: 2\n    offload_optimizer:\n      device: cpu",
     set()),
    ("optimizer: muon", {"optimizer"}),
    ("optimizer: muon\ndeepspeed:\n  zero_optimization:\n    stage: 1", set()),
    ("adapter: lora\nlora_target_modules: 'model\\.layers\\.[0-9]\\.self_attn\\.q_proj'",
     {"lora_target_modules"}),
    ("deepspeed:\n  zero_optimization:\n    stage: 3\n    offload_param:\n      device: cpu",
     {"deepspeed.zero_optimization.offload_param.device"}),
    *((f"adapter: lora\ngradient_checkpointing: true\nfsdp_version: {version}\n"
       f"gradient_checkpointing_kwargs: {{use_reentrant: {reentrant}}}",
       {"gradient_checkpointing_kwargs.use_reentrant"} if keeps else set())
      for version, reentrant, keeps in ((1, "true", 1), (1, "false", 0), (2, "true", 0))),
])  # fmt: skip
def test_what_estimates_leave_out(tmp_path, lines, left_out):
    imported = import_file(written(tmp_path, f"{AXOLOTL}{lines}\n"))
    assert {row.key for row in imported.translation.not_estimated} == left_out
    assert imported.translation.unrecognized == []
