"""Keys that several tools share: models, optimizers, recomputation, FSDP and DeepSpeed."""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdpctl.config.hub import hub_models, local_model
from fsdpctl.config.model_path import model_settings
from fsdpctl.config.synonyms import NOT_SUPPORTED
from fsdpctl.errors import UsageError
from fsdpctl.importers.source_config import SourceConfig, SourceKey
from fsdpctl.importers.translation import Translation
from fsdpctl.io.run_files import CONFIG_JSON
from fsdpctl.io.untrusted import read_json
from fsdpctl.plan.strategy import Offload, get_strategy

TOO_HIGH = "the estimate is too high"
_FSDP_OFFLOAD = "parameters, gradients, master weights and moments on the host", Offload.ALL
# Optimizers with two fp32 states per parameter, as in fsdpctl's AdamW.
_ADAMW = (
    "adamw_torch_fused", "adamw_apex_fused", "adamw_torch_npu_fused", "adamw_torch", "adamw_hf",
    "adamw", "paged_adamw_32bit", "paged_adamw", "adopt_adamw", "schedule_free_adamw",
)  # fmt: skip
_LIKE_ADAMW = ("adopt_adamw", "schedule_free_adamw")  # same memory, another update
# Optimizers with torch's _foreach kernels, which copy the second moments temporarily.
_UNFUSED = ("adamw_torch", "adamw", "adopt_adamw", "schedule_free_adamw")
# Optimizers of bitsandbytes and torchao with two states of about one byte per parameter.
_LOW_BIT_ADAMW = re.compile(r"(?!.*galore).*adamw.*(8bit|fp8|4bit).*")
# Optimizers with fewer or smaller states than AdamW.
_SMALLER = re.compile(
    ".*(8bit|4bit|fp8|lion|muon|dion|lomo|galore|apollo).*|adafactor|came.*|rmsprop.*|adagrad|"
    "schedule_free_sgd"
)
_ZERO_OFFLOADS = {
    "optimizer": ("gradients, master weights and moments on the host",
                  Offload.STATES | Offload.GRADIENTS),
    "param": ("", Offload.PARAMS),
}  # fmt: skip
_STRATEGIES = {
    "full_shard": "full_shard", "1": "full_shard",
    "shard_grad_op": "shard_grad_op", "2": "shard_grad_op",
    "no_shard": "no_shard", "3": "no_shard",
    "hybrid_shard": "hybrid_shard", "4": "hybrid_shard",
    "hybrid_shard_zero2": "hybrid_shard_grad_op", "5": "hybrid_shard_grad_op",
    "_hybrid_shard_zero2": "hybrid_shard_grad_op",
}  # fmt: skip
_STAGES = {0: "no_shard", 1: "shard_optimizer", 2: "shard_grad_op", 3: "full_shard"}
_FSDP_1_KEYS = (
    "sharding_strategy", "fsdp_sharding_strategy", "forward_prefetch", "fsdp_forward_prefetch",
)  # fmt: skip


def read_context(target: Translation, *keys: str) -> None:
    """Translate the number of ranks that share a sample, from the last of `keys` that is set."""
    for key in keys:
        count = target.source.whole(key)
        if count is not None and count > 1:
            target.add_row(SourceKey(key, str(count)), f"train.context_parallel={count}")


def check_degrees(source: SourceConfig, degrees: Mapping[str, Sequence[str]]) -> None:
    """Refuse kinds of parallelism, such as `tensor`, if a key has a degree other than 1."""
    for noun, keys in degrees.items():
        value = source.take_enabled(*keys)
        if value and value.text.strip() != "1":
            raise source.error(
                value, f"fsdpctl does not support {NOT_SUPPORTED[f'{noun}_parallel']}; leave the "
                "key out to estimate the training without it"
            )  # fmt: skip


