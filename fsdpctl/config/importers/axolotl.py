"""An axolotl configuration (YAML) in our words, by axolotl's schema of version 0.19 and before."""

import re

from fsdpctl.config.importers.models import words_of_name
from fsdpctl.config.importers.parts import (
    IDLE_OF_FSDP,
    TOO_HIGH,
    deepspeed_file,
    read_fsdp,
    read_optimizer,
    read_zero,
    refused_degree,
)
from fsdpctl.config.importers.said import Said, Value
from fsdpctl.config.importers.translation import Batch, Degrees, Translation
from fsdpctl.errors import UsageError

# What would make the figure one of another training.
_OTHER_TRAININGS = {
    "rl": "trains on preferences, with a second model",
    "reward_model": "trains a reward model",
    "process_reward_model": "trains a reward model",
    "qat": "trains with quantization played in, which takes more",
    "lora_modules_to_save": "trains whole layers besides the adapters, which takes more",
    "lora_target_parameters": "adapts what is no linear layer",
    "peft_use_dora": "DoRA takes more than LoRA",
    "eager_attention": "eager attention keeps a score for each pair of tokens",
    "overrides_of_model_config": "changes the model; put the change into a config.json",
}
_DEGREES = {
    "tensor": ("tensor_parallel_size", "tensor_parallel_degree", "tensor_parallel"),
    "context": ("context_parallel_size", "sequence_parallel_degree"),
    "pipeline": ("pipeline_parallel_size",),
    "expert": ("expert_parallel_size", "expert_parallel_degree"),
}
_SMALLER = {
    "load_in_4bit": "the frozen weights are estimated in bf16, not in 4 bits",
    "load_in_8bit": "the frozen weights are estimated in bf16, not in 8 bits",
    "gptq": "the frozen weights are estimated in bf16, not quantized",
    "activation_offloading": "activations stay on the device here",
    "lora_mlp_kernel": "kernels of others",
    "lora_qkv_kernel": "kernels of others",
    "lora_o_kernel": "kernels of others",
    "peft_layers_to_transform": "all layers are adapted here",
}
# With these not all logits exist at once.
_FUSED_LOSSES = (
    "cut_cross_entropy", "chunked_cross_entropy", "liger_fused_linear_cross_entropy",
    "unsloth_cross_entropy_loss",
)  # fmt: skip
_IDLE = (
    "dataset*", "test_dataset*", "pretraining_dataset*", "shuffle_*", "skip_prepare_dataset",
    "dataloader_*", "wandb_*", "use_wandb", "mlflow_*", "use_mlflow", "comet_*", "use_comet",
    "swanlab*", "trackio*", "gradio_*", "ray_*", "use_ray", "use_tensorboard", "output_dir",
    "val_set_size", "eval*", "do_*eval", "save*", "logging_steps", "lr_*", "learning_rate",
    "embedding_lr*", "cosine_*", "warmup_*", "weight_decay", "adam_*", "max_grad_norm",
    "loraplus_*", "num_epochs", "max_steps", "special_tokens*", "tokens", "added_tokens_overrides*",
    "tokenizer_*", "model_type", "base_model_config", "is_*_derived_model", "trust_remote_code",
    "chat_template*", "default_system_message", "eot_tokens", "train_on_*", "roles_to_train",
    "excess_length_strategy", "hub_*", "hf_*", "push_*", "seed", "strict", "tf32",
    "resume_from_checkpoint", "auto_resume_from_checkpoints", "early_stopping_patience",
    "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "group_by_length",
    "curriculum_sampling", "debug", "local_rank", "world_size", "gradient_checkpointing_kwargs*",
    "attention", "attn_implementation", "flash_attention", "xformers_attention", "sdp_attention",
    "flex_attention", "flex_attn*", "flash_attn_*", "sample_packing_*", "pad_to_sequence_len",
    "min_sample_len", "remove_unused_columns", "loss_watchdog_*", "profiler_*", "gc_steps",
    "include_t*", "low_cpu_mem_usage", "device_map", "device", "ddp*", "accelerator_config*",
    "lora_model_dir", "lora_fan_in_fan_out", "lora_on_cpu", "merge_lora", "peft.loftq*",
    "plugins", "torch_compile_*", "torchao_*", "telemetry*", "micro_batch_size",
    "field_messages", "message_*", "unfrozen_parameters", "fp16", "float32",
    *(f"fsdp_config.{each}" for each in IDLE_OF_FSDP), "fsdp_version", "fsdp",
    "fsdp_final_state_dict_type",
)  # fmt: skip


