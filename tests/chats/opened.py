"""Conversations, opened as in a run."""

from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from fsdpctl.config.data import DataConfig
from fsdpctl.data.open_data import open_data
from fsdpctl.data.packing import DocumentSet
from fsdpctl.data.tokenizer import FileTokenizer
from tests.chats.families import write_lines, write_tokenizer

DATE = "2026-01-31"


def opened(folder: Path, name: str, rows: Any, template: str | None = None, **kwargs: Any) -> Any:
    """Open rows with the template of the family, or with `template`."""
    tokenizer = write_tokenizer(folder / "tokenizer", name, template)
    file = write_lines(folder / "chats.jsonl", rows)
    settings = {"val_fraction": 0, "date": DATE, "path": str(file), **kwargs}
    return open_data(DataConfig(name="chat", tokenizer=str(tokenizer), **settings))


def trained_texts(chats: DocumentSet, tokenizer: FileTokenizer) -> list[list[str]]:
    """Return the trained spans of each sample as text."""
    texts = []
    for tokens, trained in (chats[number] for number in range(len(chats))):
        pairs = zip(trained.tolist(), tokens.tolist(), strict=True)
        runs = [[token for _, token in run] for flag, run in groupby(pairs, itemgetter(0)) if flag]
        texts.append([tokenizer.decode(run, skip_special_tokens=False) for run in runs])
    return texts


def trained_of(folder: Path, name: str, rows: list[Any], **kwargs: Any) -> list[list[str]]:
    """Return the trained spans of each row as text."""
    data = opened(folder, name, rows, **kwargs)
    return trained_texts(data.train, data.tokenizer)
