"""Translation of the YAML file of `trl sft --config`, whose ranks are accelerate's."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fsdpctl.config.data import CHAT, TEXT
from fsdpctl.config.model_path import CONFIG_JSON_KEY
from fsdpctl.errors import UsageError
from fsdpctl.importers import adapters, shared
from fsdpctl.importers.accelerate import read_launch_beside
from fsdpctl.importers.schedules import add_schedule
from fsdpctl.importers.source_config import SourceConfig, SourceKey
from fsdpctl.importers.training_arguments import (
    first_rows,
    hides_text,
    is_fraction,
    named_data,
    part_of_hub,
    read_comparisons,
    read_data,
    read_held_out,
    read_hugging_face_training,
)
from fsdpctl.importers.translation import SourceBatch, Translation, patterns, table

_OTHER_TRAININGS = ("beta", "num_generations", "reward_model_name_or_path", "stage", "rl")


def read_trl(source: SourceConfig) -> Translation:
    """Translate a configuration; UsageError if its training can't be estimated."""
    tools = ("transformers", "trl")
    found = Translation("TRL", source, table("defaults", *tools), patterns("changes", *tools))
    for key in _OTHER_TRAININGS:
        if key in source:
            raise UsageError(f"{source.file}: {key}: expected the file of `trl sft`")
    shared.check_attention(source)
    base, revision = source.take("model_name_or_path"), source.text("model_revision")
    shared.map_model(found, base, "model_name_or_path", "" if revision == "main" else revision)
    _read_adapters(found)
    _read_length(found)
    micro = source.positive("per_device_train_batch_size")
    passes = source.positive("gradient_accumulation_steps")
    keys = ("per_device_train_batch_size", "gradient_accumulation_steps")
    found.batch = SourceBatch(keys, micro, passes, usual=8)
    half = source.take_on("fp16")
    narrow = half or source.take("bf16")
    narrow = read_launch_beside(found, narrow)
    dtype = source.take("dtype", "torch_dtype") or SourceKey("dtype", "float32")
    precision = _precision(dtype, narrow)
    if source.take_on("tf32") and precision == "precision=fp32":
        precision = "precision=tf32"
    found.map(narrow, precision, default="bf16")
    recomputes = shared.read_recomputation(found, "full")
    if precision == "precision=bf16":
        _keep_base_wide(found, dtype, recomputes=recomputes)
    note = "accelerate's configuration decides it; pass that file too, or set strategy"
    shared.read_sharding(found, "(ranks)", note)
    shared.read_optimizer(found, source.take("optim"), "optim")
    _read_loss(found)
    _read_training(found)
    found.classify_rest(patterns("unused", "trl", "accelerate"))
    return found


def _read_loss(found: Translation) -> None:
    """Translate the loss, for which TRL 1.16 makes all logits only to smooth labels."""
    smoothing = found.source.take_enabled("label_smoothing_factor")
    found.whole_logits = smoothing is not None and bool(smoothing.text.strip("0."))
    found.tiled_logits = not found.whole_logits
    note = "logits of parts of the vocabulary; loss_type=nll of TRL before 1.16 makes all at once"
    found.map(found.source.take("loss_type"), default="loss_type", note=note * found.tiled_logits)


def _keep_base_wide(found: Translation, dtype: SourceKey, *, recomputes: bool) -> None:
    if "model.lora.rank" not in found.settings or "model.base_dtype" in found.settings:
        return
    note = "frozen weights are loaded in float32; embeddings are estimated in bf16"
    found.emulate(dtype.key, dtype.text, "model.base_dtype=float32", note)
    if not recomputes:
        why = "autocast keeps copies of frozen weights in bf16 for backward, which are not counted"
        found.exclude(SourceKey("activation_checkpointing", "false"), why)


def _read_length(found: Translation) -> None:
    source = found.source
    length = source.take("max_length", "max_seq_length")
    if length is None and "max_length" in source.nulls:
        why = "max_length: null: TRL does not shorten samples; set train.seq_len=N, of the longest"
        found.missing.append(("train.seq_len", why))
    else:
        found.map(length, f"train.seq_len={length.text if length else 1024}", default="max_length")
    source.take("packing")


