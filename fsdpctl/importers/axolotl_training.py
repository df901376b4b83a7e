"""The training of an axolotl file: its data, length and learning rates."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fsdpctl.config.data import CHAT
from fsdpctl.config.source_config import SourceKey
from fsdpctl.importers.defaults import AXOLOTL
from fsdpctl.importers.schedules import NO_LIMIT, add_schedule
from fsdpctl.importers.training import (
    TrainingRows,
    is_fraction,
    part_of_hub,
    read_hugging_face_training,
)
from fsdpctl.importers.translation import Translation

_FEWEST = 2  # steps: axolotl makes a warmup of one step two
_FLOOR = "lr_scheduler.warmup_steps"
# Values of a data set's keys that fsdpctl follows, or that change nothing; others are named.
_AS_HERE: Mapping[str, tuple[object, ...]] = {
    "chat_template": ("tokenizer_default",),
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
_OF_FILES = ("path", "data_files", "type", "preprocess_shards", "trust_remote_code")
_OF_HUB = ("name", "revision", "split")
_TEMPLATES = ("chat_template", "chat_template.default")
_TEXTS = ("completion", "pretrain")
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
            rows.ask(SourceKey("plugins", name, ()), "", "may train something else")
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
    rows.leave(SourceKey("loss", "", ()), why)
    _read_data(found, rows)


def _read_schedule(rows: TrainingRows, steps: int | None) -> None:
    schedule, lowest = rows.known("lr_scheduler"), rows.value("cosine_min_lr_ratio")
    for key in _OWN_SCHEDULES:
        if (value := rows.value(key)) and not value.is_off:
            rows.ask(value, "lr_scheduler", "not supported")
    warmup, share = rows.value("warmup_steps"), rows.known("warmup_ratio")
    if warmup is None and steps is None:
        why = "if that is 1 step, axolotl warms up over 2 steps, fsdpctl over 1"
        rows.leave(share, why)
    most = 100 if rows.value("warmup_ratio") is None else NO_LIMIT
    if warmup is None and steps is None:
        words = f"lr_scheduler.warmup_ratio={share.text} {_FLOOR}={most}"
        add_schedule(rows, schedule, (share, words))
    else:
        if warmup is None:
            count = str(min(int(float(share.text) * (steps or 0)), most))
        else:
            count = warmup.text.strip()
        count = str(_FEWEST) if count == "1" else count
        add_schedule(rows, schedule, (warmup or share, f"{_FLOOR}={count}"))
    if lowest and not lowest.is_off and schedule.text.strip().lower() == "cosine":
        rows.add(lowest, f"lr_scheduler.min_lr_ratio={lowest.text}")


def _read_data(found: Translation, rows: TrainingRows) -> None:
    content = found.source.content
    key = "datasets" if content.get("datasets") else "pretraining_dataset"
    is_text = key != "datasets"
    entries = list(_entries(content.get(key)))[: 1 if is_text else None]  # axolotl reads one
    paths = _paths(entries)
    kinds = {str(entry.get("type")) for entry in entries} - {"None"}
    shown = SourceKey(key, ", ".join(paths), ()) if entries else None
    others = sorted(kinds - {*_TEMPLATES, *_TEXTS, *_ALPACA})
    own = f"{key}[].type: {others[0][:80]}" if others else ""
    option = rows.data(shown, paths, is_text=is_text, own=own)
    if alpaca := kinds.intersection(_ALPACA):
        rows.add(SourceKey(f"{key}[].type", min(alpaca), ()), "data.prompt=alpaca")
    if "completion" in kinds and not is_text:
        why = "axolotl cuts longer texts into pieces, fsdpctl follows data.too_long"
        rows.leave(SourceKey(f"{key}[].type", "completion", ()), why)
    if is_text:
        why = "fsdpctl reads one stream of tokens, axolotl cuts it at the ends of texts or windows"
        rows.leave(SourceKey(key, "text", ()), why)
    if option == CHAT:
        _read_chats(rows)
    _read_held_out(found, rows)
    for entry in entries:
        for name, value in entry.items():
            usual = _AS_HERE.get(name, ("false", False))
            is_same = name in _OF_FILES or value is None or value in usual
            is_same |= name in _OF_HUB and rows.file(_files(entry)[0]) is None
            if not is_same:
                rows.leave(SourceKey(f"{key}[].{name}", str(value)[:80], ()), "not followed")
    template = rows.value("chat_template_jinja")
    if template and (file := rows.file(template.text)) is not None:
        rows.add(template, f"data.template={file}")


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
        rows.held_out(SourceKey("test_datasets", ", ".join(paths), ()), paths)
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
