"""Translation of axolotl's YAML file, as its versions 0.18 to 0.21 read it."""

import json
from fnmatch import fnmatchcase

from fsdpctl.config.overrides import OVERRIDES_KEY
from fsdpctl.errors import UsageError
from fsdpctl.importers import adapters, shared
from fsdpctl.importers.accelerate import read_launch_beside
from fsdpctl.importers.axolotl_training import read_training
from fsdpctl.importers.source_config import SourceConfig, SourceKey
from fsdpctl.importers.translation import RankDegrees, SourceBatch, Translation, patterns, table
from fsdpctl.plan.strategy import Offload

_DEGREES = {
    "tensor": ("tensor_parallel_size", "tensor_parallel_degree", "tensor_parallel"),
    "pipeline": ("pipeline_parallel_size",),
    "expert": ("expert_parallel_size", "expert_parallel_degree"),
}
_KERNELS = ("lora_*_kernel", "liger_*", "use_scattermoe", "use_sonicmoe")
# Losses that do not compute all logits at once.
_FUSED_LOSSES = (
    "cut_cross_entropy", "chunked_cross_entropy", "liger_fused_linear_cross_entropy",
    "unsloth_cross_entropy_loss",
)  # fmt: skip
_CROSS_ENTROPY = "CutCrossEntropyPlugin"  # the plugin is on unless `cut_cross_entropy` is false


def read_axolotl(source: SourceConfig) -> Translation:
    """Translate a file; UsageError if the training can't be estimated."""
    tools = ("transformers", "axolotl")
    target = Translation("axolotl", source, table("defaults", *tools), patterns("changes", *tools))
    _check_training(source)
    _read_model(target)
    _read_length(target)
    adapts = _read_adapters(target)
    half_key = read_launch_beside(target, source.take("bf16"))
    has_masters = _read_sharding(target)
    keys = ("context_parallel_size", "sequence_parallel_degree", "context_parallel.size")
    shared.read_context(target, *keys)
    _read_layer_offload(target, adapts=adapts)
    offloads = "strategy.offload" in target.settings  # then fp32 master weights are on the host
    _read_precision(target, half_key, has_masters=adapts or has_masters or offloads)
    if shared.read_recomputation(target, "none"):
        _read_saved_outputs(target)
    shared.read_optimizer(target, source.take("optimizer"), "optimizer")
    _read_savings(target)
    read_training(target, adapts=adapts)
    target.classify_rest(patterns("unused", "axolotl", "accelerate"))
    return target


def _check_training(source: SourceConfig) -> None:
    for key, why in table("refused", "axolotl").items():
        if key in source and (value := source.take_enabled(key)):
            raise source.error(value, why)
        if any(each.key.startswith(f"{key}.") for each in source.peek()):
            raise UsageError(f"{source.file}: {key}: {why}")
    shared.check_degrees(source, _DEGREES)
    shared.check_attention(source)


def _read_model(target: Translation) -> None:
    base, revision = target.source.take("base_model"), target.source.text("revision_of_model")
    shared.map_model(target, base, "base_model", revision)
    for each in target.source.peek():
        section, _, name = each.key.partition(".")
        if section == "overrides_of_model_config" and name and not name.startswith("_"):
            target.source.take(each.key)
            text = json.dumps(each.items) if each.is_list else each.text
            target.add_row(each, f"{OVERRIDES_KEY}.{name}={text}")
    keys = ("tokens", "special_tokens.additional_special_tokens")
    values = [value for key in keys if (value := target.source.take_enabled(key))]
    texts = [*dict.fromkeys(text for value in values for text in value.items)]
    for value in values:
        target.add_row(value, f"data.new_tokens={json.dumps(texts, ensure_ascii=False)}")


