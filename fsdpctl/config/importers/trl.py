"""Translation of the YAML file of `trl sft --config`, whose ranks are accelerate's."""

from fsdpctl.config.importers.command_line import LAUNCH, UNUSED_OF_ACCELERATE, read_launch
from fsdpctl.config.importers.models import map_model
from fsdpctl.config.importers.shared import (
    deepspeed_file,
    keep_base_wide,
    quantized,
    read_optimizer,
    read_targets,
    read_zero,
)
from fsdpctl.config.importers.source_config import SourceConfig, SourceKey
from fsdpctl.config.importers.training import (
    USUAL_OF_TRL,
    TrainingRows,
    read_hugging_face_training,
)
from fsdpctl.config.importers.translation import SourceBatch, Translation
from fsdpctl.errors import UsageError

_OTHER_TRAININGS = ("beta", "num_generations", "reward_model_name_or_path", "stage", "rl")
_UNUSED = (
    f"{LAUNCH}.*", *UNUSED_OF_ACCELERATE,
    "dataset_*", "datasets*", "dataloader_*", "report_to", "logging_*", "save_*", "eval_*",
    "learning_rate", "lr_scheduler_*", "warmup_*", "weight_decay", "adam_*", "max_grad_norm",
    "num_train_epochs", "max_steps", "seed", "data_seed", "output_dir", "overwrite_output_dir",
    "push_to_hub", "hub_*", "run_name", "per_device_eval_batch_size", "remove_unused_columns",
    "gradient_checkpointing_kwargs*", "attn_implementation", "trust_remote_code", "tf32",
    "chat_template_path", "assistant_only_loss", "completion_only_loss", "packing_strategy",
    "lora_dropout", "bnb_4bit_*", "use_bnb_nested_quant", "env.*", "do_*", "model_revision",
    "shuffle_dataset", "eos_token", "pad_token", "bf16_full_eval", "ddp_*", "lora_task_type",
)  # fmt: skip


def read_trl(source: SourceConfig) -> Translation:
    """Translate a configuration.

    Raises:
        UsageError: If its training can't be estimated.
    """
    found = Translation("TRL", source)
    for key in _OTHER_TRAININGS:
        if key in source:
            raise UsageError(f"{source.file}: {key}: expected the file of `trl sft`")
    map_model(found, source.take("model_name_or_path"), "model_name_or_path")
    _read_adapters(found)
    length = source.take("max_length", "max_seq_length")
    found.map(length, f"train.seq_len={length.text if length else 1024}", default="max_length")
    if packing := source.take_on("packing"):
        found.map(packing, "data=chat", "data.packing=true")
    micro = source.positive("per_device_train_batch_size")
    passes = source.positive("gradient_accumulation_steps")
    keys = ("per_device_train_batch_size", "gradient_accumulation_steps")
    found.batch = SourceBatch(keys, micro or 8, passes or 1)
    narrow = source.take("bf16", "fp16")
    dtype = source.take("dtype", "torch_dtype") or SourceKey("dtype", "float32", ())
    precision = _precision(dtype, narrow)
    found.map(narrow, precision, default="bf16")
    recomputes = source.take("gradient_checkpointing")
    if precision == "precision=bf16":
        keep_base_wide(found, dtype, recomputes)
    if recomputes is None or recomputes.is_on:
        found.map(recomputes, "activation_checkpointing=full", default="gradient_checkpointing")
    deepspeed = source.take("deepspeed")
    if deepspeed and (inner := deepspeed_file(found, deepspeed)) is not None:
        read_zero(found, inner, "zero_optimization.", "stage")
    elif deepspeed is None and not (LAUNCH in source and read_launch(found, splits=False)):
        note = "accelerate's configuration decides it; set strategy"
        found.map(None, "strategy=no_shard", "engine=ddp", default="(ranks)", note=note)
    read_optimizer(found, source.take("optim"), "optim")
    found.reduces_as_computed = True
    _read_training(found)
    found.sort_rest(_UNUSED)
    return found


def _read_adapters(found: Translation) -> None:
    source = found.source
    rank, alpha, targets = map(source.take, ("lora_r", "lora_alpha", "lora_target_modules"))
    if dora := source.take_on("use_dora"):
        raise source.error(dora, "DoRA needs more memory than LoRA")
    if (on := source.take_on("use_peft")) is None:
        return
    found.map(rank or on, f"model.lora.rank={rank.text if rank else 16}")
    found.map(alpha, f"model.lora.alpha={alpha.text if alpha else 32}", default="lora_alpha")
    if targets:
        read_targets(found, targets)
    else:
        words = "model.lora.targets=q_proj,v_proj"  # for most families
        found.map(None, words, default="lora_target_modules", note="the default of peft")
    for key, dtype in (("load_in_4bit", "nf4"), ("load_in_8bit", "int8")):
        if value := source.take_on(key):
            found.map(value, *quantized(dtype))


def _precision(dtype: SourceKey, narrow: SourceKey | None) -> str:
    if dtype.text in ("bfloat16", "float16", "auto"):
        return "precision=bf16_true"
    return "precision=fp32" if narrow is not None and narrow.is_off else "precision=bf16"


def _read_training(found: Translation) -> None:
    read_hugging_face_training(found, "linear", USUAL_OF_TRL)
    rows = TrainingRows(found)
    if found.settings.get("model.lora.rank") and rows.value("lora_dropout") is None:
        rows.add(SourceKey("lora_dropout", "", ()), "model.lora.dropout=0.05")
    data = rows.value("dataset_name")
    content = found.source.content.get("datasets")
    entries = content if isinstance(content, list) else []
    paths = [str(each.get("path", "")) for each in entries if isinstance(each, dict)]
    if paths:
        rows.data(SourceKey("datasets", ", ".join(paths), ()), paths)
    else:
        rows.data(data, data.items if data else ())
