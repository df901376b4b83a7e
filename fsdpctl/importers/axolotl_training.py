"""Translation of the training in axolotl's file: data, length and learning rates."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fsdpctl.config.data import CHAT, TEXT
from fsdpctl.importers import training_arguments as hf
from fsdpctl.importers.schedules import NO_LIMIT, add_schedule
from fsdpctl.importers.source_config import SourceKey, is_fraction, is_zero
from fsdpctl.importers.translation import Translation

_MIN_WARMUP = 2  # axolotl extends a warmup of 1 step to 2 steps
_WARMUP_STEPS = "lr_scheduler.warmup_steps"
# Keys of a data set, and values that fsdpctl follows or that change nothing; others are reported.
_SAME_MEANING: Mapping[str, tuple[object, ...]] = {
    "ds_type": ("json", "parquet", "arrow", "text"),
    "field": ("text",),
    "field_messages": ("messages", "conversations"),
    "message_field_content": ("content", "value"),
    "message_field_role": ("role", "from"),
    "message_property_mappings": (
        {"role": "role", "content": "content"}, {"role": "from", "content": "value"},
    ),
    "roles_to_train": (["assistant"],),
    "split": ("train",),
    "train_on_eos": ("turn",),
    "train_on_eot": ("turn",),
}  # fmt: skip
_HANDLED_KEYS = (
    "path", "data_files", "type", "preprocess_shards", "trust_remote_code", "chat_template",
    "chat_template_jinja",
)  # fmt: skip
_HUB_KEYS = ("name", "revision", "split")
_TEMPLATE_TYPES = ("chat_template", "chat_template.default")
_TEXTS = ("completion", "pretrain")
_TEMPLATE_KEY, _JINJA = "chat_template", "chat_template_jinja"
_OWN_PROMPTS = (
    "has its own prompts, not the chat template; write rows with prompt and completion to a "
    "file and set data.path=FILE"
)
_ALPACA = ("alpaca", "alpaca:instruct")
# Keys of schedules that transformers doesn't have.
_OWN_SCHEDULES = (
    "cosine_constant_lr_ratio", "jagged_restart_steps", "lr_quadratic_warmup",
)  # fmt: skip
_SAME_LOSS_PLUGINS = (
    "CutCrossEntropy",
    "Liger",
    "Kernels",
    "ExpertParallel",
    "LMEval",
    "SwanLab",
)
_OTHER_LOSSES = (
    "trainer_cls", "use_dft", "use_eaft", "scaling_softmax", "processor_type", "use_pose",
)  # fmt: skip


def read_training(target: Translation, *, adapts: bool) -> None:
    """Translate the data, the length and the learning rates; `adapts`: with LoRA adapters."""
    plugins = target.value("plugins")
    for plugin in plugins.items if plugins else ():
        name = plugin.rpartition(".")[2]
        if name and name.removesuffix("Plugin") not in _SAME_LOSS_PLUGINS:
            target.refuse(SourceKey("plugins", name), name="", why="may train something else")
    for key in _OTHER_LOSSES:
        if (changed := target.value(key)) and not changed.is_off:
            target.refuse(changed, name="", why="trains something else")
    if adapts:
        target.add_same({"lora_alpha": "model.lora.alpha"})
    steps = hf.read_hugging_face_training(target, adapts=adapts)
    if steps is None:
        target.add_same({"num_epochs": "train.epochs"})
    _read_schedule(target, steps)
    why = "axolotl averages the loss over tokens of a micro-batch, fsdpctl over tokens of a step"
    target.leave_out(SourceKey("loss", ""), why)
    _read_data(target)
    hf.read_comparisons(target)


def _read_schedule(target: Translation, steps: int | None) -> None:
    schedule, lowest = target.effective("lr_scheduler"), target.value("cosine_min_lr_ratio")
    for key in _OWN_SCHEDULES:
        if (value := target.value(key)) and not value.is_off:
            target.refuse(value, "lr_scheduler", "not supported")
    warmup, share = target.value("warmup_steps"), target.effective("warmup_ratio")
    # axolotl limits a warmup of its default ratio to 100 steps.
    limit = 100 if target.value("warmup_ratio") is None else NO_LIMIT
    is_share = is_fraction(share.text) or is_zero(share.text)
    if warmup is None and (steps is None or not is_share):
        target.leave_out(share, "a warmup of 1 step has 2 steps in axolotl")
        settings = f"lr_scheduler.warmup_ratio={share.text} {_WARMUP_STEPS}={limit}"
        add_schedule(target, schedule, (share, settings))
    else:
        from_ratio = 0 if warmup else min(int(float(share.text) * (steps or 0)), limit)
        count = warmup.text.strip() if warmup else str(from_ratio)
        count = str(_MIN_WARMUP) if count == "1" else count
        add_schedule(target, schedule, (warmup or share, f"{_WARMUP_STEPS}={count}"))
    if lowest and not lowest.is_off and schedule.text.strip().lower() == "cosine":
        target.add_training(lowest, f"lr_scheduler.min_lr_ratio={lowest.text}")


def _read_data(target: Translation) -> None:
    """Add the data; data that fsdpctl would read otherwise requires a rewritten file."""
    content = target.source.content
    key = "datasets" if content.get("datasets") else "pretraining_dataset"
    streams = key != "datasets"
    entries = list(_entries(content.get(key)))[: 1 if streams else None]  # axolotl reads one
    paths = _hub_parts_by_path(entries)
    kinds = {str(entry.get("type")) for entry in entries} - {"None"}
    texts = [each for each in entries if streams or str(each.get("type")) in _TEXTS]
    text_paths = _hub_parts_by_path(texts)
    firsts = hf.first_rows(target, text_paths)
    has_hidden_text = any(map(hf.hides_text, firsts)) or not all(map(target.path_of, text_paths))
    is_text = streams or (has_hidden_text and len(texts) == len(entries))
    shown_key = SourceKey(key, ", ".join(paths)) if entries else None
    unsupported = kinds - {*_TEMPLATE_TYPES, *_TEXTS, *_ALPACA}
    columns = {str(x.get("field") or x.get("text_column") or TEXT) for x in texts} - {TEXT}
    rewrite = ""
    if columns or (has_hidden_text and not is_text):
        changed = f"field: {min(columns)[:80]}" if columns else "type: completion"
        advice = "write rows with only the column text to a file and set data.path=FILE"
        rewrite = f"{key}[].{changed}: {advice}"
    elif unsupported:
        rewrite = f"{key}[].type: {min(unsupported)[:80]}: {_OWN_PROMPTS}"
    option = hf.read_data(target, shown_key, paths, is_text=is_text, rewrite=rewrite)
    if alpaca := kinds.intersection(_ALPACA):
        target.add_training(SourceKey(f"{key}[].type", min(alpaca)), "data.prompt=alpaca")
    if is_text:
        why = "fsdpctl reads one stream of tokens, axolotl cuts it at the ends of texts or windows"
        target.leave_out(SourceKey(key, "text"), why)
    if option == CHAT:
        _read_chats(target)
        _read_template(target, [each if each.get(_TEMPLATE_KEY) else content for each in entries])
    _read_held_out(target)
    for entry in entries:
        for name, value in entry.items():
            allowed = _SAME_MEANING.get(name, ("false", False))
            is_same = name in _HANDLED_KEYS or value is None or value in allowed
            is_same |= name in _HUB_KEYS and target.path_of(_files(entry)[0]) is None
            if not is_same:
                target.leave_out(SourceKey(f"{key}[].{name}", str(value)[:80]), "ignored")


def _read_template(target: Translation, sources: Iterable[Mapping[Any, Any]]) -> None:
    templates = {(str(x.get(_TEMPLATE_KEY) or ""), str(x.get(_JINJA) or "")) for x in sources}
    names = ", ".join(sorted(name for name, _ in templates if name))
    (name, text), *more = templates or {("", "")}  # only used if there is one template
    value = SourceKey(_TEMPLATE_KEY, names)
    if more:
        target.leave_out(value, "fsdpctl has one template for all data; set data.template=FILE")
    elif text and name in ("jinja", ""):
        if (file := target.path_of(text)) is not None:
            target.add_training(SourceKey(_JINJA, text), f"data.template={file}")
        else:
            shown = " ".join(text.split())[:40]
            advice = "not a file; write the template to one and set data.template=FILE"
            target.require_for_training("data.template", f"{_JINJA}: {shown}: {advice}")
    elif name and not name.startswith("tokenizer_default"):
        why = "a template of axolotl; the tokenizer's is used; for another, set data.template=FILE"
        target.leave_out(value, why)


def _read_chats(target: Translation) -> None:
    packing, inputs = (
        target.effective("sample_packing"),
        target.effective("train_on_inputs"),
    )
    target.add_training(packing, f"data.packing={str(packing.is_on).lower()}")
    target.add_training(inputs, f"data.train_on={'all' if inputs.is_on else 'assistant'}")
    long = target.effective("excess_length_strategy")
    target.add_training(long, f"data.too_long={long.text}")


def _read_held_out(target: Translation) -> None:
    entries = list(_entries(target.source.content.get("test_datasets")))
    paths = _hub_parts_by_path(entries)
    val_size = target.effective("val_set_size")
    text = "0" if val_size.is_off else val_size.text.strip()
    if entries:
        hf.read_held_out(target, SourceKey("test_datasets", ", ".join(paths)), paths)
    elif is_zero(text) or is_fraction(text):
        target.add_training(val_size, f"data.val_fraction={text}")
    else:
        target.refuse(val_size, "data.val_fraction", "a number of samples, not a share")


def _entries(content: object) -> Iterator[Mapping[str, Any]]:
    listed = content if isinstance(content, list) else [content] if content else []
    for entry in listed:
        yield entry if isinstance(entry, Mapping) else {"path": entry}


def _hub_parts_by_path(entries: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    parts = [(x, hf.part_of_hub(x.get("name"), x.get("split"), x.get("revision"))) for x in entries]
    return {path: part for entry, part in parts for path in _files(entry)}


def _files(entry: Mapping[str, Any]) -> list[str]:
    files = entry.get("data_files") or entry.get("path") or ""
    return [str(each) for each in (files if isinstance(files, list) else [files])]
