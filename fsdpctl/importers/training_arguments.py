"""Settings that trainers of transformers share, which mostly don't matter for memory."""

import math
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fsdpctl.chats.formats import detect_format, parse_row
from fsdpctl.chats.rows import first_row
from fsdpctl.config.data import CHAT, TEXT
from fsdpctl.config.data_files import option_of_path
from fsdpctl.config.training import TRACKERS
from fsdpctl.errors import UsageError
from fsdpctl.importers.source_config import SourceKey, as_whole
from fsdpctl.importers.translation import SourceBatch, Translation, patterns

# The names of transformers' TrainingArguments, which axolotl and TRL share, and ours.
_PLAIN = {
    "learning_rate": "optimizer.lr", "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.beta1", "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.eps", "max_grad_norm": "optimizer.max_grad_norm",
    "seed": "train.seed", "output_dir": "train.run_dir", "save_total_limit": "checkpoint.keep_last",
    "logging_steps": "train.log_every", "lora_model_dir": "model.lora.path",
}  # fmt: skip
# Steps between events, which may be a share of all steps; the number per epoch; and ours.
_INTERVALS = (
    ("save_steps", "saves_per_epoch", "checkpoint.every"),
    ("eval_steps", "evals_per_epoch", "train.eval_every"),
)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?(:[\w.-]+)?/[\w.-]+")
_FILE_SUFFIXES = (".json", ".jsonl", ".parquet", ".arrow", ".csv", ".tsv", ".txt", ".gz", ".zst")
_SPLIT = re.compile(r"(?:^|\+)([\w.-]+)")  # a name in train[:20%]+test
# Keys of a file that turn on a tracker, in the order of `TRACKERS`, and that name its project.
_ON = (
    ("use_tensorboard",), ("use_wandb", "wandb_project"), ("trackio_project_name", "use_trackio"),
    ("mlflow_experiment_name", "use_mlflow"),
)  # fmt: skip
_ALL = TRACKERS[:2]  # of `report_to: all`: those that are installed
_PROJECTS = (
    "wandb_project", "env.WANDB_PROJECT", "mlflow_experiment_name", "env.MLFLOW_EXPERIMENT_NAME",
    "trackio_project_name", "project",
)  # fmt: skip
# What names the best checkpoint, or ends the training, by validation losses.
_BY_LOSS = {
    "early_stopping_patience": ("train.patience={}", "checkpoint.keep_best=true"),
    "load_best_model_at_end": ("checkpoint.keep_best=true",),
    "save_strategy": ("checkpoint.keep_best=true",),
}
_LOSSES = ("loss", "eval_loss")
_BY_DATA = "the number of steps depends on the data; set"


def part_of_hub(config: object, split: object, revision: object = None) -> str:
    """Return what follows the name of a data set on the Hub in `data.path`."""
    at = f"@{revision}" if revision else ""
    return f"{at}{f':{config}' if config else ''}/{split or 'train'}"


def named_data(
    found: Translation, name: SourceKey | None, config: str, split: str, usual: str = "train"
) -> tuple[SourceKey | None, dict[str, str]]:
    """Return the key and the paths of a data set of which other keys have the two parts."""
    parts = [found.value(config), found.value(split)]
    part = part_of_hub(parts[0] and parts[0].text, parts[1].text if parts[1] else usual)
    if name is None or found.path_of(name.text) is not None:
        return name, dict.fromkeys(name.items if name else (), part)
    keys = ", ".join(each.key for each in (name, *parts) if each)
    return SourceKey(keys, name.text, name.items), dict.fromkeys(name.items, part)


def read_hugging_face_training(found: Translation, *, adapts: bool) -> int | None:
    """Translate the names of transformers' TrainingArguments; return the steps, if it has them."""
    epochs = "num_epochs" if found.value("num_epochs") else "num_train_epochs"
    steps = _read_steps(found)
    if steps is not None and (unused := found.value(epochs)) is not None:
        found.leave_out(unused, "max_steps decides the length")
    _read_trackers(found)
    half = found.value("fp16", "float16")
    if half is not None and half.is_on:
        found.leave_out(half, "trained in bf16, without scaling of the loss")
    read_inner_deepspeed(found)
    for interval in _INTERVALS:
        _read_interval(found, steps, *interval)
    found.add_same({**_PLAIN, **({"lora_dropout": "model.lora.dropout"} if adapts else {})})
    return steps


def _read_trackers(found: Translation) -> None:
    keys = [found.value(*each) for each in _ON]
    on = {name: key for name, key in zip(TRACKERS, keys, strict=True) if key and not key.is_off}
    if given := found.value("report_to"):
        named = {*re.findall(r"\w+", given.text.lower())}
        on |= {
            name: given for name in TRACKERS if name in named or ("all" in named and name in _ALL)
        }
        if others := named - {*TRACKERS, "all", "none"}:
            found.leave_out(given, f"{', '.join(sorted(others))[:80]}: not supported")
    if on:
        names = ",".join(name for name in TRACKERS if name in on)
        found.add(next(iter(on.values())), f"log.trackers={names}", decides=False)
        found.add_same(dict.fromkeys(_PROJECTS, "log.project"))
        if label := found.value("run_name", "wandb_name"):
            found.leave_out(label, "a run has the name of train.run_dir in a tracker")


