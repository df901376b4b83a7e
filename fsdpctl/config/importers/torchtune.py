"""Translation of torchtune's YAML files, by its recipes of version 0.6."""

import re

from fsdpctl.config.importers.models import map_model
from fsdpctl.config.importers.shared import (
    OF_FSDP,
    TOO_HIGH,
    check_degrees,
    quantized,
    read_context,
    read_offload,
    read_optimizer,
)
from fsdpctl.config.importers.source_config import SourceConfig, SourceKey
from fsdpctl.config.importers.training import TrainingRows
from fsdpctl.config.importers.translation import RankDegrees, SourceBatch, Translation
from fsdpctl.errors import UsageError

# Keys and components of recipes that aren't fine-tuning.
_OTHER_TRAININGS = {
    "teacher_model._component_": "distills another model",
    "prompt": "generates text",
    "tasks": "evaluates a model",
    "reward_and_value_model._component_": "trains on rewards",
    "num_steps": "trains on rewards",
}
_OTHER_LOSSES = re.compile(r"dpo|ppo|grpo|simpo|rso|hinge", re.IGNORECASE)
_NAMES = {"output_proj": "o_proj"}  # layers as transformers names them
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "output_proj"), ("gate_proj", "up_proj",
                                                                  "down_proj")  # fmt: skip
_PLAIN = {
    "optimizer.lr": "optimizer.lr", "optimizer.weight_decay": "optimizer.weight_decay",
    "optimizer.eps": "optimizer.eps", "epochs": "train.epochs", "seed": "train.seed",
    "output_dir": "train.run_dir", "model.lora_dropout": "model.lora.dropout",
    "log_every_n_steps": "train.log_every", "run_val_every_n_steps": "train.eval_every",
    "lr_scheduler.num_warmup_steps": "lr_scheduler.warmup_steps",
}  # fmt: skip
_UNUSED = (
    "tokenizer.*", "checkpointer.*", "resume_from_checkpoint", "save_adapter_weights_only",
    "dataset.*", "dataset_val.*", "batch_size_val", "shuffle", "seed", "optimizer.*",
    "lr_scheduler.*", "loss._component_", "loss.*", "epochs", "max_steps_per_epoch",
    "clip_grad_norm", "metric_logger.*", "log_*", "device", "profiler.*", "output_dir",
    "run_val_every_n_steps", "*_component_", "checkpoint_files*", "model.lora_dropout", "name",
    "collate_fn", "custom_sharded_layers", "keep_last_n_checkpoints", "base_model_path",
    "tensor_parallel_plan.*",
)  # fmt: skip


def read_torchtune(source: SourceConfig) -> Translation:
    """Translate the configuration of a recipe.

    Raises:
        UsageError: If its training can't be estimated.
    """
    found = Translation("torchtune", source)
    component = source.text("model._component_")
    _check_training(source, component)
    _read_model(found)
    _read_adapters(found, component)
    _read_lengths(found)
    _read_sharding(found)
    dtype = source.take("dtype")
    is_whole = dtype is not None and dtype.text.strip() in ("fp32", "float32")
    found.map(dtype, f"precision={'fp32' if is_whole else 'bf16_true'}", default="dtype")
    leaves = source.take_on("enable_activation_offloading")
    if recomputes := source.take_on("enable_activation_checkpointing"):
        found.map(recomputes, "activation_checkpointing=full")
        if leaves:
            found.map(leaves, "activation_checkpointing.offload=true")
    elif leaves:
        found.exclude(leaves, f"activations are estimated on the device; {TOO_HIGH}")
    _read_optimizer(found)
    losses = source.text("loss._component_")
    found.whole_logits = not re.search("chunk|linear", losses, re.IGNORECASE)
    if compiled := source.take_on("compile"):
        found.map(compiled, "train.compile=true")
    _read_training(found)
    found.sort_rest(_UNUSED)
    return found


def _check_training(source: SourceConfig, component: str) -> None:
    for key, what in _OTHER_TRAININGS.items():
        if key in source:
            raise UsageError(f"{source.file}: {key}: {what}; expected a fine-tuning recipe")
    loss = next((each for each in source.peek() if each.key == "loss._component_"), None)
    if loss and _OTHER_LOSSES.search(loss.text):
        raise source.error(loss, "trains on preferences or rewards; expected a fine-tuning recipe")
    if "vision" in component or "multimodal" in component:
        raise UsageError(f"{source.file}: model: {component}: sees images; expected a text model")
    if any(each.key.startswith("quantizer._component_") for each in source.peek()):
        raise UsageError(f"{source.file}: quantizer: quantization-aware training is not supported")
    check_degrees(source, {"tensor": ("tensor_parallel_dim",)})


def _read_model(found: Translation) -> None:
    """Translate the model: by the directory of its weights, or by that directory's name."""
    folder = found.source.take("checkpointer.checkpoint_dir")
    if folder is not None:
        folder = SourceKey(folder.key, folder.text.strip().rstrip("/"), ())
    others = () if folder is None else (folder.text.rpartition("/")[2],)
    map_model(found, folder, "checkpointer.checkpoint_dir", *others)


