"""Translation of axolotl's YAML file, by the schemas of versions 0.18 to 0.21."""

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
# With these, not all logits exist at once.
_FUSED_LOSSES = (
    "cut_cross_entropy", "chunked_cross_entropy", "liger_fused_linear_cross_entropy",
    "unsloth_cross_entropy_loss",
)  # fmt: skip
_CROSS_ENTROPY = "CutCrossEntropyPlugin"  # on unless `cut_cross_entropy` turns it off


def read_axolotl(source: SourceConfig) -> Translation:
    """Translate a configuration; UsageError if its training can't be estimated."""
    tools = ("transformers", "axolotl")
    found = Translation("axolotl", source, table("defaults", *tools), patterns("changes", *tools))
    _check_training(source)
    _read_model(found)
    _read_length(found)
    adapts = _read_adapters(found)
    narrow = read_launch_beside(found, source.take("bf16"))
    shards = _read_sharding(found)
    keys = ("context_parallel_size", "sequence_parallel_degree", "context_parallel.size")
    shared.read_context(found, *keys)
    _read_layer_offload(found, adapts=adapts)
    offloads = "strategy.offload" in found.settings  # with masters in fp32 on the host
    _read_precision(found, narrow, keeps_masters=adapts or shards or offloads)
    if shared.read_recomputation(found, "none"):
        _read_saved_outputs(found)
    shared.read_optimizer(found, source.take("optimizer"), "optimizer")
    _read_without(found)
    read_training(found, adapts=adapts)
    found.classify_rest(patterns("unused", "axolotl", "accelerate"))
    return found


def _check_training(source: SourceConfig) -> None:
    for key, why in table("refused", "axolotl").items():
        if key in source and (value := source.take_enabled(key)):
            raise source.error(value, why)
        if any(each.key.startswith(f"{key}.") for each in source.peek()):
            raise UsageError(f"{source.file}: {key}: {why}")
    shared.check_degrees(source, _DEGREES)
    shared.check_attention(source)


def _read_model(found: Translation) -> None:
    base, revision = found.source.take("base_model"), found.source.text("revision_of_model")
    shared.map_model(found, base, "base_model", revision)
    for each in found.source.peek():
        place, _, name = each.key.partition(".")
        if place == "overrides_of_model_config" and name and not name.startswith("_"):
            found.source.take(each.key)
            text = json.dumps(each.items) if each.is_list else each.text
            found.map(each, f"{OVERRIDES_KEY}.{name}={text}")
    keys = ("tokens", "special_tokens.additional_special_tokens")
    given = [value for key in keys if (value := found.source.take_enabled(key))]
    texts = [*dict.fromkeys(text for value in given for text in value.items)]
    for value in given:
        found.map(value, f"data.new_tokens={json.dumps(texts, ensure_ascii=False)}")


