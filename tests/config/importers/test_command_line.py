"""Command lines of ms-swift and TRL in shell scripts."""

import json
from pathlib import Path

import pytest

from fsdpctl.config.importers.read import read_others
from fsdpctl.config.importers.recipe import convert
from fsdpctl.config.schema import Config
from fsdpctl.errors import UsageError
from fsdpctl.estimate.from_others import completed

SWIFT = """\
# 4 GPUs
export HF_HOME=/tmp
nproc_per_node=4
NPROC_PER_NODE=$nproc_per_node \\
swift sft \\
    --model meta-llama/Llama-3.1-8B --max_length 2048 \\
    --dataset 'org/one#500' 'org/two' \\
    --gradient_accumulation_steps $(expr 32 / $nproc_per_node) \\
"""


def script(folder: Path, text: str) -> Path:
    file = folder / "train.sh"
    file.write_text(text)
    return file


def read(folder: Path, text: str, *typed: str) -> Config:
    return completed(
        read_others(script(folder, text)), ["cluster=h100", *typed], None
    ).composed.config


def test_a_command_line_of_ms_swift_is_read_with_its_variables(tmp_path):
    found = read_others(script(tmp_path, f"{SWIFT} --lora_rank=16 --packing"))
    assert found.unrecognized == []
    config = read(tmp_path, f"{SWIFT} --lora_rank=16 --packing")
    lora, train = config.model.lora, config.train
    assert (lora.rank, lora.alpha, lora.targets, lora.dropout) == (16, 32, "all_linear", 0.05)
    assert (config.launch.nproc_per_node, config.launch.nnodes) == (4, 1)
    assert (train.seq_len, train.micro_batch_size, train.global_batch_size) == (2048, 1, 32)
    assert (config.strategy.name, config.engine.name) == ("no_shard", "fsdpctl")
    assert (config.precision.name, config.activation_checkpointing.name) == ("bf16", "full")
    assert (train.loss_chunk_tokens, config.data.name) == (0, "chat")  # which is packed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--tuner_type full", {"strategy": "no_shard", "engine": "ddp", "precision": "bf16_true"}),
        ("--tuner_type full --deepspeed zero3", {"strategy": "full_shard", "precision": "bf16"}),
        ("--tuner_type full --fsdp fsdp2", {"strategy": "full_shard", "engine": "fsdp2"}),
        ("--deepspeed zero2_offload", {"strategy": "shard_grad_op"}),
        ('--deepspeed \'{"zero_optimization": {"stage": 1}}\'', {"strategy": "shard_optimizer"}),
        ("--gradient_checkpointing false", {"activation_checkpointing": "none"}),
        ("--tuner_type full --torch_dtype float32", {"precision": "bf16"}),
    ],
)
def test_options_of_ms_swift(tmp_path, options, words):
    config = read(tmp_path, f"{SWIFT} {options}")
    for section, name in words.items():
        assert getattr(config, section).name == name


def test_values_of_ms_swift(tmp_path):
    lines = "--quant_bits 4 --deepspeed zero3_offload --use_liger_kernel true"
    config = read(tmp_path, f"{SWIFT} {lines} --sequence_parallel_size 2")
    assert (config.model.base_dtype, config.optimizer.offload) == ("nf4", "all")
    assert (config.train.loss_chunk_tokens, config.train.context_parallel) == (None, 2)
    whole = read(tmp_path, SWIFT.replace("$(expr 32 / $nproc_per_node)", "$((12 / 4))"))
    assert whole.train.global_batch_size == 12
    usual = SWIFT.replace("--gradient_accumulation_steps $(expr 32 / $nproc_per_node)", "")
    for typed in ((), ("launch.nproc_per_node=8",)):
        assert read(tmp_path, usual, *typed).train.global_batch_size == 16
    wide = read(tmp_path, f"{SWIFT} --torch_dtype float32")
    assert wide.model.base_dtype == "float32"
    other = completed(read_others(script(tmp_path, SWIFT)), ["cluster=8xa100_80"], None)
    assert other.composed.config.launch.nproc_per_node == 8


def test_a_variable_that_is_not_known_is_left_out_of_a_recipe(tmp_path):
    recipe = convert(read_others(script(tmp_path, f"{SWIFT} --output_dir out/$NAME")), {}, 1)
    assert "train.run_dir" not in dict(recipe.words)
    assert "output_dir=out/$NAME: a variable that is not known" in recipe.left_out


