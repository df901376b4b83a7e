"""Translation of transformers' learning-rate schedules and their arguments."""

import json
from collections.abc import Mapping
from contextlib import suppress

from fsdpctl.importers.source_config import SourceKey, as_whole
from fsdpctl.importers.translation import Translation

NO_LIMIT = 1_000_000  # warmup steps that never apply: `warmup_ratio` then rounds down


def add_schedule(target: Translation, value: SourceKey, warmup: tuple[SourceKey, str]) -> None:
    """Translate a schedule with its arguments; rates are those of transformers at each step.

    `value` is the name of the schedule. `warmup` is the key of the warmup, and its settings.
    """
    keys = target.source.all_keys()
    kwargs = {each.key: each for each in keys if each.key.startswith("lr_scheduler_kwargs")}
    arguments = _arguments(kwargs)
    if kwargs:
        value = SourceKey(", ".join((value.key, *kwargs)), value.text, ())
    name = value.text.strip().lower()
    schedule = _settings(target, value, arguments)
    if schedule is None:
        return
    if arguments:
        names = ", ".join(f"{key}={text}" for key, text in arguments.items())
        target.refuse(value, "lr_scheduler", f"arguments that fsdpctl does not have: {names[:80]}")
        return
    target.add_training(value, *schedule)
    key, settings = warmup
    for setting in ("lr_scheduler.warmup_steps=0",) if name == "constant" else settings.split():
        is_unlimited = setting.endswith(f"warmup_steps={NO_LIMIT}")
        note = "no limit: the share of all steps, rounded down" if is_unlimited else ""
        target.add_training(key, setting, note=note)


def _settings(target: Translation, value: SourceKey, arguments: dict[str, str]) -> list[str] | None:
    """Return the settings, and remove the arguments that they cover; None if refused."""
    name = value.text.strip().lower()
    # In transformers, the first step of a warmup has rate 0, and the final rate is never reached.
    start, last = "lr_scheduler.start_lr_ratio=0", "lr_scheduler.reaches_min=false"
    lowest = arguments.pop("min_lr_rate", None) or arguments.pop("min_lr_ratio", None)
    if absolute := arguments.pop("min_lr", None):
        lowest = ratio(absolute, target.effective("learning_rate").text)
    floor = f"lr_scheduler.min_lr_ratio={lowest or 0}"
    if name == "cosine_with_min_lr" and lowest is None:
        target.refuse(value, "lr_scheduler", "requires min_lr or min_lr_rate")
        return None
    if name in ("cosine", "cosine_with_min_lr"):
        if arguments.get("num_cycles") == "0.5":
            arguments.pop("num_cycles")
        return ["lr_scheduler=cosine", floor, start, last]
    if name == "linear":
        return ["lr_scheduler=wsd", "lr_scheduler.decay_ratio=1", floor, start, last]
    if name in ("constant", "constant_with_warmup"):
        return ["lr_scheduler=constant", start]
    if name == "warmup_stable_decay" and arguments.pop("warmup_type", "linear") == "linear":
        kind = arguments.pop("decay_type", "cosine")
        limit, decay, share = target.value("max_steps"), arguments.pop("num_decay_steps", ""), []
        if limit and (steps := as_whole(limit.text)):
            share = [f"lr_scheduler.decay_ratio={ratio(decay, str(steps))}"]
        else:
            target.refuse(value, "lr_scheduler.decay_ratio", "the number of all steps is not known")
        start = f"lr_scheduler.start_lr_ratio={lowest or 0}"  # warmup starts at the minimum
        kind = f"lr_scheduler.decay_type={kind}"
        return ["lr_scheduler=wsd", floor, start, last, kind, *share]
    why = "not supported; expected linear, cosine, cosine_with_min_lr, constant, "
    target.refuse(value, "lr_scheduler", f"{why}constant_with_warmup or warmup_stable_decay")
    return None


def _arguments(values: Mapping[str, SourceKey]) -> dict[str, str]:
    kwargs = values.get("lr_scheduler_kwargs")
    if kwargs is None:
        return {key.rpartition(".")[2]: each.text for key, each in values.items()}
    with suppress(ValueError, RecursionError):
        if isinstance(parsed := json.loads(kwargs.text), dict):
            return {key: str(value) for key, value in parsed.items()}
    return {"lr_scheduler_kwargs": kwargs.text}


def ratio(low: str, high: str) -> str:
    """Return the quotient of two numbers in texts; `low` if one isn't a number."""
    try:
        return f"{float(low) / float(high):.12g}"
    except (ValueError, ZeroDivisionError):
        return low  # the caller's setting rejects this text