def _read_adapters(found: Translation, component: str) -> None:
    source = found.source
    rank, alpha = source.take("model.lora_rank"), source.take("model.lora_alpha")
    attention = source.take("model.lora_attn_modules")
    keys = ("model.apply_lora_to_mlp", "model.apply_lora_to_output", "model.quantize_base")
    mlp, head, packed = map(source.take_on, keys)
    if dora := source.take_on("model.use_dora"):
        raise source.error(dora, "DoRA needs more memory than LoRA")
    if rank is None:
        return
    found.map(rank, f"model.lora.rank={rank.text}")
    if alpha:
        found.map(alpha, f"model.lora.alpha={alpha.text}")
    layers = [*(attention.items if attention else _ATTENTION)]
    layers += _MLP if mlp else ()
    layers += ["lm_head"] if head else []
    names = ",".join(_NAMES.get(each.strip(), each.strip()) for each in layers)
    found.map(attention or rank, f"model.lora.targets={names}")
    if ".qlora_" in component or packed:
        key = packed or SourceKey("model._component_", component, ())
        found.map(key, *quantized("nf4"))


def _read_lengths(found: Translation) -> None:
    source = found.source
    length = source.take("tokenizer.max_seq_len")
    if length:
        found.map(length, f"train.seq_len={length.text}")
    if packing := source.take_on("dataset.packed", "packed"):
        found.map(packing, "data=chat", "data.packing=true")
    micro, passes = source.positive("batch_size"), source.positive("gradient_accumulation_steps")
    keys = ("batch_size", "gradient_accumulation_steps")
    found.batch = SourceBatch(keys, micro or 1, passes or 1)


def _read_sharding(found: Translation) -> None:
    source = found.source
    reshard = source.take("fsdp_reshard_after_forward")
    keeps = reshard is not None and reshard.is_off
    strategy = "shard_grad_op" if keeps else "full_shard"
    found.map(reshard, f"strategy={strategy}", "engine=fsdp2", default="fsdp_reshard_after_forward")
    keys = ("data_parallel_replicate_dim", "data_parallel_shard_dim")
    replicate, shard = (max(0, source.whole(key) or 0) for key in keys)
    if replicate > 1 or shard:
        found.degrees = RankDegrees(keys, replicate or 1, shard or -1)
    read_context(found, "context_parallel_dim")
    if offload := source.take_on("fsdp_cpu_offload"):
        read_offload(found, offload, OF_FSDP)


def _read_optimizer(found: Translation) -> None:
    component = found.source.take("optimizer._component_")
    name = component.text.rpartition(".")[2].lower() if component else "adamw"
    if name in ("adamw", "adam") and found.source.take_on("optimizer.fused"):
        name = "adamw_torch_fused"
    names = {"pagedadamw8bit": "paged_adamw_8bit", "adamw8bit": "adamw_8bit",
             "pagedadamw": "paged_adamw", "adamw4bit": "adamw_4bit"}  # fmt: skip
    shown = SourceKey("optimizer._component_", names.get(name, name), ())
    read_optimizer(found, shown, "optimizer._component_")
    if backward := found.source.take_on("optimizer_in_bwd"):
        found.exclude(backward, f"gradients of all parameters are estimated; {TOO_HIGH}")


def _read_training(found: Translation) -> None:
    rows = TrainingRows(found)
    names = dict(_PLAIN)
    steps, epochs = rows.value("max_steps_per_epoch"), rows.value("epochs")
    if steps and not steps.is_off and steps.text.isdigit():
        count = epochs.text if epochs and epochs.text.isdigit() else "1"
        rows.add(steps, f"train.steps={int(steps.text) * int(count)}")
        names.pop("epochs")
    if (betas := rows.value("optimizer.betas")) and len(betas.items) == 2:
        rows.add(betas, f"optimizer.beta1={betas.items[0]}", f"optimizer.beta2={betas.items[1]}")
    clip = rows.value("clip_grad_norm")
    rows.add(clip or SourceKey("clip_grad_norm", "null", ()),
             f"optimizer.max_grad_norm={clip.text if clip else 0}")  # fmt: skip
    rows.plain(names)
    schedule = rows.value("lr_scheduler._component_")
    if schedule and "cosine" not in schedule.text:
        rows.leave(schedule, "expected get_cosine_schedule_with_warmup; cosine is used")
    kind = SourceKey(schedule.key, "cosine", ()) if schedule else None
    rows.schedule(kind, "constant", warms_up="lr_scheduler.warmup_steps" in rows.settings)
    rows.usual({"optimizer.beta2": "0.999", "optimizer.weight_decay": "0.01"})
    rows.data(*_data(rows))


def _data(rows: TrainingRows) -> tuple[SourceKey | None, list[str]]:
    component = rows.value("dataset._component_")
    files = rows.value("dataset.data_files") or rows.value("dataset.source")
    if files is None or files.text in ("json", "text", "csv", "parquet"):
        return component, [component.text.rpartition(".")[2]] if component else []
    return files, list(files.items)