def _read_length(target: Translation) -> None:
    length = target.source.take("sequence_len")
    seq_len = length.text if length else 512
    target.add_row(length, f"train.seq_len={seq_len}", key_if_unset="sequence_len")
    if (packing := target.source.take("sample_packing")) and packing.is_off:
        target.add_row(packing, note="each sample is estimated with sequence_len tokens")
    micro = target.source.positive("micro_batch_size")
    passes = target.source.positive("gradient_accumulation_steps")
    per_step = target.source.positive("batch_size")  # samples per rank and step
    if per_step and passes is None:
        passes = max(1, per_step // (micro or 1))
    keys = ("micro_batch_size", "batch_size" if per_step else "gradient_accumulation_steps")
    target.batch = SourceBatch(keys, micro, passes)


def _read_precision(target: Translation, half_key: SourceKey | None, *, has_masters: bool) -> None:
    """Translate dtypes. Without fp32 masters, weights are trained in the dtype of loading."""
    source = target.source
    mixed = "precision=bf16" if has_masters else "precision=bf16_true"
    loaded = "" if has_masters else "the weights are loaded in this dtype"
    pure, half = source.take_on("bfloat16"), source.take_on("fp16", "float16")
    tf32 = source.take_on("tf32")
    if eight := source.take_enabled("fp8"):
        target.exclude(eight, "matrix products are estimated in bf16")
        half_key = half_key or eight
    if pure:
        target.add_row(pure, "precision=bf16_true")
    elif half:
        target.add_row(half, mixed, note=loaded or "same size as fp16")
    elif half_key is None or not half_key.is_off:
        target.add_row(half_key, mixed, key_if_unset="bf16", note=loaded)
    else:
        target.add_row(half_key, f"precision={'tf32' if tf32 else 'fp32'}")


def _read_saved_outputs(target: Translation) -> None:
    """Translate selective recomputation, which by default saves the output of attention."""
    section = "selective_checkpointing"
    values = {x.key: x for x in target.source.peek() if x.key.partition(".")[0] == section}
    for key in values:
        target.source.take(key)
    used = [each for each in values.values() if not each.is_off]
    if not used:
        return
    saved = values.get(f"{section}.save")
    unsupported = values.keys() & {f"{section}.save_modules", f"{section}.save_matmul_min_k"}
    unsupported |= target.settings.keys() & {"activation_checkpointing.blocks"}
    if (offload := values.get(f"{section}.offload")) and offload.is_on:
        target.add_row(offload, note="in host memory; estimates do not count it")
    elif unsupported or (saved and saved.items != ("attention",)):
        advice = "saves other outputs than fsdpctl; add activation_checkpointing=selective or full"
        target.require("activation_checkpointing", used[0], advice)
    else:
        note = "fsdpctl also saves every second matrix product; the estimate is too high"
        target.add_row(used[0], "activation_checkpointing=selective", note=note)


def _read_layer_offload(target: Translation, *, adapts: bool) -> None:
    """Translate the offload of frozen weights, which each rank gathers layer by layer."""
    if (value := target.source.take_on("layer_offloading")) is None or not adapts:
        return
    if target.settings.get("strategy") == "no_shard":
        note = "frozen weights are sharded, so the estimate shards the model"
        target.add_row(value, "strategy=full_shard", note=note)
    shared.read_offload(target, value, "frozen weights on the host", Offload.PARAMS)


def _read_adapters(target: Translation) -> bool:
    source = target.source
    adapter = source.take("adapter")
    rank = source.take("lora_r")
    if adapter is None:
        if parts := source.take("unfrozen_parameters"):
            why = "regular expressions are not read from files; add model.trainable=REGEX"
            target.require("model.trainable", parts, why)
        # Take these keys, which have no effect without adapters.
        source.value(*(each.key for each in source.peek() if each.key.startswith("lora_")))
        return False
    kind = adapter.text.strip().lower()
    if kind not in ("lora", "qlora"):
        raise source.error(adapter, "expected lora or qlora")
    shown_key = SourceKey("adapter, lora_r", f"{kind}, {rank.text if rank else '(not set)'}")
    target.add_row(shown_key, f"model.lora.rank={rank.text if rank else 8}")
    four, eight, gptq = map(source.take_on, ("load_in_4bit", "load_in_8bit", "gptq"))
    quantizes_experts = source.take_on("quantize_moe_experts") is not None
    if kind == "qlora" or four or gptq:
        shown_key = four or gptq or adapter
        note = "linear layers of blocks take 0.516 bytes per weight"
        target.add_row(shown_key, *adapters.quantized("nf4", experts=quantizes_experts), note=note)
    elif eight:
        note = "linear layers of blocks take 1.03 bytes per weight"
        target.add_row(eight, *adapters.quantized("int8", experts=quantizes_experts), note=note)
    _read_targets(target)
    adapters.read_modules_to_save(target)
    if scaled := source.take_on("peft_use_rslora"):
        target.add_row(scaled, "model.lora.rslora=true")
    return True


def _read_targets(target: Translation) -> None:
    names = ("linear", "modules", "parameters")
    linear, targets, stacked = (target.source.take(f"lora_target_{each}") for each in names)
    if stacked:
        default = ("all_linear",) if linear and linear.is_on else ()
        adapters.read_stacked(target, stacked, targets, default)
    elif targets and not (linear and linear.is_on):
        adapters.read_targets(target, targets)
    elif linear and linear.is_on:
        adapters.check_targets(target, targets)
        target.add_row(linear, "model.lora.targets=all_linear")
    elif not target.source.text("lora_model_dir"):
        why = "lora_target_modules: required by axolotl; set model.lora.targets"
        target.require_for_training("model.lora.targets", why)


def _read_sharding(target: Translation) -> bool:
    """Translate the sharding, and return whether bf16 weights get fp32 master weights.

    FSDP 1 and DeepSpeed have master weights; axolotl's patched FSDP 2 does not.
    """
    keys = ("dp_replicate_size", "dp_shard_size")
    replicate, shard = map(target.source.positive, keys)
    sharder = shared.read_sharding(target, "fsdp, deepspeed")
    if sharder and (replicate or shard):
        target.degrees = RankDegrees(keys, replicate or 1, shard or -1)
    return sharder == "DEEPSPEED" or (sharder == "FSDP" and target.whole_gradients)


def _read_savings(target: Translation) -> None:
    plugins = target.source.take("plugins")
    if plugins and _CROSS_ENTROPY in plugins.text and "cut_cross_entropy" not in target.source:
        target.add_row(plugins, note=f"{_CROSS_ENTROPY}: logits of a few tokens at a time")
        target.whole_logits = False
    for key in _FUSED_LOSSES:
        if value := target.source.take_enabled(key):
            target.add_row(value, note="logits of few tokens at a time: train.loss_chunk_tokens")
            target.whole_logits = False
    for key, why in table("smaller", "axolotl").items():
        if value := target.source.take_enabled(key):
            target.exclude(value, f"{why}; {shared.TOO_HIGH}")
    is_restored = target.source.take_on("model_quantization_config_kwargs.dequantize")
    if (packed := target.source.take_enabled("model_quantization_config")) and not is_restored:
        target.exclude(packed, f"weights are estimated as if dequantized; {shared.TOO_HIGH}")
    if tiled := target.source.take_on("tiled_mlp"):
        target.add_row(tiled, "train.mlp_chunk_tokens=auto")
    if compiled := target.source.take_enabled("torch_compile", "deepcompile"):
        target.exclude(compiled, "estimated without compilation, which usually needs more memory")
    _read_kernels(target)


def _read_kernels(target: Translation) -> None:
    """Translate kernels that save fewer tensors for backward."""
    recomputes = target.settings.get("activation_checkpointing") == "full"
    for each in target.source.peek():
        if not any(fnmatchcase(each.key, pattern) for pattern in _KERNELS):
            continue
        value = target.source.take_on(each.key)
        if value and recomputes:
            target.add_row(value, note="not counted: saves only tensors of the recomputed layer")
        elif value:
            target.exclude(value, f"third-party kernels; {shared.TOO_HIGH}")