def read_optimizer(target: Translation, value: SourceKey | None, default: str) -> None:
    """Translate an optimizer by its name in transformers; without `value`, show `default`."""
    name = "adamw_torch_fused" if value is None else value.text.strip().lower()
    shown_key, expected = value or SourceKey(default, name), "expected AdamW, SGD or Muon"
    if name in _ADAMW:
        target.add_row(value, "optimizer=adamw", key_if_unset=default)
        if name in _UNFUSED:
            target.emulate("(AdamW)", name, "engine.program=transformers_foreach")
        if name in _LIKE_ADAMW:
            target.refuse(shown_key, "optimizer", expected)
    elif name == "sgd":
        target.add_row(value, "optimizer=sgd", "optimizer.momentum=0")
    elif _LOW_BIT_ADAMW.fullmatch(name):
        note = "moments of matrices take 1.03 bytes per element"
        if "paged" in name:
            note += ", without paging; strategy.offload=states keeps them in host memory"
        elif name in ("adamw_bnb_8bit", "adamw_8bit"):
            note += "; transformers keeps moments of embeddings in fp32"
        target.add_row(value, "optimizer=adamw", "optimizer.state_dtype=int8", note=note)
        if "4bit" in name:
            target.exclude(shown_key, f"states are estimated in 8 bits, not in 4; {TOO_HIGH}")
    elif name == "muon" and target.settings.get("strategy") in ("no_shard", "shard_optimizer"):
        target.add_row(value, "optimizer=muon")  # fsdpctl's Muon needs whole matrices
    elif _SMALLER.fullmatch(name):
        target.exclude(shown_key, f"estimated with AdamW's two states in fp32; {TOO_HIGH}")
        target.refuse(shown_key, "optimizer", expected)
    else:
        advice = "add optimizer=adamw or optimizer=sgd to estimate with that optimizer"
        target.require("optimizer", shown_key, f"unknown optimizer states; {advice}")


def read_offload(target: Translation, value: SourceKey, note: str, offload: Offload) -> None:
    """Translate model states in host memory, and add them to those translated before."""
    if target.settings.get("strategy") == "no_shard" or "nvme" in value.text.lower():
        target.exclude(value, f"model states are estimated on the device; {TOO_HIGH}")
        return
    offload |= Offload.parse(target.settings.get("strategy.offload", "none"))
    row = get_strategy(target.settings.get("strategy", "full_shard"))
    has_frozen = "model.lora.rank" in target.settings or "model.trainable" in target.settings
    can_rest = row.can_offload_params and (has_frozen or Offload.STATES in offload)
    if Offload.PARAMS in offload and not can_rest:
        offload, note = offload & ~Offload.PARAMS, ""
        target.exclude(value, f"parameters are estimated on the device; {TOO_HIGH}")
    if offload:
        target.add_row(value, f"strategy.offload={offload}", note=note)


def check_attention(source: SourceConfig) -> None:
    """Refuse eager attention; UsageError if the file selects it."""
    value, eager = source.value("attn_implementation"), source.take_enabled("eager_attention")
    if value and value.text.strip() == "eager":
        eager = value
    if eager:
        raise source.error(eager, "eager attention stores a score for each pair of tokens")


def read_recomputation(target: Translation, default: str) -> bool:
    """Translate recomputation (`default` if not set) and its offload; return whether it is on."""
    source, names = target.source, ("activation_checkpointing", "gradient_checkpointing")
    value, set_before = source.take(*names), target.settings.get(names[0])
    every_n = source.positive(*(f"{name}_kwargs.every_n_layers" for name in names))
    offload = source.take_enabled(*(f"{x}_kwargs.offload" for x in names), "activation_offloading")
    recomputes = not value.is_off if value else (set_before or default) == "full"
    if value is not None or set_before is None:
        option = f"{names[0]}={'full' if recomputes else 'none'}"
        target.add_row(value, option, key_if_unset=names[1])
    if recomputes and value is not None and not value.is_on:  # the value is "offload"
        offload = offload or value
    if recomputes and every_n and every_n > 1:
        _read_every_n(target, every_n, offloads=offload is not None)
    elif offload and recomputes:
        read_activation_offload(target, offload)
    if offload and not recomputes:
        target.exclude(offload, f"activations are estimated on the device; {TOO_HIGH}")
    return recomputes


