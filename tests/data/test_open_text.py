"""Text that the first start reads: later starts read its cache, or the text if it changed."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fsdpctl.config.data import DataConfig
from fsdpctl.data import open_text, token_cache
from fsdpctl.data.data_set import DataSet
from fsdpctl.data.documents import read_text
from fsdpctl.data.open_data import open_data
from fsdpctl.data.streams import TokenStream

ROWS = '{"text": "a b b"}\n{"text": "b a", "extra": 1}\n{"text": ""}\n'
KINDS: dict[str, dict[str, Any]] = {
    "one file": {"a.txt": "a b a " * 30},
    "files to validate on, one that isn't text": {
        "train/a.txt": "a b", "train/b.txt": b"\0\1", "validation/c.txt": "b a",
    },
    "rows": {"a.jsonl": ROWS},
}  # fmt: skip


@pytest.fixture(params=list(KINDS.values()), ids=list(KINDS))
def folder(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(open_text, "_SMALL", 0)
    for name, content in request.param.items():
        file = tmp_path / "texts" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return tmp_path / "texts"


def opened(config: DataConfig) -> tuple[DataSet, int]:
    """Return the data, and how often text was read."""
    with mock.patch.object(open_text, "read_text", wraps=read_text) as read:
        return open_data(config), read.call_count


def facts(data: DataSet) -> list[Any]:
    parts = [each for each in (data.train, data.val) if each is not None]
    streams = [each for each in parts if isinstance(each, TokenStream)]
    tokens = [each.tokens[:].tolist() for each in streams]
    sizes = [each.num_bytes for each in streams]
    return [
        tokens, sizes, data.fingerprint, data.description, data.notes, data.files,
        data.has_val_files,
    ]  # fmt: skip


@pytest.fixture(params=["bytes", "words"])
def config(request: Any, folder: Path, word_tokenizer: Path) -> DataConfig:
    tokenizer = str(word_tokenizer) if request.param == "words" else None
    return DataConfig(name="text", path=str(folder), val_fraction=0.2, tokenizer=tokenizer)


def test_a_later_start_reads_nothing_and_gets_the_same(config, tmp_path, monkeypatch):
    first, reads = opened(config)
    assert reads > 0
    with mock.patch.object(token_cache, "_checksum", None):  # reading the tokens would fail
        again, reads = opened(config)
    assert (reads, facts(again)) == (0, facts(first))
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/none")  # not writable
    monkeypatch.setattr(open_text, "_SMALL", 1 << 30)
    uncached, reads = opened(config)
    assert reads > 0
    assert facts(uncached) == facts(first)


# Changes of the first text file, or of its tokens in the cache.
CHANGES: dict[str, Callable[[Path, Path], object]] = {
    "another_size": lambda first, _: first.write_bytes(2 * first.read_bytes()),
    "another_time": lambda first, _: os.utime(first, (1, 1)),
    "another_file": lambda first, _: first.with_stem("z").write_bytes(first.read_bytes()),
    "damaged_tokens": lambda _, text: text.write_bytes(text.read_bytes()[:-1] + b"\xff"),
    "removed_tokens": lambda _, text: text.unlink(),
    "strange_index": lambda _, text: _negate(next(text.parents[1].glob("texts-*/header.json"))),
}


def _negate(header: Path) -> None:
    header.write_text(header.read_text().replace('"num_bytes": ', '"num_bytes": -'))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_text_is_read_again_if_anything_else_is_there(change, config, folder, tmp_path):
    opened(config)
    first = next(file for file in sorted(folder.rglob("*")) if file.is_file())
    change(first, next((tmp_path / "cache").glob("fsdpctl/text-*/tokens.npy")))
    assert opened(config)[1] > 0


def test_what_is_held_out_by_another_share_is_read_again(config):
    opened(config)
    assert opened(replace(config, val_fraction=0.4))[1] > 0
