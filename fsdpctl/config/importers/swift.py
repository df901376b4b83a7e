"""Translation of a command line of ms-swift, `swift sft` or `swift pt`, in a shell script."""

import re
from fnmatch import fnmatchcase

from fsdpctl.config.importers.command_line import LAUNCH, UNUSED_OF_ACCELERATE, read_launch
from fsdpctl.config.importers.models import map_model
from fsdpctl.config.importers.shared import (
    TOO_HIGH,
    deepspeed_file,
    keep_base_wide,
    quantized,
    read_context,
    read_optimizer,
    read_targets,
    read_zero,
)
from fsdpctl.config.importers.source_config import SourceConfig, SourceKey
from fsdpctl.config.importers.training import TrainingRows, read_hugging_face_training
from fsdpctl.config.importers.translation import SourceBatch, Translation
from fsdpctl.errors import UsageError

_UNUSED = (
    f"{LAUNCH}.*", *UNUSED_OF_ACCELERATE,
    "dataset*", "val_dataset*", "split_dataset_ratio", "columns",
    "cached_*", "load_from_cache_file", "streaming", "shuffle_buffer_size", "dataloader_*",
    "model_author", "model_name", "model_type", "template", "system", "use_hf", "attn_impl",
    "report_to", "logging_*", "save_*", "eval_*", "predict_with_generate", "metric*", "output_dir",
    "add_version", "learning_rate", "lr_scheduler_*", "warmup_*", "weight_decay", "adam_*",
    "max_grad_norm", "num_train_epochs", "max_steps", "seed", "data_seed", "ddp_*", "loss_scale",
    "per_device_eval_batch_size", "gradient_checkpointing_kwargs*", "lora_dropout", "bnb_4bit_*",
    "freeze_vit", "freeze_aligner", "vit_gradient_checkpointing", "push_to_hub", "hub_*",
    "swanlab*", "rope_scaling", "max_model_len", "router_aux_loss_coef", "early_stop_interval",
    "greater_is_better", "max_epochs", "init_weights", "lora_ga_*",
    "truncation_strategy", "create_checkpoint_symlink", "resume_*", "ignore_*", "custom_*",
    "enable_thinking", "max_new_tokens", "temperature", "top_*", "lazy_tokenize", "padding_free",
    "external_plugins", "agent_template", "use_chat_template", "strict", "group_by_length",
)  # fmt: skip
_OTHER_TRAININGS = (
    "rlhf_type", "use_dora", "use_galore", "freeze_llm", "target_parameters", "target_regex",
    "freeze_parameters*", "trainable_parameters*", "modules_to_save", "device_map",
    "deepspeed_autotp_size", "zero_hpz_partition_size", "lisa_activated_layers",
)  # fmt: skip
_PRESET = re.compile(r"zero([0-3])(_offload)?")
_USUAL = {"optimizer.weight_decay": "0.1", "optimizer.beta2": "0.95", "train.epochs": "3"}
_TOTAL = 16  # samples of a step, if the number of passes is not set


def read_swift(source: SourceConfig) -> Translation:
    """Translate a command line.

    Raises:
        UsageError: If its training can't be estimated.
    """
    found = Translation("ms-swift", source)
    for value in source.peek():
        is_other = any(fnmatchcase(value.key, each) for each in _OTHER_TRAININGS)
        if is_other and source.take_used(value.key):
            raise source.error(value, "not supported; expected full fine-tuning or LoRA")
    if source.text("task_type", default="causal_lm") != "causal_lm":
        raise UsageError(f"{source.file}: task_type: expected causal_lm")
    map_model(found, source.take("model"), "model")
    adapts = _read_adapters(found)
    masters = _read_sharding(found) or adapts
    _read_lengths(found)
    dtype = source.take("torch_dtype") or SourceKey("torch_dtype", "bfloat16", ())
    precision = "bf16" if masters or dtype.text != "bfloat16" else "bf16_true"
    found.map(dtype, f"precision={precision}")
    found.reduces_as_computed = True
    recomputes = source.take("gradient_checkpointing")
    if dtype.text == "float32":
        keep_base_wide(found, dtype, recomputes)
    if (recomputes is None or recomputes.is_on) and (
        "activation_checkpointing" not in found.settings
    ):
        found.map(recomputes, "activation_checkpointing=full", default="gradient_checkpointing")
    read_context(found, "sequence_parallel_size")
    read_optimizer(found, source.take("optim"), "optim")
    if other := source.take_used("optimizer"):
        found.exclude(other, f"estimated with AdamW's states; {TOO_HIGH}")
    found.whole_logits = source.take_on("use_liger_kernel") is None
    read_hugging_face_training(found, "cosine", _USUAL)
    rows = TrainingRows(found)
    data = rows.value("dataset")
    rows.data(data, [each.partition("#")[0] for each in data.items] if data else ())
    found.sort_rest(_UNUSED)
    return found


