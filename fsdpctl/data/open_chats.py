"""Conversations as data: rendered and tokenized once, then memory-mapped from the cache."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from fsdpctl.chats.formats import TOOLS_KEYS
from fsdpctl.chats.rows import check_unambiguous
from fsdpctl.chats.template_processes import MAX_BYTES_PER_CHAT, MAX_SECONDS_PER_CHAT, TemplateSetup
from fsdpctl.chats.values import count_of, list_counts
from fsdpctl.config.data import CHAT, DataConfig
from fsdpctl.config.data_files import DataFiles
from fsdpctl.data.chat_template import ChatTemplate, control_pattern, open_template
from fsdpctl.data.chat_tokens import SPLITS, ChatDataBuilder, ChatSource
from fsdpctl.data.data_set import DataSet
from fsdpctl.data.find_data import find_data
from fsdpctl.data.new_tokens import open_run_tokenizer
from fsdpctl.data.packing import DocumentSet, Packing
from fsdpctl.data.token_cache import CacheEntry, entry_name, read_cache, write_cache
from fsdpctl.data.tokenizer import BYTE_TOKENIZER, FileTokenizer
from fsdpctl.errors import UsageError
from fsdpctl.io.files import open_regular

_CHUNK_BYTES = 1 << 22
_MAX_NAMED_FILES = 8  # in notes
_CACHE_VERSION = 7  # a part of cache keys; increase it if the same input gives other tokens
_POLICIES = {
    "split": "each is trained on as rendered while it is the last message",
    "keep": "they are trained on as rendered after the rewrite",
}
# Notes on events that change the loss: by the key of a count, the counted noun and the text.
_EVENTS = {
    "rewritten_chats": (
        "conversation",
        "whose assistant messages the template rewrites once others follow: {policy}",
    ),
    "empty": ("row", "without text, skipped"),
    "without_loss": ("sample", "dropped, with no token that is trained on"),
    "control_tokens": ("message", "with control tokens in the text, encoded as control tokens"),
    "left_out": ("message", "not rendered verbatim by the template"),
}


@dataclass(frozen=True, slots=True)
class ChatSetup:
    """The template and tokenizer that conversations are rendered and tokenized with."""

    config: DataConfig
    seed: int  # determines which conversations share a sequence
    tokenizer: FileTokenizer
    template: ChatTemplate | UsageError  # the error is raised if a row needs a template
    today: str

    @property
    def template_or_none(self) -> ChatTemplate | None:
        return None if isinstance(self.template, UsageError) else self.template

    def template_setup(self) -> tuple[TemplateSetup, str]:
        """Return what a process needs to render conversations, and the template's location.

        UsageError if there is no template.
        """
        if isinstance(self.template, UsageError):
            raise self.template
        setup = make_template_setup(self.template, self.tokenizer, self.today, self.config)
        return setup, self.template.location


def open_chat_setup(config: DataConfig, seed: int) -> ChatSetup:
    """Open the tokenizer and the chat template; UsageError if the tokenizer can't be used."""
    if config.tokenizer in (None, BYTE_TOKENIZER):
        hint = "set model=hf model.path=DIR, or data.tokenizer=DIR; or data=text, for rows of text"
        raise UsageError(f"data=chat: requires a model's tokenizer; {hint}")
    today = _date(config.date)
    tokenizer = open_run_tokenizer(config)
    assert isinstance(tokenizer, FileTokenizer)
    return ChatSetup(config, seed, tokenizer, _template(config, tokenizer), today)