def is_axolotl(said: Said) -> bool:
    """Whether a YAML file is one of axolotl's."""
    return "base_model" in said


def read_axolotl(said: Said) -> Translation:
    """What it means.

    Raises:
        UsageError: it trains in a way that the figure could not be for.
    """
    found = Translation("axolotl", said)
    _refuse_other_trainings(said)
    _read_model(found)
    _read_length(found)
    adapts = _read_adapters(found)
    shards = _read_sharding(found)
    _read_precision(found, keeps_masters=adapts or shards)
    _read_recomputation(found)
    read_optimizer(found, said.take("optimizer"), "optimizer")
    _read_without(found)
    found.sort_rest(_IDLE)
    return found


def _refuse_other_trainings(said: Said) -> None:
    for key, why in _OTHER_TRAININGS.items():
        if key in said and (value := said.take(key)) and not value.is_off:
            raise said.refused(value, f"{why}; the figure would be for something else")
    if any(each.key.startswith("qat.") for each in said.peek()):
        raise UsageError(f"{said.file}: qat: {_OTHER_TRAININGS['qat']}")
    for what, keys in _DEGREES.items():
        value = said.take(*keys)
        if value and not value.is_off and value.text.strip() != "1":
            raise refused_degree(said, value, what)


def _read_model(found: Translation) -> None:
    base, revision = found.said.take("base_model"), found.said.text("revision_of_model")
    if base is None:
        found.missing.append(("model", "base_model: not set; say which, as model=llama3_8b"))
        return
    try:
        words = words_of_name(base.text.strip() + (f"@{revision}" if revision else ""))
    except UsageError as error:
        raise UsageError(f"{found.file}: base_model: {error}") from None
    if words:
        found.became(base, *words)
    else:
        found.missing.append(
            ("model", f"base_model: {base.text}: no directory, not in the cache of Hugging Face, "
             "and no model that is known here by name; say which, as model=llama3_8b or model=hf "
             "model.path=DIR with its config.json")
        )  # fmt: skip