def _read_adapters(found: Translation) -> None:
    source = found.source
    rank, alpha = map(source.take, ("lora_r", "lora_alpha"))
    if dora := source.take_on("use_dora"):
        raise source.error(dora, "DoRA needs more memory than LoRA")
    if (on := source.take_on("use_peft")) is None:
        return
    found.map(rank or on, f"model.lora.rank={rank.text if rank else 16}")
    found.map(alpha, f"model.lora.alpha={alpha.text if alpha else 32}", default="lora_alpha")
    _read_targets(found)
    adapters.read_modules_to_save(found)
    if scaled := source.take_on("use_rslora"):
        found.map(scaled, "model.lora.rslora=true")
    for key, dtype in (("load_in_4bit", "nf4"), ("load_in_8bit", "int8")):
        if value := source.take_on(key):
            found.map(value, *adapters.quantized(dtype))


def _read_targets(found: Translation) -> None:
    names = ("lora_target_modules", "lora_target_parameters")
    targets, stacked = map(found.source.take, names)
    text = shared.model_of(found).get(CONFIG_JSON_KEY, '{"model_type": "llama"}')
    family, layers = json.loads(text)["model_type"], table("targets", "peft")
    usual = next((each for each, of in layers.items() if family in of.split()), "")
    if stacked:
        adapters.read_stacked(found, stacked, targets, [usual] if usual and not targets else [])
    elif targets:
        adapters.read_targets(found, targets)
    elif usual:
        note = "the default of peft"
        found.map(None, f"model.lora.targets={usual}", default=names[0], note=note)
    else:
        why = f"peft has no default for {family}; set model.lora.targets"
        found.require_for_training("model.lora.targets", f"{names[0]}: not set: {why}")


def _precision(dtype: SourceKey, narrow: SourceKey | None) -> str:
    if dtype.text in ("bfloat16", "float16", "auto"):
        return "precision=bf16_true"
    return "precision=fp32" if narrow is not None and narrow.is_off else "precision=bf16"


def _read_training(found: Translation) -> None:
    adapts = "model.lora.rank" in found.settings
    steps = read_hugging_face_training(found, adapts=adapts)
    if steps is None:
        note = "" if found.value("num_train_epochs") else "the default of TRL"
        note = f"{note}; TRL ends each epoch with a smaller step".removeprefix("; ")
        epochs = found.value_or_default("num_train_epochs")
        found.add(epochs, f"train.epochs={epochs.text}", note=note)
    share, warmup = found.value("warmup_ratio"), found.value_or_default("warmup_steps")
    if share and not warmup.text.strip("0."):
        warmup = share
    elif share:
        found.leave_out(share, "warmup_steps decides")
    is_share = warmup.key == "warmup_ratio" or is_fraction(warmup.text)
    name = "lr_scheduler.warmup_ratio" if is_share else "lr_scheduler.warmup_steps"
    add_schedule(
        found, found.value_or_default("lr_scheduler_type"), (warmup, f"{name}={warmup.text}")
    )
    if not found.value("router_aux_loss_coef"):
        why = "TRL takes that of config.json for models with experts; set model.router_aux_loss"
        found.leave_out(SourceKey("router_aux_loss_coef", "(not set)"), why)
    _read_data(found)
    read_comparisons(found)
    if (loss := found.value("loss_type")) and loss.text not in ("nll", "chunked_nll"):
        found.refuse(loss, "", "another loss")


