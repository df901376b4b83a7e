"""From the data section of a configuration to conversations as tokens."""

import re
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path

import xxhash

from fsdpctl.config.data import DataConfig
from fsdpctl.data.chats.building import Building, OnRows, Plan, named_sources
from fsdpctl.data.chats.cache import cache_folder, read_cache, write_cache
from fsdpctl.data.chats.child import Setup
from fsdpctl.data.chats.files import files_checksum, sources_of
from fsdpctl.data.chats.notes import notes_on
from fsdpctl.data.chats.template import ChatTemplate, open_template
from fsdpctl.data.chats.tokens import ChatTokens
from fsdpctl.data.chats.workers import MOST_BYTES, MOST_SECONDS
from fsdpctl.data.tokenizer import BYTES, FileTokenizer, open_tokenizer, tokenizer_checksum
from fsdpctl.errors import UsageError

_ENCODING = 1  # counts the ways in which chats became tokens: what another one kept is not used


@dataclass(frozen=True, slots=True)
class ChatSet:
    """What a run trains on and validates with, where that is conversations."""

    train: ChatTokens
    val: ChatTokens | None
    tokenizer: FileTokenizer
    template: ChatTemplate | None  # None: no line needed one
    date: str  # what the template took for today, YYYY-MM-DD: to be kept as data.date
    end_tokens: tuple[int, ...]  # that end an answer, the most frequent first
    description: str
    notes: tuple[str, ...]  # what is worth saying, a line each

    @property
    def vocab_size(self) -> int:
        """Of the tokenizer."""
        return self.tokenizer.vocab_size

    @property
    def fingerprint(self) -> str:
        """Identifies the content of both parts."""
        return self.train.checksum + (self.val.checksum if self.val else "")


def open_chats(config: DataConfig, on_rows: OnRows = lambda count: None) -> ChatSet:
    """The conversations of a run, made into tokens once and mapped from the user's cache later.

    Args:
        config: the section `data`; `tokenizer` is a directory with a tokenizer.json and, unless
            `template` names a file, a chat template.
        on_rows: called with the conversations done since the last call; not at all for kept ones.

    Raises:
        UsageError: a file, a line, the template or the tokenizer cannot be used; of a line the
            message names file and number.
    """
    if config.path is None:
        raise UsageError("data=chat: say which, as data.path=FILE.jsonl")
    if config.tokenizer in (None, BYTES):
        raise UsageError(
            "data=chat: takes a model's tokenizer: model=hf model.path=DIR, or data.tokenizer=DIR"
        )
    today = _date(config.date)
    tokenizer = open_tokenizer(config.tokenizer)
    assert isinstance(tokenizer, FileTokenizer)
    template = _template(config)
    sources = sources_of(config.path)
    held = () if config.val_path is None else sources_of(config.val_path, "data.val_path")
    if any(each.share is not None for each in held):
        raise UsageError(f"data.val_path={config.val_path}: validation has no shares")

    def setup() -> tuple[Setup, str]:
        if isinstance(template, UsageError):
            raise template
        return setup_of(template, tokenizer, today, config), template.source

    known = None if isinstance(template, UsageError) else template
    name = _digest(config, known, tokenizer, today, files_checksum(sources) + files_checksum(held))
    folder = cache_folder(name)
    kept = read_cache(folder)
    if kept is None:
        plan = Plan(sources, held, config.val_fraction, setup, on_rows)
        kept = write_cache(folder, Building(plan, tokenizer).build())
    used = known if kept.counts.get("marked") or kept.counts.get("found") else None
    return ChatSet(
        kept.train,
        kept.val,
        tokenizer,
        used,
        today,
        tuple(kept.end_tokens),
        named_sources(sources),
        notes_on(kept, (*sources, *held), used, config, today),
    )


def _template(config: DataConfig) -> ChatTemplate | UsageError:
    """The template; why there is none, which matters only once a line needs one."""
    try:
        return open_template(Path(str(config.tokenizer)), config.template)
    except UsageError as error:
        if config.template is not None:
            raise
        return error


def _date(said: str | None) -> str:
    if said is None:
        return date.today().isoformat()
    try:
        return datetime.strptime(said, "%Y-%m-%d").date().isoformat()
    except ValueError:
        raise UsageError(f"data.date={said}: allowed is a day, as 2026-01-31, or auto") from None


def setup_of(
    template: ChatTemplate, tokenizer: FileTokenizer, today: str, config: DataConfig = DataConfig()
) -> Setup:
    """What the process of a template is told."""
    # The longest first: some begin as others do.
    controls = sorted(tokenizer.controls, key=lambda text: (-len(text), text))
    return Setup(
        template.text,
        template.tool_text,
        template.special_tokens,
        "|".join(re.escape(each) for each in controls if each),
        today,
        config.train_on,
        config.rewritten_turns,
        MOST_SECONDS,
        MOST_BYTES,
    )


def _digest(
    config: DataConfig,
    template: ChatTemplate | None,
    tokenizer: FileTokenizer,
    today: str,
    files: str,
) -> str:
    """Identifies what the tokens are made of."""
    parts = [
        str(_ENCODING),
        files,
        tokenizer_checksum(tokenizer),
        str(tokenizer.end),
        "" if template is None else template.checksum,
        today if template is not None and template.tells_date else "",
        config.train_on,
        config.rewritten_turns,
        "" if config.val_path is not None else repr(config.val_fraction),
    ]
    return xxhash.xxh3_128_hexdigest("\n".join(parts).encode())
