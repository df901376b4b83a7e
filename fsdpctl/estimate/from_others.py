"""A configuration of another tool, completed by what was typed and by the hardware it is for."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdpctl.config.compose import Composed, compose_config
from fsdpctl.config.importers.translation import (
    RankDegrees,
    SourceBatch,
    Translation,
    TranslationRow,
)
from fsdpctl.config.schema import SIZES
from fsdpctl.errors import UsageError
from fsdpctl.plan.engines import has_strategy
from fsdpctl.plan.strategy import STRATEGIES, get_strategy
from fsdpctl.resolve.machine import placed_on_cluster, world_size

_ASSUMED = "h100"  # where neither the file nor what was typed says a word of hardware
_RANKS = ("launch.nproc_per_node", "launch.nnodes")


@dataclass(frozen=True, slots=True)
class Asked:
    """What is estimated, and where each word of it came from."""

    composed: Composed
    translation: Translation
    rows: tuple[TranslationRow, ...]
    typed: dict[str, str]
    overruled: frozenset[str]  # words of the file that typed ones took the place of

    def to_dict(self) -> dict[str, Any]:
        """What `estimate-memory --from … --json` prints below `from`."""
        found = self.translation
        return {
            "file": str(found.file),
            "tool": found.tool,
            "rows": [row.to_dict() for row in self.rows],
            "command_line": [f"{name}={text}" for name, text in self.typed.items()],
            "overridden": sorted(self.overruled),
            "excluded": [row.to_dict() for row in found.excluded],
            "no_memory_effect": found.no_memory_effect,
            "unrecognized": found.unrecognized,
        }


def completed(
    translation: Translation, typed_words: Sequence[str], config_dir: Path | None
) -> Asked:
    """The configuration that a file and typed words ask for; typed words win.

    Raises:
        UsageError: something is missing that neither says, or cannot be.
    """
    typed = _pairs(typed_words)
    _refuse_missing(translation, typed)
    compose_config(typed_words, None, config_dir)  # a mistake in these is not the file's

    def composed(rows: list[TranslationRow]) -> Composed:
        kept, _ = _without_overruled(translation.settings_of(rows), typed)
        try:
            words = [f"{name}={text}" for name, text in kept.items()]
            return compose_config([*words, *typed_words], None, config_dir)
        except UsageError as error:
            raise UsageError(f"{translation.file}: {error}") from None

    rows = [*translation.rows, *_hardware(translation, typed)]
    if translation.whole_logits:
        words = ("train.loss_chunk_tokens=0",)
        rows.append(
            TranslationRow("(loss)", "", words, "of all tokens at once, as that tool computes it")
        )
    rows += _ranks(composed(rows), translation.degrees, typed)
    world = world_size(placed_on_cluster(composed(rows).config))
    if translation.degrees is not None:
        rows.append(_arranged(translation, translation.degrees, world))
    if translation.batch is not None:
        whole = translation.whole_gradients
        rows += _batches(translation.batch, typed, world, whole_gradients=whole)
    _, overruled = _without_overruled(translation.settings_of(rows), typed)
    return Asked(composed(rows), translation, tuple(rows), typed, frozenset(overruled))


def _pairs(words: Sequence[str]) -> dict[str, str]:
    split = (word.partition("=") for word in words)
    return {name.strip(): text for name, _, text in split}


def _refuse_missing(translation: Translation, typed: dict[str, str]) -> None:
    for name, why in translation.missing:
        if name not in typed:
            raise UsageError(f"{translation.file}: {why}")


def _without_overruled(
    words: dict[str, str], typed: dict[str, str]
) -> tuple[dict[str, str], set[str]]:
    """The words of a file that hold beside typed ones, and the others."""
    names = {name for name in words if _is_overruled(name, typed)}
    strategy = typed.get("strategy")
    if strategy and "engine" in words and "engine" not in typed:
        row = get_strategy(strategy) if strategy in STRATEGIES else None
        if row is None or not has_strategy(words["engine"], row):
            names.add("engine")
    if any(name.startswith(("model.lora.", "model.trainable", "optimizer")) for name in typed):
        names |= {"engine"} & words.keys()  # PyTorch's own are estimated without those
    kept = {name: text for name, text in words.items() if name not in names}
    return kept, {f"{name}={words[name]}" for name in names}


def _is_overruled(name: str, typed: dict[str, str]) -> bool:
    if name in typed:
        return True
    section = name.split(".")[0]
    if section in typed and section != name:  # another choice, but adapters go with any model
        return not name.startswith("model.lora.")
    if name == "strategy" and "reshard_after_forward" in typed:
        return False
    steps = name in SIZES or name == "accumulation.steps"
    return steps and any(each in typed for each in SIZES)


def _hardware(translation: Translation, typed: dict[str, str]) -> list[TranslationRow]:
    """What is assumed where neither the file nor what was typed names hardware, nor is any here."""
    named = ("cluster", "cluster.memory", "launch.device")
    device = {**translation.settings, **typed}.get("launch.device")
    if any(each in typed for each in named) or device == "cpu" or torch.cuda.is_available():
        return []
    note = "assumed: there is no GPU here; cluster= names another"
    return [TranslationRow("(hardware)", "", (f"cluster={_ASSUMED}",), note)]


def _ranks(
    composed: Composed, degrees: RankDegrees | None, typed: dict[str, str]
) -> list[TranslationRow]:
    """Nodes for the ranks that the degrees ask for, where nobody said how many there are."""
    asked = composed.config.launch.nproc_per_node is not None
    if degrees is None or degrees.total is None or asked or any(each in typed for each in _RANKS):
        return []
    node = placed_on_cluster(composed.config).launch.nproc_per_node or 1
    total = degrees.total
    nodes = total // node if total > node and total % node == 0 else 1
    words = (f"launch.nproc_per_node={total // nodes}", f"launch.nnodes={nodes}")
    return [TranslationRow(*degrees.shown, words, f"on nodes of {node}" if nodes > 1 else "")]


def _arranged(translation: Translation, degrees: RankDegrees, world: int) -> TranslationRow:
    """Copies and shards as a strategy.

    Raises:
        UsageError: the copies do not divide the ranks.
    """
    replicate, shard = degrees.replicate, degrees.shard
    if replicate < 1 or world % replicate:
        where = f"{translation.file}: {degrees.keys[0]}: {replicate}"
        raise UsageError(f"{where}: does not divide the {world} ranks; say how many there are, as "
                         "launch.nproc_per_node=8 launch.nnodes=4")  # fmt: skip
    reshards = translation.settings.get("strategy") != "shard_grad_op"
    if shard == 1 or world == replicate:
        words: tuple[str, ...] = ("strategy=no_shard", "engine=ddp")
    elif replicate == 1:
        words = (f"strategy={'full_shard' if reshards else 'shard_grad_op'}", "engine=fsdp2")
    else:
        name = "hybrid_shard" if reshards else "hybrid_shard_grad_op"
        size = world // replicate
        words = (f"strategy={name}", f"strategy.dp_shard_size={size}", "engine=fsdp2")
    return TranslationRow(*degrees.shown, words, f"of {world} ranks")


def _batches(
    batch: SourceBatch, typed: dict[str, str], world: int, *, whole_gradients: bool
) -> list[TranslationRow]:
    """The sizes of a step, which follow from the ranks."""
    micro = _whole(typed.get("train.micro_batch_size")) or batch.micro
    passes = _whole(typed.get("accumulation.steps")) or batch.accumulation
    said = [str(each) for each in (batch.micro, batch.accumulation) if each]
    note = f"over {world} ranks" if said else "assumed: the file says nothing of it"
    micro, passes = micro or 1, passes or 1
    words: tuple[str, ...] = (
        f"accumulation.steps={passes}",
        f"train.global_batch_size={micro * passes * world}",
    )
    if whole_gradients and passes > 1:
        words = ("accumulation=last", *words)
        note += "; gradients stay whole between passes"
    row = TranslationRow(
        ", ".join(batch.keys), ", ".join(said), (f"train.micro_batch_size={micro}", *words)
    )
    return [TranslationRow(row.key, row.value, row.settings, note)]


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
