"""The training of an axolotl file: its data, length and learning rates."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fsdpctl.config.data import CHAT, TEXT
from fsdpctl.config.source_config import SourceKey
from fsdpctl.importers.defaults import AXOLOTL
from fsdpctl.importers.schedules import NO_LIMIT, add_schedule
from fsdpctl.importers.training import (
    TrainingRows,
    first_rows,
    hides_text,
    is_fraction,
    part_of_hub,
    read_hugging_face_training,
)
from fsdpctl.importers.translation import Translation

_FEWEST = 2  # steps: axolotl makes a warmup of one step two
_FLOOR = "lr_scheduler.warmup_steps"
# Values of a data set's keys that fsdpctl follows, or that change nothing; others are named.
_AS_HERE: Mapping[str, tuple[object, ...]] = {
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
_OF_FILES = (
    "path", "data_files", "type", "preprocess_shards", "trust_remote_code", "chat_template",
    "chat_template_jinja",
)  # fmt: skip
_OF_HUB = ("name", "revision", "split")
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
_OTHER_LOSSES = ("trainer_cls", "use_eaft", "scaling_softmax", "processor_type", "use_pose")


def read_training(found: Translation, *, adapts: bool) -> None:
    rows = TrainingRows(found, AXOLOTL)
    for plugin in each.items if (each := rows.value("plugins")) else ():
        name = plugin.rpartition(".")[2]
        if name and name.removesuffix("Plugin") not in _SAME_LOSS:
            rows.ask(SourceKey("plugins", name), "", "may train something else")
    for key in _OTHER_LOSSES:
        if (other := rows.value(key)) and not other.is_off:
            rows.ask(other, "", "trains something else")
    if adapts:
        rows.plain({"lora_alpha": "model.lora.alpha"})
    steps = read_hugging_face_training(rows, adapts=adapts)
    if steps is None:
        rows.plain({"num_epochs": "train.epochs"})
    _read_schedule(rows, steps)
    why = "axolotl averages it over the tokens of each micro-batch, fsdpctl over those of a step"
    rows.leave(SourceKey("loss", ""), why)
    _read_data(found, rows)
    rows.comparisons()


def _read_schedule(rows: TrainingRows, steps: int | None) -> None:
    schedule, lowest = rows.known("lr_scheduler"), rows.value("cosine_min_lr_ratio")
    for key in _OWN_SCHEDULES:
        if (value := rows.value(key)) and not value.is_off:
            rows.ask(value, "lr_scheduler", "not supported")
    warmup, share = rows.value("warmup_steps"), rows.known("warmup_ratio")
    most = 100 if rows.value("warmup_ratio") is None else NO_LIMIT
    if warmup is None and steps is None:
        rows.leave(share, "if that is 1 step, axolotl warms up over 2 steps, fsdpctl over 1")
        words = f"lr_scheduler.warmup_ratio={share.text} {_FLOOR}={most}"
        add_schedule(rows, schedule, (share, words))
    else:
        of_share = 0 if warmup else min(int(float(share.text) * (steps or 0)), most)
        count = warmup.text.strip() if warmup else str(of_share)
        count = str(_FEWEST) if count == "1" else count
        add_schedule(rows, schedule, (warmup or share, f"{_FLOOR}={count}"))
    if lowest and not lowest.is_off and schedule.text.strip().lower() == "cosine":
        rows.add(lowest, f"lr_scheduler.min_lr_ratio={lowest.text}")


def _read_data(found: Translation, rows: TrainingRows) -> None:
    content = found.source.content
    key = "datasets" if content.get("datasets") else "pretraining_dataset"
    streams = key != "datasets"
    entries = list(_entries(content.get(key)))[: 1 if streams else None]  # axolotl reads one
    paths = _paths(entries)
    kinds = {str(entry.get("type")) for entry in entries} - {"None"}
    texts = [each for each in entries if streams or str(each.get("type")) in _TEXTS]
    of_texts = _paths(texts)
    hides = any(map(hides_text, first_rows(rows, of_texts))) or not all(map(rows.file, of_texts))
    is_text = streams or (hides and len(texts) == len(entries))
    shown = SourceKey(key, ", ".join(paths)) if entries else None
    others = sorted(kinds - {*_TEMPLATES, *_TEXTS, *_ALPACA})
    own = f"{key}[].type: {others[0][:80]}: {_OWN_PROMPTS}" if others else ""
    columns = {str(x.get("field") or x.get("text_column") or TEXT) for x in texts} - {TEXT}
    if columns or (hides and not is_text):
        own = f"{key}[].field: {min(columns)[:80]}" if columns else f"{key}[].type: completion"
        own += ": write rows with the column text, and no other, to a file and set data.path=FILE"
    option = rows.data(shown, paths, is_text=is_text, own=own)
    if alpaca := kinds.intersection(_ALPACA):
        rows.add(SourceKey(f"{key}[].type", min(alpaca)), "data.prompt=alpaca")
    if is_text:
        why = "fsdpctl reads one stream of tokens, axolotl cuts it at the ends of texts or windows"
        rows.leave(SourceKey(key, "text"), why)
    if option == CHAT:
        _read_chats(rows)
        _read_template(rows, [each if each.get(_TEMPLATE) else content for each in entries])
    _read_held_out(found, rows)
    for entry in entries:
        for name, value in entry.items():
            usual = _AS_HERE.get(name, ("false", False))
            is_same = name in _OF_FILES or value is None or value in usual
            is_same |= name in _OF_HUB and rows.file(_files(entry)[0]) is None
            if not is_same:
                rows.leave(SourceKey(f"{key}[].{name}", str(value)[:80]), "not followed")


def _read_template(rows: TrainingRows, places: Iterable[Mapping[Any, Any]]) -> None:
    """Translate the chat template, whose name and Jinja text each data set may have."""
    found = {(str(x.get(_TEMPLATE) or ""), str(x.get(_JINJA) or "")) for x in places}
    names = ", ".join(sorted(name for name, _ in found if name))
    (name, text), *others = found or {("", "")}
    value = SourceKey(_TEMPLATE, names)
    if others:
        rows.leave(value, "fsdpctl has one template for all data; set data.template=FILE")
    elif text and name in ("jinja", ""):
        if (file := rows.file(text)) is not None:
            rows.add(SourceKey(_JINJA, text), f"data.template={file}")
        else:
            shown = " ".join(text.split())[:40]
            way = "not a file; write the template to one and set data.template=FILE"
            rows.missing("data.template", f"{_JINJA}: {shown}: {way}")
    elif name and not name.startswith("tokenizer_default"):
        why = "axolotl's own; the tokenizer's is used; for another one, set data.template=FILE"
        rows.leave(value, why)


def _read_chats(rows: TrainingRows) -> None:
    packing, inputs = rows.known("sample_packing"), rows.known("train_on_inputs")
    rows.add(packing, f"data.packing={str(packing.is_on).lower()}")
    rows.add(inputs, f"data.train_on={'all' if inputs.is_on else 'assistant'}")
    long = rows.known("excess_length_strategy")
    rows.add(long, f"data.too_long={long.text}")


def _read_held_out(found: Translation, rows: TrainingRows) -> None:
    entries = list(_entries(found.source.content.get("test_datasets")))
    paths = _paths(entries)
    held = rows.known("val_set_size")
    if entries:
        rows.held_out(SourceKey("test_datasets", ", ".join(paths)), paths)
    elif held.is_off or not held.text.strip().strip("0.") or is_fraction(held.text):
        rows.add(held, f"data.val_fraction={'0' if held.is_off else held.text}")
    else:
        rows.ask(held, "data.val_fraction", "a number of samples, not a share")


def _entries(content: object) -> Iterator[Mapping[str, Any]]:
    for entry in content if isinstance(content, list) else [content] if content else []:
        yield entry if isinstance(entry, Mapping) else {"path": entry}


def _paths(entries: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the files and names of data, each with its part on the Hub."""
    parts = [(x, part_of_hub(x.get("name"), x.get("split"), x.get("revision"))) for x in entries]
    return {path: part for entry, part in parts for path in _files(entry)}


def _files(entry: Mapping[str, Any]) -> list[str]:
    files = entry.get("data_files") or entry.get("path") or ""
    return [str(each) for each in (files if isinstance(files, list) else [files])]
