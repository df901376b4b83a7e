"""Conversations of the section `data`, rendered and tokenized once, then mapped from the cache."""

from dataclasses import dataclass, replace
from datetime import date, datetime
from typing import Any

import numpy as np
import xxhash

from fsdpctl.config.data import DataConfig
from fsdpctl.data.cache import CacheEntry, read_cache, write_cache
from fsdpctl.data.chats.building import PARTS, Building, BuildPlan
from fsdpctl.data.chats.file_notes import MOST_FILES, counted, notes_on_files
from fsdpctl.data.chats.files import ChatFiles, files_checksum, sources_of
from fsdpctl.data.chats.template import ChatTemplate, control_pattern, open_template
from fsdpctl.data.chats.workers import MOST_BYTES, MOST_SECONDS, TemplateSetup
from fsdpctl.data.data_set import DataSet
from fsdpctl.data.packing import DocumentSet, Packing
from fsdpctl.data.tokenizer import BYTES, FileTokenizer, open_tokenizer
from fsdpctl.errors import UsageError, first_of

_Rendering = tuple[FileTokenizer, ChatTemplate | None, str]  # with today's date
_ENCODING = 6  # increase it if the same input gives other tokens
_POLICIES = {
    "split": "each is trained on as it is when it is the last one",
    "last": "only the last assistant message is trained on",
    "keep": "they are trained on as rewritten",
}
# What happened in rendering, with the key of its count and the noun that is counted.
_EVENTS = {
    "rewritten_chats": (
        "conversation",
        "whose assistant messages the template rewrites once others follow: {policy}",
    ),
    "not_as_served": ("assistant message", "after messages that are rendered differently later"),
    "switched_off": ("assistant message", "masked by the data (weight, train)"),
    "others_trained": (
        "message",
        "of other roles masked by the data, but trained on (train_on=all)",
    ),
    "empty": ("row", "without text, passed over"),
    "begun": ("text", "beginning with the begin token, where no other is added"),
    "without_loss": ("sample", "dropped, with no token that is trained on"),
    "control_tokens": ("message", "with control tokens in the text, encoded as control tokens"),
    "left_out": ("message", "not rendered verbatim by the template"),
    "arguments_as_text": ("conversation", "with arguments of calls given to the template as text"),
    "joined_parts": ("conversation", "with parts joined into one text for the template"),
}


@dataclass(frozen=True, slots=True)
class ChatSet(DataSet):
    """The conversations that a run trains and validates on."""

    train: DocumentSet
    val: DocumentSet | None
    tokenizer: FileTokenizer


def open_chats(config: DataConfig, seed: int = 0) -> ChatSet:
    """Open the conversations of a run.

    Args:
        config: The section `data`; `tokenizer` is the directory of a tokenizer and, unless
            `template` is set, a chat template.
        seed: Determines which conversations share a sequence.

    Raises:
        UsageError: If a file, a line, the template or the tokenizer can't be used.
    """
    if config.path is None:
        raise UsageError("data=chat: data.path is required, such as data.path=FILE.jsonl")
    if config.tokenizer in (None, BYTES):
        raise UsageError(
            "data=chat: requires a model's tokenizer; set model=hf model.path=DIR, or "
            "data.tokenizer=DIR; or data=text, for rows of text"
        )
    today = _date(config.date)
    tokenizer = open_tokenizer(config.tokenizer)
    assert isinstance(tokenizer, FileTokenizer)
    template = _template(config, tokenizer)
    files = sources_of(config.path)
    held = files.validation if config.takes_validation else ()
    if config.val_path is not None:
        held = sources_of(config.val_path, "data.val_path").train
    if any(each.share is not None for each in held):
        raise UsageError(f"data.val_path={config.val_path}: shares are only valid in data.path")

    def setup() -> tuple[TemplateSetup, str]:
        if isinstance(template, UsageError):
            raise template
        return setup_of(template, tokenizer, today, config), template.source

    known = None if isinstance(template, UsageError) else template
    files = replace(files, validation=held)
    name = _entry_name(config, files, (tokenizer, known, today))
    entry = read_cache(name)
    if entry is None:
        plan = BuildPlan(files.train, held, config.val_fraction, config.prompt, setup)
        built = Building(plan, tokenizer).build()
        names = ("counts", "formats", "end_tokens", "keys")
        facts = {each: getattr(built, each) for each in names}
        entry = write_cache(name, built.arrays, facts)
    return _data_set(config, seed, files, entry, (tokenizer, known, today))


def _data_set(
    config: DataConfig, seed: int, files: ChatFiles, entry: CacheEntry, rendering: _Rendering
) -> ChatSet:
    tokenizer, template, today = rendering
    counts: dict[str, int] = entry.facts["counts"]
    if not (counts.get("marked") or counts.get("found")):
        template = None  # all lines are plain text
    packing = Packing(config.packing is not False, config.too_long, seed)
    train, val = (_part(entry, name, packing, str(config.path)) for name in PARTS)
    assert train is not None
    names = dict.fromkeys(
        each.path if each.share is None else f"{each.group} ({each.share:.0%})"
        for each in files.train
    )
    abouts = [
        f"{path}: {each.about(validates=config.takes_validation)}"
        for path, each in files.found
        if each.left_out or each.validation
    ]
    about_files = tuple(notes_on_files([*files.train, *files.validation], entry.facts, template))
    return ChatSet(
        train,
        val,
        tokenizer,
        tokenizer.vocab_size,
        "; ".join([first_of(list(names), MOST_FILES), *abouts]),
        gzip_bits_per_byte=None,
        notes=(*about_files, *_notes(config, entry, (train, val), (template, today))),
        about_files=about_files,
        date=today if template is not None and template.tells_date else None,
        template=template.text if template is not None and config.template is not None else None,
        end_tokens=tuple(entry.facts["end_tokens"]),
        prompt=_first_prompt(val or train),
        has_val_files=bool(files.validation),
    )


