"""The translation of another tool's file: settings of fsdpctl, and keys without a counterpart."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, cast

from fsdpctl.config.schema import GROUPS, KEYS
from fsdpctl.config.synonyms import NOT_NEEDED, NOT_SUPPORTED, SYNONYMS
from fsdpctl.errors import UsageError
from fsdpctl.importers.source_config import SourceConfig, SourceKey
from fsdpctl.io.packages import package_folder
from fsdpctl.io.untrusted import read_yaml

# Settings of fsdpctl that affect the memory estimate; a section includes all of its keys.
_AFFECT_MEMORY = (
    "model", "strategy", "prefetch", "accumulation", "precision", "activation_checkpointing",
    "engine", "launch.nproc_per_node", "launch.nnodes", "launch.device", "train.seq_len",
    "train.micro_batch_size", "train.global_batch_size", "train.global_batch_tokens",
    "train.compile", "train.context_parallel", "train.mlp_chunk_tokens", "data.packing",
    "optimizer.state_dtype",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TranslationRow:
    """Keys of the other tool, and the settings of fsdpctl that replace them."""

    key: str  # several keys are separated by commas
    value: str
    settings: tuple[str, ...] = ()  # KEY=VALUE
    note: str = ""


@dataclass(frozen=True, slots=True)
class SourceBatch:
    """The batch sizes in the file, not yet combined with the number of ranks."""

    keys: tuple[str, ...]  # keys of batch sizes; the first is that of the micro-batch
    micro: int | None  # samples per rank and micro-batch; None: not in the file
    accumulation: int | None = None  # micro-batches per step
    samples: int | None = None  # samples per step; None: not in the file
    default_micro: int = 1  # the tool's default of `micro`


@dataclass(frozen=True, slots=True)
class RankDegrees:
    """The degrees of data parallelism in the file."""

    keys: tuple[str, ...]
    replicate: int  # replicas
    shard: int  # ranks per replica; -1: all remaining ranks

    @property
    def key_and_text(self) -> tuple[str, str]:
        return ", ".join(self.keys), f"{self.replicate}, {self.shard}"


@dataclass(slots=True)
class Translation:
    """The translation of a file, which functions of each tool fill with rows."""

    tool: str
    source: SourceConfig
    defaults: Mapping[str, str] = field(default_factory=dict)  # the tool's values of training keys
    training_keys: tuple[str, ...] = ()  # patterns of keys that change the training
    rows: list[TranslationRow] = field(default_factory=list)  # settings of the recipe
    # Memory use of the other program: settings that only estimates have, and notes.
    emulated: list[TranslationRow] = field(default_factory=list)
    not_estimated: list[TranslationRow] = field(default_factory=list)  # keys that estimates ignore
    left_out: list[TranslationRow] = field(default_factory=list)  # keys that the training ignores
    unrecognized: list[str] = field(default_factory=list)
    # Settings that the command line must have, with the reason.
    missing: list[tuple[str, str]] = field(default_factory=list)
    missing_for_training: list[tuple[str, str]] = field(default_factory=list)  # not for estimates
    # Refused values: the setting that may replace the value, or an empty text, and the reason.
    refused: list[tuple[str, str]] = field(default_factory=list)
    deepspeed: SourceConfig | None = None  # DeepSpeed's file, which replaces parts of the training
    model: SourceKey | None = None  # the directory or name of the pretrained weights
    batch: SourceBatch | None = None
    degrees: RankDegrees | None = None
    uses_torch: bool = False  # whether PyTorch's engines shard or replicate the model
    whole_gradients: bool = False  # whether gradients stay unsharded until the last micro-batch
    whole_logits: bool = True  # whether the logits of all tokens of a micro-batch exist at once
    tiled_logits: bool = False  # whether logits are computed for a part of the vocabulary at a time

    @property
    def settings(self) -> dict[str, str]:
        return settings_of(self.rows)

    @property
    def batch_key_and_text(self) -> tuple[str, str]:
        names = self.batch.keys if self.batch else ()
        keys = (*self.source.all_keys(), *(self.deepspeed.all_keys() if self.deepspeed else ()))
        sizes = {each.key: each.text for each in keys if each.key in names and each.text != "auto"}
        return ", ".join(sizes) or "(batch)", ", ".join(sizes.values()) or "(not set)"

    def add_row(
        self, value: SourceKey | None, *settings: str, key_if_unset: str = "", note: str = ""
    ) -> None:
        """Add a row for `value`, or for `key_if_unset` if the file has no value.

        Without settings, it is a note on the estimate. An invalid setting is added to `missing`.
        """
        key_and_text = (key_if_unset, "(not set)") if value is None else (value.key, value.text)
        for name, why in _invalid(settings):
            self.missing.append((name, f"{key_and_text[0]}: {why}"))
            return
        rows = self.rows if settings else self.emulated
        rows.append(TranslationRow(*key_and_text, settings, note))

    def emulate(self, key: str, value: str, setting: str, note: str = "") -> None:
        """Add a setting that describes memory use of the tool, for estimates alone."""
        self.emulated.append(TranslationRow(key, value, (setting,), note))

    def add_training(
        self, value: SourceKey, *settings: str, note: str = "", decides: bool = True
    ) -> None:
        """Add a row for a value of the training.

        If a setting is invalid, refuse the value if it `decides` (affects) the training, else leave
        it out.
        """
        for name, why in _invalid(settings):
            if decides:
                self.refuse(value, name, why)
            else:
                self.leave_out(value, why)
            return
        is_default = value.key in self.defaults and self.value(value.key) is None
        note = note or f"the default of {self.tool}" * is_default
        self.add_row(None if is_default else value, *settings, key_if_unset=value.key, note=note)

    def add_same(self, names: Mapping[str, str]) -> None:
        """Add the values of keys with a counterpart; `names` maps the keys to fsdpctl's."""
        for key, setting in names.items():
            value = self.effective(key) if key in self.defaults else self.value(key)
            if value is None or setting in self.settings:
                continue
            if not value.text or ("$" in value.text and key in self.defaults):
                # An empty default is a required key; ${NAME} is a variable of the environment.
                why = f"{value.text[:80]}: a variable that is not known"
                why = why if value.text else f"required by {self.tool}"
                self.require_for_training(setting, f"{value.key}: {why}; set {setting}")
            else:
                self.add_training(value, f"{setting}={value.text}", decides=key in self.defaults)

    def value(self, *keys: str) -> SourceKey | None:
        """Return the first of `keys` that is set; takes all of them, as SourceConfig.value."""
        return self.source.value(*keys)

    def effective(self, key: str) -> SourceKey:
        """Return the value of a key, else the tool's default."""
        text = self.defaults[key]
        return self.value(key) or SourceKey(key, text, (text,))

    def exclude(self, value: SourceKey, why: str) -> None:
        """Record that the estimate ignores `value`."""
        self.not_estimated.append(TranslationRow(value.key, value.text, note=why))

    def leave_out(self, value: SourceKey, why: str) -> None:
        """Record that the training ignores `value`."""
        self.left_out.append(TranslationRow(value.key, value.text, note=why))

    def require(self, name: str, value: SourceKey, why: str) -> None:
        """Require the setting `name` on the command line, because of a value."""
        self.missing.append((name, f"{value.key}: {value.text[:80]}: {why}"))

    def require_for_training(self, name: str, why: str) -> None:
        """Require the setting `name` for a training; estimates do without it."""
        self.missing_for_training.append((name, why))

    def refuse(self, value: SourceKey, name: str, why: str) -> None:
        """Refuse a training because of a value, unless the command line has the setting `name`."""
        advice = f"; set {name}" if name else ""
        shown = value.key if not value.text else f"{value.key}: {value.text[:80]}"
        self.refused.append((name, f"{shown}: {why}{advice}"))

    def path_of(self, path: str) -> Path | None:
        """Return a path in the working directory or next to the file; None if it doesn't exist."""
        candidates = (Path(os.path.expanduser(path)), self.source.file.parent / path)
        try:
            return next((each for each in candidates if path and each.exists()), None)
        except OSError:  # the text is too long for a path
            return None

    def classify_rest(self, unused: Iterable[str]) -> None:
        """Classify all keys that remain; keys that match `unused` do not affect memory."""
        unused = tuple(unused)
        for value in self.source.rest():
            last = value.key.rpartition(".")[2]
            # A setting or advice.
            setting = SYNONYMS.get(value.key, SYNONYMS.get(last, ""))
            name, reason = setting.partition("=")[0], NOT_SUPPORTED.get(last)
            has_no_effect = (name in KEYS or name in GROUPS) and not affects_memory(name)
            if any(fnmatchcase(value.key, pattern) for pattern in unused):
                self.source.no_memory_effect.add(value.key)
            elif reason is not None:
                if not value.is_off:
                    self.exclude(value, f"fsdpctl does not support {reason}")
            elif setting in KEYS and affects_memory(setting):
                self.add_row(value, f"{setting}={value.text}")
            elif last in NOT_NEEDED or has_no_effect:
                self.source.no_memory_effect.add(value.key)
            else:
                self.unrecognized.append(value.key)


def settings_of(rows: Iterable[TranslationRow]) -> dict[str, str]:
    """Return the settings of `rows` by key. Later rows take precedence."""
    pairs = (setting.partition("=") for row in rows for setting in row.settings)
    return {name: text for name, _, text in pairs}


def _invalid(settings: Iterable[str]) -> Iterator[tuple[str, str]]:
    for setting in settings:
        name, _, text = setting.partition("=")
        try:
            if name in KEYS:
                KEYS[name].parse(text)
        except UsageError as error:
            yield name, str(error)


def affects_memory(name: str) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in _AFFECT_MEMORY)


@cache
def _read_tools() -> dict[str, dict[str, Any]]:
    return cast(dict[str, dict[str, Any]], read_yaml(package_folder("conf") / "tools.yaml"))


def table(part: str, *tools: str) -> dict[str, str]:
    """Return a part of conf/tools.yaml with a text for each key; later `tools` take precedence."""
    return {key: text for tool in tools for key, text in _read_tools()[tool][part].items()}


def patterns(part: str, *tools: str) -> tuple[str, ...]:
    """Return a part of conf/tools.yaml with patterns of keys."""
    return tuple(each for tool in tools for each in _read_tools()[tool][part].split())
