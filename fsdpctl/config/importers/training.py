"""Settings of other tools that matter for a training, but not for its memory."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fsdpctl.config.data import CHAT, option_of_data
from fsdpctl.config.importers.source_config import SourceKey
from fsdpctl.config.importers.translation import Translation, TranslationRow
from fsdpctl.config.schema import KEYS
from fsdpctl.errors import UsageError

_SCHEDULES = {
    "cosine": ("cosine", "lr_scheduler.min_lr_ratio=0"),
    "cosine_with_min_lr": ("cosine",),
    "linear": ("wsd", "lr_scheduler.decay_ratio=1", "lr_scheduler.min_lr_ratio=0"),
    "constant": ("constant",),
    "constant_with_warmup": ("constant",),
    "warmup_stable_decay": ("wsd", "lr_scheduler.min_lr_ratio=0"),
    "wsd": ("wsd",),
}
_WARMUP = "lr_scheduler.warmup_steps=0"
# The names of transformers' TrainingArguments, which axolotl and TRL share, and ours.
_PLAIN = {
    "learning_rate": "optimizer.lr", "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.beta1", "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.eps", "max_grad_norm": "optimizer.max_grad_norm",
    "seed": "train.seed", "output_dir": "train.run_dir", "save_total_limit": "checkpoint.keep_last",
    "logging_steps": "train.log_every", "lora_dropout": "model.lora.dropout",
    "warmup_ratio": "lr_scheduler.warmup_ratio", "wandb_project": "log.wandb_project",
    "cosine_min_lr_ratio": "lr_scheduler.min_lr_ratio", "use_tensorboard": "log.tensorboard",
    "num_epochs": "train.epochs", "num_train_epochs": "train.epochs", "max_steps": "train.steps",
    "save_steps": "checkpoint.every", "eval_steps": "train.eval_every",
    "val_set_size": "data.val_fraction", "lora_model_dir": "model.lora.path",
}  # fmt: skip
# Defaults of the tools that are not fsdpctl's.
_USUAL = {"optimizer.weight_decay": "0", "optimizer.beta2": "0.999"}
USUAL_OF_AXOLOTL = {**_USUAL, "train.epochs": "1", "lr_scheduler.warmup_ratio": "0.03"}
USUAL_OF_TRL = {**_USUAL, "train.epochs": "3", "optimizer.lr": "2e-5"}


class TrainingRows:
    """Collects the rows of a translation that only matter for a training."""

    def __init__(self, found: Translation) -> None:
        self._found = found
        self._keys = {each.key: each for each in found.source.all_keys()}
        self.settings: set[str] = set()  # their names, so far

    def value(self, *keys: str) -> SourceKey | None:
        """Return the first of `keys` that is set."""
        return next((self._keys[key] for key in keys if key in self._keys), None)

    def add(self, value: SourceKey, *settings: str, note: str = "") -> None:
        """Add a row for a value, unless its setting is rejected: then the reason is kept."""
        for setting in settings:
            name, _, text = setting.partition("=")
            try:
                if name in KEYS:
                    KEYS[name].parse(text)
            except UsageError as error:
                self.leave(value, str(error))
                return
        self.settings |= {setting.partition("=")[0] for setting in settings}
        self._found.training.append(TranslationRow(value.key, value.text, settings, note))

    def leave(self, value: SourceKey, why: str) -> None:
        """Record that a value has no counterpart."""
        self._found.left_out.append(TranslationRow(value.key, value.text, note=why))

    def plain(self, names: Mapping[str, str]) -> None:
        """Add the values of keys that have a counterpart with the same meaning."""
        for theirs, ours in names.items():
            value = self.value(theirs)
            if value is not None and "$" in value.text:
                self.leave(value, "a variable that is not known")
            elif value is not None and ours not in self.settings:
                self.add(value, f"{ours}={value.text}")

    def usual(self, settings: Mapping[str, str]) -> None:
        """Add the tool's defaults for settings that its file leaves out."""
        for name, text in settings.items():
            if name not in self.settings:
                row = TranslationRow("(not set)", "", (f"{name}={text}",), "the tool's default")
                self._found.training.append(row)

    def schedule(self, value: SourceKey | None, usual: str, *, warms_up: bool) -> None:
        """Add the learning rate schedule, which is `usual` if it isn't set."""
        name = usual if value is None else value.text.strip().lower()
        shown = value or SourceKey("(not set)", usual, ())
        if name not in _SCHEDULES:
            expected = ", ".join(_SCHEDULES)
            self.leave(shown, f"expected one of {expected}; cosine is used")
            return
        option, *others = _SCHEDULES[name]
        kept = [each for each in others if each.partition("=")[0] not in self.settings]
        warmup = () if warms_up and name != "constant" else (_WARMUP,)
        self.add(shown, f"lr_scheduler={option}", *kept, *warmup)

    def data(self, value: SourceKey | None, paths: Iterable[str], *, is_text: bool = False) -> None:
        """Add the data if all of `paths` are here; the Hub's names have to be downloaded."""
        listed = [(path, _found_file(path, self._found.file)) for path in paths]
        absent = [path for path, file in listed if file is None]
        files = [str(file) for _, file in listed if file is not None]
        option = "text" if is_text else (option_of_data(files[0]) if files else CHAT)
        shown = value or SourceKey("(data)", "", ())
        self.add(shown, f"data={option}")
        if listed and not absent:
            self.add(shown, f"data.path={','.join(files)}")
            return
        why = f"{shown.key}: not set; set data.path=FILE"
        if absent:
            names = f"{shown.key}: {', '.join(absent)[:200]}"
            why = f"{names}: not found here; download the data and set data.path=FILE"
        self._found.missing_for_training.append(("data.path", why))


