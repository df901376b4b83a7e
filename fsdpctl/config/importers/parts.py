"""What several tools say alike: optimizers, by transformers' names; sections of FSDP, DeepSpeed."""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fsdpctl.config.importers.said import Said, Value
from fsdpctl.config.importers.translation import Translation
from fsdpctl.config.words import NOT_OFFERED
from fsdpctl.errors import UsageError
from fsdpctl.io.documents import read_json

TOO_HIGH = "the figure is too high for that"
# With two states of fp32 for each parameter, as ours.
_ADAMW = (
    "adamw_torch_fused", "adamw_apex_fused", "adamw_torch_npu_fused", "adamw_torch", "adamw_hf",
    "adamw", "adam", "fusedadam", "paged_adamw_32bit", "paged_adamw", "adopt_adamw",
    "schedule_free_adamw",
)  # fmt: skip
_FUSED = ("adamw_torch_fused", "adamw_apex_fused", "adamw_torch_npu_fused", "fusedadam")
# With fewer or smaller ones.
_SMALLER = (
    "*8bit*", "*4bit*", "*fp8*", "adafactor", "*lion*", "*muon*", "*dion*", "*lomo*", "*galore*",
    "*apollo*", "came*", "rmsprop*", "adagrad", "schedule_free_sgd",
)  # fmt: skip
_STRATEGIES = {
    "full_shard": "full_shard", "1": "full_shard",
    "shard_grad_op": "shard_grad_op", "2": "shard_grad_op",
    "no_shard": "no_shard", "3": "no_shard",
    "hybrid_shard": "hybrid_shard", "4": "hybrid_shard",
    "hybrid_shard_zero2": "hybrid_shard_grad_op", "5": "hybrid_shard_grad_op",
    "_hybrid_shard_zero2": "hybrid_shard_grad_op",
}  # fmt: skip
_STAGES = {0: "no_shard", 1: "shard_optimizer", 2: "shard_grad_op", 3: "full_shard"}
IDLE_OF_FSDP = (
    "*cpu_ram_efficient_loading", "*sync_module_states", "*use_orig_params", "*state_dict_type",
    "*limit_all_gathers", "*transformer_layer_cls_to_wrap", "*auto_wrap_policy", "*fsdp_version",
    "*min_num_params", "*cast_forward_inputs",
)  # fmt: skip


def refused_degree(said: Said, value: Value, what: str) -> UsageError:
    """The error for ranks that are arranged as fsdpctl has none, such as `tensor` parallel ones."""
    return said.refused(
        value, f"fsdpctl does not offer {NOT_OFFERED[f'{what}_parallel']}, and a figure without it "
        "would be of another training; leave the key out to ask for that one"
    )  # fmt: skip


def read_optimizer(found: Translation, value: Value | None, default: str) -> None:
    """An optimizer by transformers' name; `default` is the key where it is not set."""
    name = "adamw_torch_fused" if value is None else value.text.strip().lower()
    if name in _ADAMW:
        note = "" if name in _FUSED else "as fused; other kernels take passing copies besides"
        found.became(value, "optimizer=adamw", default=default, note=note)
    elif name == "sgd":
        found.became(value, "optimizer=sgd", "optimizer.momentum=0")
        found.own_engine = "PyTorch's own engines are estimated with AdamW"
    elif value is not None and any(fnmatchcase(name, each) for each in _SMALLER):
        found.without(value, f"estimated with AdamW's two states in fp32; {TOO_HIGH}")
    elif value is not None:
        found.missing.append(
            ("optimizer", f"{value.key}: {name}: what it keeps is not known here; say as which it "
             "is to be estimated, with optimizer=adamw or optimizer=sgd")
        )  # fmt: skip


