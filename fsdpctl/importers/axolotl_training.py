"""The training of an axolotl file: its data, length and learning rates."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fsdpctl.config.data import CHAT, TEXT
from fsdpctl.importers.schedules import NO_LIMIT, add_schedule
from fsdpctl.importers.source_config import SourceKey
from fsdpctl.importers.training_arguments import (
    first_rows,
    hides_text,
    is_fraction,
    part_of_hub,
    read_comparisons,
    read_data,
    read_held_out,
    read_hugging_face_training,
)
from fsdpctl.importers.translation import Translation

_FEWEST = 2  # steps: axolotl makes a warmup of one step two
_FLOOR = "lr_scheduler.warmup_steps"
# Values of a data set's keys that fsdpctl follows, or that change nothing; others are named.
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
_PATH_KEYS = (
    "path", "data_files", "type", "preprocess_shards", "trust_remote_code", "chat_template",
    "chat_template_jinja",
)  # fmt: skip
_HUB_KEYS = ("name", "revision", "split")
_TEMPLATES = ("chat_template", "chat_template.default")
_TEXTS = ("completion", "pretrain")
_TEMPLATE, _JINJA = "chat_template", "chat_template_jinja"
_OWN_PROMPTS = (
    "writes prompts of its own, not the chat template; write rows with prompt and completion to a "
    "file and set data.path=FILE"
)
_ALPACA = ("alpaca", "alpaca:instruct")
# Schedules and their parts that transformers doesn't have.
_OWN_SCHEDULES = (
    "cosine_constant_lr_ratio", "jagged_restart_steps", "lr_quadratic_warmup",
)  # fmt: skip
_SAME_LOSS = ("CutCrossEntropy", "Liger", "Kernels", "ExpertParallel", "LMEval", "SwanLab")
_OTHER_LOSSES = (
    "trainer_cls", "use_dft", "use_eaft", "scaling_softmax", "processor_type", "use_pose",
)  # fmt: skip


def read_training(found: Translation, *, adapts: bool) -> None:
    for plugin in each.items if (each := found.value("plugins")) else ():
        name = plugin.rpartition(".")[2]
        if name and name.removesuffix("Plugin") not in _SAME_LOSS:
            found.refuse(SourceKey("plugins", name), "", "may train something else")
    for key in _OTHER_LOSSES:
        if (other := found.value(key)) and not other.is_off:
            found.refuse(other, "", "trains something else")
    if adapts:
        found.add_same({"lora_alpha": "model.lora.alpha"})
    steps = read_hugging_face_training(found, adapts=adapts)
    if steps is None:
        found.add_same({"num_epochs": "train.epochs"})
    _read_schedule(found, steps)
    why = "axolotl averages it over the tokens of each micro-batch, fsdpctl over those of a step"
    found.leave_out(SourceKey("loss", ""), why)
    _read_data(found)
    read_comparisons(found)


def _read_schedule(found: Translation, steps: int | None) -> None:
    schedule, lowest = found.value_or_default("lr_scheduler"), found.value("cosine_min_lr_ratio")
    for key in _OWN_SCHEDULES:
        if (value := found.value(key)) and not value.is_off:
            found.refuse(value, "lr_scheduler", "not supported")
    warmup, share = found.value("warmup_steps"), found.value_or_default("warmup_ratio")
    most = 100 if found.value("warmup_ratio") is None else NO_LIMIT
    is_share = is_fraction(share.text) or not share.text.strip("0.")
    if warmup is None and (steps is None or not is_share):
        found.leave_out(share, "if that is 1 step, axolotl warms up over 2 steps, fsdpctl over 1")
        words = f"lr_scheduler.warmup_ratio={share.text} {_FLOOR}={most}"
        add_schedule(found, schedule, (share, words))
    else:
        of_share = 0 if warmup else min(int(float(share.text) * (steps or 0)), most)
        count = warmup.text.strip() if warmup else str(of_share)
        count = str(_FEWEST) if count == "1" else count
        add_schedule(found, schedule, (warmup or share, f"{_FLOOR}={count}"))
    if lowest and not lowest.is_off and schedule.text.strip().lower() == "cosine":
        found.add(lowest, f"lr_scheduler.min_lr_ratio={lowest.text}")


def _read_data(found: Translation) -> None:
    content = found.source.content
    key = "datasets" if content.get("datasets") else "pretraining_dataset"
    streams = key != "datasets"
    entries = list(_entries(content.get(key)))[: 1 if streams else None]  # axolotl reads one
    paths = _paths(entries)
    kinds = {str(entry.get("type")) for entry in entries} - {"None"}
    texts = [each for each in entries if streams or str(each.get("type")) in _TEXTS]
    of_texts = _paths(texts)
    firsts = first_rows(found, of_texts)
    hides = any(map(hides_text, firsts)) or not all(map(found.path_of, of_texts))
    is_text = streams or (hides and len(texts) == len(entries))
    shown = SourceKey(key, ", ".join(paths)) if entries else None
    others = sorted(kinds - {*_TEMPLATES, *_TEXTS, *_ALPACA})
    own = f"{key}[].type: {others[0][:80]}: {_OWN_PROMPTS}" if others else ""
    columns = {str(x.get("field") or x.get("text_column") or TEXT) for x in texts} - {TEXT}
    if columns or (hides and not is_text):
        own = f"{key}[].field: {min(columns)[:80]}" if columns else f"{key}[].type: completion"
        own += ": write rows with the column text, and no other, to a file and set data.path=FILE"
    option = read_data(found, shown, paths, is_text=is_text, own=own)
    if alpaca := kinds.intersection(_ALPACA):
        found.add(SourceKey(f"{key}[].type", min(alpaca)), "data.prompt=alpaca")
    if is_text:
        why = "fsdpctl reads one stream of tokens, axolotl cuts it at the ends of texts or windows"
        found.leave_out(SourceKey(key, "text"), why)
    if option == CHAT:
        _read_chats(found)
        _read_template(found, [each if each.get(_TEMPLATE) else content for each in entries])
    _read_held_out(found)
    for entry in entries:
        for name, value in entry.items():
            usual = _SAME_MEANING.get(name, ("false", False))
            is_same = name in _PATH_KEYS or value is None or value in usual
            is_same |= name in _HUB_KEYS and found.path_of(_files(entry)[0]) is None
            if not is_same:
                found.leave_out(SourceKey(f"{key}[].{name}", str(value)[:80]), "not followed")


def _read_template(found: Translation, places: Iterable[Mapping[Any, Any]]) -> None:
    given = {(str(x.get(_TEMPLATE) or ""), str(x.get(_JINJA) or "")) for x in places}
    names = ", ".join(sorted(name for name, _ in given if name))
    (name, text), *others = given or {("", "")}
    value = SourceKey(_TEMPLATE, names)
    if others:
        found.leave_out(value, "fsdpctl has one template for all data; set data.template=FILE")
    elif text and name in ("jinja", ""):
        if (file := found.path_of(text)) is not None:
            found.add(SourceKey(_JINJA, text), f"data.template={file}")
        else:
            shown = " ".join(text.split())[:40]
            way = "not a file; write the template to one and set data.template=FILE"
            found.require_for_training("data.template", f"{_JINJA}: {shown}: {way}")
    elif name and not name.startswith("tokenizer_default"):
        why = "axolotl's own; the tokenizer's is used; for another one, set data.template=FILE"
        found.leave_out(value, why)


def _read_chats(found: Translation) -> None:
    packing, inputs = (
        found.value_or_default("sample_packing"),
        found.value_or_default("train_on_inputs"),
    )
    found.add(packing, f"data.packing={str(packing.is_on).lower()}")
    found.add(inputs, f"data.train_on={'all' if inputs.is_on else 'assistant'}")
    long = found.value_or_default("excess_length_strategy")
    found.add(long, f"data.too_long={long.text}")


def _read_held_out(found: Translation) -> None:
    entries = list(_entries(found.source.content.get("test_datasets")))
    paths = _paths(entries)
    held = found.value_or_default("val_set_size")
    if entries:
        read_held_out(found, SourceKey("test_datasets", ", ".join(paths)), paths)
    elif held.is_off or not held.text.strip().strip("0.") or is_fraction(held.text):
        found.add(held, f"data.val_fraction={'0' if held.is_off else held.text}")
    else:
        found.refuse(held, "data.val_fraction", "a number of samples, not a share")


def _entries(content: object) -> Iterator[Mapping[str, Any]]:
    for entry in content if isinstance(content, list) else [content] if content else []:
        yield entry if isinstance(entry, Mapping) else {"path": entry}


def _paths(entries: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    parts = [(x, part_of_hub(x.get("name"), x.get("split"), x.get("revision"))) for x in entries]
    return {path: part for entry, part in parts for path in _files(entry)}


def _files(entry: Mapping[str, Any]) -> list[str]:
    files = entry.get("data_files") or entry.get("path") or ""
    return [str(each) for each in (files if isinstance(files, list) else [files])]
