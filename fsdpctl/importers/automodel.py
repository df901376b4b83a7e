"""Translation of NeMo Automodel's YAML files for fine-tuning and pretraining of text models."""

import re

from fsdpctl.config.source_config import SourceConfig, SourceKey
from fsdpctl.errors import UsageError
from fsdpctl.importers.automodel_training import read_training
from fsdpctl.importers.defaults import CHANGES_AUTOMODEL
from fsdpctl.importers.models import map_model, map_overrides
from fsdpctl.importers.shared import (
    TOO_HIGH,
    check_degrees,
    check_heads,
    quantized,
    read_context,
    read_optimizer,
)
from fsdpctl.importers.translation import RankDegrees, SourceBatch, Translation

_RECIPES = (
    "TrainFinetuneRecipeForNextTokenPrediction", "BenchmarkingRecipeForNextTokenPrediction", ""
)  # fmt: skip
_SCHEDULER = "step_scheduler."
_BATCH = 32  # samples of a step: components/training/step_scheduler.py:379
_OTHER_TRAININGS = ("dllm", "flow_matching", "teacher_model", "kd_ratio", "recipe_args", "mining")
_UNUSED = (
    "recipe", f"{_SCHEDULER}*", "dist_env.*", "rng.*", "model.trust_remote_code",
    "model.attn_implementation", "model.use_liger_kernel", "model.backend.*", "model.*_target_",
    "*._target_", "clip_grad_norm.*", "dataset.*", "dataloader.*", "validation_*", "optimizer.*",
    "lr_scheduler.*", "checkpoint.*", "loss_fn.*", "wandb.*", "mlflow.*", "comet.*", "ci.*",
    "compile.*", "tokenizer.*", "slurm.*", "skypilot.*", "packed_sequence.*", "peft.use_triton",
    "peft.dropout", "peft.lora_*_init", "peft.dropout_position", "logger.*",
    "distributed.pipeline.*", "distributed.sequence_parallel", "distributed.dp_size", "benchmark.*",
    "nvtx", "quantization.bnb_4bit_*", "distributed.mp_policy.*", "distributed.moe.*", "timeout*",
    "model.force_hf", "model.output_hidden_states", "peft.use_memory_efficient_lora",
    "tool_call_eval.*", "neftune.*", "fp8.*", "distributed.enable_fsdp2_prefetch",
    "distributed.patch_is_packed_sequence",
)  # fmt: skip


def read_automodel(source: SourceConfig) -> Translation:
    """Translate a configuration; UsageError if its training can't be estimated."""
    found = Translation("Automodel", source)
    recipe = source.take("recipe", "recipe._target_")
    if recipe and recipe.text.rpartition(".")[2] not in _RECIPES:
        raise source.error(recipe, f"expected {_RECIPES[0]}")
    if other := next((key for key in _OTHER_TRAININGS if key in source), None):
        raise UsageError(f"{source.file}: {other}: trains something else than next tokens")
    kinds = {"tensor": "tp_size", "pipeline": "pp_size", "expert": "ep_size"}
    check_degrees(source, {what: (f"distributed.{key}",) for what, key in kinds.items()})
    _read_model(found)
    _read_adapters(found)
    _read_lengths(found)
    _read_sharding(found)
    dtype = source.take("model.torch_dtype", "model.dtype")
    is_whole = dtype is not None and dtype.text.rpartition(".")[2] in ("float32", "fp32")
    precision = "precision=bf16" if is_whole else "precision=bf16_true"
    found.map(dtype, precision, "precision.reduce_dtype=float32", default="model.torch_dtype")
    for key in ("fp8.enabled", "fp8"):
        if eight := source.take_used(key):
            found.exclude(eight, "matrix products are estimated in bf16")
    name = source.take("optimizer._target_")
    kind = name.text.rpartition(".")[2].lower() if name else "adamw"
    fused, each = found.source.take_on("optimizer.fused"), found.source.take("optimizer.foreach")
    if kind in ("adam", "adamw") and (fused or (each and each.is_off)):
        read_optimizer(found, SourceKey("optimizer._target_", "adamw_torch_fused", ()), "optimizer")
    else:
        read_optimizer(found, SourceKey("optimizer._target_", kind, ()), "optimizer")
    loss = source.text("loss_fn._target_")
    found.whole_logits = not re.search("fused|chunk", loss, re.IGNORECASE)
    for key in ("compile.enabled", "distributed.enable_compile"):
        if compiled := source.take_on(key):
            found.map(compiled, "train.compile=true")
    read_training(found, kind)
    found.changes = CHANGES_AUTOMODEL
    found.sort_rest(_UNUSED)
    return found


