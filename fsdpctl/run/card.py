"""The model card of an export: its base, data, steps, losses, settings and versions.

Nothing in it names a directory of this machine: of a path, only the last name is kept.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from fsdpctl.checkpoint.publish import sealed_card
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.config.compose import compose_config
from fsdpctl.config.schema import KEYS
from fsdpctl.config.serialize import config_words
from fsdpctl.errors import UsageError
from fsdpctl.io.files import read_text_file
from fsdpctl.io.run_files import CHECKPOINTS, METRICS, OVERRIDES
from fsdpctl.io.texts import by_name, one_line
from fsdpctl.run.metrics import read_metrics

_OF_THE_MACHINE = ("checkpoint", "cluster", "launch", "log", "train.run_dir", "train.profile")
_HUB_DATA = re.compile(r"hf://(?:datasets/)?([\w.-]+/[\w.-]+)")
_HUB_MODEL = re.compile(r"([\w.-]+/[\w.-]+)@[0-9a-f]{7}")
_FOLDERS = re.compile(r"(?<![\w/:.~-])(?:~|\.{1,2})?/(?:[^\s/,'\"=]+/)*")
_TOKEN = re.compile(r"\bhf_\w{8,}")


def card_of(reader: CheckpointReader, *, is_peft: bool = False) -> bytes:
    """Return README.md for an export of a model, or of adapters in PEFT's format."""
    from huggingface_hub import ModelCardData  # takes 0.1 s

    words, info = reader.manifest.config, reader.manifest.base
    path = "" if words.get("model.init") == "random" else words.get("model.path", "")
    base = _public("model.path", path if info is None else info.path)
    named = _HUB_MODEL.fullmatch(base)
    front = ModelCardData(
        library_name="peft" if is_peft else "transformers",
        base_model=named[1] if named else None,
        datasets=sorted({*_HUB_DATA.findall(words.get("data.path", ""))}) or None,
        tags=["fsdpctl", *(["lora"] if "model.lora.rank" in words else [])],
    )
    facts = {"base model": base, **dict(_facts(reader))}
    rows = "\n".join(
        f"| {name} | {one_line(text).replace('|', chr(92) + '|')} |"
        for name, text in facts.items()
        if text
    )
    text = f"---\n{front.to_yaml()}\n---\n\n# Trained with fsdpctl\n\n| | |\n|---|---|\n{rows}\n"
    for title, lines in (("Command", _command(reader)), ("Settings", _settings(words))):
        if block := "".join(f"    {one_line(each)}\n" for each in lines):
            text += f"\n## {title}\n\n{block}"
    return sealed_card(text)


def _facts(reader: CheckpointReader) -> Iterator[tuple[str, str]]:
    words, progress = reader.manifest.config, reader.manifest.progress
    yield "data", _public("data.path", words.get("data.path", words.get("data", "")))
    trained = "LoRA adapters" if "model.lora.rank" in words else words.get("model.trainable", "all")
    yield "trained parameters", trained
    yield "steps, samples", f"{progress.step:,}, {progress.samples:,}"
    tokens, losses, validation = 0, list[tuple[int, float]](), ""
    folder = reader.folder.parent
    path = folder.parent / METRICS
    with suppress(UsageError):  # a damaged file
        for line in read_metrics(path) if folder.name == CHECKPOINTS and path.is_file() else ():
            if line.step > progress.step:
                break
            tokens += line.tokens or 0
            if isinstance(line.loss, float):
                losses = [*losses[:1], (line.step, line.loss)]
            if isinstance(line.val_loss, float):
                validation = f"{line.val_loss:.4f} at step {line.step:,}"
    yield "tokens", f"{tokens:,}" if tokens else ""
    yield "training loss", ", ".join(f"{loss:.4f} at step {step:,}" for step, loss in losses)
    best = progress.best
    yield "validation loss", validation
    yield "lowest validation loss", f"{best.loss:.4f} at step {best.step:,}" if best else ""
    yield "versions", ", ".join(f"{a} {b}" for a, b in reader.manifest.versions.items() if b)


def _command(reader: CheckpointReader) -> list[str]:
    """Return the command as it was typed, without what is of the machine."""
    run_dir, words = reader.folder.parent.parent, reader.manifest.config
    with suppress(UsageError):
        typed = read_text_file(run_dir / OVERRIDES).splitlines()
        pairs = [(each, *each.partition("=")[::2]) for each in typed]
        kept = [
            f"{name}={_public(name, words.get(name, text) if _is_path(name) else text)}"
            if "=" in each else _public("", each)
            for each, name, text in pairs
            if not name.startswith(_OF_THE_MACHINE)
        ]  # fmt: skip
        return [f"fsdpctl train {shlex.join(kept)}"]
    return []


def _settings(words: Mapping[str, str]) -> Iterator[str]:
    usual = config_words(compose_config([]).config)
    for name, text in words.items():
        is_own = name.startswith(_OF_THE_MACHINE) or name == "model.config_json"
        if not is_own and usual.get(name) != text:
            yield f"{name}={_public(name, text)}"


def _is_path(name: str) -> bool:
    return name in KEYS and KEYS[name].is_path


def _public(name: str, text: str) -> str:
    """Return a value without directories, and without what looks like a token of the Hub."""
    text = _TOKEN.sub("hf_***", text)
    if not _is_path(name):
        return _FOLDERS.sub("", by_name(text))
    parts = text.split(",")
    return ",".join(
        x if x.startswith("hf://") else by_name(x) if by_name(x) != x else Path(x).name
        for x in parts
    )
