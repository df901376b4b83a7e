"""Translation of the YAML file of `trl sft --config`; accelerate's file has the ranks."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fsdpctl.config.data import CHAT, TEXT
from fsdpctl.config.model_path import CONFIG_JSON_KEY
from fsdpctl.errors import UsageError
from fsdpctl.importers import adapters, shared
from fsdpctl.importers import training_arguments as hf
from fsdpctl.importers.accelerate import read_launch_beside
from fsdpctl.importers.schedules import add_schedule
from fsdpctl.importers.source_config import SourceConfig, SourceKey
from fsdpctl.importers.translation import SourceBatch, Translation, patterns, table

_OTHER_TRAININGS = ("beta", "num_generations", "reward_model_name_or_path", "stage", "rl")


def read_trl(source: SourceConfig) -> Translation:
    """Translate a file; UsageError if the training can't be estimated."""
    tools = ("transformers", "trl")
    target = Translation("TRL", source, table("defaults", *tools), patterns("changes", *tools))
    for key in _OTHER_TRAININGS:
        if key in source:
            raise UsageError(f"{source.file}: {key}: expected the file of `trl sft`")
    shared.check_attention(source)
    base, revision = source.take("model_name_or_path"), source.text("model_revision")
    shared.map_model(target, base, "model_name_or_path", "" if revision == "main" else revision)
    _read_adapters(target)
    _read_length(target)
    micro = source.positive("per_device_train_batch_size")
    passes = source.positive("gradient_accumulation_steps")
    keys = ("per_device_train_batch_size", "gradient_accumulation_steps")
    target.batch = SourceBatch(keys, micro, passes, default_micro=8)
    half = source.take_on("fp16")
    narrow = half or source.take("bf16")
    narrow = read_launch_beside(target, narrow)
    dtype = source.take("dtype", "torch_dtype") or SourceKey("dtype", "float32")
    precision = _precision(dtype, narrow)
    if source.take_on("tf32") and precision == "precision=fp32":
        precision = "precision=tf32"
    target.map(narrow, precision, default="bf16")
    recomputes = shared.read_recomputation(target, "full")
    if precision == "precision=bf16":
        _keep_base_wide(target, dtype, recomputes=recomputes)
    note = "accelerate's file sets the sharding; pass that file too, or set strategy"
    shared.read_sharding(target, "(ranks)", note)
    shared.read_optimizer(target, source.take("optim"), "optim")
    _read_loss(target)
    _read_training(target)
    target.classify_rest(patterns("unused", "trl", "accelerate"))
    return target


def _read_loss(target: Translation) -> None:
    """Translate the loss. TRL 1.16 computes all logits at once only for label smoothing."""
    smoothing = target.source.take_enabled("label_smoothing_factor")
    target.whole_logits = smoothing is not None and bool(smoothing.text.strip("0."))
    target.tiled_logits = not target.whole_logits
    note = "logits of parts of the vocabulary; loss_type=nll of TRL before 1.16 makes all at once"
    target.map(
        target.source.take("loss_type"), default="loss_type", note=note * target.tiled_logits
    )


def _keep_base_wide(target: Translation, dtype: SourceKey, *, recomputes: bool) -> None:
    if "model.lora.rank" not in target.settings or "model.base_dtype" in target.settings:
        return
    note = "frozen weights are loaded in float32; embeddings are estimated in bf16"
    target.emulate(dtype.key, dtype.text, "model.base_dtype=float32", note)
    if not recomputes:
        why = "autocast keeps copies of frozen weights in bf16 for backward, which are not counted"
        target.exclude(SourceKey("activation_checkpointing", "false"), why)


def _read_length(target: Translation) -> None:
    source = target.source
    length = source.take("max_length", "max_seq_length")
    if length is None and "max_length" in source.nulls:
        why = "max_length: null: TRL does not shorten samples; set train.seq_len=N, of the longest"
        target.missing.append(("train.seq_len", why))
    else:
        target.map(length, f"train.seq_len={length.text if length else 1024}", default="max_length")
    source.take("packing")