def open_chats(
    setup: ChatSetup, config: DataConfig, key: str, data_files: DataFiles | None = None
) -> DataSet:
    """Open the conversations at `config.path`, the value of the setting `key`.

    `data_files` are the files of this path, if they are known. UsageError if a file, a row or the
    template can't be used.
    """
    data_files = data_files or find_data(str(config.path), key, CHAT)
    val_files = data_files.validation if config.uses_validation_files else ()
    files = DataFiles(data_files.kind, data_files.files, val_files)
    paths = (*files.files, *files.validation)
    for each in paths if config.is_inferred else ():
        check_unambiguous(str(each))
    entry = _entry(config, files, setup, key)
    counts: dict[str, int] = entry.facts["counts"]
    has_chats = counts.get("marked") or counts.get("found")  # otherwise, all rows are plain text
    template = setup.template_or_none if has_chats else None
    packing = Packing(config.packing is not False, config.too_long, setup.seed)
    train, val = (_documents(entry, part, packing, str(config.path)) for part in SPLITS)
    assert train is not None
    summary = data_files.summary(validates=config.uses_validation_files)
    format_notes = tuple(_notes_on_files(paths, entry.facts, template))
    parts = [("train" if key == "data.path" else "validation", train), ("validation", val)]
    return DataSet(
        train,
        val,
        tokenizer=setup.tokenizer,
        vocab_size=setup.tokenizer.vocab_size,
        description=str(config.path) if summary == "1 file" else f"{config.path}, {summary}",
        files=paths,
        notes=(*format_notes, *_notes(config, counts, parts, (template, setup.today))),
        format_notes=format_notes,
        date=setup.today if template is not None and template.uses_date else None,
        template=template.text if template is not None and config.template is not None else None,
        end_tokens=tuple(entry.facts["end_tokens"]),
        generation_prompt=_first_prompt(val or train),
        has_val_files=bool(val_files),
    )


def has_cached_chats(setup: ChatSetup, config: DataConfig, files: DataFiles) -> bool:
    sums = read_cache(_checksums_entry_name(files))
    return sums is not None and read_cache(_entry_name(config, files, setup)) is not None


def _entry(config: DataConfig, files: DataFiles, setup: ChatSetup, key: str) -> CacheEntry:
    name = _entry_name(config, files, setup)
    if entry := read_cache(name):
        return entry
    splits, fraction = (files.files, files.validation), config.used_val_fraction
    source = ChatSource(key, *splits, fraction, config.prompt, setup.template_setup)
    tokenized = ChatDataBuilder(source, setup.tokenizer).build()
    facts = {each: getattr(tokenized, each) for each in ("counts", "formats", "end_tokens", "keys")}
    return write_cache(name, tokenized.arrays, facts)


def _documents(entry: CacheEntry, split: str, packing: Packing, origin: str) -> DocumentSet | None:
    keys = [f"{split}.{each}" for each in ("tokens", "trained", "starts")]
    if keys[0] not in entry.arrays:
        return None
    tokens, loss_mask, starts = (entry.arrays[each] for each in keys)
    checksum = "".join(entry.checksums[each] for each in keys)
    origin = origin if split == "train" else "the validation data"
    return DocumentSet(tokens, loss_mask, starts, packing, origin=origin, checksum=checksum)


def _first_prompt(documents: DocumentSet) -> tuple[int, ...]:
    tokens, loss_mask = documents[0]
    answers = np.flatnonzero(loss_mask[1:]) + 1
    return tuple(int(each) for each in tokens[: answers[0] if len(answers) else len(tokens)])


def _template(config: DataConfig, tokenizer: FileTokenizer) -> ChatTemplate | UsageError:
    """Return the template, or the error to raise if a row needs a template."""
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


def make_template_setup(
    template: ChatTemplate, tokenizer: FileTokenizer, today: str, config: DataConfig = DataConfig()
) -> TemplateSetup:
    return TemplateSetup(
        template.text, template.tool_text, template.special_tokens, control_pattern(tokenizer),
        date=today, train_on=config.train_on, rewritten_turns=config.rewritten_turns,
        max_seconds=MAX_SECONDS_PER_CHAT, max_bytes=MAX_BYTES_PER_CHAT,
    )  # fmt: skip


def _entry_name(config: DataConfig, files: DataFiles, setup: ChatSetup) -> str:
    template = setup.template_or_none
    parts = [
        str(_CACHE_VERSION),
        *_checksums(files),
        setup.tokenizer.checksum,
        "" if template is None else template.checksum,
        setup.today if template is not None and template.uses_date else "",
        config.prompt,
        config.train_on,
        config.rewritten_turns,
        "" if files.validation else repr(config.used_val_fraction),
    ]
    text = "\n".join(parts)
    return f"chats-{xxhash.xxh3_128_hexdigest(text.encode())}"


