"""The estimate of another tool's file: of its recipe, with what that tool does to memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fsdpctl.config.compose import Composed, compose_config, without_shorthands
from fsdpctl.config.data import CHAT, TEXT
from fsdpctl.config.schema import GROUPS, KEYS, Config
from fsdpctl.config.selection import with_fixed_defaults
from fsdpctl.errors import UsageError
from fsdpctl.importers.convert import rows_of
from fsdpctl.importers.translation import Translation, TranslationRow, affects_memory, settings_of
from fsdpctl.plan.strategy import FSDPCTL
from fsdpctl.resolve.machine import assign_ranks, num_ranks_of
from fsdpctl.resolve.rules import validate

_ASSUMED_CLUSTER = "h100"  # if neither the file nor the command line names hardware
_PROGRAM_KEY = "engine.program"
_SHOWN = ("optimizer", "data.new_tokens", "cluster", "train.loss_chunk_tokens")
_TILE_TOKENS = (
    4096  # tokens whose logits of a part of the vocabulary take what a 16th of them take here
)


@dataclass(frozen=True, slots=True)
class ImportedConfig:
    """The configuration to estimate, and the origin of each setting."""

    composed: Composed
    translation: Translation
    rows: tuple[TranslationRow, ...]  # that affect memory
    command_line: dict[str, str]
    engine_reason: str  # why the estimate is for fsdpctl's engine

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
            "command_line": [f"{name}={text}" for name, text in self.command_line.items()],
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


def import_config(translation: Translation, arguments: Sequence[str]) -> ImportedConfig:
    """Combine a translated file with the command line, which takes precedence.

    It is the configuration of the recipe, with what the other program does to memory unless
    `engine.program` is typed. UsageError if a required setting is missing, or the combination is
    invalid.
    """
    pairs = (word.partition("=") for word in arguments)
    typed = {name.strip(): text for name, _, text in pairs}
    for name, why in translation.missing:
        if name not in typed:
            raise UsageError(f"{translation.file}: {why}")
    compose_config(arguments)  # a mistake in these is not the file's
    hardware = _hardware_rows(translation, typed)
    about = settings_of(hardware) | without_shorthands(typed)
    rows = [*rows_of(translation, about, num_ranks_of(about)), *hardware]

    def composed(words: Mapping[str, str]) -> Composed:
        try:
            made = compose_config(arguments, converted=[*words.items()])
        except UsageError as error:
            raise UsageError(f"{translation.file}: {error}") from None
        return replace(made, recipe=translation.file.stem)

    found, own_engine = composed(settings_of(rows)), ""
    data = found.config.data
    if data.path is None and data.name in (CHAT, TEXT) and found.config.model.vocab_size is None:
        raise UsageError(f"{translation.file}: has no data; set data.path, or model.vocab_size")
    if _PROGRAM_KEY not in typed:
        rows += _program_rows(translation, assign_ranks(found.config))
        words = settings_of(rows)
        found = composed(words)
        try:
            if "engine" in words.keys() - typed:
                validate(assign_ranks(found.config))
        except UsageError as error:
            got = f": requires engine={FSDPCTL}, got engine="
            own_engine = str(error).replace(got, " requires it instead of ")
            found = composed({name: text for name, text in words.items() if name != "engine"})
        found = replace(found, config=with_fixed_defaults(found.config))  # as the other tool runs
    shown = (row for row in rows if row.key not in translation.source.seen and _is_shown(row))
    return ImportedConfig(found, translation, tuple(shown), typed, own_engine)


def _is_shown(row: TranslationRow) -> bool:
    names = settings_of([row])
    return not names or any(affects_memory(name) or name in _SHOWN for name in names)


def _hardware_rows(translation: Translation, typed: Mapping[str, str]) -> list[TranslationRow]:
    """Assume a cluster if neither file nor command line names one and this machine has no GPU."""
    named = ("cluster", "cluster.memory", "launch.device")
    device = {**translation.settings, **typed}.get("launch.device")
    if any(each in typed for each in named) or device == "cpu" or torch.cuda.is_available():
        return []
    note = "assumed: no GPU found; set cluster to change it"
    return [TranslationRow("(hardware)", "", (f"cluster={_ASSUMED_CLUSTER}",), note)]


def _program_rows(found: Translation, config: Config) -> Iterator[TranslationRow]:
    yield from found.program
    if found.uses_torch:
        engine = "ddp" if config.strategy.name == "no_shard" else "fsdp2"
        yield TranslationRow("(engine)", "", (f"engine={engine}",))
        if engine == "fsdp2" and config.precision.name.startswith("bf16"):
            note = "accelerate reduces gradients in the dtype that it computes in"
            yield TranslationRow("(FSDP)", "", ("precision.reduce_dtype=bfloat16",), note)
    if config.data.packing:
        note = "also if the model mixes the documents of a sequence"
        yield TranslationRow("(packing)", "", ("data.packing=auto",), note)
    micro, train, lora = config.train.micro_batch_size or 1, config.train, config.model.lora
    if found.whole_gradients and train.global_batch_size > micro * config.num_groups:
        note = "gradients stay unsharded between micro-batches"
        yield TranslationRow(*found.shown_batch, ("accumulation=last",), note)
    if (declared := config.model.max_seq_len) < train.seq_len:
        note = f"above the model's {declared} tokens; estimated for samples of that length"
        words = (f"model.max_seq_len={train.seq_len}",)
        yield TranslationRow("(length)", str(train.seq_len), words, note)
    if found.whole_logits:
        note = "of all tokens at once, as that tool computes it"
        yield TranslationRow("(loss)", "", ("train.loss_chunk_tokens=0",), note)
    tokens = micro * train.seq_len // train.context_parallel
    if found.tiled_logits and lora.rank is not None and "head" not in str(lora.also):
        chunk = -(-max(min(tokens, _TILE_TOKENS), tokens // 8) // 16)
        yield TranslationRow("(loss)", "", (f"train.loss_chunk_tokens={chunk}",))
