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
from fsdpctl.importers.source_config import SourceConfig, SourceKey, is_fraction, is_zero
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
    half_key = half or source.take("bf16")
    half_key = read_launch_beside(target, half_key)
    dtype = source.take("dtype", "torch_dtype") or SourceKey("dtype", "float32")
    precision = _precision(dtype, half_key)
    if source.take_on("tf32") and precision == "precision=fp32":
        precision = "precision=tf32"
    target.add_row(half_key, precision, key_if_unset="bf16")
    recomputes = shared.read_recomputation(target, "full")
    if precision == "precision=bf16":
        _emulate_fp32_base(target, dtype, recomputes=recomputes)
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
    target.whole_logits = smoothing is not None and not is_zero(smoothing.text)
    target.tiled_logits = not target.whole_logits
    note = "logits of parts of the vocabulary; loss_type=nll of TRL before 1.16 makes all at once"
    note = note if target.tiled_logits else ""
    target.add_row(target.source.take("loss_type"), key_if_unset="loss_type", note=note)


def _emulate_fp32_base(target: Translation, dtype: SourceKey, *, recomputes: bool) -> None:
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
        seq_len = length.text if length else 1024
        target.add_row(length, f"train.seq_len={seq_len}", key_if_unset="max_length")
    source.take("packing")  # `_read_chats` reads it, `classify_rest` must not


def _read_adapters(target: Translation) -> None:
    source = target.source
    rank, alpha = map(source.take, ("lora_r", "lora_alpha"))
    if dora := source.take_on("use_dora"):
        raise source.error(dora, "DoRA needs more memory than LoRA")
    if (on := source.take_on("use_peft")) is None:
        return
    target.add_row(rank or on, f"model.lora.rank={rank.text if rank else 16}")
    target.add_row(
        alpha, f"model.lora.alpha={alpha.text if alpha else 32}", key_if_unset="lora_alpha"
    )
    _read_targets(target)
    adapters.read_modules_to_save(target)
    if scaled := source.take_on("use_rslora"):
        target.add_row(scaled, "model.lora.rslora=true")
    for key, dtype in (("load_in_4bit", "nf4"), ("load_in_8bit", "int8")):
        if value := source.take_on(key):
            target.add_row(value, *adapters.quantized(dtype))


def _read_targets(target: Translation) -> None:
    names = ("lora_target_modules", "lora_target_parameters")
    targets, stacked = map(target.source.take, names)
    text = shared.model_of(target).get(CONFIG_JSON_KEY, '{"model_type": "llama"}')
    family, layers = json.loads(text)["model_type"], table("targets", "peft")
    default = next((names for names, families in layers.items() if family in families.split()), "")
    if stacked:
        defaults = [default] if default and not targets else []
        adapters.read_stacked(target, stacked, targets, defaults)
    elif targets:
        adapters.read_targets(target, targets)
    elif default:
        note = "the default of peft"
        target.add_row(None, f"model.lora.targets={default}", key_if_unset=names[0], note=note)
    else:
        why = f"peft has no default for {family}; set model.lora.targets"
        target.require_for_training("model.lora.targets", f"{names[0]}: not set: {why}")


def _precision(dtype: SourceKey, half_key: SourceKey | None) -> str:
    if dtype.text in ("bfloat16", "float16", "auto"):
        return "precision=bf16_true"
    return "precision=fp32" if half_key is not None and half_key.is_off else "precision=bf16"


def _read_training(target: Translation) -> None:
    adapts = "model.lora.rank" in target.settings
    steps = hf.read_hugging_face_training(target, adapts=adapts)
    if steps is None:
        note = "" if target.value("num_train_epochs") else "the default of TRL"
        note = f"{note}; TRL ends each epoch with a smaller step".removeprefix("; ")
        epochs = target.effective("num_train_epochs")
        target.add_training(epochs, f"train.epochs={epochs.text}", note=note)
    share, warmup = target.value("warmup_ratio"), target.effective("warmup_steps")
    if share and is_zero(warmup.text):
        warmup = share
    elif share:
        target.leave_out(share, "warmup_steps takes precedence")
    is_share = warmup.key == "warmup_ratio" or is_fraction(warmup.text)
    name = "lr_scheduler.warmup_ratio" if is_share else "lr_scheduler.warmup_steps"
    add_schedule(target, target.effective("lr_scheduler_type"), (warmup, f"{name}={warmup.text}"))
    if not target.value("router_aux_loss_coef"):
        why = "TRL uses config.json's factor for models with experts; set model.router_aux_loss"
        target.leave_out(SourceKey("router_aux_loss_coef", "(not set)"), why)
    _read_data(target)
    hf.read_comparisons(target)
    if (loss := target.value("loss_type")) and loss.text not in ("nll", "chunked_nll"):
        target.refuse(loss, name="", why="not the loss of fsdpctl, cross-entropy")


