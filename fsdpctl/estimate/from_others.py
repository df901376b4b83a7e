"""Completion of an imported configuration by the command line and the hardware."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
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
from fsdpctl.config.schema import SIZES, Config
from fsdpctl.errors import UsageError
from fsdpctl.plan.strategy import FSDPCTL, STRATEGIES, get_strategy, has_strategy
from fsdpctl.resolve.machine import placed_on_cluster, sample_groups, world_size

_ASSUMED = "h100"  # if neither the file nor the command line names hardware
_OF_ANY_MODEL = ("model.lora.", "model.base_dtype")  # adapters, and the weights that they freeze
_FUSED = "optimizer.fused"  # of PyTorch's engines
_PACKS = "data.packing=true"
_RANKS = ("launch.nproc_per_node", "launch.nnodes")


@dataclass(frozen=True, slots=True)
class ImportedConfig:
    """The configuration to estimate, and the origin of each setting."""

    composed: Composed
    translation: Translation
    rows: tuple[TranslationRow, ...]
    typed: dict[str, str]
    overridden: frozenset[str]  # settings of the file that the command line overrides

    def to_dict(self) -> dict[str, Any]:
        """Return the value of `from` in `estimate-memory --from FILE --json`."""
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


def completed(
    translation: Translation, arguments: Sequence[str], config_dir: Path | None
) -> ImportedConfig:
    """Combine a translated file with the command line, which takes precedence.

    Raises:
        UsageError: If a required setting is missing, or the combination is invalid.
    """
    typed = _pairs(arguments)
    for name, why in translation.missing:
        if name not in typed:
            raise UsageError(f"{translation.file}: {why}")
    compose_config(arguments, None, config_dir)  # a mistake in these is not the file's

    def composed(rows: list[TranslationRow]) -> Composed:
        kept, _ = _without_overridden(translation.settings_of(rows), typed)
        try:
            words = [f"{name}={text}" for name, text in kept.items()]
            return compose_config([*words, *arguments], None, config_dir)
        except UsageError as error:
            raise UsageError(f"{translation.file}: {error}") from None

    rows = [*map(_packed, translation.rows), *_hardware(translation, typed)]
    if translation.whole_logits:
        words = ("train.loss_chunk_tokens=0",)
        rows.append(
            TranslationRow("(loss)", "", words, "of all tokens at once, as that tool computes it")
        )
    if (wide := translation.wide_base) is not None:
        note = "frozen weights are loaded in float32; embeddings are estimated in bf16"
        rows.append(TranslationRow(wide.key, wide.text, ("model.base_dtype=float32",), note))
    rows += _longer(composed(rows).config)
    rows += _ranks(composed(rows), translation.degrees, typed)
    placed = placed_on_cluster(composed(rows).config)
    world = world_size(placed)
    if translation.degrees is not None:
        rows.append(_arranged(translation, translation.degrees, world))
    if translation.batch is not None:
        whole = translation.whole_gradients
        rows += _batches(translation.batch, typed, placed, whole_gradients=whole)
    _, overridden = _without_overridden(translation.settings_of(rows), typed)
    return ImportedConfig(composed(rows), translation, tuple(rows), typed, frozenset(overridden))


def _pairs(words: Sequence[str]) -> dict[str, str]:
    split = (word.partition("=") for word in words)
    return {name.strip(): text for name, _, text in split}


def _without_overridden(
    words: dict[str, str], typed: dict[str, str]
) -> tuple[dict[str, str], set[str]]:
    """Return the settings of a file that apply, and those that the command line overrides."""
    names = {name for name in words if _is_overridden(name, typed)}
    strategy = typed.get("strategy")
    if strategy and "engine" in words and "engine" not in typed:
        row = get_strategy(strategy) if strategy in STRATEGIES else None
        if row is None or not has_strategy(words["engine"], row):
            names.add("engine")
    ours = ("model.lora.", "model.trainable", "optimizer")  # not supported by PyTorch's engines
    if any(name.startswith(ours) for name in typed if name != _FUSED):
        names |= {"engine"} & words.keys()
    engine = FSDPCTL if "engine" in names else words.get("engine", FSDPCTL)
    if typed.get("engine", engine) == FSDPCTL:
        names |= {_FUSED} & words.keys()
    if strategy in ("no_shard", "ddp"):
        names |= {"optimizer.offload"} & words.keys()  # not supported by every rank on its own
    if "optimizer.offload" in names and not {"model.lora.rank", "model.trainable"} & words.keys():
        names |= {"strategy.offload_params"} & words.keys()
    kept = {name: text for name, text in words.items() if name not in names}
    return kept, {f"{name}={words[name]}" for name in names}


def _is_overridden(name: str, typed: dict[str, str]) -> bool:
    if name in typed:
        return True
    section = name.split(".")[0]
    if section in typed and section != name:  # another option of the group
        return not name.startswith(_OF_ANY_MODEL)
    if name == "strategy" and "reshard_after_forward" in typed:
        return False
    if section == "launch" and re.match(r"\d+x", typed.get("cluster", "")):
        return True  # the number of ranks is that of the command line
    steps = name in SIZES or name == "accumulation.steps"
    return steps and any(each in typed for each in SIZES)


def _hardware(translation: Translation, typed: dict[str, str]) -> list[TranslationRow]:
    """Assume a cluster if neither file nor command line names one and this machine has no GPU."""
    named = ("cluster", "cluster.memory", "launch.device")
    device = {**translation.settings, **typed}.get("launch.device")
    if any(each in typed for each in named) or device == "cpu" or torch.cuda.is_available():
        return []
    note = "assumed: no GPU found; set cluster to change it"
    return [TranslationRow("(hardware)", "", (f"cluster={_ASSUMED}",), note)]


def _packed(row: TranslationRow) -> TranslationRow:
    """Return a row of a tool that packs even if its model mixes the documents of a sequence."""
    words = ("data.packing=auto" if word == _PACKS else word for word in row.settings)
    return replace(row, settings=tuple(words))


def _longer(config: Config) -> Iterator[TranslationRow]:
    """Yield a row for samples that are longer than the model declares."""
    length, declared = config.train.seq_len, config.model.max_seq_len
    if length > declared:
        note = f"above the model's {declared} tokens; estimated for samples of that length"
        words = (f"model.max_seq_len={length}",)
        yield TranslationRow("(length)", str(length), words, note)


def _ranks(
    composed: Composed, degrees: RankDegrees | None, typed: dict[str, str]
) -> list[TranslationRow]:
    """Derive the number of nodes from the degrees, unless a number of ranks is set."""
    asked = composed.config.launch.nproc_per_node is not None
    if degrees is None or degrees.total is None or asked or any(each in typed for each in _RANKS):
        return []
    node = placed_on_cluster(composed.config).launch.nproc_per_node or 1
    total = degrees.total * composed.config.train.context_parallel
    nodes = total // node if total > node and total % node == 0 else 1
    words = (f"launch.nproc_per_node={total // nodes}", f"launch.nnodes={nodes}")
    return [TranslationRow(*degrees.shown, words, f"on nodes of {node}" if nodes > 1 else "")]


def _arranged(translation: Translation, degrees: RankDegrees, world: int) -> TranslationRow:
    """Return the strategy with the requested replicas and shards.

    Raises:
        UsageError: If the number of ranks is not divisible by the number of replicas.
    """
    replicate, shard = degrees.replicate, degrees.shard
    if replicate < 1 or world % replicate:
        where = f"{translation.file}: {degrees.keys[0]}: {replicate}"
        raise UsageError(f"{where}: does not divide the {world} ranks; set the number of ranks, "
                         "such as launch.nproc_per_node=8 launch.nnodes=4")  # fmt: skip
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
    batch: SourceBatch, typed: dict[str, str], placed: Config, *, whole_gradients: bool
) -> list[TranslationRow]:
    """Derive the batch sizes from the number of ranks, or of groups that share samples."""
    micro = _whole(typed.get("train.micro_batch_size")) or batch.micro
    passes = _whole(typed.get("accumulation.steps")) or batch.accumulation
    groups = max(1, sample_groups(placed))
    each = "ranks" if placed.train.context_parallel == 1 else "groups of ranks"
    said = [str(value) for value in (batch.micro, batch.accumulation, batch.samples) if value]
    note = f"over {groups} {each}" if said else "assumed: not set in the file"
    micro, passes = micro or 1, passes or 1
    words: tuple[str, ...] = (
        f"accumulation.steps={passes}",
        f"train.global_batch_size={micro * passes * groups}",
    )
    if batch.samples is not None:
        words = (f"train.global_batch_size={max(batch.samples, groups)}",)
        passes = max(passes, batch.samples // (micro * groups))
    if whole_gradients and passes > 1:
        words = ("accumulation=last", *words)
        note += "; gradients stay unsharded between micro-batches"
    words = (f"train.micro_batch_size={micro}", *words)
    return [TranslationRow(", ".join(batch.keys), ", ".join(said), words, note)]


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