def _part(entry: CacheEntry, name: str, packing: Packing, origin: str) -> DocumentSet | None:
    if f"{name}.tokens" not in entry.arrays:
        return None
    keys = [f"{name}.{each}" for each in ("tokens", "trained", "starts")]
    tokens, trained, starts = (entry.arrays[each] for each in keys)
    checksum = "".join(entry.checksums[each] for each in keys)
    origin = origin if name == "train" else "the validation data"
    return DocumentSet(tokens, trained, starts, packing, origin, checksum)


def _first_prompt(part: DocumentSet) -> tuple[int, ...]:
    """Return the tokens before the first assistant message of the first sample."""
    tokens, trained = part[0]
    answers = np.flatnonzero(trained[1:]) + 1
    return tuple(int(each) for each in tokens[: answers[0] if len(answers) else len(tokens)])


def _template(config: DataConfig, tokenizer: FileTokenizer) -> ChatTemplate | UsageError:
    """Return the template, or the error that matters once a line needs a template."""
    try:
        return open_template(tokenizer, config.template)
    except UsageError as error:
        if config.template is not None:
            raise
        return error


def _date(day: str | None) -> str:
    if day is None:
        return date.today().isoformat()
    try:
        return datetime.strptime(day, "%Y-%m-%d").date().isoformat()
    except ValueError:
        raise UsageError(f"data.date={day}: expected a day such as 2026-01-31, or auto") from None


def setup_of(
    template: ChatTemplate, tokenizer: FileTokenizer, today: str, config: DataConfig = DataConfig()
) -> TemplateSetup:
    """Return what a process needs to render conversations."""
    return TemplateSetup(
        template.text,
        template.tool_text,
        template.special_tokens,
        control_pattern(tokenizer),
        today,
        config.train_on,
        config.rewritten_turns,
        MOST_SECONDS,
        MOST_BYTES,
    )


def _entry_name(config: DataConfig, files: ChatFiles, rendering: _Rendering) -> str:
    """Return the name of the cache entry: a checksum of everything that determines the tokens."""
    tokenizer, template, today = rendering
    parts = [
        str(_ENCODING),
        *map(files_checksum, (files.train, files.validation)),
        tokenizer.checksum,
        "" if template is None else template.checksum,
        today if template is not None and template.tells_date else "",
        config.prompt,
        config.train_on,
        config.rewritten_turns,
        "" if files.validation else repr(config.val_fraction),
    ]
    return f"chats-{xxhash.xxh3_128_hexdigest(chr(10).join(parts).encode())}"


def _notes(
    config: DataConfig,
    entry: CacheEntry,
    parts: tuple[DocumentSet, DocumentSet | None],
    rendering: tuple[ChatTemplate | None, str],
) -> tuple[str, ...]:
    """Return lines about the data, most important first."""
    counts: dict[str, int] = entry.facts["counts"]
    template, today = rendering
    lines = []
    if template is not None:
        lines += _about_template(config, counts, template, today)
    train, val = parts
    lines.append(_about_part("train", train, counts.get("chats", 0)))
    if val is not None:
        lines.append(_about_part("validation", val, counts.get("val_chats", 0)))
    elif config.val_fraction:
        lines.append(
            f"no validation: data.val_fraction={config.val_fraction:g} selects none of the few "
            "conversations"
        )
    policy = f"{_POLICIES.get(config.rewritten_turns)} (data.rewritten_turns)"
    lines += (
        f"{counted(counts[name], noun)} {text.format(policy=policy)}"
        for name, (noun, text) in _EVENTS.items()
        if counts.get(name)
    )
    return tuple(lines)


def _about_template(
    config: DataConfig, counts: dict[str, Any], template: ChatTemplate, today: str
) -> list[str]:
    lines = [f"chat template: {template.source}"]
    answers = counted(counts.get("answers", 0), "assistant message")
    if config.train_on == "all":
        lines.append("all tokens are trained on (data.train_on=all)")
    elif counts.get("marked"):
        lines.append(f"{answers}, marked by the template's generation blocks")
    else:
        lines.append(f"{answers}, located in the rendered text, with the tokens that end them")
    if template.tells_date:
        lines.append(f"date given to the template: {today} (data.date)")
    return lines


def _about_part(name: str, part: DocumentSet, chats: int) -> str:
    return (
        f"{name}: {counted(chats, 'conversation')}, {counted(len(part), 'sample')}, "
        f"{part.num_tokens:,} tokens, {part.num_trained / part.num_tokens:.0%} of them trained on"
    )