def _read_every_n(target: Translation, every_n: int, *, offloads: bool) -> None:
    """Translate every_n_layers: fsdpctl recomputes the same number of blocks, the first ones."""
    key = SourceKey("every_n_layers", str(every_n))
    if layers := model_of(target).get("model.num_layers"):
        count = -(-int(layers) // every_n)
        blocks = f"activation_checkpointing.blocks={'offload' if offloads else 'full'}:{count}"
        note = "the same number of blocks, the first ones"
        target.add_row(key, "activation_checkpointing=none", blocks, note=note)
    else:
        advice = "add activation_checkpointing=none activation_checkpointing.blocks=full:N"
        target.require("activation_checkpointing", key, f"number of blocks unknown; {advice}")


def read_activation_offload(target: Translation, value: SourceKey) -> None:
    """Translate the offload of inputs of recomputed blocks, to host memory or to a disk."""
    note = "in host memory, not on disk" if "disk" in value.text.lower() else ""
    target.add_row(value, "activation_checkpointing.offload=true", note=note)


def read_fsdp(target: Translation, *, version: str, strategy: str = "") -> None:
    """Translate the FSDP section of accelerate or axolotl; its keys may begin with `fsdp_`.

    `version` is "1" or "2". `strategy` is the strategy that a key outside the section sets.
    """

    def take(name: str) -> SourceKey | None:
        return target.source.take(f"fsdp_config.fsdp_{name}", f"fsdp_config.{name}")

    sharding, resharding = take("sharding_strategy"), take("reshard_after_forward")
    named = sharding or resharding
    mode = (named.text.strip().lower() if named else "") or strategy or "full_shard"
    if named and named is resharding and (named.is_on or named.is_off):
        mode = "full_shard" if named.is_on else "shard_grad_op"
    if mode not in _STRATEGIES:
        named = named or SourceKey("fsdp", mode)
        raise target.source.error(named, f"expected {', '.join(_STRATEGIES)}")
    ours = _STRATEGIES[mode]
    # Between micro-batches, transformers calls no_sync, which only FSDP 1 has.
    target.whole_gradients, target.uses_torch = version == "1", True
    old = "" if version == "2" else "estimated as FSDP 2"
    target.add_row(named, f"strategy={ours}", key_if_unset="fsdp_config", note=old)
    _read_prefetch(target, take("backward_prefetch"), take("forward_prefetch"))
    recomputes, input_offload = (
        take("activation_checkpointing"),
        take("activation_checkpointing_offload"),
    )
    if recomputes and recomputes.is_on:
        target.add_row(recomputes, "activation_checkpointing=full")
        if input_offload and input_offload.is_on:
            read_activation_offload(target, input_offload)
    if (offload := take("offload_params") or take("cpu_offload")) and not offload.is_off:
        read_offload(target, offload, *_FSDP_OFFLOAD)
    value = target.source.take("gradient_checkpointing_kwargs.use_reentrant")
    if value and value.is_on and version == "1" and "model.lora.rank" in target.settings:
        target.exclude(value, "reentrant checkpoints keep inputs of blocks, which are not counted")
    wrap = take("auto_wrap_policy")
    if wrap and "no_wrap" in wrap.text.lower():
        raise target.source.error(wrap, "gathers the whole model at once, which is not supported")
    if wrap and "size" in wrap.text.lower():
        target.exclude(wrap, "estimated with one unit per block")


def read_sharding(target: Translation, default: str, note: str = "") -> str:
    """Translate `deepspeed`, or `fsdp` and `fsdp_config`, of TrainingArguments.

    Return accelerate's name of the engine that shards; without one, "", and the row has `default`.
    """
    source = target.source
    if file := source.take("deepspeed"):
        read_deepspeed(target, file)
    elif "deepspeed.zero_optimization" in source:
        target.deepspeed = SourceConfig(source.file, source.content["deepspeed"])
        read_zero(target, source, "deepspeed.zero_optimization.", "stage")
    elif source.sets_sharding:
        _read_fsdp_of_transformers(target)
        return "FSDP"
    elif source.launch is not None:
        return str(source.launch.content.get("distributed_type")).upper()
    else:
        target.add_row(None, "strategy=no_shard", key_if_unset=default, note=note)
        target.uses_torch = True
        return ""
    return "DEEPSPEED"


def _read_fsdp_of_transformers(target: Translation) -> None:
    modes = target.source.take("fsdp")
    values = re.findall(r"\w+", modes.text.lower()) if modes else []
    strategies = [each for each in values if each not in ("auto_wrap", "offload", "true")]
    keys = ("fsdp_version", "fsdp_config.fsdp_version", "fsdp_config.version")
    # Transformers 5 defaults to FSDP 2; axolotl 0.20 does too, but refuses keys of FSDP 1 with it.
    old = modes or any(f"fsdp_config.{each}" in target.source for each in _FSDP_1_KEYS)
    default = "1" if old and target.tool == "axolotl" else "2"
    version = target.source.text(*keys, default=default)
    read_fsdp(target, version=version, strategy=next(iter(strategies), ""))
    if modes and "offload" in values:
        read_offload(target, modes, *_FSDP_OFFLOAD)


def _read_prefetch(
    target: Translation, backward: SourceKey | None, forward: SourceKey | None
) -> None:
    if backward and backward.text.strip().lower() in ("no_prefetch", "none"):
        target.add_row(backward, "prefetch=none")
    elif forward and forward.is_on:
        target.add_row(forward, "prefetch=both")
    elif backward or forward:
        target.add_row(backward or forward, "prefetch=backward")


def read_deepspeed(target: Translation, value: SourceKey) -> None:
    """Translate ZeRO from the file of DeepSpeed in `value`."""
    candidates = (Path(value.text), target.source.file_of(value.key).parent / value.text)
    file = next((each for each in candidates if each.is_file()), None)
    if file is None:
        target.require("strategy", value, "not found; add the ZeRO stage, such as strategy=zero3")
        return
    target.deepspeed = SourceConfig(file, read_json(file, dict[str, Any]))
    read_zero(target, target.deepspeed, "zero_optimization.", "stage")


def read_zero(target: Translation, source: SourceConfig, section: str, stage_key: str) -> None:
    """Translate the stage of ZeRO and its offload from the keys of a section."""
    stage = source.whole(f"{section}{stage_key}") or 0
    hpz = source.whole(f"{section}zero_hpz_partition_size") or 1
    if stage not in _STAGES:
        raise source.error(SourceKey(f"{section}{stage_key}", str(stage)), "expected 0 to 3")
    settings: tuple[str, ...] = (f"strategy={_STAGES[stage]}",)
    if stage == 3 and hpz > 1:
        settings = ("strategy=hybrid_shard_optimizer", f"strategy.dp_shard_size={hpz}")
    note = "estimated for fsdpctl's engine, without DeepSpeed's buffers"
    target.add_row(SourceKey(f"{section}{stage_key}", str(stage)), *settings, note=note)
    for states in ("optimizer", "param"):
        keys = (f"{section}offload_{states}_device", f"{section}offload_{states}.device")
        offload = source.take_enabled(*keys)
        if offload and states == "param" and stage < 3:  # DeepSpeed ignores it
            target.source.no_memory_effect.add(offload.key)
        elif offload:
            read_offload(target, offload, *_ZERO_OFFLOADS[states])


def _is_known(name: str) -> bool:
    """Return whether a model is here, in the table, or on the Hub (its config.json is fetched)."""
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        if not (folder / CONFIG_JSON).is_file():
            raise UsageError(f"{name}: {CONFIG_JSON} not found")
        model_settings(str(folder))
        return True
    with suppress(UsageError):  # not on the Hub, or fetching failed
        return name.partition("@")[0] in hub_models() or local_model(name, "config") != name
    return False


def model_of(target: Translation) -> dict[str, str]:
    """Return the settings of the pretrained model; {} if its configuration is unknown."""
    with suppress(UsageError):  # not on the Hub, or fetching failed
        if target.model:
            path = local_model(os.path.expanduser(target.model.text), "config", allow_table=True)
            return model_settings(path)
    return {}


def map_model(target: Translation, value: SourceKey | None, key: str, revision: str = "") -> None:
    """Translate the model in `value`; without `value`, the message names `key`."""
    advice = "add model=llama3_8b, or model=hf model.path=DIR"
    if value is None:
        target.missing.append(("model", f"{key}: not set; {advice}"))
        return
    name = f"{value.text.strip()}{revision and '@'}{revision}"
    target.model = SourceKey(value.key, name)
    try:
        is_known = _is_known(name)
    except UsageError as error:
        raise UsageError(f"{target.source.file}: {value.key}: {error}") from None
    target.add_row(target.model, "model=hf", f"model.path={name}")
    if not is_known:
        why = "not a directory, a known name, or one on the Hugging Face Hub"
        target.require("model", target.model, f"{why}; {advice}")