def _read_data(target: Translation) -> None:
    content = target.source.content.get("datasets")
    listed = content if isinstance(content, list) else []
    entries = [each for each in listed if isinstance(each, dict)]
    pairs = ((x.get("path", ""), hf.part_of_hub(x.get("name"), x.get("split"))) for x in entries)
    paths = {str(path): part for path, part in pairs}
    data = target.value("dataset_name")
    data_key: SourceKey | None = SourceKey("datasets", ", ".join(paths))
    if not paths:
        data_key, paths = _named_data(target, data, "dataset_train_split", "train")
    rows = hf.first_rows(target, paths)
    field, rewrite = target.value("dataset_text_field"), ""
    if field and field.text != TEXT and any(_trains_column(field.text, row) for row in rows):
        advice = "rename the column to text in a file and set data.path=FILE"
        rewrite = f"{field.key}: {field.text[:80]}: fsdpctl reads the column text; {advice}"
    is_text = any(_trains_column(TEXT, row) and hf.hides_text(row) for row in rows)
    option = hf.read_data(target, data_key, paths, is_text=is_text, rewrite=rewrite)
    for entry in entries:
        is_here = target.path_of(str(entry.get("path", ""))) is not None
        for key in entry.keys() - ({"path"} if is_here else {"path", "name", "split"}):
            if entry[key] is not None and (key, entry[key]) != ("split", "train"):
                ignored = SourceKey(f"datasets[].{key}", str(entry[key])[:80])
                target.leave_out(ignored, "ignored")
    eval_strategy = target.effective("eval_strategy")
    test_key, test_paths = _named_data(target, data, "dataset_test_split", "test")
    if eval_strategy.is_off:
        target.add_training(eval_strategy, "data.val_fraction=0")
    elif test_key is None or entries or target.path_of(test_key.text) is not None:
        hf.read_held_out(target, eval_strategy, {})
    else:
        keys = SourceKey(f"{eval_strategy.key}, {test_key.key}", test_key.text)
        hf.read_held_out(target, keys, test_paths)
    _read_template(target)
    if option == CHAT:
        _read_chats(target, rows, is_known=bool(paths) and all(map(target.path_of, paths)))
    elif option == TEXT:
        why = "TRL trains on the text of each row alone, fsdpctl on one stream of tokens"
        target.leave_out(data_key or SourceKey("dataset_name", ""), why)


def _named_data(
    target: Translation, name: SourceKey | None, split_key: str, default_split: str
) -> tuple[SourceKey | None, dict[str, str]]:
    """Return the key and the paths of a data set whose configuration and split are other keys."""
    config, split = target.value("dataset_config"), target.value(split_key)
    part = hf.part_of_hub(config and config.text, split.text if split else default_split)
    if name is None or target.path_of(name.text) is not None:
        return name, dict.fromkeys(name.items if name else (), part)
    keys = ", ".join(each.key for each in (name, config, split) if each)
    return SourceKey(keys, name.text, name.items), dict.fromkeys(name.items, part)


def _read_template(target: Translation) -> None:
    if (value := target.value("chat_template_path")) is None:
        return
    file = target.path_of(value.text)
    if file is not None and file.is_dir():
        file = target.path_of(f"{file}/chat_template.jinja")
        target.leave_out(value, "fsdpctl adds no tokens of that tokenizer; set data.new_tokens")
    if file is not None:
        target.add_training(value, f"data.template={file}")
    else:
        advice = "no Jinja file; set data.template=FILE"
        target.require_for_training("data.template", f"{value.key}: {value.text[:80]}: {advice}")


def _trains_column(name: str, row: Mapping[str, Any]) -> bool:
    """Return whether TRL trains on the text in a column of a row, not on a conversation."""
    turns = row.get("conversations") or [None]
    is_sharegpt = isinstance(turns, list) and isinstance(turns[0], dict) and "value" in turns[0]
    return name in row and not is_sharegpt and not row.keys() & {"prompt", "messages"}


def _read_chats(target: Translation, rows: Sequence[Mapping[str, Any]], *, is_known: bool) -> None:
    packing, long = target.effective("packing"), target.effective("truncation_mode")
    target.add_training(packing, f"data.packing={str(packing.is_on).lower()}")
    if long.text == "keep_start":
        target.add_training(long, "data.too_long=truncate")
    else:
        target.refuse(long, "data.too_long", "fsdpctl keeps the start of a sample")
    assistant_key = target.effective("assistant_only_loss")
    completion_key = target.value("completion_only_loss")
    if enabled := [key for key in (assistant_key, completion_key) if key and key.is_on]:
        target.add_training(enabled[0], "data.train_on=assistant")
    elif completion_key is None and not is_known:
        why = "TRL trains on the completion of rows with prompt and completion, else on all tokens"
        advice = "set data.train_on=assistant or all, or data=text for rows with a text"
        target.require_for_training("data.train_on", f"dataset_name: {why}; {advice}")
    elif completion_key is None and all("completion" in row for row in rows):
        note = "rows with prompt and completion: TRL trains on the completion"
        target.add_training(assistant_key, "data.train_on=assistant", note=note)
    else:
        note = "TRL trains on all tokens"
        target.add_training(completion_key or assistant_key, "data.train_on=all", note=note)
