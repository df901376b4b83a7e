"""Keys of transformers' TrainingArguments, which axolotl and TRL share, and data of both."""

import math
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fsdpctl.chats.formats import detect_format, parse_row
from fsdpctl.chats.rows import first_row
from fsdpctl.config.data import CHAT, TEXT
from fsdpctl.config.data_files import kind_of_path
from fsdpctl.config.training import TRACKERS
from fsdpctl.errors import UsageError
from fsdpctl.importers.source_config import SourceKey, as_whole, is_fraction, is_zero
from fsdpctl.importers.translation import SourceBatch, Translation, patterns

# Keys of TrainingArguments and axolotl that have a counterpart with the same meaning.
_COUNTERPARTS = {
    "learning_rate": "optimizer.lr", "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.beta1", "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.eps", "max_grad_norm": "optimizer.max_grad_norm",
    "seed": "train.seed", "output_dir": "train.run_dir", "save_total_limit": "checkpoint.keep_last",
    "logging_steps": "train.log_every", "lora_model_dir": "model.lora.path",
}  # fmt: skip
# Steps between events, which may be a fraction of all steps; events per epoch; fsdpctl's setting.
_INTERVALS = (
    ("save_steps", "saves_per_epoch", "checkpoint.every"),
    ("eval_steps", "evals_per_epoch", "train.eval_every"),
)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?(:[\w.-]+)?/[\w.-]+")
_FILE_SUFFIXES = (".json", ".jsonl", ".parquet", ".arrow", ".csv", ".tsv", ".txt", ".gz", ".zst")
_SPLIT = re.compile(r"(?:^|\+)([\w.-]+)")  # a name in train[:20%]+test
# Keys that enable a tracker, in the order of `TRACKERS`.
_TRACKER_KEYS = (
    ("use_tensorboard",), ("use_wandb", "wandb_project"), ("trackio_project_name", "use_trackio"),
    ("mlflow_experiment_name", "use_mlflow"),
)  # fmt: skip
_TRACKERS_OF_ALL = TRACKERS[:2]  # trackers of `report_to: all`, which selects installed ones
_PROJECTS = (
    "wandb_project", "env.WANDB_PROJECT", "mlflow_experiment_name", "env.MLFLOW_EXPERIMENT_NAME",
    "trackio_project_name", "project",
)  # fmt: skip
# Keys that select the best checkpoint, or end the training, by validation losses.
_COMPARISONS = {
    "early_stopping_patience": ("train.patience={}", "checkpoint.keep_best=true"),
    "load_best_model_at_end": ("checkpoint.keep_best=true",),
    "save_strategy": ("checkpoint.keep_best=true",),
}
_LOSS_METRICS = ("loss", "eval_loss")
_NO_STEPS = "the number of steps depends on the data; set"


def part_of_hub(config: object, split: object, revision: object = None) -> str:
    """Return the suffix of a data set's name in `data.path`: @REVISION:CONFIG/SPLIT."""
    at = f"@{revision}" if revision else ""
    return f"{at}{f':{config}' if config else ''}/{split or 'train'}"


def read_hugging_face_training(target: Translation, *, adapts: bool) -> int | None:
    """Translate keys of TrainingArguments; return the number of steps if the file sets it."""
    epochs = "num_epochs" if target.value("num_epochs") else "num_train_epochs"
    steps = _read_steps(target)
    if steps is not None and (unused := target.value(epochs)) is not None:
        target.leave_out(unused, "max_steps sets the length")
    _read_trackers(target)
    half = target.value("fp16", "float16")
    if half is not None and half.is_on:
        target.leave_out(half, "trained in bf16, without scaling of the loss")
    read_deepspeed_training(target)
    for interval in _INTERVALS:
        _read_interval(target, steps, *interval)
    target.add_same({**_COUNTERPARTS, **({"lora_dropout": "model.lora.dropout"} if adapts else {})})
    return steps


def _read_trackers(target: Translation) -> None:
    keys = [target.value(*each) for each in _TRACKER_KEYS]
    on = {name: key for name, key in zip(TRACKERS, keys, strict=True) if key and not key.is_off}
    if reported := target.value("report_to"):
        named = {*re.findall(r"\w+", reported.text.lower())}
        reporting = named.union(_TRACKERS_OF_ALL if "all" in named else ())
        on |= {name: reported for name in TRACKERS if name in reporting}
        if unsupported := named - {*TRACKERS, "all", "none"}:
            target.leave_out(reported, f"{', '.join(sorted(unsupported))[:80]}: not supported")
    if on:
        names = ",".join(name for name in TRACKERS if name in on)
        target.add_training(next(iter(on.values())), f"log.trackers={names}", decides=False)
        target.add_same(dict.fromkeys(_PROJECTS, "log.project"))
        if label := target.value("run_name", "wandb_name"):
            target.leave_out(label, "a run has the name of train.run_dir in a tracker")


