"""The translation of another tool's configuration: settings of fsdpctl, and what remains."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from fsdpctl.config.schema import GROUPS, KEYS
from fsdpctl.config.source_config import SourceConfig, SourceKey
from fsdpctl.config.synonyms import NOT_NEEDED, NOT_SUPPORTED, SYNONYMS

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
    """Keys of the other tool with the settings that they become."""

    key: str  # separated by commas if there are several
    value: str
    settings: tuple[str, ...] = ()  # KEY=VALUE
    note: str = ""


@dataclass(frozen=True, slots=True)
class SourceBatch:
    """The batch sizes of the file, which don't depend on the number of ranks."""

    keys: tuple[str, ...]  # that the file may have; first that of the micro-batch
    micro: int | None  # samples per rank and micro-batch, if the file says so
    accumulation: int | None = None  # micro-batches per step
    samples: int | None = None  # of a step, if the file says so
    usual: int = 1  # samples of a micro-batch if the file does not say so


@dataclass(frozen=True, slots=True)
class RankDegrees:
    """The arrangement of ranks; -1 means all remaining ranks."""

    keys: tuple[str, ...]
    replicate: int  # replicas
    shard: int  # ranks per replica

    @property
    def shown(self) -> tuple[str, str]:
        return ", ".join(self.keys), f"{self.replicate}, {self.shard}"

    @property
    def total(self) -> int | None:
        """The number of ranks, if both degrees are set."""
        return self.replicate * self.shard if self.shard > 0 else None


@dataclass(slots=True)
class Translation:
    """The configuration of another tool, as far as fsdpctl recognizes it."""

    tool: str
    source: SourceConfig
    rows: list[TranslationRow] = field(default_factory=list)
    excluded: list[TranslationRow] = field(default_factory=list)  # not estimated; see the note
    no_memory_effect: list[str] = field(default_factory=list)
    unrecognized: list[str] = field(default_factory=list)
    # Settings that must be given on the command line, and the reason.
    missing: list[tuple[str, str]] = field(default_factory=list)
    # What only matters if the file is trained, not if it is estimated.
    training: list[TranslationRow] = field(default_factory=list)
    left_out: list[TranslationRow] = field(default_factory=list)
    missing_for_training: list[tuple[str, str]] = field(default_factory=list)
    # Values that no recipe can have: a setting that replaces each, or none, and the reason.
    refused: list[tuple[str, str]] = field(default_factory=list)
    changes: tuple[str, ...] = ()  # patterns of keys that change the training
    deepspeed: SourceConfig | None = None  # the file that replaces parts of the training
    model: SourceKey | None = None  # the directory or name of the pretrained weights
    batch: SourceBatch | None = None
    degrees: RankDegrees | None = None
    whole_gradients: bool = False  # gradients stay unsharded until the last micro-batch
    whole_logits: bool = True  # the logits of all tokens of a micro-batch exist at once
    tiled_logits: bool = False  # a part of the vocabulary at a time, of up to 4,096 tokens
    wide_base: SourceKey | None = None  # why weights that adapters freeze are in float32

    @property
    def file(self) -> Path:
        return self.source.file

    @property
    def settings(self) -> dict[str, str]:
        return settings_of(self.rows)

    @property
    def has_frozen_head(self) -> bool:
        words = self.settings
        return "model.lora.rank" in words and "head" not in words.get("model.lora.also", "")

    @property
    def shown_batch(self) -> tuple[str, str]:
        """The keys of the batch that the file has, and their values."""
        names = self.batch.keys if self.batch else ()
        given = (*self.source.all_keys(), *(self.deepspeed.all_keys() if self.deepspeed else ()))
        own = {each.key: each.text for each in given if each.key in names and each.text != "auto"}
        return ", ".join(own) or "(batch)", ", ".join(own.values()) or "(not set)"

    def map(
        self, value: SourceKey | None, *settings: str, default: str = "", note: str = ""
    ) -> None:
        """Add a row for `value`, or for the key `default` that isn't set."""
        if value is None:
            self.rows.append(TranslationRow(default, "(not set)", settings, note))
        else:
            self.rows.append(TranslationRow(value.key, value.text, settings, note))

    def exclude(self, value: SourceKey, why: str) -> None:
        """Record that the estimate doesn't include `value`."""
        self.excluded.append(TranslationRow(value.key, value.text, note=why))

    def sort_rest(self, unused: Iterable[str]) -> None:
        """Classify all keys that are left; the patterns `unused` don't affect memory."""
        patterns = tuple(unused)
        for value in self.source.rest():
            last = value.key.rsplit(".", 1)[-1]
            ours = SYNONYMS.get(value.key, SYNONYMS.get(last, ""))
            name, reason = ours.partition("=")[0], NOT_SUPPORTED.get(last)
            is_other = (name in KEYS or name in GROUPS) and not _affects_memory(name)
            if any(fnmatchcase(value.key, pattern) for pattern in patterns):
                self.no_memory_effect.append(value.key)
            elif reason is not None:
                if not value.is_off:
                    self.exclude(value, f"fsdpctl does not support {reason}")
            elif ours in KEYS and _affects_memory(ours):
                self.map(value, f"{ours}={value.text}")
            elif last in NOT_NEEDED or is_other:
                self.no_memory_effect.append(value.key)
            else:
                self.unrecognized.append(value.key)


def settings_of(rows: Iterable[TranslationRow]) -> dict[str, str]:
    """Return the settings of `rows` by key. Later rows take precedence."""
    pairs = (setting.partition("=") for row in rows for setting in row.settings)
    return {name: text for name, _, text in pairs}


def _affects_memory(name: str) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in _AFFECT_MEMORY)