def _read_adapters(target: Translation) -> None:
    source = target.source
    rank, alpha = map(source.take, ("lora_r", "lora_alpha"))
    if dora := source.take_on("use_dora"):
        raise source.error(dora, "DoRA needs more memory than LoRA")
    if (on := source.take_on("use_peft")) is None:
        return
    target.map(rank or on, f"model.lora.rank={rank.text if rank else 16}")
    target.map(alpha, f"model.lora.alpha={alpha.text if alpha else 32}", default="lora_alpha")
    _read_targets(target)
    adapters.read_modules_to_save(target)
    if scaled := source.take_on("use_rslora"):
        target.map(scaled, "model.lora.rslora=true")
    for key, dtype in (("load_in_4bit", "nf4"), ("load_in_8bit", "int8")):
        if value := source.take_on(key):
            target.map(value, *adapters.quantized(dtype))


def _read_targets(target: Translation) -> None:
    names = ("lora_target_modules", "lora_target_parameters")
    targets, stacked = map(target.source.take, names)
    text = shared.model_of(target).get(CONFIG_JSON_KEY, '{"model_type": "llama"}')
    family, layers = json.loads(text)["model_type"], table("targets", "peft")
    default = next((each for each, of in layers.items() if family in of.split()), "")
    if stacked:
        adapters.read_stacked(
            target, stacked, targets, [default] if default and not targets else []
        )
    elif targets:
        adapters.read_targets(target, targets)
    elif default:
        note = "the default of peft"
        target.map(None, f"model.lora.targets={default}", default=names[0], note=note)
    else:
        why = f"peft has no default for {family}; set model.lora.targets"
        target.require_for_training("model.lora.targets", f"{names[0]}: not set: {why}")


def _precision(dtype: SourceKey, narrow: SourceKey | None) -> str:
    if dtype.text in ("bfloat16", "float16", "auto"):
        return "precision=bf16_true"
    return "precision=fp32" if narrow is not None and narrow.is_off else "precision=bf16"


def _read_training(target: Translation) -> None:
    adapts = "model.lora.rank" in target.settings
    steps = hf.read_hugging_face_training(target, adapts=adapts)
    if steps is None:
        note = "" if target.value("num_train_epochs") else "the default of TRL"
        note = f"{note}; TRL ends each epoch with a smaller step".removeprefix("; ")
        epochs = target.get("num_train_epochs")
        target.add(epochs, f"train.epochs={epochs.text}", note=note)
    share, warmup = target.value("warmup_ratio"), target.get("warmup_steps")
    if share and not warmup.text.strip("0."):
        warmup = share
    elif share:
        target.leave_out(share, "warmup_steps takes precedence")
    is_share = warmup.key == "warmup_ratio" or hf.is_fraction(warmup.text)
    name = "lr_scheduler.warmup_ratio" if is_share else "lr_scheduler.warmup_steps"
    add_schedule(target, target.get("lr_scheduler_type"), (warmup, f"{name}={warmup.text}"))
    if not target.value("router_aux_loss_coef"):
        why = "TRL uses config.json's factor for models with experts; set model.router_aux_loss"
        target.leave_out(SourceKey("router_aux_loss_coef", "(not set)"), why)
    _read_data(target)
    hf.read_comparisons(target)
    if (loss := target.value("loss_type")) and loss.text not in ("nll", "chunked_nll"):
        target.refuse(loss, "", "not the loss of fsdpctl, cross-entropy")


