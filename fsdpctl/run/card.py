"""The model card of an export: base model, data, steps, losses, settings and versions.

The card names no directory of this machine: only the last component of a path is written.
"""

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

from fsdpctl.checkpoint.publish import card_with_checksum
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.config.compose import compose_config
from fsdpctl.config.schema import KEYS
from fsdpctl.config.serialize import to_settings
from fsdpctl.errors import UsageError
from fsdpctl.io.files import read_text_file
from fsdpctl.io.run_files import CHECKPOINTS, METRICS, OVERRIDES_FILE
from fsdpctl.io.texts import one_line, shorten_snapshots
from fsdpctl.run.metrics import read_metrics

_LOCAL_SETTINGS = ("checkpoint", "cluster", "launch", "log", "train.run_dir", "train.profile")
_HUB_DATA = re.compile(r"hf://(?:datasets/)?([\w.-]+/[\w.-]+)")
_HUB_MODEL = re.compile(r"([\w.-]+/[\w.-]+)@[0-9a-f]{7}")
# Directories in free text: absolute, in the home directory, or relative with a dot.
_FOLDERS = re.compile(r"(?<![\w/:.~-])(?:~|\.{1,2})?/(?:[^\s/,'\"=]+/)*")
_TOKEN = re.compile(r"\bhf_\w{8,}")


def model_card(reader: CheckpointReader, *, is_peft: bool = False) -> bytes:
    """Return README.md for an export of a model, or of adapters in PEFT's format."""
    from huggingface_hub import ModelCardData  # takes 0.1 s

    settings = reader.manifest.config
    base = _redacted("model.path", base_model_path(reader))
    hub_match, is_lora = _HUB_MODEL.fullmatch(base), "model.lora.rank" in settings
    front = ModelCardData(
        library_name="peft" if is_peft else "transformers",
        base_model=hub_match[1] if hub_match else None,
        datasets=sorted({*_HUB_DATA.findall(settings.get("data.path", ""))}) or None,
        tags=["fsdpctl", *(["lora"] if is_lora else [])],
    )
    trainable = settings.get("model.trainable", "all parameters")
    facts = {
        "base model": base,
        "data": _redacted("data.path", settings.get("data.path", settings.get("data", ""))),
        "trained": "LoRA adapters" if is_lora else trainable,
        **dict(_progress(reader)),
        "versions": ", ".join(f"{a} {b}" for a, b in reader.manifest.versions.items() if b),
    }
    rows = (f"| {name} | {one_line(x).replace('|', '&#124;')} |" for name, x in facts.items() if x)
    text = f"---\n{front.to_yaml()}\n---\n\n# Trained with fsdpctl\n\n| | |\n|---|---|\n"
    text += "\n".join(rows) + "\n"
    defaults = to_settings(compose_config([]).config)
    changed = [
        f"{name}={_redacted(name, value)}"
        for name, value in settings.items()
        if defaults.get(name) != value and not _is_left_out(name)
    ]
    for title, lines in (("Command", _command(reader)), ("Settings", changed)):
        if lines:
            text += f"\n## {title}\n\n" + "".join(f"    {one_line(x)}\n" for x in lines)
    return card_with_checksum(text)


def base_model_path(reader: CheckpointReader) -> str:
    """Return the path of the model that the training started from, or an empty string."""
    settings, info = reader.manifest.config, reader.manifest.base
    if info is not None:
        return info.path
    return "" if settings.get("model.init") == "random" else settings.get("model.path", "")


def _progress(reader: CheckpointReader) -> Iterator[tuple[str, str]]:
    progress, metrics_file = reader.manifest.progress, reader.folder.parent.parent / METRICS
    yield "steps, samples", f"{progress.step:,}, {progress.samples:,}"
    is_run = reader.folder.parent.name == CHECKPOINTS and metrics_file.is_file()
    lines = []
    with suppress(UsageError):  # metrics.jsonl is corrupted
        lines = [x for x in read_metrics(metrics_file) if x.step <= progress.step] if is_run else []
    losses = [f"{x.loss:.4f} at step {x.step:,}" for x in lines if isinstance(x.loss, float)]
    validated = [x for x in lines if isinstance(x.val_loss, float)]
    yield "tokens", f"{sum(x.tokens or 0 for x in lines):,}" if losses else ""
    yield "training loss", ", ".join(losses[:1] + losses[1:][-1:])  # the first and the last
    yield (
        "validation loss",
        ", ".join(f"{x.val_loss:.4f} at step {x.step:,}" for x in validated[-1:]),
    )
    best = progress.best
    yield "lowest validation loss", f"{best.loss:.4f} at step {best.step:,}" if best else ""


def _command(reader: CheckpointReader) -> list[str]:
    with suppress(UsageError):
        recorded = read_text_file(reader.folder.parent.parent / OVERRIDES_FILE).splitlines()
        args = [_redacted_argument(reader, x) for x in recorded if not _is_left_out(x)]
        parts = (x.split(" ", 1) if x.startswith("--") else [x] for x in args)  # --recipe NAME
        return [f"fsdpctl train {shlex.join(chain(*parts))}"]
    return []


def _redacted_argument(reader: CheckpointReader, argument: str) -> str:
    name, separator, text = argument.partition("=")
    text = reader.manifest.config.get(name, text) if _is_path(name) else text
    return f"{name}={_redacted(name, text)}" if separator else _redacted("", argument)


def _is_left_out(name: str) -> bool:
    return name.startswith((*_LOCAL_SETTINGS, "model.config_json"))


def _is_path(name: str) -> bool:
    return name in KEYS and KEYS[name].is_path


def _redacted(name: str, text: str) -> str:
    """Return a value without directories and without access tokens of the Hub."""
    text = _TOKEN.sub("hf_***", text)
    if not _is_path(name):
        return _FOLDERS.sub("", shorten_snapshots(text))
    paths = []
    for path in text.split(","):
        shortened = shorten_snapshots(path)
        is_on_hub = path.startswith("hf://") or shortened != path
        paths.append(shortened if is_on_hub else Path(path).name)
    return ",".join(paths)
