"""Number of tokens in an estimate: fsdpctl reads a part of large data and estimates the rest."""

import gzip
import io
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdpctl.chats import partial_reads
from fsdpctl.config.data import DataConfig
from fsdpctl.data import open_estimated as module
from fsdpctl.data.estimated import EstimatedData
from fsdpctl.data.mixture import Mixture
from fsdpctl.data.open_data import open_data
from fsdpctl.data.open_estimated import open_estimated
from fsdpctl.errors import UsageError
from tests.chats.families import say, write_tokenizer

_ENDS = ("en", "ored", "in \n", "1", "ed", "or\n")
_WORDS = [a + b for a in "abcdefghimnoprstuvé" for b in _ENDS]


def prose(count: int, seed: int) -> str:
    """Return a text whose words are shorter in some parts than in others."""
    some = random.Random(seed)
    kinds = [some.sample(_WORDS, 20) for _ in range(5)]
    return " ".join(some.choice(kinds[n * 5 // count]) for n in range(count))


def lengths(count: int) -> list[int]:
    """Return lengths whose distribution has a long tail."""
    some = random.Random(0)
    return [int(some.lognormvariate(3, 1)) + 1 for _ in range(count)]


TEXTS = [prose(each, n) for n, each in enumerate(lengths(600))]
CHATS = [{"messages": say(text[: len(text) // 3], text)} for text in TEXTS]
ROWS = [{"text": text} for text in TEXTS]


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in rows).encode()


def parquet(rows: list[Any]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=500)
    return file.getvalue()


def arrow(rows: list[Any]) -> bytes:
    import pyarrow as pa

    file, table = io.BytesIO(), pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=50)
    return file.getvalue()


def zstd(content: bytes) -> bytes:
    import pyarrow as pa

    return bytes(pa.compress(content, "zstd", asbytes=True))


DATA: dict[str, tuple[str, dict[str, bytes]]] = {
    "one text": ("text", {"a.txt": "\n".join(TEXTS).encode()}),
    "texts": ("text", {f"{n // 9}/{n}.txt": text.encode() for n, text in enumerate(TEXTS)}),
    "rows of text": ("text", {"a.jsonl": lines(ROWS)}),
    "rows of text, compressed": ("text", {"a.jsonl.gz": gzip.compress(lines(ROWS))}),
    "chats": ("chat", {"a.jsonl": lines(CHATS)}),
    "chats in files": ("chat", {f"{n}.jsonl": lines(CHATS[n::50]) for n in range(50)}),
    "chats, compressed": ("chat", {"a.jsonl.gz": gzip.compress(lines(CHATS))}),
    "chats, zstd": ("chat", {"a.jsonl.zst": zstd(lines(CHATS))}),
    "an array, compressed": ("chat", {"a.json.gz": gzip.compress(json.dumps(CHATS).encode())}),
    "an array": ("chat", {"a.json": json.dumps(CHATS, indent=1).encode()}),
    "Parquet": ("chat", {"a.parquet": parquet(CHATS)}),
    "Arrow": ("chat", {"a.arrow": arrow(CHATS)}),
}


FAST = ("one text", "rows of text", "chats, compressed")
KINDS = [
    pytest.param(*about, id=name, marks=() if name in FAST else pytest.mark.slow)
    for name, about in DATA.items()
]


@pytest.fixture
def tokenizer(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "EXACT_BYTES", 1 << 14)
    monkeypatch.setattr(module, "EXCERPT_BYTES", 1 << 8)
    return str(write_tokenizer(tmp_path / "tokenizer", "qwen3"))


def written(folder: Path, files: dict[str, bytes]) -> int:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return sum(map(len, files.values()))


def both(config: DataConfig) -> tuple[Any, Any]:
    return open_estimated(config), open_data(config)


def near(result: float, expected: float, spread: float | None) -> bool:
    assert spread is not None
    return abs(result / expected - 1) <= max(0.03, 2 * spread)


@pytest.mark.parametrize(("kind", "files"), KINDS)
def test_estimated_tokens_and_rows_are_those_of_a_run(kind, files, tokenizer, tmp_path):
    size = written(tmp_path / "data", files)
    config = DataConfig(name=kind, path=str(tmp_path / "data"), tokenizer=tokenizer)
    data, exact = open_estimated(config), open_data(config)
    assert isinstance(data.train, EstimatedData)
    assert isinstance(data.val, EstimatedData)
    assert data.train.excerpt.num_tokens < 0.55 * exact.train.num_tokens
    assert near(data.train.num_tokens, exact.train.num_tokens, data.relative_error)
    assert near(len(data.train.samples(512)), len(exact.train.samples(512)), 0.05)
    assert data.val.num_tokens == pytest.approx(data.train.num_tokens * 0.02 / 0.98, abs=1)
    assert 0 < (data.relative_error or 0) < 0.06
    assert data.notes[-1].endswith(f" in {size:,} bytes (estimated from 64 excerpts)")
    again = open_estimated(config)  # the cache has the tokens now
    assert (again.fingerprint, again.relative_error) == (exact.fingerprint, None)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "chats.jsonl", "chats.jsonl.gz"])
def test_most_of_large_data_is_not_read(name, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "EXCERPT_BYTES", 128)
    monkeypatch.setattr(partial_reads, "MIB", 1 << 16)
    kind = "chat" if "chats" in name else "text"
    rows = CHATS if kind == "chat" else ROWS
    content = "\n".join(TEXTS).encode() if name == "a.txt" else lines(rows)
    content = gzip.compress(40 * content, 1) if name.endswith("gz") else 40 * content
    (tmp_path / name).write_bytes(content)
    config = DataConfig(name=kind, path=str(tmp_path / name), tokenizer=tokenizer)
    open_estimated(config)  # imports
    before = bytes_read()
    open_estimated(config)
    assert bytes_read() - before < len(content) / 3


def bytes_read() -> int:
    """Return the bytes that this thread has read; a process would count its children, too."""
    return int(Path("/proc/thread-self/io").read_text().split()[1])


def test_a_small_source_is_counted_and_files_of_validation_have_their_share(tokenizer, tmp_path):
    written(tmp_path, {"many.jsonl": lines(CHATS[:400]), "few.jsonl": lines(CHATS[:40])})
    written(tmp_path / "both", {"train.jsonl": lines(ROWS), "validation.jsonl": lines(ROWS[::9])})
    written(tmp_path / "few", {"train.jsonl": lines(ROWS[:2]), "validation.jsonl": lines(ROWS)})
    config = DataConfig(name="chat", tokenizer=tokenizer, val_fraction=0)
    config = replace(config, path=f"{tmp_path}/few.jsonl:1,{tmp_path}/many.jsonl:3")
    data, exact = both(config)
    assert isinstance(data.train, Mixture)
    few, many = data.train.sources
    assert [type(each.content) for each in (few, many)] == [EstimatedData, EstimatedData]
    assert few.content.num_tokens == exact.train.sources[0].content.num_tokens
    assert near(data.train.num_tokens, exact.train.num_tokens, data.relative_error)
    assert near(len(data.train.samples(512)), len(exact.train.samples(512)), 0.05)
    assert any(each.startswith("many: ") and "excerpts" in each for each in data.notes)
    for options in (
        {"path": "both"},
        {"path": "few"},
        {"path": "both/train.jsonl", "val_path": "both/validation.jsonl"},
    ):
        paths: Any = {key: f"{tmp_path}/{path}" for key, path in options.items()}
        config = DataConfig(name="text", tokenizer=tokenizer, **paths)
        data, exact = both(config)
        assert data.has_val_files
        assert near(data.train.num_tokens, exact.train.num_tokens, 0.05)
        assert near(data.val.num_tokens, exact.val.num_tokens, 0.05)


def test_a_run_cannot_train_on_an_estimate(tokenizer, tmp_path):
    written(tmp_path, {"a.jsonl": lines(ROWS)})
    config = DataConfig(name="text", path=f"{tmp_path}/a.jsonl", tokenizer=tokenizer)
    data = open_estimated(config)
    with pytest.raises(AssertionError, match="no data to train on"):
        data.train.samples(512)[0]
    with pytest.raises(AssertionError, match="no data to train on"):
        assert data.fingerprint


@pytest.mark.parametrize(
    ("kind", "path", "problem"),
    [
        ("tokens", "s3://bucket/a.bin", "data.path=s3://bucket/a.bin: in a store"),
        ("chat", "hf://org/name", "data.path=hf://org/name: not fetched"),
        ("text", "a.bin", "a.bin: binary, expected UTF-8 text"),
    ],
)
def test_nothing_is_fetched_for_an_estimate(kind, path, problem, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"\0" * (1 << 20))
    with pytest.raises(UsageError, match=problem):
        open_estimated(DataConfig(name=kind, path=path, tokenizer=tokenizer))
