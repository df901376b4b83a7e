"""A torchtitan configuration (TOML, of versions up to 0.2) in our words, by its JobConfig."""

from pathlib import Path

from fsdpctl.config.hugging_face import CONFIG_JSON
from fsdpctl.config.importers.models import words_of_flavor, words_of_name
from fsdpctl.config.importers.parts import TOO_HIGH, refused_degree
from fsdpctl.config.importers.said import Said
from fsdpctl.config.importers.translation import Batch, Degrees, Translation

_SECTIONS = ("job", "training", "model", "parallelism", "activation_checkpoint")
_IDLE = (
    "job.*", "profiling.*", "metrics.*", "lr_scheduler.*", "checkpoint.*", "comm.*",
    "validation.*", "experimental.*", "fault_tolerance.*", "memory_estimation.*", "debug.*",
    "model.tokenizer_path", "model.hf_assets_path", "model.print_after_conversion",
    "model.norm_type", "optimizer.lr", "optimizer.beta*", "optimizer.eps",
    "optimizer.weight_decay", "training.dataset*", "training.steps", "training.max_norm",
    "training.gc_*", "training.seed", "training.deterministic", "training.warmup_steps",
    "training.data_*", "training.tensor_*", "parallelism.pipeline_*",
    "parallelism.context_parallel_*", "parallelism.disable_loss_parallel",
    "parallelism.enable_async_tensor_parallel", "parallelism.expert_*",
    "parallelism.enable_compiled_autograd", "activation_checkpoint.*", "compile.*", "float8.*",
    "mx.*", "quantize.*",
)  # fmt: skip


def is_torchtitan(said: Said) -> bool:
    """Whether a TOML file is one of torchtitan's."""
    return "training" in said and any(each in said for each in ("job", "parallelism", "model"))


def read_torchtitan(said: Said) -> Translation:
    """What it means.

    Raises:
        UsageError: it trains in a way that the figure could not be for.
    """
    found = Translation("torchtitan", said)
    for what in ("tensor", "context", "pipeline", "expert"):
        name = f"{what}_parallel_degree"
        value = said.take(f"parallelism.{name}", f"training.{name}", f"experimental.{name}")
        if value and value.text not in ("0", "1"):
            raise refused_degree(said, value, what)
    _read_model(found)
    _read_sizes(found)
    _read_precision(found)
    _read_recomputation(found)
    _read_optimizer(found)
    _read_sharding(found)
    found.sort_rest(_IDLE)
    return found


def _read_model(found: Translation) -> None:
    said = found.said
    name, flavor = said.text("model.name", default="llama3"), said.take("model.flavor")
    assets, changed = said.take("model.hf_assets_path"), said.take("model.converters")
    shown = name if flavor is None else f"{name} {flavor.text}"
    words = words_of_flavor(name, flavor.text) if flavor else ()
    if not words and assets and (Path(assets.text) / CONFIG_JSON).is_file():
        flavor, words = assets, words_of_name(assets.text)
    if words:
        found.became(flavor, *words)
    else:
        found.missing.append(
            ("model", f"model.flavor: {shown}: is none that is known here by name; say which, as "
             "model=llama3_8b or model=hf model.path=DIR with its config.json")
        )  # fmt: skip
    if changed:
        found.without(changed, f"what converters change is not estimated; with fp8 {TOO_HIGH}")


def _read_sizes(found: Translation) -> None:
    said = found.said
    length = said.take("training.seq_len")
    found.became(
        length, f"train.seq_len={length.text if length else 2048}", default="training.seq_len"
    )
    micro = said.positive("training.local_batch_size", "training.batch_size") or 8
    whole = said.whole("training.global_batch_size")
    keys = ("training.local_batch_size", "training.global_batch_size")
    found.batch = Batch(keys, micro, whole=whole if whole and whole > 0 else None)


def _read_precision(found: Translation) -> None:
    said = found.said
    own = said.take("training.dtype")
    if own and own.text == "bfloat16":
        found.became(own, "precision=bf16_true")
        said.take("training.mixed_precision_param")
        said.take("training.mixed_precision_reduce")
        return
    param, reduce = (said.take(f"training.mixed_precision_{each}") for each in ("param", "reduce"))
    narrow = param is None or param.text == "bfloat16"
    found.became(
        param,
        f"precision={'bf16' if narrow else 'fp32'}",
        default="training.mixed_precision_param",
    )
    if reduce and reduce.text != "float32":
        found.became(reduce, f"precision.reduce_dtype={reduce.text}")


def _read_recomputation(found: Translation) -> None:
    said = found.said
    mode = said.take("activation_checkpoint.mode")
    option = said.take("activation_checkpoint.selective_ac_option")
    kind, which = mode.text if mode else "selective", option.text if option else "2"
    if kind in ("none", "full"):
        found.became(mode, f"activation_checkpointing={kind}")
    elif kind == "selective" and which in ("op", "1"):
        ours = "selective" if which == "op" else "full"
        found.became(option, f"activation_checkpointing={ours}")
    else:
        what = f"every block of {which}" if kind == "selective" else kind
        found.missing.append(
            ("activation_checkpointing", f"activation_checkpoint.mode: {what} is not offered; "
             "between full, which holds less, and none, which holds more: say which, as "
             "activation_checkpointing=full")
        )  # fmt: skip
    if (budget := said.take("activation_checkpoint.memory_budget")) and kind == "memory_budget":
        found.without(budget, "is not estimated")


def _read_optimizer(found: Translation) -> None:
    said = found.said
    name = said.take("optimizer.name")
    if name is None or name.text in ("AdamW", "Adam"):
        how = said.text("optimizer.implementation", default="fused")
        note = "" if how == "fused" else f"as fused; {how} takes passing copies besides"
        found.became(name, "optimizer=adamw", default="optimizer.name", note=note)
    elif name.text in ("Muon", "DistMuon", "Dion"):
        found.without(name, f"estimated with AdamW's two states; {TOO_HIGH}")
    else:
        found.missing.append(
            ("optimizer", f"optimizer.name: {name.text}: what it keeps is not known here; say as "
             "which it is to be estimated, with optimizer=adamw or optimizer=sgd")
        )  # fmt: skip
    early = said.take("optimizer.early_step_in_backward")
    if early and early.is_on:
        found.without(early, f"gradients are kept until the step; {TOO_HIGH}")
    offload = said.take("training.enable_cpu_offload")
    if offload and offload.is_on:
        found.without(offload, f"states stay on the device here; {TOO_HIGH}")
    compiled = said.take("compile.enable", "training.compile")
    if compiled and compiled.is_on:
        found.without(compiled, "estimated as if uncompiled, which takes more as a rule")


def _read_sharding(found: Translation) -> None:
    said = found.said
    names = ("data_parallel_replicate_degree", "data_parallel_shard_degree")
    replicate, shard = (said.whole(f"parallelism.{n}", f"training.{n}") for n in names)
    reshard = said.text("parallelism.fsdp_reshard_after_forward", default="default")
    found.degrees = Degrees(
        tuple(f"parallelism.{name}" for name in names),
        1 if replicate is None else replicate,
        -1 if shard is None else shard,
        reshards=reshard != "never",
    )