def _read_data(found: Translation) -> None:
    content = found.source.content.get("datasets")
    listed = content if isinstance(content, list) else []
    entries = [each for each in listed if isinstance(each, dict)]
    parts = (part_of_hub(each.get("name"), each.get("split")) for each in entries)
    paths = dict(zip((str(each.get("path", "")) for each in entries), parts, strict=True))
    data = found.value("dataset_name")
    named: SourceKey | None = SourceKey("datasets", ", ".join(paths))
    if not paths:
        named, paths = named_data(found, data, "dataset_config", "dataset_train_split")
    firsts = first_rows(found, paths)
    field, own = found.value("dataset_text_field"), ""
    if field and field.text != TEXT and any(_trains_column(field.text, row) for row in firsts):
        own = f"{field.key}: {field.text[:80]}: fsdpctl reads the column text; rename it in a file "
        own += "and set data.path=FILE"
    is_text = any(_trains_column(TEXT, row) and hides_text(row) for row in firsts)
    option = read_data(found, named, paths, is_text=is_text, own=own)
    for entry in entries:
        is_here = found.path_of(str(entry.get("path", ""))) is not None
        for key in entry.keys() - ({"path"} if is_here else {"path", "name", "split"}):
            if entry[key] is not None and (key, entry[key]) != ("split", "train"):
                found.leave_out(
                    SourceKey(f"datasets[].{key}", str(entry[key])[:80]), "not followed"
                )
    held = found.value_or_default("eval_strategy")
    test, tested = named_data(found, data, "dataset_config", "dataset_test_split", "test")
    if held.is_off:
        found.add(held, "data.val_fraction=0")
    elif test is None or entries or found.path_of(test.text) is not None:
        read_held_out(found, held, {})
    else:
        read_held_out(found, SourceKey(f"{held.key}, {test.key}", test.text), tested)
    _read_template(found)
    if option == CHAT:
        _read_chats(found, firsts, is_known=bool(paths) and all(map(found.path_of, paths)))
    elif option == TEXT:
        why = "TRL trains on the text of each row alone, fsdpctl on one stream of tokens"
        found.leave_out(named or SourceKey("dataset_name", ""), why)


def _read_template(found: Translation) -> None:
    if (value := found.value("chat_template_path")) is None:
        return
    file = found.path_of(value.text)
    if file is not None and file.is_dir():
        file = found.path_of(f"{file}/chat_template.jinja")
        found.leave_out(value, "fsdpctl adds no tokens of that tokenizer; set data.new_tokens")
    if file is not None:
        found.add(value, f"data.template={file}")
    else:
        way = "no Jinja file; set data.template=FILE"
        found.require_for_training("data.template", f"{value.key}: {value.text[:80]}: {way}")


def _trains_column(name: str, row: Mapping[str, Any]) -> bool:
    """Return whether TRL trains on the text in a column rather than on a conversation."""
    turns = row.get("conversations") or [None]
    is_shared = isinstance(turns, list) and isinstance(turns[0], dict) and "value" in turns[0]
    return name in row and not is_shared and not row.keys() & {"prompt", "messages"}


def _read_chats(found: Translation, firsts: Sequence[Mapping[str, Any]], *, is_known: bool) -> None:
    packing, long = found.value_or_default("packing"), found.value_or_default("truncation_mode")
    found.add(packing, f"data.packing={str(packing.is_on).lower()}")
    if long.text == "keep_start":
        found.add(long, "data.too_long=truncate")
    else:
        found.refuse(long, "data.too_long", "fsdpctl keeps the start of a sample")
    only = found.value_or_default("assistant_only_loss")
    completion = found.value("completion_only_loss")
    if only.is_on or (completion and completion.is_on):
        found.add(only if only.is_on else completion or only, "data.train_on=assistant")
    elif completion is None and not is_known:
        why = "of rows with prompt and completion TRL trains on the completion, of others on all"
        way = "set data.train_on=assistant or all, or data=text for rows with text and other keys"
        found.require_for_training("data.train_on", f"dataset_name: {why}; {way}")
    elif completion is None and all("completion" in row for row in firsts):
        note = "rows with prompt and completion: TRL trains on the completion"
        found.add(only, "data.train_on=assistant", note=note)
    else:
        found.add(completion or only, "data.train_on=all", note="TRL trains on all tokens")
