"""Translation of the YAML file of `accelerate config`: ranks, sharding and precision."""

from fsdpctl.importers import shared
from fsdpctl.importers.source_config import SourceConfig, SourceKey
from fsdpctl.importers.training_arguments import read_deepspeed_training
from fsdpctl.importers.translation import RankDegrees, SourceBatch, Translation, patterns

_MULTI_DEVICE = ("MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA")


def read_accelerate(source: SourceConfig) -> Translation:
    """Translate a file, which names no model; UsageError if the training can't be estimated."""
    target = Translation("accelerate", source)
    target.missing.append(
        ("model", "names no model; add model=llama3_8b, or model=hf model.path=DIR, and "
         "train.seq_len=N train.micro_batch_size=N")
    )  # fmt: skip
    read_launch(target)
    _read_precision(target)
    _read_batch(target)
    read_deepspeed_training(target)
    clip = target.value("deepspeed_config.gradient_clipping")
    if clip and clip.text.strip() != "auto":
        target.add_training(clip, f"optimizer.max_grad_norm={clip.text}")
    why = "decided by the script; set optimizer.lr, lr_scheduler, data and the length"
    target.leave_out(SourceKey("(training)", ""), why)
    target.classify_rest(patterns("unused", "accelerate"))
    return target


def read_launch(target: Translation) -> None:
    """Translate the ranks, compilation and sharding."""
    source = target.source
    environment = source.take("compute_environment")
    if environment is not None and environment.text.strip() != "LOCAL_MACHINE":
        raise source.error(environment, "expected LOCAL_MACHINE")
    _read_ranks(target)
    compiled = source.take("dynamo_config.dynamo_backend", "dynamo_backend")
    if compiled and compiled.text.lower() != "no":
        target.exclude(compiled, "estimated without compilation, which usually needs more memory")
    if not (source.launch and source.sets_sharding):
        _read_sharding(target)


def read_launch_beside(target: Translation, half_key: SourceKey | None) -> SourceKey | None:
    """Translate the file of accelerate next to a training file; return the key of the precision.

    accelerate's key applies if `half_key`, the training file's, is off. For other keys that both
    files have, the training file decides, as in transformers.
    """
    source = target.source
    if (launch := source.launch) is None:
        return half_key
    read_launch(target)
    why = f"{source.file.name} sets it"
    keys = ("gradient_accumulation_steps", "gradient_clipping")
    zero_keys = [source.take(f"deepspeed_config.{key}") for key in keys]
    mixed = source.take("mixed_precision")
    if mixed is not None and half_key is not None and half_key.is_off:
        half_key = half_key if mixed.text.strip().lower() == "no" else mixed
        mixed = None
    ignored = [x for x in (*zero_keys, mixed) if x and x.text.strip() not in ("auto", "bf16")]
    ignored += [each for each in launch.peek() if each.key.partition(".")[0] in source.decided]
    for each in ignored:
        if (each.key, each.text) != ("gradient_accumulation_steps", "1"):  # the default
            target.leave_out(SourceKey(each.key, each.text[:80]), why)
    return half_key


def _read_ranks(target: Translation) -> None:
    source, prefix = target.source, "parallelism_config.parallelism_config_"
    shared.check_degrees(source, {"tensor": (f"{prefix}tp_size",)})
    shared.read_context(target, f"{prefix}cp_size", f"{prefix}sp_size")
    keys = (f"{prefix}dp_replicate_size", f"{prefix}dp_shard_size")
    replicate, shard = map(source.positive, keys)
    if replicate or shard:
        target.degrees = RankDegrees(keys, replicate or 1, shard or 1)
    ranks, nodes = source.positive("num_processes"), source.positive("num_machines") or 1
    shown_key = SourceKey("num_processes, num_machines", f"{ranks}, {nodes}")
    if ranks is None:
        return
    if ranks % nodes:
        raise source.error(shown_key, "expected the same number of ranks on each node")
    per_node = f"launch.nproc_per_node={ranks // nodes}"
    target.add_row(shown_key, per_node, f"launch.nnodes={nodes}")


def _read_sharding(target: Translation) -> None:
    source = target.source
    kind = source.take("distributed_type")
    name = kind.text.strip().upper() if kind else "NO"
    cpu = source.take_on("use_cpu")
    if cpu or name == "MULTI_CPU":
        target.add_row(cpu or kind, "launch.device=cpu")
    if name == "FSDP":
        shared.read_fsdp(target, version=source.text("fsdp_config.fsdp_version", default="1"))
    elif name == "DEEPSPEED":
        if file := source.take("deepspeed_config.deepspeed_config_file"):
            shared.read_deepspeed(target, file)
        else:
            shared.read_zero(target, source, "deepspeed_config.", "zero_stage")
    elif name in (*_MULTI_DEVICE, "MULTI_CPU"):
        target.add_row(kind, "strategy=no_shard")
        target.uses_torch = True
    elif name == "NO":
        settings = ("strategy=no_shard", "launch.nproc_per_node=1")
        target.add_row(kind, *settings, key_if_unset="distributed_type")
    else:
        assert kind is not None
        raise source.error(kind, "expected NO, FSDP, DEEPSPEED, MULTI_GPU or MULTI_CPU")


def _read_precision(target: Translation) -> None:
    source, inner = target.source, target.deepspeed
    value = source.take("mixed_precision")
    if value is None and inner is not None:
        for name in ("bf16", "fp16"):
            if on := inner.take_on(f"{name}.enabled"):
                value = SourceKey(on.key, name, (name,))
    if value is None:
        target.add_row(None, "precision=fp32", key_if_unset="mixed_precision")
        return
    name = value.text.strip().lower()
    if name not in ("no", "false", "bf16", "fp16", "fp8"):
        raise source.error(value, "expected no, bf16, fp16 or fp8")
    ours = "fp32" if name in ("no", "false") else "bf16"
    note = "same size as fp16" if name == "fp16" else ""
    target.add_row(value, f"precision={ours}", note=note)
    if name == "fp16":
        target.leave_out(value, "trained in bf16, without scaling of the loss")
    if name == "fp8":
        target.exclude(value, "matrix products are estimated in bf16")


def _read_batch(target: Translation) -> None:
    source, inner = target.source, target.deepspeed
    passes = source.positive("deepspeed_config.gradient_accumulation_steps")
    passes = source.positive("gradient_accumulation_steps") or passes
    micro = total = None
    if inner is not None:
        passes = passes or inner.positive("gradient_accumulation_steps")
        micro = inner.positive("train_micro_batch_size_per_gpu")
        total = inner.positive("train_batch_size")
    keys = (
        "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
        "deepspeed_config.gradient_accumulation_steps", "train_batch_size",
    )  # fmt: skip
    target.batch = SourceBatch(keys, micro, passes, total)