def _read_adapters(found: Translation) -> bool:
    """Translate the adapters, and return whether there are any."""
    source = found.source
    kind = source.take("tuner_type", "train_type")
    rank, alpha, targets = map(source.take, ("lora_rank", "lora_alpha", "target_modules"))
    bits, method = source.take_used("quant_bits"), source.take_used("quant_method")
    if (bits or method) and (bits is None or (kind is not None and kind.text == "full")):
        raise UsageError(f"{source.file}: quant_method: expected adapters, and quant_bits 4 or 8")
    if kind is not None and kind.text == "full":
        return False
    if kind is not None and kind.text != "lora":
        raise source.error(kind, "expected lora or full")
    shown = rank or kind
    found.map(shown, f"model.lora.rank={rank.text if rank else 8}", default="lora_rank")
    found.map(alpha, f"model.lora.alpha={alpha.text if alpha else 32}", default="lora_alpha")
    if targets is not None and "all-linear" in targets.items and len(targets.items) > 1:
        raise source.error(targets, "expected all-linear, or names of linear layers")
    if targets is None or targets.text == "all-linear":
        found.map(targets, "model.lora.targets=all_linear", default="target_modules")
    else:
        read_targets(found, targets)
    if "lora_dropout" not in source:
        found.map(None, "model.lora.dropout=0.05", default="lora_dropout")
    if bits is not None:
        dtype = {"4": "nf4", "8": "int8"}.get(bits.text)
        if dtype is None:
            raise source.error(bits, "expected 4 or 8")
        other = method is not None and method.text != "bnb"
        note = "estimated as bitsandbytes' format" if other else ""
        found.map(bits, *quantized(dtype), note=note)
    return True


def _read_sharding(found: Translation) -> bool:
    """Translate ranks and sharding, and return whether weights in bf16 get masters in fp32."""
    source = found.source
    is_sharded = read_launch(found, splits=True)
    deepspeed, fsdp = source.take("deepspeed"), source.take("fsdp")
    if "fsdp.fsdp" in source or "fsdp.fsdp_config" in source:
        raise UsageError(f"{source.file}: fsdp: expected fsdp2, got a configuration")
    if "deepspeed.zero_optimization" in source:
        read_zero(found, source, "deepspeed.zero_optimization.", "stage")
    elif deepspeed and (preset := _PRESET.fullmatch(deepspeed.text)):
        about = {"stage": int(preset[1])}
        names = ("optimizer", "param")[: 2 if preset[1] == "3" else 1] if preset[2] else ()
        offloads = {f"offload_{name}": {"device": "cpu"} for name in names}
        read_zero(found, SourceConfig(source.file, {**about, **offloads}), "", "stage")
    elif deepspeed:
        if (file := deepspeed_file(found, deepspeed)) is not None:
            read_zero(found, file, "zero_optimization.", "stage")
    elif fsdp and fsdp.text == "fsdp2":
        words = ("strategy=full_shard", "engine=fsdp2", "activation_checkpointing=full")
        found.map(fsdp, *words)
    elif fsdp:
        text = f"fsdp: {fsdp.text}: not read; add strategy=full_shard engine=fsdp2"
        found.missing.append(("strategy", text))
    elif not is_sharded:
        found.map(None, "strategy=no_shard", "engine=ddp", default="deepspeed, fsdp")
        return False
    return True


def _read_lengths(found: Translation) -> None:
    source = found.source
    if length := source.take("max_length"):
        found.map(length, f"train.seq_len={length.text}")
    else:
        text = "max_length: not set: as long as the model declares; add train.seq_len=N"
        found.missing.append(("train.seq_len", text))
    if packing := source.take_on("packing"):
        found.map(packing, "data=chat", "data.packing=true")
    micro = source.positive("per_device_train_batch_size") or 1
    passes = source.positive("gradient_accumulation_steps")
    keys = ("per_device_train_batch_size", "gradient_accumulation_steps")
    found.batch = SourceBatch(keys, micro, passes, None if passes else _TOTAL)
