"""Completion of an imported configuration by the command line and the hardware."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fsdpctl.config.compose import Composed, compose_config
from fsdpctl.config.schema import GROUPS, KEYS, Config
from fsdpctl.errors import UsageError
from fsdpctl.importers.recipe import rows_of_ranks
from fsdpctl.importers.translation import RankDegrees, Translation, TranslationRow, settings_of
from fsdpctl.plan.strategy import FSDPCTL
from fsdpctl.resolve.place import place
from fsdpctl.resolve.rules import checked

_ASSUMED = "h100"  # if neither the file nor the command line names hardware
_PACKS = "data.packing=true"
_TILE = 4096  # tokens whose logits of a part of the vocabulary take what a 16th of them take here


@dataclass(frozen=True, slots=True)
class ImportedConfig:
    """The configuration to estimate, and the origin of each setting."""

    composed: Composed
    translation: Translation
    rows: tuple[TranslationRow, ...]
    typed: dict[str, str]
    own_engine: str  # why the estimate is for fsdpctl's engine

    @property
    def overridden(self) -> set[str]:
        """Settings of the file that the command line, or the engine, overrides."""
        words = settings_of(self.rows).items()
        return {f"{name}={text}" for name, text in words if _differs(self.composed, name, text)}

    def to_dict(self) -> dict[str, Any]:
        found = self.translation
        return {
            "file": str(found.file),
            "tool": found.tool,
            "rows": [asdict(row) for row in self.rows],
            "command_line": [f"{name}={text}" for name, text in self.typed.items()],
            "overridden": sorted(self.overridden),
            "excluded": [asdict(row) for row in found.excluded],
            "no_memory_effect": found.no_memory_effect,
            "unrecognized": found.unrecognized,
        }


def _differs(composed: Composed, name: str, text: str) -> bool:
    value = composed.config.value(name)
    if name in GROUPS:
        return bool(value != text)
    return bool(value != KEYS[name].parse(text)) and (value, text) != (None, "auto")


def completed(translation: Translation, arguments: Sequence[str]) -> ImportedConfig:
    """Combine a translated file with the command line, which takes precedence.

    UsageError if a required setting is missing, or the combination is invalid.
    """
    pairs = (word.partition("=") for word in arguments)
    typed = {name.strip(): text for name, _, text in pairs}
    for name, why in translation.missing:
        if name not in typed:
            raise UsageError(f"{translation.file}: {why}")
    compose_config(arguments)  # a mistake in these is not the file's
    dropped = {"engine"} if typed.get("engine") == FSDPCTL else set()
    if typed.get("strategy") in ("no_shard", "ddp") or "optimizer" in typed:
        dropped.add("strategy.offload")  # every rank would step everything, or nothing is there

    def composed(rows: Sequence[TranslationRow]) -> Composed:
        kept = [pair for pair in settings_of(rows).items() if pair[0] not in dropped]
        try:
            return compose_config(arguments, converted=kept)
        except UsageError as error:
            raise UsageError(f"{translation.file}: {error}") from None

    rows = [*map(_packed, translation.rows), *_hardware(translation, typed)]
    rows += _as_there(translation)
    rows += _longer(composed(rows).config)
    rows += _ranks(composed(rows), translation.degrees)
    words = settings_of(rows) | typed
    rows += rows_of_ranks(translation, words, place(composed(rows).config).num_ranks)
    rows += _of_passes(translation, place(composed(rows).config))
    found, own_engine = composed(rows), ""
    if found.config.engine.name != FSDPCTL and "engine" not in typed:
        try:
            checked(place(found.config))
        except UsageError as error:
            dropped.add("engine")
            got = f": requires engine={FSDPCTL}, got engine="
            found, own_engine = composed(rows), str(error).replace(got, " requires it instead of ")
    found = replace(found, unset=())  # as the other tool runs it
    return ImportedConfig(found, translation, tuple(rows), typed, own_engine)


def _packed(row: TranslationRow) -> TranslationRow:
    """Return a row of a tool that packs even if its model mixes the documents of a sequence."""
    words = ("data.packing=auto" if word == _PACKS else word for word in row.settings)
    return replace(row, settings=tuple(words))


def _hardware(translation: Translation, typed: Mapping[str, str]) -> list[TranslationRow]:
    """Assume a cluster if neither file nor command line names one and this machine has no GPU."""
    named = ("cluster", "cluster.memory", "launch.device")
    device = {**translation.settings, **typed}.get("launch.device")
    if any(each in typed for each in named) or device == "cpu" or torch.cuda.is_available():
        return []
    note = "assumed: no GPU found; set cluster to change it"
    return [TranslationRow("(hardware)", "", (f"cluster={_ASSUMED}",), note)]


def _as_there(found: Translation) -> Iterator[TranslationRow]:
    """Yield what the other tool does without a key."""
    if found.whole_logits:
        note = "of all tokens at once, as that tool computes it"
        yield TranslationRow("(loss)", "", ("train.loss_chunk_tokens=0",), note)
    if (wide := found.wide_base) is not None:
        note = "frozen weights are loaded in float32; embeddings are estimated in bf16"
        yield TranslationRow(wide.key, wide.text, ("model.base_dtype=float32",), note)
    is_narrow = found.settings.get("precision", "").startswith("bf16")
    if found.settings.get("engine") == "fsdp2" and is_narrow:
        note = "accelerate reduces gradients in the dtype that it computes in"
        yield TranslationRow("(FSDP)", "", ("precision.reduce_dtype=bfloat16",), note)


def _longer(config: Config) -> Iterator[TranslationRow]:
    """Yield a row for samples that are longer than the model declares."""
    length, declared = config.train.seq_len, config.model.max_seq_len
    if length > declared:
        note = f"above the model's {declared} tokens; estimated for samples of that length"
        words = (f"model.max_seq_len={length}",)
        yield TranslationRow("(length)", str(length), words, note)


def _ranks(composed: Composed, degrees: RankDegrees | None) -> Iterator[TranslationRow]:
    """Yield the number of nodes by the degrees, unless a number of ranks is set."""
    if degrees is None or degrees.total is None or composed.config.launch.nproc_per_node:
        return
    node = place(composed.config).launch.nproc_per_node or 1
    total = degrees.total * composed.config.train.context_parallel
    nodes = total // node if total > node and total % node == 0 else 1
    words = (f"launch.nproc_per_node={total // nodes}", f"launch.nnodes={nodes}")
    yield TranslationRow(*degrees.shown, words, f"on nodes of {node}" if nodes > 1 else "")


def _of_passes(found: Translation, config: Config) -> Iterator[TranslationRow]:
    """Yield what the other tool does between micro-batches, and for their logits."""
    micro, step = config.train.micro_batch_size or 1, config.train.global_batch_size
    if found.whole_gradients and step > micro * config.num_groups:
        note = "gradients stay unsharded between micro-batches"
        yield TranslationRow(*found.shown_batch, ("accumulation=last",), note)
    tokens = micro * config.train.seq_len // config.train.context_parallel
    if found.tiled_logits and found.has_frozen_head:
        chunk = -(-max(min(tokens, _TILE), tokens // 8) // 16)
        yield TranslationRow("(loss)", "", (f"train.loss_chunk_tokens={chunk}",))
