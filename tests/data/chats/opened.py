"""Conversations opened as a run opens them, and looked at."""

from pathlib import Path
from typing import Any

from fsdpctl.config.data import DataConfig
from fsdpctl.data.chats.open import ChatSet, open_chats
from fsdpctl.data.chats.tokens import ChatTokens
from fsdpctl.data.tokenizer import FileTokenizer
from tests.data.chats.families import write_lines, write_tokenizer

DATE = "2026-01-31"


def opened(
    folder: Path, name: str, rows: list[Any], template: str | None = None, **about: Any
) -> ChatSet:
    """The rows under the family's template, or another."""
    tokenizer = write_tokenizer(folder / "tokenizer", name, template)
    file = write_lines(folder / "chats.jsonl", rows)
    given = {"val_fraction": 0, "date": DATE, "path": str(file), **about}
    return open_chats(DataConfig(name="chat", tokenizer=str(tokenizer), **given))


def trained_texts(chats: ChatTokens, tokenizer: FileTokenizer) -> list[list[str]]:
    """Of each sample, the stretches of tokens that have a loss, as text."""
    found = []
    for number in range(chats.num_samples):
        tokens, trained = chats.sample(number)
        texts, run = [], []
        for token, flag in zip(tokens.tolist(), trained.tolist(), strict=True):
            if flag:
                run.append(token)
            elif run:
                texts.append(tokenizer.decode_all(run))
                run = []
        found.append([*texts, *([tokenizer.decode_all(run)] if run else [])])
    return found


def trained_of(folder: Path, name: str, rows: list[Any], **about: Any) -> list[list[str]]:
    """The same of rows under a family's template."""
    found = opened(folder, name, rows, **about)
    return trained_texts(found.train, found.tokenizer)