def _read_length(found: Translation) -> None:
    length = found.source.take("sequence_len")
    found.map(length, f"train.seq_len={length.text if length else 512}", default="sequence_len")
    if (packing := found.source.take("sample_packing")) and packing.is_off:
        found.map(packing, note="each sample is estimated with sequence_len tokens")
    micro = found.source.positive("micro_batch_size")
    passes = found.source.positive("gradient_accumulation_steps")
    both = found.source.positive("batch_size")  # per rank and step
    if both and passes is None:
        passes = max(1, both // (micro or 1))
    keys = ("micro_batch_size", "batch_size" if both else "gradient_accumulation_steps")
    found.batch = SourceBatch(keys, micro, passes)


def _read_precision(found: Translation, narrow: SourceKey | None, *, keeps_masters: bool) -> None:
    """Translate the dtypes. Where no `keeps_masters`, weights are trained as they are loaded."""
    source = found.source
    mixed = "precision=bf16" if keeps_masters else "precision=bf16_true"
    loaded = "" if keeps_masters else "the weights are loaded in this dtype"
    pure, half = source.take_on("bfloat16"), source.take_on("fp16", "float16")
    tf32 = source.take_on("tf32")
    if eight := source.take_enabled("fp8"):
        found.exclude(eight, "matrix products are estimated in bf16")
        narrow = narrow or eight
    if pure:
        found.map(pure, "precision=bf16_true")
    elif half:
        found.map(half, mixed, note=loaded or "same size as fp16")
    elif narrow is None or not narrow.is_off:
        found.map(narrow, mixed, default="bf16", note=loaded)
    else:
        found.map(narrow, f"precision={'tf32' if tf32 else 'fp32'}")


def _read_saved_outputs(found: Translation) -> None:
    """Translate selective recomputation, by default with the saved output of attention."""
    section = "selective_checkpointing"
    given = {x.key: x for x in found.source.peek() if x.key.partition(".")[0] == section}
    for key in given:
        found.source.take(key)
    used = [each for each in given.values() if not each.is_off]
    if not used:
        return
    saved = given.get(f"{section}.save")
    others = given.keys() & {f"{section}.save_modules", f"{section}.save_matmul_min_k"}
    others |= found.settings.keys() & {"activation_checkpointing.blocks"}
    if (leaves := given.get(f"{section}.offload")) and leaves.is_on:
        found.map(leaves, note="in host memory, which is not counted")
    elif others or (saved and saved.items != ("attention",)):
        way = "saves other outputs than fsdpctl; add activation_checkpointing=selective or full"
        found.require("activation_checkpointing", used[0], way)
    else:
        note = "fsdpctl also saves every second matrix product; the estimate is too high"
        found.map(used[0], "activation_checkpointing=selective", note=note)


def _read_layer_offload(found: Translation, *, adapts: bool) -> None:
    """Translate the frozen weights of layers on the host, which each rank gathers by layer."""
    if (value := found.source.take_on("layer_offloading")) is None or not adapts:
        return
    if found.settings.get("strategy") == "no_shard":
        found.map(value, "strategy=full_shard", note="replicas share the frozen weights")
    shared.read_offload(found, value, "frozen weights on the host", Offload.PARAMS)


def _read_adapters(found: Translation) -> bool:
    source = found.source
    adapter = source.take("adapter")
    rank = source.take("lora_r")
    if adapter is None:
        if parts := source.take("unfrozen_parameters"):
            why = "regular expressions are not read from files; add model.trainable=REGEX"
            found.require("model.trainable", parts, why)
        source.value(*(each.key for each in source.peek() if each.key.startswith("lora_")))
        return False
    kind = adapter.text.strip().lower()
    if kind not in ("lora", "qlora"):
        raise source.error(adapter, "expected lora or qlora")
    shown = SourceKey("adapter, lora_r", f"{kind}, {rank.text if rank else '(not set)'}")
    found.map(shown, f"model.lora.rank={rank.text if rank else 8}")
    four, eight, gptq = map(source.take_on, ("load_in_4bit", "load_in_8bit", "gptq"))
    packs = source.take_on("quantize_moe_experts") is not None
    if kind == "qlora" or four or gptq:
        shown = four or gptq or adapter
        note = "linear layers of blocks take 0.516 bytes per weight"
        found.map(shown, *adapters.quantized("nf4", experts=packs), note=note)
    elif eight:
        note = "linear layers of blocks take 1.03 bytes per weight"
        found.map(eight, *adapters.quantized("int8", experts=packs), note=note)
    _read_targets(found)
    adapters.read_modules_to_save(found)
    if scaled := source.take_on("peft_use_rslora"):
        found.map(scaled, "model.lora.rslora=true")
    return True


def _read_targets(found: Translation) -> None:
    names = ("linear", "modules", "parameters")
    linear, targets, stacked = (found.source.take(f"lora_target_{each}") for each in names)
    if stacked:
        usual = ("all_linear",) if linear and linear.is_on else ()
        adapters.read_stacked(found, stacked, targets, usual)
    elif targets and not (linear and linear.is_on):
        adapters.read_targets(found, targets)
    elif linear and linear.is_on:
        adapters.check_heads(found, targets)
        found.map(linear, "model.lora.targets=all_linear")
    elif not found.source.text("lora_model_dir"):
        why = "lora_target_modules: required by axolotl; set model.lora.targets"
        found.require_for_training("model.lora.targets", why)


def _read_sharding(found: Translation) -> bool:
    """Translate the sharding, and return whether weights in bf16 get masters in fp32.

    FSDP 1 and DeepSpeed make those; axolotl's patched FSDP 2 leaves the weights as they are.
    """
    keys = ("dp_replicate_size", "dp_shard_size")
    replicate, shard = map(found.source.positive, keys)
    shards = shared.read_sharding(found, "fsdp, deepspeed")
    if shards and (replicate or shard):
        found.degrees = RankDegrees(keys, replicate or 1, shard or -1)
    return shards == "DEEPSPEED" or (shards == "FSDP" and found.whole_gradients)


def _read_without(found: Translation) -> None:
    plugins = found.source.take("plugins")
    if plugins and _CROSS_ENTROPY in plugins.text and "cut_cross_entropy" not in found.source:
        found.map(plugins, note=f"{_CROSS_ENTROPY}: logits of a few tokens at a time")
        found.whole_logits = False
    for key in _FUSED_LOSSES:
        if value := found.source.take_enabled(key):
            found.map(value, note="logits of few tokens at a time: train.loss_chunk_tokens")
            found.whole_logits = False
    for key, why in table("smaller", "axolotl").items():
        if value := found.source.take_enabled(key):
            found.exclude(value, f"{why}; {shared.TOO_HIGH}")
    is_restored = found.source.take_on("model_quantization_config_kwargs.dequantize")
    if (packed := found.source.take_enabled("model_quantization_config")) and not is_restored:
        found.exclude(packed, f"weights are estimated as if dequantized; {shared.TOO_HIGH}")
    if tiled := found.source.take_on("tiled_mlp"):
        found.map(tiled, "train.mlp_chunk_tokens=auto")
    if compiled := found.source.take_enabled("torch_compile", "deepcompile"):
        found.exclude(compiled, "estimated without compilation, which usually needs more memory")
    _read_kernels(found)


def _read_kernels(found: Translation) -> None:
    """Translate kernels that save fewer tensors for backward: of one layer, if it is recomputed."""
    recomputes = found.settings.get("activation_checkpointing") == "full"
    for each in found.source.peek():
        if not any(fnmatchcase(each.key, pattern) for pattern in _KERNELS):
            continue
        value = found.source.take_on(each.key)
        if value and recomputes:
            found.map(value, note="not counted: only saves tensors of the layer being recomputed")
        elif value:
            found.exclude(value, f"third-party kernels; {shared.TOO_HIGH}")
