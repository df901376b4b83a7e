"""`fsdpctl tokenize`: every input, files of a set size, and killed runs that continue."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fsdpctl.data import tokenizing
from fsdpctl.data.token_formats import check_tokens, open_token_files
from fsdpctl.data.tokenizer import ByteTokenizer, open_tokenizer
from fsdpctl.data.tokenizing import TokenOutput, tokenize_files
from fsdpctl.errors import UsageError
from fsdpctl.io import files
from tests.chats.families import say, write_lines
from tests.data.token_file import encoded

TEXTS = [f"document {number} é " + "a b " * (number % 7) for number in range(60)]


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "src"
    folder.mkdir()
    rows = [json.dumps({"text": each, "id": 1}) for each in TEXTS]
    (folder / "a.jsonl").write_text("\n".join(rows[:20]))
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.write("\n".join(rows[20:30]))
    pq.write_table(pa.table({"text": TEXTS[30:45], "url": ["x"] * 15}), folder / "c.parquet")
    for number in range(45, 60):
        (folder / f"d{number}.json").write_text(json.dumps({"text": TEXTS[number]}))
    (folder / "e.dat").write_bytes(b"\0\1")
    (folder / "README.md").write_text("# Texts")
    (folder / "state.json").write_text("{}")  # a file of `datasets`
    return folder


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number:02}.txt").write_text(text)
    (folder / "e.dat").write_bytes(b"\0\1")
    return folder


def tokens_at(path):
    data = open_token_files(str(path)).train
    for each in data:
        check_tokens(each, None)
    return np.concatenate([each.shard.read(0, each.shard.count) for each in data]).tolist()


@pytest.mark.parametrize("kind", ["source", "texts"])
@pytest.mark.parametrize("has_file", [False, True])
def test_all_kinds_of_files_become_documents(tmp_path, kind, word_tokenizer, has_file, request):
    source = request.getfixturevalue(kind)
    tokenizer = open_tokenizer(str(word_tokenizer)) if has_file else ByteTokenizer()
    done = tokenize_files(str(source), TokenOutput(tmp_path / "t.bin"), tokenizer)
    expected = encoded(tokenizer, *TEXTS).tolist()
    assert tokens_at(tmp_path / "t.bin") == expected
    assert (done.tokens, done.num_bytes) == (len(expected), len("".join(TEXTS).encode()))
    left_out = {
        "source": "18 files of 21; left out: README.md, e.dat, state.json",
        "texts": "60 files of 61, 1 file skipped: e.dat (binary)",
    }
    assert done.summary == left_out[kind]
    assert sorted(each.name for each in tmp_path.glob("t.*")) == ["t.bin", "t.json"]


class KilledError(Exception):
    """An exception that ends a run where a signal might."""


@pytest.mark.parametrize("shard_tokens", [None, 100])
def test_a_killed_run_continues_to_the_same_bytes(tmp_path, source, monkeypatch, shard_tokens):
    monkeypatch.setattr(tokenizing, "BATCH_BYTES", 50)
    whole = TokenOutput(tmp_path / "whole" / "t.bin", shard_tokens)
    whole.path.parent.mkdir()
    tokenize_files(str(source), whole, ByteTokenizer())
    rng, kills = np.random.default_rng(0), 0
    output = TokenOutput(tmp_path / "killed" / "t.bin", shard_tokens)
    output.path.parent.mkdir()
    left = [0]

    def dying(call):
        def dying_call(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                raise KilledError
            result = call(*args, **kwargs)
            if left[0] == -1:
                if result is not None:
                    result.close()
                raise KilledError
            return result

        return dying_call

    for room, name in (
        (files, "write_atomic"), (tokenizing, "write_header"), (tokenizing, "open_nofollow")
    ):  # fmt: skip
        monkeypatch.setattr(room, name, dying(getattr(room, name)))
    while True:
        left[0] = int(rng.integers(0, 5)) if kills < 20 else -9
        try:
            tokenize_files(str(source), output, ByteTokenizer(), overwrite=kills == 0)
            break
        except KilledError:
            kills += 1
    assert kills > 1
    folders = [each.path.parent for each in (whole, output)]
    one, other = ({each.name: each.read_bytes() for each in x.iterdir()} for x in folders)
    assert one == other
    pattern = "t.bin" if shard_tokens is None else "t-*.bin"
    assert bytes(tokens_at(output.path.parent / pattern)).decode() == "".join(TEXTS)


def test_a_run_that_stopped_is_told_and_its_output_is_no_input(tmp_path, source, monkeypatch):
    monkeypatch.setattr(tokenizing, "BATCH_BYTES", 50)
    output = TokenOutput(source / "t.bin", 200)
    real = tokenizing._encoded

    def stopping(*args):
        for number, each in enumerate(real(*args)):
            if number == 12:
                raise KilledError
            yield each

    monkeypatch.setattr(tokenizing, "_encoded", stopping)
    with pytest.raises(KilledError):
        tokenize_files(str(source), output, ByteTokenizer())
    monkeypatch.setattr(tokenizing, "_encoded", real)
    complete = sorted(source.glob("t-*.bin"))
    assert len(complete) > 1
    with pytest.raises(UsageError, match=r"t\.progress\.json: `fsdpctl tokenize` has not finished"):
        open_token_files(str(source / "t-*.bin"))
    times = [each.stat().st_mtime_ns for each in complete]
    tokenize_files(str(source), output, ByteTokenizer())
    assert [each.stat().st_mtime_ns for each in complete] == times
    assert bytes(tokens_at(source / "t-*.bin")).decode() == "".join(TEXTS)
    result = tokenize_files(str(source), output, ByteTokenizer(), overwrite=True)
    assert result.tokens == len("".join(TEXTS).encode())


def test_other_input_or_files_in_the_way_are_refused(tmp_path, source):
    output = TokenOutput(tmp_path / "t.bin", 100)
    tokenize_files(str(source), output, ByteTokenizer())
    assert len(list(tmp_path.glob("t-*.bin"))) > 5
    with pytest.raises(UsageError, match=r"t-00000\.bin: already exists"):
        tokenize_files(str(source), output, ByteTokenizer())
    tokenize_files(str(source / "a.jsonl"), output, ByteTokenizer(), overwrite=True)
    assert bytes(tokens_at(tmp_path / "t-*.bin")).decode() == "".join(TEXTS[:20])
    chats = tmp_path / "c.jsonl"
    write_lines(chats, [{"messages": say("x", "y")}])
    with pytest.raises(UsageError, match=r"c\.jsonl, line 1: a conversation; expected `text`"):
        tokenize_files(str(chats), TokenOutput(tmp_path / "c.bin"), ByteTokenizer())