def first_rows(target: Translation, paths: Iterable[str]) -> list[dict[str, Any]]:
    """Return the first row of each local file, and of the first file of each local directory."""
    local_files = [file for path in paths if (file := target.path_of(path)) is not None]
    files = [sorted(each.rglob("*.*"))[:1] if each.is_dir() else [each] for each in local_files]
    return [first_row(str(file)) for each in files for file in each]


def hides_text(row: Mapping[str, Any]) -> bool:
    """Return whether a row has `text`, but `data=chat` would read its other keys."""
    try:
        parse_row(name := detect_format(row), row)
    except UsageError:
        name = ""
    return TEXT in row and name != TEXT


def _read_interval(
    target: Translation, steps: int | None, key: str, per_epoch: str, setting: str
) -> None:
    value, count = target.value(key), target.value(per_epoch)
    if count is not None and not count.is_off:
        value = count
    elif _by_strategy(target, value, key, setting):
        return
    elif value is None or not is_fraction(value.text):
        target.add_same({key: setting})
        return
    epochs = target.value("num_epochs")
    try:
        share = float(value.text)
        if value is count:  # axolotl converts events per epoch to a fraction of all steps
            share = 1 / (share * float(epochs.text if epochs else 1))
    except (ValueError, ZeroDivisionError):
        share = 0
    held_out = target.value("test_datasets", "val_set_size", "eval_strategy")
    if not 0 < share < math.inf:
        target.leave_out(value, f"expected a number above 0; set {setting}")
    elif key == "eval_steps" and (not held_out or held_out.is_off or is_zero(held_out.text)):
        target.leave_out(value, "nothing is held out")
    elif steps is not None:
        every = min(steps, math.ceil(steps * share))
        target.add_training(value, f"{setting}={every}", note=f"of {steps} steps", decides=False)
    else:
        target.require_for_training(setting, f"{value.key}: {value.text}: {_NO_STEPS} {setting}")


def _by_strategy(target: Translation, value: SourceKey | None, key: str, setting: str) -> bool:
    """Add an interval from a strategy such as epoch; return whether the strategy decides it."""
    strategy = target.value(key.replace("steps", "strategy"))
    if strategy is None or (value is not None and target.tool == "axolotl"):
        return False
    mode = strategy.text.strip().lower()
    if mode == "epoch":
        target.require_for_training(setting, f"{strategy.key}: epoch: {_NO_STEPS} {setting}")
    elif mode == "best" or strategy.is_off:
        target.add_training(strategy, f"{setting}=0", decides=False)
    else:
        # Only TRL has a default.
        log = (target.effective if target.tool == "TRL" else target.value)("logging_steps")
        if log is None or value is not None or key != "eval_steps":
            return False
        note = "eval_steps is not set"
        target.add_training(log, f"{setting}={log.text}", note=note, decides=False)
    return True


def _read_steps(target: Translation) -> int | None:
    if (value := target.value("max_steps")) is None:
        return None
    if (steps := as_whole(value.text)) is None:
        target.refuse(value, "train.steps", "expected a whole number")
    elif steps > 0:
        target.add_training(value, f"train.steps={steps}")
        return steps
    return None


def read_deepspeed_training(target: Translation) -> None:
    """Translate DeepSpeed's file: clipping, and its own schedule and optimizer.

    Values that are `auto` follow transformers 5.23, integrations/deepspeed.py.
    """
    if (inner := target.deepspeed) is None:
        return
    values = {each.key: each for each in inner.all_keys()}
    clip = values.get("gradient_clipping") or SourceKey("gradient_clipping", "0")
    if clip.text.strip() != "auto":
        note = "" if clip.key in values else "the default of DeepSpeed"
        target.add_training(clip, f"optimizer.max_grad_norm={clip.text}", note=note)
    if scheduler := values.get("scheduler.type"):
        target.refuse(scheduler, "lr_scheduler", "schedules of DeepSpeed are not supported")
    optimizer = values.get("optimizer.type")
    if optimizer and optimizer.text.lower() not in ("adam", "adamw"):
        target.refuse(optimizer, "optimizer", "expected AdamW")
    for key in ("lr", "eps", "weight_decay"):
        value = values.get(f"optimizer.params.{key}")
        if value is not None and value.text.strip() != "auto":
            target.add_training(value, f"optimizer.{key}={value.text}")
    betas = values.get("optimizer.params.betas")
    if betas is not None and len(betas.items) == 2:
        beta1, beta2 = betas.items
        target.add_training(betas, f"optimizer.beta1={beta1}", f"optimizer.beta2={beta2}")
    batch = target.batch or SourceBatch(keys=(), micro=None)
    micro, passes = batch.micro or batch.default_micro, batch.accumulation or 1
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    for key, size in zip(keys, (micro, passes, batch.samples), strict=True):
        value = values.get(key)
        if value is not None and value.text.strip() not in ("auto", str(size)):
            target.leave_out(value, f"{target.source.file.name} sets it")
    changes = patterns("changes", "deepspeed")
    for key, value in values.items():
        is_default = value.is_on if key.startswith("optimizer.") else value.is_off
        is_default |= value.text.strip() == "auto"
        if not is_default and any(fnmatchcase(key, pattern) for pattern in changes):
            target.leave_out(value, "changes the training, without a counterpart")