def test_accelerate_and_torchrun_launch(tmp_path):
    fsdp = {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_offload_params": False}
    about = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": fsdp}
    (tmp_path / "fsdp.json").write_text(json.dumps(about))
    options = "--model gpt2 --tuner_type full --max_length 512"
    launch = "accelerate launch --config_file fsdp.json"
    config = read(tmp_path, f"{launch} swift/cli/sft.py {options}")
    assert (config.strategy.name, config.engine.name) == ("full_shard", "fsdp2")
    assert (config.launch.nproc_per_node, config.precision.name) == (2, "bf16")
    (tmp_path / "one.json").write_text(json.dumps(about | {"fsdp_config": {}}))
    config = read(
        tmp_path,
        "accelerate launch --config_file one.json swift/cli/sft.py --model gpt2 --max_length 512",
    )
    assert config.engine.keeps_inputs
    of_trl = "--model_name_or_path gpt2 --max_length 512 --bf16"
    config = read(tmp_path, f"{launch} trl/scripts/sft.py {of_trl}")
    assert (config.strategy.name, config.launch.nproc_per_node) == ("full_shard", 2)
    config = read(tmp_path, f"trl sft {of_trl}")
    assert (config.strategy.name, config.launch.nproc_per_node) == ("no_shard", None)
    assert read(tmp_path, f"swift sft {options}").launch.nproc_per_node == 1
    deepspeed = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}
    (tmp_path / "zero.json").write_text(json.dumps(deepspeed))
    with pytest.raises(UsageError, match="distributed_type: DEEPSPEED: expected FSDP, MULTI_GPU"):
        read(tmp_path, f"accelerate launch --config_file zero.json swift/cli/sft.py {options}")
    nodes = "torchrun --nproc-per-node=4 --nnodes 2"
    config = read(tmp_path, f"{nodes} swift/cli/sft.py {options}")
    assert (config.launch.nproc_per_node, config.launch.nnodes) == (4, 2)
    (tmp_path / "list.yaml").write_text("- distributed_type: FSDP\n")
    with pytest.raises(UsageError, match="list.yaml: expected a mapping"):
        read(tmp_path, f"accelerate launch --config_file list.yaml swift/cli/sft.py {options}")
    with pytest.raises(UsageError, match="config_file: no.json: not found"):
        read(tmp_path, f"accelerate launch --config_file no.json swift/cli/sft.py {options}")


@pytest.mark.parametrize(
    "text",
    [
        f"# a comment \\\n{SWIFT} --packing true 2>&1 | tee log",
        f"{SWIFT} --packing true > log; swift infer --packing false",
        f"cd /x && env A=1 true\n{SWIFT} --packing &",
        f"{SWIFT} --system 'two\nlines, and a {{brace}}' --packing",
        f"{SWIFT} --dataset org/one#500 --packing # and more",
        f"cat <<'EOF' > other.sh\nswift sft it's\nEOF\n{SWIFT} --packing",
        f"echo swift sft starts\n{SWIFT} --output_dir $UNKNOWN/x --packing",
        f"NPROC_PER_NODE=8 swift infer\n{SWIFT} --packing",
        SWIFT.replace("\n", "\r\n") + " --packing",
    ],
)
def test_a_script_is_read_as_a_shell_reads_it(tmp_path, text):
    config = read(tmp_path, text)
    assert (config.data.name, config.launch.nproc_per_node) == ("chat", 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("swift infer --model gpt2", "starts 0 trainings by `swift sft`, `swift pt` or `trl sft`"),
        (f"{SWIFT}\nswift sft --model gpt2", "starts 2 trainings"),
        ("\nswift sft --model 'gpt2", "line 2: not read; expected a quotation that ends"),
        (f"{SWIFT} --rlhf_type dpo", "rlhf_type: dpo: not supported"),
        (f"{SWIFT} --task_type seq_cls", "task_type: expected causal_lm"),
        (f"{SWIFT} --tuner_type boft", "tuner_type: boft: expected lora or full"),
        (f"{SWIFT} --quant_bits 2", "quant_bits: 2: expected 4 or 8"),
        (f"{SWIFT} --deepspeed '{{\"a\": '", "deepspeed: "),
        (SWIFT.replace("--max_length 2048", ""), "max_length: not set"),
        (f"{SWIFT} --fsdp other.json", "fsdp: other.json: not read; add strategy=full_shard"),
        ("CUDA_VISIBLE_DEVICES=0,1 swift sft --model gpt2", "splits the layers over several"),
        ("swift sft --model gpt2 --gradient_accumulation_steps $(rm x)", "$(rm x): not known"),
        (f'{SWIFT} "${{ARGS[@]}}"', "${ARGS[@]}: not known; write its value"),
        (f"{SWIFT} --output_dir x $EXTRA", "output_dir: $EXTRA: not known"),
        (f"N=1\nN=2\n{SWIFT} --packing $N", "packing: $N: not known"),
        ("swift sft run.yaml --model gpt2", "run.yaml: not read; expected options"),
        ("trl sft --config sft.yaml --use_peft", "config: sft.yaml: not read; write its options"),
        (
            "if a\nNPROC_PER_NODE=2\nfi\nNPROC_PER_NODE=4\nswift sft --model gpt2 --max_length 8",
            "launch.nproc_per_node: $NPROC_PER_NODE: expected a whole number",
        ),
        ("CUDA_VISIBLE_DEVICES=$GPUS trl sft --model_name_or_path gpt2", "=$GPUS: not known"),
        ("srun --nodes 4 swift sft --model gpt2", "srun: not read; expected torchrun or"),
        ("accelerate launch --use_fsdp swift/cli/sft.py --model gpt2", "--use_fsdp: not read"),
        (f"{SWIFT} --target_regex x", "target_regex: x: not supported"),
        (f"{SWIFT} --quant_method fp8", "quant_method: expected adapters, and quant_bits 4 or 8"),
        (f"{SWIFT} --target_modules all-linear lm_head", "expected all-linear, or names"),
        (f'{SWIFT} --fsdp \'{{"fsdp": "full_shard"}}\'', "fsdp: expected fsdp2"),
        ("A=xxxxxxxxxx\n" + 30 * f"A={10 * '$A'}\n", "starts 0 trainings"),
    ],
)
def test_what_a_command_line_cannot_say_is_an_error(tmp_path, text, message):
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value)
    assert "train.sh" in str(caught.value)
