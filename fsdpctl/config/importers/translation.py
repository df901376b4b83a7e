"""What becomes of the configuration of another tool: rows of theirs and ours, and what is left."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fsdpctl.config.importers.said import Said, Value
from fsdpctl.config.schema import GROUPS, KEYS
from fsdpctl.config.words import NOT_OFFERED, OURS

# Ours that an estimate of memory depends on; sections stand for all that is in them.
_MATTER = (
    "model", "strategy", "prefetch", "accumulation", "precision", "activation_checkpointing",
    "engine", "launch.nproc_per_node", "launch.nnodes", "launch.device", "train.seq_len",
    "train.micro_batch_size", "train.global_batch_size", "train.global_batch_tokens",
    "train.compile", "data.packing",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """Keys of theirs, and what they became."""

    key: str  # with commas between several
    value: str
    words: tuple[str, ...] = ()  # KEY=VALUE
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "key": self.key, "value": self.value, "words": list(self.words), "note": self.note,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step computes; the number of ranks, which it depends on, is not known yet."""

    keys: tuple[str, ...]
    micro: int | None  # samples of a rank and pass
    accumulation: int | None = None  # passes
    whole: int | None = None  # samples of a step, over all ranks


@dataclass(frozen=True, slots=True)
class Degrees:
    """How ranks are arranged; -1: as many as there are."""

    keys: tuple[str, ...]
    replicate: int  # copies
    shard: int  # ranks of a copy
    reshards: bool = True  # parameters are freed after forward

    @property
    def shown(self) -> tuple[str, str]:
        """Keys and values for people."""
        return ", ".join(self.keys), f"{self.replicate}, {self.shard}"

    @property
    def total(self) -> int | None:
        """Ranks, where both are said."""
        return self.replicate * self.shard if self.shard > 0 else None


@dataclass(slots=True)
class Translation:
    """A configuration of another tool, as far as it is understood."""

    tool: str
    said: Said
    rows: list[Row] = field(default_factory=list)
    unlike: list[Row] = field(default_factory=list)  # is estimated without; the note says why
    idle: list[str] = field(default_factory=list)  # keys without influence on memory
    unknown: list[str] = field(default_factory=list)
    # What has to be typed, as it cannot be taken from the file: a key of ours, and why.
    missing: list[tuple[str, str]] = field(default_factory=list)
    batch: Batch | None = None
    degrees: Degrees | None = None
    whole_gradients: bool = False  # until the last of several passes
    whole_logits: bool = True  # those of all tokens of a pass exist at once
    own_engine: str = ""  # why the figure is for fsdpctl's engine, whatever the file uses

    @property
    def file(self) -> Path:
        """Where it was read."""
        return self.said.file

    @property
    def words(self) -> dict[str, str]:
        """What the rows became, by key."""
        return self.words_of(self.rows)

    def words_of(self, rows: Iterable[Row]) -> dict[str, str]:
        """What `rows` became, by key; a later one wins."""
        pairs = (word.partition("=") for row in rows for word in row.words)
        words = {name: text for name, _, text in pairs}
        if self.own_engine:
            words.pop("engine", None)
        return words

    def became(self, value: Value | None, *words: str, default: str = "", note: str = "") -> None:
        """`value` means `words`; where it is not set, that of `default`, a key of theirs."""
        if value is None:
            self.rows.append(Row(default, "(not set)", words, note))
        else:
            self.rows.append(Row(value.key, value.text, words, note))

    def without(self, value: Value, why: str) -> None:
        """The estimate leaves `value` out."""
        self.unlike.append(Row(value.key, value.text, note=why))

    def sort_rest(self, idle: Iterable[str]) -> None:
        """Say of all keys that nobody took what they are.

        Args:
            idle: patterns of keys that have no influence on memory.
        """
        patterns = tuple(idle)
        for value in self.said.rest():
            if any(fnmatchcase(value.key, pattern) for pattern in patterns):
                self.idle.append(value.key)
            else:
                self._sort(value)

    def _sort(self, value: Value) -> None:
        last = value.key.rsplit(".", 1)[-1]
        ours = OURS.get(value.key, OURS.get(last, ""))
        name = ours.partition("=")[0]
        reason = NOT_OFFERED.get(last)
        if reason is not None:
            if not value.is_off:
                self.without(value, f"fsdpctl does not offer {reason}")
        elif ours in KEYS and _matters(ours):
            self.became(value, f"{ours}={value.text}")
        elif ours.startswith("nothing;") or (
            (name in KEYS or name in GROUPS) and not _matters(name)
        ):
            self.idle.append(value.key)
        else:
            self.unknown.append(value.key)


def _matters(name: str) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in _MATTER)