def _read_model(found: Translation) -> None:
    keys = ("model.pretrained_model_name_or_path", "model.config.pretrained_model_name_or_path")
    value = found.source.take(*keys, "model.config")
    target = found.source.text("model._target_")
    if value is None or (target and not re.search("CausalLM|gpt2", target)):
        why = f"model: {target or 'not set'}: expected a causal language model by its path or name"
        raise UsageError(f"{found.file}: {why}")
    map_model(found, value, value.key)
    map_overrides(found, "model.config")
    if target.endswith("from_config"):  # from scratch
        found.model = None
        found.map(value, "model.init=random")


def _read_adapters(found: Translation) -> None:
    source = found.source
    rank, alpha = source.take("peft.dim"), source.take("peft.alpha")
    every, targets = source.take("peft.match_all_linear"), source.take("peft.target_modules")
    if trains := source.take_on("qat.enabled"):
        raise source.error(trains, "quantization-aware training needs more memory")
    if dora := source.take_on("peft.use_dora"):
        raise source.error(dora, "DoRA needs more memory than LoRA")
    if not any(each.key.startswith("peft.") for each in source.all_keys()):
        return
    found.map(rank, f"model.lora.rank={rank.text if rank else 8}", default="peft.dim")
    found.map(alpha, f"model.lora.alpha={alpha.text if alpha else 32}", default="peft.alpha")
    check_heads(found, targets)
    without = source.take_used("peft.exclude_modules")
    is_every = every is not None and every.is_on
    if without and (targets or is_every):
        raise source.error(without, "conflicts with target_modules and match_all_linear")
    if without:
        names = "|".join(map(_pattern, without.items))
        found.map(without, f"model.lora.targets=^(?!.*({names}))")
    elif targets and targets.items != ("*",) and not is_every:
        names = "|".join(map(_pattern, targets.items))
        found.map(targets, f"model.lora.targets={names}")
    elif targets or is_every:
        note = "without the head, which has adapters in Automodel"
        found.map(every or targets, "model.lora.targets=all_linear", note=note)
    else:
        found.map(None, "model.lora.targets=_proj$", default="peft.target_modules")
    for key, dtype in (("load_in_4bit", "nf4"), ("load_in_8bit", "int8")):
        if value := source.take_on(f"quantization.{key}"):
            found.map(value, *quantized(dtype))


def _pattern(wildcard: str) -> str:
    """Return the regular expression of a name in which `*` is any text."""
    inner = ".*".join(map(re.escape, re.split(r"\*+", wildcard.strip())))
    return rf"(^|\.){inner}$" if not inner.startswith(".*") else f"{inner[2:]}$"


def _read_lengths(found: Translation) -> None:
    source = found.source
    packed = source.whole("packed_sequence.packed_sequence_size") or 0
    length = source.take("dataset.seq_length", "dataset.seq_len", "dataset.max_seq_length")
    if packed:
        found.map(SourceKey("packed_sequence.packed_sequence_size", str(packed), ()),
                  "data=chat", "data.packing=true", f"train.seq_len={packed}")  # fmt: skip
    elif length:
        found.map(length, f"train.seq_len={length.text}")
    else:
        why = "dataset.seq_length: not set: Automodel does not shorten samples; set train.seq_len"
        found.missing_for_training.append(("train.seq_len", why))
    keys = (f"{_SCHEDULER}local_batch_size", f"{_SCHEDULER}global_batch_size")
    micro, total = map(source.positive, keys)
    found.batch = SourceBatch(keys, micro, None, total or _BATCH)


def _read_sharding(found: Translation) -> None:
    source = found.source
    kind = source.take("distributed.strategy", "distributed._target_")
    name = kind.text.rpartition(".")[2].lower() if kind else "fsdp2"
    if "ddp" in name:
        found.map(kind, "strategy=no_shard", "engine=ddp")
    else:
        note = "" if "fsdp2" in name else "estimated as FSDP 2"
        after = source.take("distributed.reshard_after_forward")
        strategy = "shard_grad_op" if after and after.is_off else "full_shard"
        found.map(kind, f"strategy={strategy}", "engine=fsdp2", default="distributed.strategy",
                  note=note)  # fmt: skip
        deferred = source.take("distributed.defer_fsdp_grad_sync")
        found.whole_gradients = "fsdp2" in name and not (deferred and deferred.is_off)
    replicate = source.whole("distributed.dp_replicate_size") or 1
    if replicate > 1:
        keys = ("distributed.dp_replicate_size", "distributed.dp_size")
        found.degrees = RankDegrees(keys, replicate, -1)
    read_context(found, "distributed.cp_size")
    keys = ("distributed.activation_checkpointing", "parallelizer.activation_checkpointing")
    for value in filter(None, map(source.take_used, keys)):
        mode = "selective" if value.text.strip().lower() == "selective" else "full"
        found.map(value, f"activation_checkpointing={mode}")
    keys = ("distributed.offload_policy._target_", "distributed.cpu_offload")
    if offload := source.take_used(*keys):
        found.exclude(offload, f"model states are estimated on the device; {TOO_HIGH}")