def _read_data(target: Translation) -> None:
    content = target.source.content.get("datasets")
    listed = content if isinstance(content, list) else []
    entries = [each for each in listed if isinstance(each, dict)]
    parts = (hf.part_of_hub(each.get("name"), each.get("split")) for each in entries)
    paths = dict(zip((str(each.get("path", "")) for each in entries), parts, strict=True))
    data = target.value("dataset_name")
    named: SourceKey | None = SourceKey("datasets", ", ".join(paths))
    if not paths:
        named, paths = hf.named_data(target, data, "dataset_config", "dataset_train_split")
    rows = hf.first_rows(target, paths)
    field, rewrite = target.value("dataset_text_field"), ""
    if field and field.text != TEXT and any(_trains_column(field.text, row) for row in rows):
        advice = "rename the column to text in a file and set data.path=FILE"
        rewrite = f"{field.key}: {field.text[:80]}: fsdpctl reads the column text; {advice}"
    is_text = any(_trains_column(TEXT, row) and hf.hides_text(row) for row in rows)
    option = hf.read_data(target, named, paths, is_text=is_text, rewrite=rewrite)
    for entry in entries:
        is_here = target.path_of(str(entry.get("path", ""))) is not None
        for key in entry.keys() - ({"path"} if is_here else {"path", "name", "split"}):
            if entry[key] is not None and (key, entry[key]) != ("split", "train"):
                target.leave_out(SourceKey(f"datasets[].{key}", str(entry[key])[:80]), "ignored")
    held = target.get("eval_strategy")
    test, tested = hf.named_data(target, data, "dataset_config", "dataset_test_split", "test")
    if held.is_off:
        target.add(held, "data.val_fraction=0")
    elif test is None or entries or target.path_of(test.text) is not None:
        hf.read_held_out(target, held, {})
    else:
        hf.read_held_out(target, SourceKey(f"{held.key}, {test.key}", test.text), tested)
    _read_template(target)
    if option == CHAT:
        _read_chats(target, rows, is_known=bool(paths) and all(map(target.path_of, paths)))
    elif option == TEXT:
        why = "TRL trains on the text of each row alone, fsdpctl on one stream of tokens"
        target.leave_out(named or SourceKey("dataset_name", ""), why)


def _read_template(target: Translation) -> None:
    if (value := target.value("chat_template_path")) is None:
        return
    file = target.path_of(value.text)
    if file is not None and file.is_dir():
        file = target.path_of(f"{file}/chat_template.jinja")
        target.leave_out(value, "fsdpctl adds no tokens of that tokenizer; set data.new_tokens")
    if file is not None:
        target.add(value, f"data.template={file}")
    else:
        advice = "no Jinja file; set data.template=FILE"
        target.require_for_training("data.template", f"{value.key}: {value.text[:80]}: {advice}")


def _trains_column(name: str, row: Mapping[str, Any]) -> bool:
    """Return whether TRL trains on the text in a column of a row, not on a conversation."""
    turns = row.get("conversations") or [None]
    is_shared = isinstance(turns, list) and isinstance(turns[0], dict) and "value" in turns[0]
    return name in row and not is_shared and not row.keys() & {"prompt", "messages"}


def _read_chats(target: Translation, rows: Sequence[Mapping[str, Any]], *, is_known: bool) -> None:
    packing, long = target.get("packing"), target.get("truncation_mode")
    target.add(packing, f"data.packing={str(packing.is_on).lower()}")
    if long.text == "keep_start":
        target.add(long, "data.too_long=truncate")
    else:
        target.refuse(long, "data.too_long", "fsdpctl keeps the start of a sample")
    only = target.get("assistant_only_loss")
    completion = target.value("completion_only_loss")
    if only.is_on or (completion and completion.is_on):
        target.add(only if only.is_on else completion or only, "data.train_on=assistant")
    elif completion is None and not is_known:
        why = "TRL trains on the completion of rows with prompt and completion, else on all tokens"
        advice = "set data.train_on=assistant or all, or data=text for rows with a text"
        target.require_for_training("data.train_on", f"dataset_name: {why}; {advice}")
    elif completion is None and all("completion" in row for row in rows):
        note = "rows with prompt and completion: TRL trains on the completion"
        target.add(only, "data.train_on=assistant", note=note)
    else:
        target.add(completion or only, "data.train_on=all", note="TRL trains on all tokens")
