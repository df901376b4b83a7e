"""Translation of the YAML file of `accelerate config`: the ranks, and how they shard."""

from fsdpctl.importers import shared
from fsdpctl.importers.source_config import SourceConfig, SourceKey
from fsdpctl.importers.training_arguments import read_inner_deepspeed
from fsdpctl.importers.translation import RankDegrees, SourceBatch, Translation, patterns

_MANY = ("MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA")


def read_accelerate(source: SourceConfig) -> Translation:
    """Translate a configuration, which names no model; UsageError if it can't be estimated."""
    found = Translation("accelerate", source)
    found.missing.append(
        ("model", "names no model; add model=llama3_8b, or model=hf model.path=DIR, and "
         "train.seq_len=N train.micro_batch_size=N")
    )  # fmt: skip
    read_launch(found)
    _read_precision(found)
    _read_batch(found)
    read_inner_deepspeed(found)
    clip = found.value("deepspeed_config.gradient_clipping")
    if clip and clip.text.strip() != "auto":
        found.add(clip, f"optimizer.max_grad_norm={clip.text}")
    why = "of the script: set optimizer.lr, lr_scheduler, data and the length"
    found.leave_out(SourceKey("(training)", ""), why)
    found.classify_rest(patterns("unused", "accelerate"))
    return found


def read_launch(found: Translation) -> None:
    source = found.source
    place = source.take("compute_environment")
    if place is not None and place.text.strip() != "LOCAL_MACHINE":
        raise source.error(place, "expected LOCAL_MACHINE")
    _read_ranks(found)
    compiled = source.take("dynamo_config.dynamo_backend", "dynamo_backend")
    if compiled and compiled.text.lower() != "no":
        found.exclude(compiled, "estimated without compilation, which usually needs more memory")
    if not (source.launch and source.shards):
        _read_sharding(found)


def read_launch_beside(found: Translation, narrow: SourceKey | None) -> SourceKey | None:
    """Translate the file of accelerate next to a training file; return the key of the precision.

    That is `narrow`, of the training file, unless it is off. What else both have is the training
    file's, as in transformers.
    """
    source = found.source
    if (launch := source.launch) is None:
        return narrow
    read_launch(found)
    why = f"{source.file.name} decides it"
    keys = ("gradient_accumulation_steps", "gradient_clipping")
    of_zero = [source.take(f"deepspeed_config.{key}") for key in keys]
    mixed = source.take("mixed_precision")
    if mixed is not None and narrow is not None and narrow.is_off:
        narrow = narrow if mixed.text.strip().lower() == "no" else mixed
        mixed = None
    others = [x for x in (*of_zero, mixed) if x and x.text.strip() not in ("auto", "bf16")]
    others += [each for each in launch.peek() if each.key.partition(".")[0] in source.decided]
    for each in others:
        if (each.key, each.text) != ("gradient_accumulation_steps", "1"):
            found.leave_out(SourceKey(each.key, each.text[:80]), why)
    return narrow


def _read_ranks(found: Translation) -> None:
    source, prefix = found.source, "parallelism_config.parallelism_config_"
    shared.check_degrees(source, {"tensor": (f"{prefix}tp_size",)})
    shared.read_context(found, f"{prefix}cp_size", f"{prefix}sp_size")
    keys = (f"{prefix}dp_replicate_size", f"{prefix}dp_shard_size")
    replicate, shard = map(source.positive, keys)
    if replicate or shard:
        found.degrees = RankDegrees(keys, replicate or 1, shard or 1)
    ranks, nodes = source.positive("num_processes"), source.positive("num_machines") or 1
    shown = SourceKey("num_processes, num_machines", f"{ranks}, {nodes}")
    if ranks is None:
        return
    if ranks % nodes:
        raise source.error(shown, "expected the same number of ranks on each node")
    settings = (f"launch.nproc_per_node={ranks // nodes}", f"launch.nnodes={nodes}")
    found.map(shown, *settings)


def _read_sharding(found: Translation) -> None:
    source = found.source
    kind = source.take("distributed_type")
    name = kind.text.strip().upper() if kind else "NO"
    cpu = source.take_on("use_cpu")
    if cpu or name == "MULTI_CPU":
        found.map(cpu or kind, "launch.device=cpu")
    if name == "FSDP":
        shared.read_fsdp(found, version=source.text("fsdp_config.fsdp_version", default="1"))
    elif name == "DEEPSPEED":
        if file := source.take("deepspeed_config.deepspeed_config_file"):
            shared.read_deepspeed(found, file)
        else:
            shared.read_zero(found, source, "deepspeed_config.", "zero_stage")
    elif name in (*_MANY, "MULTI_CPU"):
        found.map(kind, "strategy=no_shard")
        found.uses_torch = True
    elif name == "NO":
        found.map(kind, "strategy=no_shard", "launch.nproc_per_node=1", default="distributed_type")
    else:
        assert kind is not None
        raise source.error(kind, "expected NO, FSDP, DEEPSPEED, MULTI_GPU or MULTI_CPU")


def _read_precision(found: Translation) -> None:
    source, inner = found.source, found.deepspeed
    value = source.take("mixed_precision")
    if value is None and inner is not None:
        for name in ("bf16", "fp16"):
            if on := inner.take_on(f"{name}.enabled"):
                value = SourceKey(on.key, name, (name,))
    if value is None:
        found.map(None, "precision=fp32", default="mixed_precision")
        return
    name = value.text.strip().lower()
    if name not in ("no", "false", "bf16", "fp16", "fp8"):
        raise source.error(value, "expected no, bf16, fp16 or fp8")
    ours = "fp32" if name in ("no", "false") else "bf16"
    found.map(value, f"precision={ours}", note="same size as fp16" * (name == "fp16"))
    if name == "fp16":
        found.leave_out(value, "trained in bf16, without scaling of the loss")
    if name == "fp8":
        found.exclude(value, "matrix products are estimated in bf16")


def _read_batch(found: Translation) -> None:
    source, inner = found.source, found.deepspeed
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
    found.batch = SourceBatch(keys, micro, passes, total)
