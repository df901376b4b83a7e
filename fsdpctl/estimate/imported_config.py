"""The configuration of another tool's file, with the settings that imitate that tool's memory."""

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
# Tokens per tile of a tiled loss. The logits of a tile, for a part of the vocabulary, take as much
# memory as the logits of a 16th of these tokens in fsdpctl's chunked loss.
_TILE_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class ImportedConfig:
    """The configuration to estimate, and the origin of each setting."""

    composed: Composed
    translation: Translation
    rows: tuple[TranslationRow, ...]  # the translated settings that affect memory
    command_line: dict[str, str]
    engine_reason: str  # why the estimate is for fsdpctl's engine; empty if it is not

    @property
    def overridden(self) -> set[str]:
        """The settings of the file that the command line or the engine overrides."""
        settings = settings_of(self.rows).items()
        return {f"{name}={text}" for name, text in settings if _differs(self.composed, name, text)}

    def to_dict(self) -> dict[str, Any]:
        translation = self.translation
        return {
            "file": str(translation.source.file), "tool": translation.tool,
            "rows": [asdict(row) for row in self.rows],
            "command_line": [f"{name}={text}" for name, text in self.command_line.items()],
            "overridden": sorted(self.overridden),
            "excluded": [asdict(row) for row in translation.not_estimated],
            "no_memory_effect": sorted(translation.source.no_memory_effect),
            "unrecognized": translation.unrecognized,
        }  # fmt: skip


def _differs(composed: Composed, name: str, text: str) -> bool:
    """Return whether a setting of the file has another value in the composed configuration."""
    value = composed.config.value(name)
    if name in GROUPS:
        return bool(value != text)
    is_auto = value is None and text == "auto"
    return not is_auto and bool(value != KEYS[name].parse(text))


def import_config(translation: Translation, arguments: Sequence[str]) -> ImportedConfig:
    """Combine a translated file with the command line, which takes precedence.

    Unless the command line sets `engine.program`, settings are added that imitate the memory of the
    other tool. UsageError if a required setting is missing, or the combination is invalid.
    """
    pairs = (argument.partition("=") for argument in arguments)
    typed, file = {name.strip(): text for name, _, text in pairs}, translation.source.file
    for name, problem in translation.missing:
        if name not in typed:
            raise UsageError(f"{file}: {problem}")
    compose_config(arguments)  # reports mistakes in the arguments without the file's name
    hardware = _hardware_rows(translation, typed)
    overrides = settings_of(hardware) | without_shorthands(typed)
    rows = [*rows_of(translation, overrides, num_ranks_of(overrides)), *hardware]

    def compose(settings: Mapping[str, str]) -> Composed:
        try:
            composed = compose_config(arguments, converted=[*settings.items()])
        except UsageError as error:
            raise UsageError(f"{file}: {error}") from None
        return replace(composed, recipe=file.stem)

    composed, engine_reason = compose(settings_of(rows)), ""
    data = composed.config.data
    if data.path is None and data.name in (CHAT, TEXT) and composed.config.model.vocab_size is None:
        raise UsageError(f"{file}: has no data; set data.path or model.vocab_size")
    if _PROGRAM_KEY not in typed:
        rows += _program_rows(translation, assign_ranks(composed.config))
        settings = settings_of(rows)
        composed = compose(settings)
        try:
            if "engine" in settings and "engine" not in typed:
                validate(assign_ranks(composed.config))
        except UsageError as error:
            # PyTorch's engine does not support a setting: estimate with fsdpctl's engine instead.
            got = f": requires engine={FSDPCTL}, got engine="  # the text of the rule
            engine_reason = str(error).replace(got, " requires it instead of ")
            composed = compose({name: text for name, text in settings.items() if name != "engine"})
        # The other tool selects nothing if its defaults do not fit.
        composed = replace(composed, config=with_fixed_defaults(composed.config))
    shown = (
        row for row in rows if row.key not in translation.source.no_memory_effect and _is_shown(row)
    )
    return ImportedConfig(composed, translation, tuple(shown), typed, engine_reason)


def _is_shown(row: TranslationRow) -> bool:
    names = settings_of([row])
    return not names or any(affects_memory(name) or name in _SHOWN for name in names)


def _hardware_rows(translation: Translation, typed: Mapping[str, str]) -> list[TranslationRow]:
    """Assume a cluster if no hardware is set and this machine has no GPU."""
    hardware = ("cluster", "cluster.memory", "launch.device")
    device = {**translation.settings, **typed}.get("launch.device")
    if any(key in typed for key in hardware) or device == "cpu" or torch.cuda.is_available():
        return []
    note = "assumed: no GPU found; set cluster to change it"
    return [TranslationRow("(hardware)", "", (f"cluster={_ASSUMED_CLUSTER}",), note)]


def _program_rows(translation: Translation, config: Config) -> Iterator[TranslationRow]:
    """Yield the settings that imitate what the other tool does to memory."""
    yield from translation.emulated
    if translation.uses_torch:
        engine = "ddp" if config.strategy.name == "no_shard" else "fsdp2"
        yield TranslationRow("(engine)", "", (f"engine={engine}",))
        if engine == "fsdp2" and config.precision.name.startswith("bf16"):
            note = "accelerate reduces gradients in the dtype that it computes in"
            yield TranslationRow("(FSDP)", "", ("precision.reduce_dtype=bfloat16",), note)
    if config.data.packing:
        note = "also if the model mixes the documents of a sequence"
        yield TranslationRow("(packing)", "", ("data.packing=auto",), note)
    train, lora, samples = config.train, config.model.lora, config.train.micro_batch_size or 1
    accumulates = train.global_batch_size > samples * config.data_parallel_size
    if translation.whole_gradients and accumulates:
        note = "gradients stay unsharded between micro-batches"
        yield TranslationRow(*translation.batch_key_and_text, ("accumulation=last",), note)
    if (declared := config.model.max_seq_len) < train.seq_len:
        note = f"above the model's {declared} tokens; estimated for samples of that length"
        settings = (f"model.max_seq_len={train.seq_len}",)
        yield TranslationRow("(length)", str(train.seq_len), settings, note)
    if translation.whole_logits:
        note = "logits of all tokens at once, as in that tool"
        yield TranslationRow("(loss)", "", ("train.loss_chunk_tokens=0",), note)
    tokens = samples * train.seq_len // train.context_parallel
    if translation.tiled_logits and lora.rank is not None and "head" not in str(lora.also):
        chunk = -(-max(min(tokens, _TILE_TOKENS), tokens // 8) // 16)  # a loss has at most 8 tiles
        yield TranslationRow("(loss)", "", (f"train.loss_chunk_tokens={chunk}",))