def read_fsdp(found: Translation, section: str, *, version: str, strategy: str = "") -> None:
    """The section of FSDP that accelerate and axolotl have, with or without `fsdp_` in its keys.

    Args:
        found: is added to.
        section: its dotted name.
        version: of FSDP, "1" or "2".
        strategy: by a word that stands elsewhere.
    """

    def take(name: str) -> Value | None:
        return found.said.take(f"{section}.fsdp_{name}", f"{section}.{name}")

    sharding, resharding = take("sharding_strategy"), take("reshard_after_forward")
    named = sharding or resharding
    word = (named.text.strip().lower() if named else "") or strategy or "full_shard"
    if named and named is resharding and (named.is_on or named.is_off):
        word = "full_shard" if named.is_on else "shard_grad_op"
    if word not in _STRATEGIES:
        assert named is not None
        raise found.said.refused(named, f"allowed is {', '.join(_STRATEGIES)}")
    ours = _STRATEGIES[word]
    engine = "ddp" if ours == "no_shard" else "fsdp2"
    # Between passes transformers calls no_sync, which FSDP 1 has and FSDP 2 has not.
    found.whole_gradients = version == "1"
    old = "" if version == "2" else "FSDP 1 is estimated as its successor"
    found.became(named, f"strategy={ours}", f"engine={engine}", default=section, note=old)
    _read_prefetch(found, take("backward_prefetch"), take("forward_prefetch"))
    if (recomputes := take("activation_checkpointing")) and recomputes.is_on:
        found.became(recomputes, "activation_checkpointing=full")
    if (offload := take("offload_params") or take("cpu_offload")) and not offload.is_off:
        found.without(offload, f"states stay on the device here; {TOO_HIGH}")
    wrap = take("auto_wrap_policy")
    if wrap and "no_wrap" in wrap.text.lower():
        raise found.said.refused(
            wrap, "the whole model would be gathered at once, where fsdpctl gathers block by block"
        )
    if wrap and "size" in wrap.text.lower():
        found.without(wrap, "estimated with a unit for each block")


def _read_prefetch(found: Translation, backward: Value | None, forward: Value | None) -> None:
    if backward and backward.text.strip().lower() in ("no_prefetch", "none"):
        found.became(backward, "prefetch=none")
    elif forward and forward.is_on:
        found.became(forward, "prefetch=both")
    elif backward or forward:
        found.became(backward or forward, "prefetch=backward")


def deepspeed_file(found: Translation, value: Value) -> Said | None:
    """DeepSpeed's own configuration, which `value` names; None where it is not there.

    Raises:
        UsageError: it is no JSON.
    """
    places = (Path(value.text), found.file.parent / value.text)
    file = next((each for each in places if each.is_file()), None)
    if file is not None:
        return Said(file, read_json(file, dict[str, Any]))
    found.missing.append(
        ("strategy", f"{value.key}: {value.text}: there is no such file here; say its stage of "
         "ZeRO, as strategy=zero1, zero2 or zero3")
    )  # fmt: skip
    return None


def read_zero(found: Translation, said: Said, section: str, stage_key: str) -> None:
    """The stage of ZeRO in `section`, whose key `stage_key` is.

    Raises:
        UsageError: there is no such stage.
    """
    stage = said.whole(f"{section}{stage_key}") or 0
    hpz = said.whole(f"{section}zero_hpz_partition_size") or 1
    if stage not in _STAGES:
        raise UsageError(f"{said.file}: {section}{stage_key}: {stage}: allowed is 0 to 3")
    ours: tuple[str, ...] = (f"strategy={_STAGES[stage]}",)
    if stage == 3 and hpz > 1:
        ours = ("strategy=hybrid_shard_optimizer", f"strategy.dp_shard_size={hpz}")
    note = "by fsdpctl's engine; DeepSpeed's own buffers are not counted"
    found.became(Value(f"{section}{stage_key}", str(stage), ()), *ours, note=note)
    for what in ("optimizer", "param"):
        keys = (f"{section}offload_{what}_device", f"{section}offload_{what}.device")
        if (offload := said.take(*keys)) and not offload.is_off:
            found.without(offload, f"states stay on the device here; {TOO_HIGH}")
