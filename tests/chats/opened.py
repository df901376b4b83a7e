"""Conversations, opened as in a run."""

from pathlib import Path
from typing import Any

from fsdpctl.config.data import DataConfig
from fsdpctl.data.open_data import open_data
from fsdpctl.data.packing import DocumentSet
from fsdpctl.data.tokenizer import FileTokenizer
from tests.chats.families import write_lines, write_tokenizer

DATE = "2026-01-31"


def opened(
    folder: Path, name: str, rows: list[Any], template: str | None = None, **about: Any
) -> Any:
    """Open rows with the template of the family, or with `template`."""
    tokenizer = write_tokenizer(folder / "tokenizer", name, template)
    file = write_lines(folder / "chats.jsonl", rows)
    given = {"val_fraction": 0, "date": DATE, "path": str(file), **about}
    return open_data(DataConfig(name="chat", tokenizer=str(tokenizer), **given))


def trained_texts(chats: DocumentSet, tokenizer: FileTokenizer) -> list[list[str]]:
    """Return the trained spans of each sample as text."""
    found = []
    for number in range(len(chats)):
        tokens, trained = chats[number]
        texts, run = [], []
        for token, flag in zip(tokens.tolist(), trained.tolist(), strict=True):
            if flag:
                run.append(token)
            elif run:
                texts.append(tokenizer.decode(run, skip_special_tokens=False))
                run = []
        found.append([*texts, *([tokenizer.decode(run, skip_special_tokens=False)] if run else [])])
    return found


def trained_of(folder: Path, name: str, rows: list[Any], **about: Any) -> list[list[str]]:
    """Return the trained spans of rows, opened by `opened`."""
    found = opened(folder, name, rows, **about)
    return trained_texts(found.train, found.tokenizer)
