"""Recipes converted from other tools' files: settings with their origin, and what is left out."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from textwrap import wrap

from fsdpctl.config.compose import FOR_ANY_OPTION, without_shorthands
from fsdpctl.config.data import CHAT
from fsdpctl.config.keys import Setting, Settings
from fsdpctl.config.recipe import MISSING, MISSING_REASON
from fsdpctl.config.schema import BATCH_KEYS, GROUPS, KEYS, SECTIONS
from fsdpctl.errors import UsageError
from fsdpctl.importers.source_config import SourceKey, is_zero
from fsdpctl.importers.translation import (
    RankDegrees,
    SourceBatch,
    Translation,
    TranslationRow,
    settings_of,
    table,
)
from fsdpctl.plan.optimizers import ADAMW, OPTIMIZERS

UNUSED = "not needed: "
_WIDTH = 100  # columns of a line
_RANKS_OF_NODE = 8
# Settings that a recipe need not have, since their defaults apply.
OPTIONAL_KEYS = ("checkpoint.every", "train.eval_every")
_PLAIN = re.compile(r"[\w./+][\w./+-]*")
_REQUIRES_PATH = {"model": "hf", "data": "text"}  # options that require a path


@dataclass(frozen=True, slots=True)
class ConvertedRecipe:
    """A recipe that was converted from the file of another tool."""

    tool: str
    rows: tuple[TranslationRow, ...]  # one row per setting, in the order of sections
    left_out: tuple[str, ...]  # one line per key or reason
    missing: tuple[tuple[str, str], ...]  # settings that users must add, with the reason

    @property
    def required(self) -> list[str]:
        """The reasons of missing settings that have no default."""
        return [why for name, why in self.missing if name not in OPTIONAL_KEYS]

    @property
    def settings(self) -> list[Setting]:
        return list(settings_of(self.rows).items())


def to_recipe(target: Translation, settings: Settings, num_ranks: int) -> ConvertedRecipe:
    """Return a recipe for the training in a file; UsageError if the training isn't supported.

    `settings` of the command line take precedence. `num_ranks` applies if neither the command line
    nor the file sets the ranks.
    """
    typed = without_shorthands(settings)
    replaced = {*typed, *(BATCH_KEYS if typed.keys() & BATCH_KEYS else ())}
    groups = tuple(f"{name}." for name in typed if name in GROUPS)
    # A typed option also replaces the file's keys for it, except keys that any option may have.
    rows_by_name = {
        name: TranslationRow(row.key, row.value, (setting,), row.note)
        for row in rows_of(target, typed, num_ranks)
        for setting in row.settings
        if (name := setting.partition("=")[0]) not in replaced
        if name.startswith(FOR_ANY_OPTION) or not name.startswith(groups)
    }
    for name, text in settings.items():
        rows_by_name[name] = TranslationRow("command line", "", (f"{name}={text}",))
    if refused := [why for name, why in target.refused if name not in typed]:
        raise UsageError(f"{target.source.file}: {refused[0]}")
    order = {name: number for number, name in enumerate(SECTIONS)}
    names = sorted(rows_by_name, key=lambda name: (order.get(name.split(".")[0], 0), "." in name))
    missing = tuple(
        (name, why)
        for name, why in (*target.missing, *target.missing_for_training)
        # A model in the file is only missing for estimates: the recipe has its name.
        if name not in typed and not (name == "model" and target.model is not None)
        if name != "data.train_on" or typed.get("data", CHAT) == CHAT  # only valid with chats
    )
    rows = tuple(rows_by_name[name] for name in names)
    return ConvertedRecipe(target.tool, rows, tuple(_left_out(target)), missing)


def rows_of(target: Translation, typed: Settings, num_ranks: int) -> list[TranslationRow]:
    """Return the settings of the training that a file describes; later rows take precedence.

    `typed` settings of the command line are not included, but other settings depend on them.
    """
    rows = target.rows
    if typed.get("strategy") in ("no_shard", "ddp") or "optimizer" in typed:
        # Offloading is invalid with an unsharded strategy or another optimizer.
        rows = [each for each in rows if not each.settings[0].startswith("strategy.offload=")]
    optimizer = OPTIMIZERS.get({**settings_of(rows), **typed}.get("optimizer", ADAMW))
    if optimizer is not None:  # drop keys of other optimizers, such as betas with SGD
        prefixes = {f"optimizer.{key}=" for row in OPTIMIZERS.values() for key in row.keys}
        prefixes -= {f"optimizer.{key}=" for key in optimizer.keys}
        rows = [each for each in rows if not each.settings[0].startswith((*prefixes,))]
    return [*rows, *_rank_rows(target, {**settings_of(rows), **typed}, num_ranks)]


def _rank_rows(target: Translation, settings: Settings, num_ranks: int) -> Iterator[TranslationRow]:
    """Yield settings that depend on the number of ranks: replicas, and the samples of a step.

    `settings` has the settings of the file and of the command line. UsageError if the number of
    replicas does not divide the number of ranks.
    """
    context_parallel, degrees = int(settings.get("train.context_parallel", "1")), target.degrees
    # If `shard` is -1, for all remaining ranks, the file does not set the number of ranks.
    if degrees and degrees.shard > 0 and "launch.nproc_per_node" not in settings:
        is_one_node = "cluster" in settings and "launch.nnodes" not in settings
        node_ranks = num_ranks if is_one_node else _RANKS_OF_NODE
        total = degrees.replicate * degrees.shard * context_parallel
        nodes = 1 if total % node_ranks else total // node_ranks  # 1 if the ranks do not fill nodes
        ranks_of_file = (f"launch.nproc_per_node={total // nodes}", f"launch.nnodes={nodes}")
        note = f"on nodes of {node_ranks}" if nodes > 1 else ""
        yield (row := TranslationRow(*degrees.key_and_text, ranks_of_file, note))
        settings = {**settings_of([row]), **settings}
    ranks, origin = num_ranks, " on this machine; change the size for other machines"
    if (per_node := settings.get("launch.nproc_per_node", "")).isdecimal():
        ranks = int(per_node) * int(settings.get("launch.nnodes", "1"))
    if per_node.isdecimal() or "cluster" in settings:
        origin = " in the file or on the command line"
    if degrees:
        yield _strategy_row(target, degrees, context_parallel, ranks)
    if target.batch is not None:
        yield from _batch(target, target.batch, settings, max(1, ranks // context_parallel), origin)


def _batch(
    target: Translation, batch: SourceBatch, settings: Settings, data_parallel: int, origin: str
) -> Iterator[TranslationRow]:
    typed_size = _whole_number(settings, "train.micro_batch_size")
    steps = _whole_number(settings, "accumulation.steps")
    micro = typed_size or batch.micro or batch.default_micro
    passes = steps or batch.accumulation or 1
    key_and_text, note = target.batch_key_and_text, ""
    if batch.micro is None:
        has_default = target.tool != "accelerate"  # with accelerate, the script sets it
        key_and_text = (batch.keys[0] if has_default else "(micro-batch)", "(not set)")
        note = f"the default of {target.tool}" if has_default else "set it as in the script"
    yield TranslationRow(*key_and_text, (f"train.micro_batch_size={micro}",), note)
    # A typed micro-batch keeps the file's samples per step, unless accumulation.steps is typed too.
    size = micro if steps else batch.micro or micro
    note = f"{size} * {passes} * {data_parallel} rank{'s' if data_parallel > 1 else ''}{origin}"
    total, note = (batch.samples, "") if batch.samples else (size * passes * data_parallel, note)
    yield TranslationRow(*target.batch_key_and_text, (f"train.global_batch_size={total}",), note)


def _strategy_row(
    target: Translation, degrees: RankDegrees, context_parallel: int, ranks: int
) -> TranslationRow:
    # The model is also sharded over the ranks that share a sample.
    replicate, shard = degrees.replicate, degrees.shard * context_parallel
    if replicate < 1 or ranks % replicate:
        raise UsageError(
            f"{target.source.file}: {degrees.keys[0]}: {replicate}: does not divide the {ranks} "
            "ranks; set the number of ranks, such as launch.nproc_per_node=8 launch.nnodes=4"
        )
    is_grad_op = target.settings.get("strategy") == "shard_grad_op"
    settings = ["strategy=shard_grad_op" if is_grad_op else "strategy=full_shard"]
    if shard == 1 or ranks == replicate:
        settings = ["strategy=no_shard"]
    elif replicate > 1:
        hybrid = "strategy=hybrid_shard_grad_op" if is_grad_op else "strategy=hybrid_shard"
        settings = [hybrid, f"strategy.dp_shard_size={ranks // replicate}"]
    return TranslationRow(*degrees.key_and_text, tuple(settings), f"of {ranks} ranks")


def _whole_number(settings: Settings, name: str) -> int | None:
    text = settings.get(name, "")
    return int(text) if text.isdecimal() else None


def _left_out(target: Translation) -> Iterator[str]:
    for row in target.left_out:
        yield f"{row.key}{f'={row.value}' if row.value else ''}: {row.note}"
    for row in target.not_estimated:  # noted as "estimated as X; the estimate is too high"
        why = row.note.partition("; the estimate")[0].replace("estimated", "trained")
        yield f"{row.key}={row.value}: {why}"
    if target.unrecognized:
        yield f"unknown: {', '.join(target.unrecognized)}"
    rows = (*target.left_out, *target.rows, *target.emulated, *target.not_estimated)
    named = {key.strip() for row in rows for key in row.key.split(",")}
    named |= {why.partition(":")[0] for _, why in target.missing_for_training}
    unnamed = [each for each in target.source.all_keys() if each.key not in named]
    if deciding := [each for each in unnamed if _changes(target, each)]:
        shown = ", ".join(f"{each.key}={each.text[:80]}" for each in deciding)
        yield f"changes the training, without a counterpart: {shown}"
    unused = target.source.no_memory_effect - {each.key for each in deciding}
    if unneeded := [key for key in sorted(unused) if key.partition("[")[0] not in named]:
        yield f"{UNUSED}{', '.join(unneeded)}"


def _changes(target: Translation, value: SourceKey) -> bool:
    name, text = value.key, value.text.strip().lower()
    is_off = value.is_off or (is_zero(text) and not value.is_list)
    harmless = table("harmless", "transformers")
    harmless_values = harmless.get(name, harmless.get(f"{name.partition('.')[0]}.*"))
    is_harmless = is_off if harmless_values is None else text in harmless_values.split()
    return not is_harmless and any(fnmatchcase(name, pattern) for pattern in target.training_keys)


def recipe_text(recipe: ConvertedRecipe, source: str) -> str:
    """Return the recipe as YAML: one setting per line with its origin, omissions as comments."""
    lines = _comment(f"Converted from {_one_line(source)} ({recipe.tool}) by fsdpctl.")
    for row in recipe.rows:
        name, _, text = row.settings[0].partition("=")
        origin = row.key if not row.value or row.value == text else f"{row.key}: {row.value}"
        note = "" if "estimate" in row.note else row.note  # a recipe is for training
        comment = _one_line(f"{origin}; {note}" if note else origin)
        quoted = text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
        line = f"{f'{name}: {quoted}':<44}  # {comment}"
        lines += [line] if len(line) <= _WIDTH else [*_comment(comment), f"{name}: {quoted}"]
    settings = settings_of(recipe.rows)
    for name, why in recipe.missing:
        group = name.partition(".")[0]
        lines += _comment(f"{MISSING_REASON}{why}")
        if group in _REQUIRES_PATH and name in (group, f"{group}.path"):
            lines += [f"{group}: {_REQUIRES_PATH[group]}"] * (group not in settings)
        elif (name in KEYS or name in GROUPS) and name not in OPTIONAL_KEYS:
            lines.append(f"{name}: {MISSING}")
    if recipe.left_out:
        lines += ["", "# Left out:"]
        lines += [line for each in recipe.left_out for line in _comment(each, "  ")]
    return "\n".join(lines) + "\n"


def _comment(text: str, indent: str = "") -> list[str]:
    first = f"# {indent}"
    return wrap(
        _one_line(text), _WIDTH, break_on_hyphens=False, break_long_words=False,
        initial_indent=first, subsequent_indent=f"{first}  ",
    )  # fmt: skip


def _one_line(text: str) -> str:
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())