def _locate(target: Translation, path: str, part: str) -> str | None:
    """Return a local file, else the name of a data set on the Hub (with `part`), else None."""
    if (file := target.path_of(path)) is not None:
        return str(file)
    # The path of a missing file may look like a name.
    is_name = _HUB_NAME.fullmatch(f"{path}{part}") and not Path(path).parent.exists()
    return f"hf://{path}{part}" if is_name and not path.endswith(_FILE_SUFFIXES) else None


def _why_absent(target: Translation, paths: Mapping[str, str], name: str) -> str:
    """Return the reason why the setting `name` can't be `paths`; empty if it can.

    `paths` has suffixes of names on the Hub. For parts of splits, the message names whole splits.
    """
    missing, splits, locations = [], [], []
    for path, part in paths.items():
        at, _, split = part.rpartition("/")
        if (location := _locate(target, path, part)) is not None:
            locations.append(location)
            continue
        names = _SPLIT.findall(split) or ["train"]
        whole = [x for each in names if (x := _locate(target, path, f"{at}/{each}")) is not None]
        locations += whole
        splits += [f"{path}: {split}"] if whole else []
        missing += [] if whole else [path]
    if missing:
        return f"{', '.join(missing)[:200]}: not found here, nor a name on the Hub; set {name}=FILE"
    why = "part of a split, or a sum of splits, is not supported; for all rows, set"
    return f"{', '.join(splits)[:200]}: {why} {name}={','.join(locations)}" if splits else ""


def read_data(
    target: Translation,
    value: SourceKey | None,
    paths: Mapping[str, str],
    *,
    is_text: bool = False,
    rewrite: str = "",
) -> str:
    """Add the data if all of `paths` exist, and return the option of `data`.

    `value` is the key of the data. `rewrite`: why rows must be rewritten to a file, or empty.
    """
    absent = _why_absent(target, paths, "data.path")
    files = [x for path, part in paths.items() if (x := _locate(target, path, part)) is not None]
    local = [each for each in files if not each.startswith("hf://")]
    option = TEXT if is_text else (kind_of_path(local[0]) if local else CHAT)
    shown_key = value or SourceKey("(data)", "")
    target.add_training(shown_key, f"data={option}")
    if paths and not absent and not rewrite:
        target.add_training(shown_key, f"data.path={','.join(files)}")
        return option
    why = absent or "not set; set data.path=FILE"
    target.require_for_training("data.path", rewrite or f"{shown_key.key}: {why}")
    return option


def read_comparisons(target: Translation) -> None:
    """Translate early stopping and the best checkpoint, which compare validation losses."""
    keys = [each for key in _COMPARISONS if (each := target.value(key)) and not each.is_off]
    keys = [each for each in keys if each.key != "save_strategy" or each.text == "best"]
    metric, high = target.value("metric_for_best_model"), target.value("greater_is_better")
    unsupported = high if high and high.is_on else None
    if metric and metric.text not in _LOSS_METRICS:
        unsupported = metric
    settings, refused = target.settings, {name for name, _ in target.refused}
    has_validation = "data.val_path" in settings or "data.val_fraction" in refused
    has_validation |= not is_zero(settings.get("data.val_fraction", "0"))
    for each in keys:
        ours = [setting.format(each.text) for setting in _COMPARISONS[each.key]]
        if unsupported is not None:
            why = "fsdpctl compares validation losses, and the lowest is the best"
            target.refuse(unsupported, ours[0].partition("=")[0], why)
        elif has_validation:
            target.add_training(each, *ours, "train.eval_batches=0", note="of all data held out")
        else:
            target.leave_out(each, f"nothing is held out; set data.val_path=FILE {' '.join(ours)}")


def read_held_out(target: Translation, value: SourceKey, paths: Mapping[str, str]) -> None:
    """Add the validation data if there are `paths` and all of them exist."""
    files = [_locate(target, path, part) for path, part in paths.items()]
    if why := _why_absent(target, paths, "data.val_path") if paths else "set data.val_path=FILE":
        target.leave_out(value, f"the data to validate on: {why}")
        target.add_training(value, "data.val_fraction=0", note="left out, see below")
    else:
        target.add_training(value, f"data.val_path={','.join(map(str, files))}")