def _read_length(found: Translation) -> None:
    length = found.said.take("sequence_len")
    found.became(length, f"train.seq_len={length.text if length else 512}", default="sequence_len")
    packing = found.said.take("sample_packing")
    if packing and packing.is_on:
        found.became(packing, "data=chat", "data.packing=true")
    elif packing:
        found.became(packing, note="each sample taken to be as long as sequence_len")
    micro = found.said.positive("micro_batch_size")
    passes = found.said.positive("gradient_accumulation_steps")
    both = found.said.positive("batch_size")  # of a rank and step
    if both and passes is None:
        passes = max(1, both // (micro or 1))
    found.batch = Batch(
        ("micro_batch_size", "gradient_accumulation_steps"), micro or 1, passes or 1
    )


def _read_precision(found: Translation, *, keeps_masters: bool) -> None:
    """In bf16 the weights are loaded so; FSDP, DeepSpeed and adapters have masters in fp32."""
    said = found.said
    mixed = "precision=bf16" if keeps_masters else "precision=bf16_true"
    loaded = "" if keeps_masters else "the weights are loaded in it, and nothing widens them"
    pure, half, narrow = said.take("bfloat16"), said.take("fp16", "float16"), said.take("bf16")
    if (eight := said.take("fp8")) and not eight.is_off:
        found.without(eight, "products are estimated in bf16")
        narrow = narrow or eight
    if pure and pure.is_on:
        found.became(pure, "precision=bf16_true")
    elif half and half.is_on:
        found.became(half, mixed, note=loaded or "as many bytes as fp16")
    elif narrow is None or not narrow.is_off:
        found.became(narrow, mixed, default="bf16", note=loaded)
    else:
        found.became(narrow, "precision=fp32")


def _read_recomputation(found: Translation) -> None:
    value = found.said.take("gradient_checkpointing")
    if value is None or value.is_off:
        found.became(value, "activation_checkpointing=none", default="gradient_checkpointing")
        return
    found.became(value, "activation_checkpointing=full")
    if not value.is_on:  # offload, offload_disk
        found.without(value, f"what blocks keep stays on the device here; {TOO_HIGH}")


def _read_adapters(found: Translation) -> bool:
    """Returns whether there are any."""
    said = found.said
    adapter = said.take("adapter")
    rank, alpha = said.take("lora_r"), said.take("lora_alpha")
    linear, targets = said.take("lora_target_linear"), said.take("lora_target_modules")
    if adapter is None:
        parts = said.take("unfrozen_parameters")
        if parts:
            found.missing.append(
                ("model.trainable", f"unfrozen_parameters: {parts.text[:80]}: expressions are not "
                 "taken from files; type what is trained, as model.trainable=REGEX")
            )  # fmt: skip
        return False
    kind = adapter.text.strip().lower()
    if kind not in ("lora", "qlora"):
        raise said.refused(adapter, "only lora and qlora are known here")
    shown = Value("adapter, lora_r", f"{kind}, {rank.text if rank else '(not set)'}", ())
    found.became(shown, f"model.lora.rank={rank.text if rank else 8}")
    if kind == "qlora":
        found.without(adapter, f"{_SMALLER['load_in_4bit']}; {TOO_HIGH}")
        said.take("load_in_4bit")
    if alpha:
        found.became(alpha, f"model.lora.alpha={alpha.text}")
    if targets and not (linear and linear.is_on):
        ends = "|".join(map(re.escape, targets.items))
        found.became(targets, rf"model.lora.targets=(^|\.)({ends})$")
    elif linear or targets:
        found.became(linear or targets, "model.lora.targets=all_linear")
    if (scaled := said.take("peft_use_rslora")) and scaled.is_on:
        found.became(scaled, "model.lora.rslora=true")
    found.own_engine = "PyTorch's own engines are estimated without adapters"
    return True


def _read_sharding(found: Translation) -> bool:
    """Returns whether anything is sharded, or kept by a tool that has masters in fp32."""
    said = found.said
    version = said.text("fsdp_version", "fsdp_config.fsdp_version", "fsdp_config.version")
    modes, deepspeed = said.take("fsdp"), said.take("deepspeed")
    replicate, shard = said.positive("dp_replicate_size"), said.positive("dp_shard_size")
    has_section = any(each.key.startswith("fsdp_config.") for each in said.peek())
    if deepspeed:
        if (inner := deepspeed_file(found, deepspeed)) is not None:
            read_zero(found, inner, "zero_optimization.", "stage")
    elif "deepspeed.zero_optimization" in said:
        read_zero(found, said, "deepspeed.zero_optimization.", "stage")
    elif modes or has_section:
        words = [each.strip().lower() for each in (modes.items if modes else ())]
        strategy = next((each for each in words if each not in ("auto_wrap", "offload")), "")
        read_fsdp(found, "fsdp_config", version=version or "1", strategy=strategy)
        if modes and "offload" in words:
            found.without(modes, f"states stay on the device here; {TOO_HIGH}")
    else:
        found.became(None, "strategy=no_shard", "engine=ddp", default="fsdp, deepspeed")
        return False
    if replicate or shard:
        found.degrees = Degrees(("dp_replicate_size", "dp_shard_size"), replicate or 1, shard or -1)
    return True


def _read_without(found: Translation) -> None:
    for key in _FUSED_LOSSES:
        if (value := found.said.take(key)) and not value.is_off:
            found.became(value, note="logits for some tokens at a time, as train.loss_chunk_tokens")
            found.whole_logits = False
    for key, why in _SMALLER.items():
        if (value := found.said.take(key)) and not value.is_off:
            found.without(value, f"{why}; {TOO_HIGH}")
    compiled = found.said.take("torch_compile")
    if compiled and not compiled.is_off:
        found.without(compiled, "estimated as if uncompiled, which takes more as a rule")
    for each in found.said.peek():
        if each.key.startswith("liger_") and (value := found.said.take(each.key)) and value.is_on:
            found.without(value, f"kernels of others; {TOO_HIGH}")