def _checksums(files: DataFiles) -> list[str]:
    """Return the checksums of the training and of the validation files.

    The cache keeps checksums for files of the same sizes and times.
    """
    parts, name = (files.files, files.validation), _checksums_entry_name(files)
    entry = read_cache(name) or write_cache(name, {}, {"sums": [*map(_checksum, parts)]})
    return [str(each) for each in entry.facts["sums"]]


def _checksums_entry_name(files: DataFiles) -> str:
    return entry_name("sums", len(files.files), (*files.files, *files.validation))


def _checksum(files: Sequence[Path]) -> str:
    digest = xxhash.xxh3_128()
    for path in files:
        with open(open_regular(path, follow_links=True), "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
            digest.update(file.tell().to_bytes(8, "little"))
    return digest.hexdigest()


def _notes(
    config: DataConfig,
    counts: dict[str, int],
    parts: Sequence[tuple[str, DocumentSet | None]],
    rendering: tuple[ChatTemplate | None, str],
) -> tuple[str, ...]:
    template, today = rendering
    lines = []
    if template is not None:
        lines += _about_template(config, counts, template, today)
    for (name, part), chats in zip(parts, ("chats", "val_chats"), strict=False):
        if part is not None:
            lines.append(
                f"{name}: {count_of(counts.get(chats, 0), 'conversation')}, "
                f"{count_of(len(part), 'sample')}, {part.num_tokens:,} tokens, "
                f"{np.count_nonzero(part.loss_mask) / part.num_tokens:.0%} of them trained on"
            )
        elif config.used_val_fraction:
            lines.append(
                f"no validation: data.val_fraction={config.used_val_fraction:g} selects none of "
                "the few conversations"
            )
    policy = f"{_POLICIES[config.rewritten_turns]} (data.rewritten_turns)"
    lines += (
        f"{count_of(counts[name], noun)} {text.format(policy=policy)}"
        for name, (noun, text) in _EVENTS.items()
        if counts.get(name)
    )
    return tuple(lines)


def _about_template(
    config: DataConfig, counts: dict[str, Any], template: ChatTemplate, today: str
) -> list[str]:
    lines = [f"chat template: {template.location}"]
    answers = count_of(counts.get("answers", 0), "assistant message")
    if config.train_on == "all":
        lines.append("all tokens are trained on (data.train_on=all)")
    elif counts.get("marked"):
        lines.append(f"{answers}, marked by the template's generation blocks")
    else:
        lines.append(f"{answers}, located in the rendered text, with the tokens that end them")
    if template.uses_date:
        lines.append(f"date given to the template: {today} (data.date)")
    return lines


def _notes_on_files(
    files: Sequence[Path], facts: Mapping[str, Any], template: ChatTemplate | None
) -> list[str]:
    template_text = "" if template is None else template.text + template.tool_text
    template_words = set(re.findall(r"\w+", template_text))
    triples = zip(files, facts["formats"], facts["keys"], strict=True)
    lines, more_ignored = [], Counter[str]()
    for number, (file, name, counts) in enumerate(triples):
        ignored, followed = dict(counts["ignored"]), dict(counts["followed"])
        # The template may read keys of messages, and may not read tools.
        for key in counts["ignored"]:
            if "[]" in key and key.rpartition(".")[2] in template_words:
                del ignored[key]
        for key in {*TOOLS_KEYS} & followed.keys() if "tools" not in template_words else ():
            ignored[key] = followed.pop(key)
        if number >= _MAX_NAMED_FILES:
            more_ignored.update(ignored)
            continue
        more = f", with {list_counts(followed)}" if followed else ""
        lines.append(f"{file}: format {name}{more}")
        if ignored:
            lines.append(f"{file}: ignored: {list_counts(ignored)}")
    if len(files) > _MAX_NAMED_FILES:
        text = count_of(len(files) - _MAX_NAMED_FILES, "more file")
        lines.append(f"{text}, ignored: {list_counts(more_ignored)}" if more_ignored else text)
    return lines
