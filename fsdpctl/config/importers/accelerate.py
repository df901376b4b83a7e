"""What `accelerate config` wrote (YAML) in our words: how many ranks, and what they shard."""

from fsdpctl.config.importers.parts import (
    IDLE_OF_FSDP,
    deepspeed_file,
    read_fsdp,
    read_zero,
    refused_degree,
)
from fsdpctl.config.importers.said import Said, Value
from fsdpctl.config.importers.translation import Batch, Degrees, Translation
from fsdpctl.errors import UsageError

_KNOWN_BY = ("compute_environment", "distributed_type", "fsdp_config", "deepspeed_config")
_IDLE = (
    "compute_environment", "debug", "downcast_bf16", "enable_cpu_affinity", "machine_rank",
    "main_process_*", "main_training_function", "rdzv_*", "same_network", "tpu_*", "gpu_ids",
    "use_cpu", "mpirun_config*", "ipex_config*", "dynamo_config*", "dynamo_backend", "commands",
    "command_file", "logging_dir", "project_dir", "gradient_clipping", "fp8_config*",
    "fp16.*", "bf16.*", "zero3_*", "deepspeed_config.zero3_*", "deepspeed_config.gradient_clipping",
    "deepspeed_config.deepspeed_*", "deepspeed_config.offload_*_nvme_path", "distributed_type",
    *(f"fsdp_config.{each}" for each in IDLE_OF_FSDP),
)  # fmt: skip
_MANY = ("MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA")


def is_accelerate(said: Said) -> bool:
    """Whether a YAML file is one of accelerate's."""
    return any(each in said for each in _KNOWN_BY)


def read_accelerate(said: Said) -> Translation:
    """What it means; it says nothing of a model.

    Raises:
        UsageError: it trains in a way that the figure could not be for.
    """
    found = Translation("accelerate", said)
    found.missing.append(
        ("model", "says nothing of the model; add model=llama3_8b or model=hf model.path=DIR, and "
         "train.seq_len= and train.micro_batch_size=")
    )  # fmt: skip
    place = said.text("compute_environment", default="LOCAL_MACHINE")
    if place != "LOCAL_MACHINE":
        raise UsageError(f"{said.file}: compute_environment: {place}: only LOCAL_MACHINE is read")
    _read_degrees(found)
    _read_ranks(found)
    inner = _read_sharding(found)
    _read_precision(found, inner)
    _read_batch(found, inner)
    compiled = said.take("dynamo_config.dynamo_backend", "dynamo_backend")
    if compiled and compiled.text.lower() != "no":
        found.without(compiled, "estimated as if uncompiled, which takes more as a rule")
    found.sort_rest(_IDLE)
    return found


def _read_degrees(found: Translation) -> None:
    said, prefix = found.said, "parallelism_config.parallelism_config_"
    for what, name in (("tensor", "tp"), ("context", "cp"), ("sequence", "sp")):
        value = said.take(f"{prefix}{name}_size")
        if value and value.text not in ("0", "1"):
            raise refused_degree(said, value, what)
    keys = (f"{prefix}dp_replicate_size", f"{prefix}dp_shard_size")
    replicate, shard = map(said.positive, keys)
    if replicate or shard:
        found.degrees = Degrees(keys, replicate or 1, shard or 1)


def _read_ranks(found: Translation) -> None:
    said = found.said
    ranks, nodes = said.positive("num_processes"), said.positive("num_machines") or 1
    shown = Value("num_processes, num_machines", f"{ranks}, {nodes}", ())
    if ranks is None:
        return
    if ranks % nodes:
        raise said.refused(shown, "machines with different numbers of ranks are not estimated")
    words = (f"launch.nproc_per_node={ranks // nodes}", f"launch.nnodes={nodes}")
    found.became(shown, *words)


def _read_sharding(found: Translation) -> Said | None:
    """Returns DeepSpeed's own configuration where there is one."""
    said = found.said
    kind = said.take("distributed_type")
    name = kind.text.strip().upper() if kind else "NO"
    cpu = said.take("use_cpu")
    if (cpu and cpu.is_on) or name == "MULTI_CPU":
        found.became(cpu or kind, "launch.device=cpu")
    if name == "FSDP":
        version = said.text("fsdp_config.fsdp_version", default="1")
        read_fsdp(found, "fsdp_config", version=version)
    elif name == "DEEPSPEED":
        file = said.take("deepspeed_config.deepspeed_config_file")
        if file is None:
            read_zero(found, said, "deepspeed_config.", "zero_stage")
            return None
        inner = deepspeed_file(found, file)
        if inner is not None:
            read_zero(found, inner, "zero_optimization.", "stage")
        return inner
    elif name in (*_MANY, "MULTI_CPU"):
        found.became(kind, "strategy=no_shard", "engine=ddp")
    elif name == "NO":
        found.became(
            kind, "strategy=no_shard", "launch.nproc_per_node=1", default="distributed_type"
        )
    else:
        assert kind is not None
        raise said.refused(kind, "only NO, FSDP, DEEPSPEED, MULTI_GPU and MULTI_CPU are read")
    return None


def _read_precision(found: Translation, inner: Said | None) -> None:
    said = found.said
    value = said.take("mixed_precision")
    if value is None and inner is not None:
        for name in ("bf16", "fp16"):
            if (on := inner.take(f"{name}.enabled")) and on.is_on:
                value = Value(on.key, name, (name,))
    name = value.text.strip().lower() if value else "no"
    if name not in ("no", "false", "bf16", "fp16", "fp8"):
        assert value is not None
        raise said.refused(value, "allowed is no, bf16, fp16, fp8")
    ours = "fp32" if name in ("no", "false") else "bf16"
    note = "as many bytes as fp16" if name == "fp16" else ""
    found.became(value, f"precision={ours}", default="mixed_precision", note=note)
    if name == "fp8" and value is not None:
        found.without(value, "products are estimated in bf16")


def _read_batch(found: Translation, inner: Said | None) -> None:
    said = found.said
    passes = said.positive("deepspeed_config.gradient_accumulation_steps")
    passes = said.positive("gradient_accumulation_steps") or passes
    micro = None
    if inner is not None:
        passes = passes or inner.positive("gradient_accumulation_steps")
        micro = inner.positive("train_micro_batch_size_per_gpu")
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    found.batch = Batch(keys, micro, passes)