def first_rows(found: Translation, paths: Iterable[str]) -> list[dict[str, Any]]:
    """Return the first row of each local file, or of the first file in each directory."""
    here = [file for path in paths if (file := found.path_of(path)) is not None]
    files = [sorted(each.rglob("*.*"))[:1] if each.is_dir() else [each] for each in here]
    return [first_row(str(file)) for each in files for file in each]


def hides_text(row: Mapping[str, Any]) -> bool:
    """Return whether `data=chat` reads a row that has `text` as something else."""
    try:
        parse_row(name := detect_format(row), row)
    except UsageError:
        name = ""
    return TEXT in row and name != TEXT


def _read_interval(
    found: Translation, steps: int | None, key: str, per_epoch: str, ours: str
) -> None:
    value, count = found.value(key), found.value(per_epoch)
    if count is not None and not count.is_off:
        value = count
    elif _by_strategy(found, value, key, ours):
        return
    elif value is None or not is_fraction(value.text):
        found.add_same({key: ours})
        return
    epochs = found.value("num_epochs")
    try:
        share = float(value.text)
        if value is count:  # as axolotl converts it
            share = 1 / (share * float(epochs.text if epochs else 1))
    except (ValueError, ZeroDivisionError):
        share = 0
    held = found.value("test_datasets", "val_set_size", "eval_strategy")
    if not 0 < share < math.inf:
        found.leave_out(value, f"expected a number above 0; set {ours}")
    elif key == "eval_steps" and (held is None or held.is_off or not held.text.strip("0.")):
        found.leave_out(value, "nothing is held out")
    elif steps is not None:
        every = min(steps, math.ceil(steps * share))
        found.add(value, f"{ours}={every}", note=f"of {steps} steps", decides=False)
    else:
        found.require_for_training(ours, f"{value.key}: {value.text}: {_BY_DATA} {ours}")


def _by_strategy(found: Translation, value: SourceKey | None, key: str, ours: str) -> bool:
    """Add an interval that isn't the number of steps `value`, and return whether there is one."""
    strategy = found.value(key.replace("steps", "strategy"))
    if strategy is None or (value is not None and found.tool == "axolotl"):
        return False
    how = strategy.text.strip().lower()
    if how == "epoch":
        found.require_for_training(ours, f"{strategy.key}: epoch: {_BY_DATA} {ours}")
    elif how == "best" or strategy.is_off:
        found.add(strategy, f"{ours}=0", decides=False)
    else:
        log = (found.value_or_default if found.tool == "TRL" else found.value)("logging_steps")
        if log is None or value is not None or key != "eval_steps":
            return False
        found.add(log, f"{ours}={log.text}", note="eval_steps is not set", decides=False)
    return True


def is_fraction(text: str) -> bool:
    try:
        return 0 < float(text) < 1
    except ValueError:
        return False


def _read_steps(found: Translation) -> int | None:
    if (value := found.value("max_steps")) is None:
        return None
    if (steps := as_whole(value.text)) is None:
        found.refuse(value, "train.steps", "expected a whole number")
    elif steps > 0:
        found.add(value, f"train.steps={steps}")
        return steps
    return None


def read_inner_deepspeed(found: Translation) -> None:
    """Add what a file of DeepSpeed decides: clipping, and schedules and optimizers of its own.

    Source: transformers 5.23, integrations/deepspeed.py, for values that are `auto`.
    """
    if (inner := found.deepspeed) is None:
        return
    given = {each.key: each for each in inner.all_keys()}
    clip = given.get("gradient_clipping") or SourceKey("gradient_clipping", "0")
    if clip.text.strip() != "auto":
        note = "" if clip.key in given else "the default of DeepSpeed"
        found.add(clip, f"optimizer.max_grad_norm={clip.text}", note=note)
    if (kind := given.get("scheduler.type")) is not None:
        found.refuse(kind, "lr_scheduler", "schedules of DeepSpeed are not supported")
    kind = given.get("optimizer.type")
    if kind is not None and kind.text.lower() not in ("adam", "adamw"):
        found.refuse(kind, "optimizer", "expected AdamW")
    for key in ("lr", "eps", "weight_decay"):
        value = given.get(f"optimizer.params.{key}")
        if value is not None and value.text.strip() != "auto":
            found.add(value, f"optimizer.{key}={value.text}")
    betas = given.get("optimizer.params.betas")
    if betas is not None and len(betas.items) == 2:
        one, two = betas.items
        found.add(betas, f"optimizer.beta1={one}", f"optimizer.beta2={two}")
    batch = found.batch or SourceBatch((), None)
    micro, passes = batch.micro or batch.usual, batch.accumulation or 1
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    for key, size in zip(keys, (micro, passes, batch.samples), strict=True):
        value = given.get(key)
        if value is not None and value.text.strip() not in ("auto", str(size)):
            found.leave_out(value, f"{found.file.name} decides it")
    changes = patterns("changes", "deepspeed")
    for key, value in given.items():
        is_usual = value.is_on if key.startswith("optimizer.") else value.is_off
        is_usual = is_usual or value.text.strip() == "auto"
        if not is_usual and any(fnmatchcase(key, x) for x in changes):
            found.leave_out(value, "changes the training, without a counterpart")