def read_hugging_face_training(
    found: Translation, usual_schedule: str, usual: Mapping[str, str]
) -> None:
    """Translate the names of transformers' TrainingArguments; `usual` are the tool's defaults."""
    rows = TrainingRows(found)
    steps, epochs = rows.value("max_steps"), rows.value("num_epochs", "num_train_epochs")
    names = dict(_PLAIN)
    if steps is not None and (not steps.text.strip().isdigit() or steps.text.strip() == "0"):
        names.pop("max_steps")  # -1: epochs count
        steps = None
    if steps is not None:
        names = {name: ours for name, ours in names.items() if ours != "train.epochs"}
        if epochs is not None:
            rows.leave(epochs, "max_steps decides the length")
    warmup = rows.value("warmup_steps")
    if warmup is not None and _is_fraction(warmup.text):  # transformers 5 accepts it
        rows.add(warmup, f"lr_scheduler.warmup_ratio={warmup.text}")
    elif warmup is not None and warmup.text.strip() != "0":
        rows.add(warmup, f"lr_scheduler.warmup_steps={warmup.text}")
        names.pop("warmup_ratio")
    held = rows.value("val_set_size")
    if held is not None and held.text.strip().strip("0.") and not _is_fraction(held.text):
        names.pop("val_set_size")
        rows.leave(held, "a number of samples; set data.val_fraction or data.val_path")
    project = rows.value("wandb_project")
    if project is not None:
        rows.add(project, "log.wandb=true")
    rows.plain(names)
    inputs = rows.value("train_on_inputs")
    if inputs is not None and inputs.is_on:
        rows.add(inputs, "data.train_on=all")
    usual = {name: text for name, text in usual.items() if not (steps and name == "train.epochs")}
    warmups = ("lr_scheduler.warmup_ratio", "lr_scheduler.warmup_steps")
    if warmup is not None or rows.settings.intersection(warmups):
        usual.pop(warmups[0], None)
    warms_up = bool({*usual, *rows.settings}.intersection(warmups))
    rows.schedule(
        rows.value("lr_scheduler", "lr_scheduler_type"), usual_schedule, warms_up=warms_up
    )
    rows.usual(usual)


def data_of_axolotl(found: Translation) -> None:
    """Translate the data of an axolotl file."""
    rows = TrainingRows(found)
    key = "datasets" if found.source.content.get("datasets") else "pretraining_dataset"
    content = found.source.content.get(key)
    entries: list[Any] = content if isinstance(content, list) else [content] if content else []
    paths, kinds = [], set()
    for entry in entries:
        about = entry if isinstance(entry, Mapping) else {"path": entry}
        files = about.get("data_files") or about.get("path") or ""
        paths += [str(each) for each in (files if isinstance(files, list) else [files])]
        kinds.add(str(about.get("type")))
    shown = SourceKey(key, ", ".join(paths), ()) if entries else None
    rows.data(shown, paths, is_text=key != "datasets")
    for kind in sorted(kinds - {"None", "chat_template", "alpaca", "completion", "sharegpt"}):
        rows.leave(SourceKey(f"{key}[].type", kind, ()), "the file's own columns decide the format")


def _found_file(path: str, beside: Path) -> Path | None:
    places = (Path(os.path.expanduser(path)), beside.parent / path)
    try:
        return next((each for each in places if path and each.exists()), None)
    except OSError:  # too long for a name
        return None


def _is_fraction(text: str) -> bool:
    try:
        return 0 < float(text) < 1
    except ValueError:
        return False
