"""Files of other tools, read by their kind, and recipes: settings with origin, what is left out."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from textwrap import wrap

from fsdpctl.config.compose import FOR_ANY_OPTION, without_shorthands
from fsdpctl.config.data import CHAT
from fsdpctl.config.recipe import MISSING, MISSING_REASON
from fsdpctl.config.schema import BATCH_SIZE_KEYS, GROUPS, KEYS, SECTIONS
from fsdpctl.errors import UsageError
from fsdpctl.importers.source_config import SourceKey
from fsdpctl.importers.translation import (
    RankDegrees,
    SourceBatch,
    Translation,
    TranslationRow,
    settings_of,
    table,
)
from fsdpctl.plan.optimizers import ADAMW, OPTIMIZERS

NOT_NEEDED = "not needed: "
_WIDTH = 100  # of a line
_RANKS_OF_NODE = 8
HAVE_DEFAULTS = ("checkpoint.every", "train.eval_every")  # even if a file sets them
_PLAIN = re.compile(r"[\w./+][\w./+-]*")


@dataclass(frozen=True, slots=True)
class ConvertedRecipe:
    """The settings of a recipe, in the order of its sections."""

    tool: str
    rows: tuple[TranslationRow, ...]  # of one setting each
    left_out: tuple[str, ...]  # a line each
    missing: tuple[tuple[str, str], ...]  # settings that must be added, with the reason

    @property
    def required(self) -> list[str]:
        """Why settings must be added that have no default."""
        return [why for name, why in self.missing if name not in HAVE_DEFAULTS]

    @property
    def words(self) -> list[tuple[str, str]]:
        return list(settings_of(self.rows).items())


def convert(found: Translation, given: Mapping[str, str], num_ranks: int) -> ConvertedRecipe:
    """Return a recipe that trains what a file describes; UsageError if none can.

    Settings `given` on the command line take precedence. There are `num_ranks` ranks if neither
    these nor the file have their number.
    """
    typed = without_shorthands(given)
    replaced = {*typed, *(BATCH_SIZE_KEYS if typed.keys() & BATCH_SIZE_KEYS else ())}
    groups = tuple(f"{name}." for name in typed if name in GROUPS)
    kept = {
        name: TranslationRow(row.key, row.value, (setting,), row.note)
        for row in rows_of(found, typed, num_ranks)
        for setting in row.settings
        if (name := setting.partition("=")[0]) not in replaced
        if name.startswith(FOR_ANY_OPTION) or not name.startswith(groups)
    }
    for name, text in given.items():
        kept[name] = TranslationRow("command line", "", (f"{name}={text}",))
    if refused := [why for name, why in found.refused if name not in typed]:
        raise UsageError(f"{found.file}: {refused[0]}")
    order = {name: number for number, name in enumerate(SECTIONS)}
    names = sorted(kept, key=lambda name: (order.get(name.split(".")[0], 0), "." in name))
    missing = tuple(
        each
        for each in (*found.missing, *found.missing_for_training)
        if each[0] not in typed and not (found.model is not None and each[0] == "model")
        if each[0] != "data.train_on" or typed.get("data", CHAT) == CHAT
    )
    rows = tuple(kept[name] for name in names)
    return ConvertedRecipe(found.tool, rows, tuple(_left_out(found)), missing)


def rows_of(found: Translation, typed: Mapping[str, str], num_ranks: int) -> list[TranslationRow]:
    """Return the settings of the training that a file describes; later rows take precedence.

    Settings `typed` on the command line are not among them, but decide what follows from them.
    """
    rows = found.rows
    if typed.get("strategy") in ("no_shard", "ddp") or "optimizer" in typed:
        # Every rank would step everything, or nothing is there.
        rows = [each for each in rows if not each.settings[0].startswith("strategy.offload=")]
    optimizer = OPTIMIZERS.get({**settings_of(rows), **typed}.get("optimizer", ADAMW))
    if optimizer is not None:  # other optimizers' keys, such as betas with SGD, change nothing
        others = {f"optimizer.{key}=" for row in OPTIMIZERS.values() for key in row.keys}
        others -= {f"optimizer.{key}=" for key in optimizer.keys}
        rows = [each for each in rows if not each.settings[0].startswith((*others,))]
    return [*rows, *_rows_of_ranks(found, {**settings_of(rows), **typed}, num_ranks)]


def _rows_of_ranks(
    found: Translation, words: dict[str, str], num_ranks: int
) -> Iterator[TranslationRow]:
    """Yield what depends on the number of ranks: replicas, and the samples of a step.

    `words` are the settings of the file and of the command line. UsageError if the replicas do not
    divide the ranks.
    """
    shared, degrees = int(words.get("train.context_parallel", "1")), found.degrees
    if degrees and degrees.shard > 0 and "launch.nproc_per_node" not in words:
        is_known = "cluster" in words and "launch.nnodes" not in words
        on_node = num_ranks if is_known else _RANKS_OF_NODE
        total = degrees.replicate * degrees.shard * shared  # which have parts of each sample
        nodes = 1 if total % on_node else total // on_node
        settings = (f"launch.nproc_per_node={total // nodes}", f"launch.nnodes={nodes}")
        note = f"on nodes of {on_node}" if nodes > 1 else ""
        yield (row := TranslationRow(*degrees.shown, settings, note))
        words = settings_of([row]) | words
    ranks, origin = num_ranks, " on this machine; change it for others"
    if (per_node := words.get("launch.nproc_per_node", "")).isdecimal():
        ranks = int(per_node) * int(words.get("launch.nnodes", "1"))
    if per_node.isdecimal() or "cluster" in words:
        origin = " in the file or on the command line"
    if degrees:
        yield _arranged(found, degrees, shared, ranks)
    if found.batch is not None:
        yield from _batch(found, found.batch, words, max(1, ranks // shared), origin)


def _batch(
    found: Translation, batch: SourceBatch, words: Mapping[str, str], groups: int, origin: str
) -> Iterator[TranslationRow]:
    typed, steps = _whole(words, "train.micro_batch_size"), _whole(words, "accumulation.steps")
    micro, passes = typed or batch.micro or batch.usual, steps or batch.accumulation or 1
    shown, note = found.shown_batch, ""
    if batch.micro is None:  # accelerate leaves it to the script
        is_known = found.tool != "accelerate"
        shown = (batch.keys[0] if is_known else "(micro-batch)", "(not set)")
        note = f"the default of {found.tool}" if is_known else "set it as in the script"
    yield TranslationRow(*shown, (f"train.micro_batch_size={micro}",), note)
    each = micro if steps else batch.micro or micro  # the step of the file, in other micro-batches
    note = f"{each} * {passes} * {groups} rank{'s' if groups > 1 else ''}{origin}"
    total, note = (batch.samples, "") if batch.samples else (each * passes * groups, note)
    yield TranslationRow(*found.shown_batch, (f"train.global_batch_size={total}",), note)


def _arranged(found: Translation, degrees: RankDegrees, shared: int, ranks: int) -> TranslationRow:
    replicate, shard = degrees.replicate, degrees.shard * shared  # over those of a sample too
    if replicate < 1 or ranks % replicate:
        raise UsageError(
            f"{found.file}: {degrees.keys[0]}: {replicate}: does not divide the {ranks} ranks; set "
            "the number of ranks, such as launch.nproc_per_node=8 launch.nnodes=4"
        )
    keeps = found.settings.get("strategy") == "shard_grad_op"
    words = ["strategy=shard_grad_op" if keeps else "strategy=full_shard"]
    if shard == 1 or ranks == replicate:
        words = ["strategy=no_shard"]
    elif replicate > 1:
        words = [f"strategy=hybrid_shard{'_grad_op' * keeps}"]
        words += [f"strategy.dp_shard_size={ranks // replicate}"]
    return TranslationRow(*degrees.shown, tuple(words), f"of {ranks} ranks")


def _whole(words: Mapping[str, str], name: str) -> int | None:
    text = words.get(name, "")
    return int(text) if text.isdecimal() else None


def _left_out(found: Translation) -> Iterator[str]:
    for row in found.left_out:
        yield f"{row.key}{f'={row.value}' if row.value else ''}: {row.note}"
    for row in found.excluded:
        why = row.note.partition("; the estimate")[0].replace("estimated", "trained")
        yield f"{row.key}={row.value}: {why}"
    if found.unrecognized:
        yield f"unknown: {', '.join(found.unrecognized)}"
    rows = (*found.left_out, *found.rows, *found.program, *found.excluded)
    named = {key.strip() for row in rows for key in row.key.split(",")}
    named |= {why.partition(":")[0] for _, why in found.missing_for_training}
    left = [each for each in found.source.all_keys() if each.key not in named]
    if deciding := [each for each in left if _changes(found, each)]:
        shown = ", ".join(f"{each.key}={each.text[:80]}" for each in deciding)
        yield f"changes the training, without a counterpart: {shown}"
    unused = [each for each in found.no_memory_effect if each.partition("[")[0] not in named]
    if others := [each for each in unused if each not in {one.key for one in deciding}]:
        yield f"{NOT_NEEDED}{', '.join(others)}"


def _changes(found: Translation, value: SourceKey) -> bool:
    name, text = value.key, value.text.strip().lower()
    is_off = value.is_off or not (value.is_list or text.strip("0."))
    harmless = table("harmless", "transformers")
    usual = harmless.get(name, harmless.get(f"{name.partition('.')[0]}.*"))
    is_usual = is_off if usual is None else text in usual.split()
    return not is_usual and any(fnmatchcase(name, pattern) for pattern in found.changes)


_REQUIRES_PATH = {"model": "hf", "data": "text"}  # options without a default of their path


def recipe_text(recipe: ConvertedRecipe, source: str) -> str:
    """Return the recipe as YAML: a setting per line with its origin, and comments for the rest."""
    lines = _comment(f"Converted from {_one_line(source)} ({recipe.tool}) by fsdpctl.")
    for row in recipe.rows:
        name, _, text = row.settings[0].partition("=")
        origin = row.key if not row.value or row.value == text else f"{row.key}: {row.value}"
        notes = (origin, "" if "estimate" in row.note else row.note)
        about = _one_line("; ".join(each for each in notes if each))
        shown = text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
        whole = f"{f'{name}: {shown}':<44}  # {about}"
        lines += [whole] if len(whole) <= _WIDTH else [*_comment(about), f"{name}: {shown}"]
    known = settings_of(recipe.rows)
    for name, why in recipe.missing:
        group = name.partition(".")[0]  # `train` rejects the recipe without it
        lines += _comment(f"{MISSING_REASON}{why}")
        if group in _REQUIRES_PATH and name in (group, f"{group}.path"):
            lines += [f"{group}: {_REQUIRES_PATH[group]}"] * (group not in known)
        elif (name in KEYS or name in GROUPS) and name not in HAVE_DEFAULTS:
            lines.append(f"{name}: {MISSING}")
    if recipe.left_out:
        lines += ["", "# Left out:"]
        for each in recipe.left_out:
            lines += _comment(each, "  ")
    return "\n".join(lines) + "\n"


def _comment(text: str, indent: str = "") -> list[str]:
    first = f"# {indent}"
    return wrap(
        _one_line(text), _WIDTH, break_on_hyphens=False, break_long_words=False,
        initial_indent=first, subsequent_indent=f"{first}  ",
    )  # fmt: skip


def _one_line(text: str) -> str:
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())