def _local_or_hub(found: Translation, path: str, part: str) -> str | None:
    """Return a path that exists, or the name of a data set on the Hub; else None.

    `part` follows the name, as in `data.path`: a revision, a configuration, a split.
    """
    if (file := found.path_of(path)) is not None:
        return str(file)
    # A path of a file that is missing could be a name too.
    is_name = _HUB_NAME.fullmatch(f"{path}{part}") and not Path(path).parent.exists()
    return f"hf://{path}{part}" if is_name and not path.endswith(_FILE_SUFFIXES) else None


def _absent(found: Translation, paths: Mapping[str, str], name: str) -> str:
    """Return why the setting `name` can't have `paths`, each with its part; empty if it can.

    If only a part of a split is asked for, the message has the names of whole splits.
    """
    lost, splits, known = [], [], []
    for path, part in paths.items():
        at, _, split = part.rpartition("/")
        if (here := _local_or_hub(found, path, part)) is not None:
            known.append(here)
            continue
        names = _SPLIT.findall(split) or ["train"]
        whole = [
            x for each in names if (x := _local_or_hub(found, path, f"{at}/{each}")) is not None
        ]
        known += whole
        splits += [f"{path}: {split}"] if whole else []
        lost += [] if whole else [path]
    if lost:
        return f"{', '.join(lost)[:200]}: not found here, nor a name on the Hub; set {name}=FILE"
    why = "part of a split, or a sum of splits, is not supported; for all rows, set"
    return f"{', '.join(splits)[:200]}: {why} {name}={','.join(known)}" if splits else ""


def read_data(
    found: Translation,
    value: SourceKey | None,
    paths: Mapping[str, str],
    *,
    is_text: bool = False,
    own: str = "",
) -> str:
    """Add the data if all of `paths` are found, each with its part; return its option.

    Its key is `value`. With `own`, the rows must be written otherwise, for that reason.
    """
    absent = _absent(found, paths, "data.path")
    files = [
        x for path, part in paths.items() if (x := _local_or_hub(found, path, part)) is not None
    ]
    local = [each for each in files if not each.startswith("hf://")]
    option = TEXT if is_text else (option_of_path(local[0]) if local else CHAT)
    shown = value or SourceKey("(data)", "")
    found.add(shown, f"data={option}")
    if paths and not absent and not own:
        found.add(shown, f"data.path={','.join(files)}")
        return option
    why = absent or "not set; set data.path=FILE"
    found.require_for_training("data.path", own or f"{shown.key}: {why}")
    return option


def read_comparisons(found: Translation) -> None:
    """Add early stopping and the best checkpoint, which compare the losses of validations."""
    given = [each for key in _BY_LOSS if (each := found.value(key)) and not each.is_off]
    given = [each for each in given if each.key != "save_strategy" or each.text == "best"]
    metric, high = found.value("metric_for_best_model"), found.value("greater_is_better")
    is_other = metric is not None and metric.text not in _LOSSES
    other = metric if is_other else high if high and high.is_on else None
    words = found.settings
    asked = {name for name, _ in found.refused}
    validates = words.get("data.val_fraction", "0").strip("0.") or "data.val_path" in words
    for each in given:
        ours = [word.format(each.text) for word in _BY_LOSS[each.key]]
        if other is not None:
            why = "fsdpctl compares validation losses, and the lowest is the best"
            found.refuse(other, ours[0].partition("=")[0], why)
        elif validates or "data.val_fraction" in asked:
            found.add(each, *ours, "train.eval_batches=0", note="of all data held out")
        else:
            found.leave_out(each, f"nothing is held out; set data.val_path=FILE {' '.join(ours)}")


def read_held_out(found: Translation, value: SourceKey, paths: Mapping[str, str]) -> None:
    """Add the data to validate on if all of `paths`, one at least, are found."""
    files = [_local_or_hub(found, path, part) for path, part in paths.items()]
    if why := _absent(found, paths, "data.val_path") if paths else "set data.val_path=FILE":
        found.leave_out(value, f"the data to validate on: {why}")
        found.add(value, "data.val_fraction=0", note="left out, see below")
    else:
        found.add(value, f"data.val_path={','.join(map(str, files))}")
