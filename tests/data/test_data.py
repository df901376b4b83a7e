"""Samples, their order and their sources."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from fsdpctl.config.data import DataConfig
from fsdpctl.data.batches import Batches
from fsdpctl.data.data_set import DataSet
from fsdpctl.data.documents import hold_out, read_text, standard_library
from fsdpctl.data.find_data import find_data
from fsdpctl.data.open_data import open_data
from fsdpctl.data.order import permute, samples_at
from fsdpctl.data.packing import IGNORE_INDEX
from fsdpctl.data.streams import TokenStream, concatenated
from fsdpctl.data.token_formats import open_token_files
from fsdpctl.data.tokenizer import ByteTokenizer, FileTokenizer, open_tokenizer
from fsdpctl.errors import UsageError
from fsdpctl.plan.batch_plan import plan_batches
from tests.data.token_file import write_token_file


def stream(data: DataSet) -> TokenStream:
    """Return the training part."""
    assert isinstance(data.train, TokenStream)
    return data.train


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 5))
def test_the_order_of_an_epoch_is_a_permutation(count, seed, epoch):
    order = permute(np.arange(count, dtype=np.uint64), count, seed, epoch)
    assert sorted(order.tolist()) == list(range(count))


def test_orders_differ_by_seed_and_epoch():
    orders = {
        tuple(permute(np.arange(100, dtype=np.uint64), 100, seed, epoch).tolist())
        for seed in (0, 1)
        for epoch in (0, 1, 2)
    }
    assert (len(orders), tuple(range(100)) in orders) == (6, False)


def test_an_order_is_well_mixed():
    order = permute(np.arange(10_000, dtype=np.uint64), 10_000, 0, 0).astype(np.float64)
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.03


@given(st.integers(0, 200), st.integers(1, 60), st.integers(1, 50))
def test_any_range_of_positions_gives_the_same_sequence(position, length, count):
    whole = samples_at(0, position + length, count, seed=7)
    assert samples_at(position, length, count, seed=7).tolist() == whole[position:].tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("micro_batch", [None, 2])
def test_a_step_sees_the_same_samples_on_any_number_of_ranks(world_size, micro_batch):
    stream = TokenStream(np.arange(101, dtype=np.uint16), None)
    plan = plan_batches(7, world_size, micro_batch_size=micro_batch)
    batches = Batches(stream.samples(5), plan, 3, 101)
    rows = []
    for rank in range(world_size):
        for micro_step in range(plan.num_micro_batches):
            batch = batches.training(14, rank, micro_step)
            assert batch.tokens.shape == (plan.micro_batch_size, 5)
            for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
                if (targets != IGNORE_INDEX).all():
                    assert torch.equal(tokens[1:], targets[:-1])
                    rows.append(int(tokens[0]) // 5)
                else:
                    assert (targets == IGNORE_INDEX).all()
    assert rows == samples_at(14, 7, 20, seed=3).tolist()


def test_validation_sees_every_sample_once_and_in_order():
    stream = TokenStream(np.arange(101, dtype=np.uint16), None)
    batches = Batches(stream.samples(5), plan_batches(8, 2), 0, 101)
    assert (batches.num_validation_batches(0), batches.num_validation_batches(2)) == (3, 2)
    rows = [
        int(tokens[0]) // 5
        for number in range(3)
        for rank in range(2)
        for tokens, targets in zip(
            *(lambda b: (b.tokens, b.targets))(batches.validation(number, rank, 0)), strict=True
        )
        if (targets != IGNORE_INDEX).all()
    ]
    assert rows == list(range(20))


def test_a_sequence_longer_than_the_data_is_rejected():
    stream = TokenStream(np.arange(5, dtype=np.uint16), None)
    with pytest.raises(UsageError, match=r"train.seq_len=5: longer than the data"):
        Batches(stream.samples(5), plan_batches(1, 1), 0, 101)


def test_a_token_beyond_the_vocabulary_names_the_file():
    stream = TokenStream(np.arange(50, dtype=np.uint16), None, origin="t.bin")
    batches = Batches(stream.samples(5), plan_batches(9, 1), 0, 20)
    with pytest.raises(UsageError, match=r"t.bin: corrupted"):
        batches.training(0, 0, 0)


def test_the_standard_library_is_text_and_splits_into_whole_files():
    texts = standard_library()
    train, val = hold_out(texts, 0.02)
    assert sorted(train + val) == sorted(texts)
    assert 0.01 < sum(map(len, val)) / sum(map(len, texts)) <= 0.02


def test_the_end_of_a_single_file_is_held_out_at_a_line_break():
    document = "".join(f"line {i} ä\n" for i in range(1000)).encode()
    (train,), (val,) = hold_out([document], 0.1)
    assert (train + val, train.endswith(b"\n")) == (document, True)
    assert 0.08 < len(val) / len(document) < 0.12


def test_the_split_is_never_within_a_character():
    document = ("日本" * 5000).encode()
    for fraction in (0.1, 0.11, 0.12, 0.13):
        (train,), (val,) = hold_out([document], fraction)
        assert train.decode() + val.decode() == document.decode()


AWKWARD = "a b,c~{d}(e)[f]=g#h&i;j!k'l$m日本.txt"


def read(path):
    data = find_data(str(path), option="text")
    text, passed = read_text(data, "data.path", str(path))
    return text, passed.files, data.summary(validates=True)


def test_files_directories_and_globs(tmp_path):
    (tmp_path / AWKWARD).write_text("one\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "two.txt").write_text("two\n")
    (tmp_path / "sub" / "x.bin").write_bytes(b"\0\1\2")
    (tmp_path / "sub" / "y.dat").write_bytes(b"\0\1\2")
    (tmp_path / ".hidden").write_text("no\n")
    assert read(tmp_path / AWKWARD) == ([b"one\n"], [], "1 file")
    documents, skipped, options = read(tmp_path)
    assert (sorted(documents), skipped) == ([b"one\n", b"two\n"], ["y.dat (binary)"])
    assert options == "3 files of 4; left out: x.bin"
    assert read(tmp_path / "**" / "t*.txt")[0] == [b"two\n"]


def _numbered(count: int) -> FileTokenizer:
    """Return a tokenizer of `count` words."""
    vocabulary = {f"w{number}": number for number in range(count)}
    text = Tokenizer(WordLevel(vocabulary, unk_token="w0")).to_str()
    return FileTokenizer("numbered", {"tokenizer.json": text.encode()})


def test_parts_of_other_tokens_have_other_fingerprints():
    tokens = np.arange(9, dtype=np.uint16)
    one, other = TokenStream(tokens, None), TokenStream(tokens[::-1], None)
    for part, its in zip(one.split(6), other.split(6), strict=True):
        assert part.fingerprint != its.fingerprint
    known = TokenStream(tokens, None, "abc", "t.bin")
    assert [each.fingerprint for each in known.split(6)] == ["abc/6", "abc/6"]
    assert [each.origin for each in known.split(6)] == ["t.bin", "t.bin"]
    assert [list(each.tokens[:]) for each in known.split(6)] == [[*range(6)], [6, 7, 8]]


@pytest.mark.parametrize("vocab_size", [256, 70_000])
def test_token_files_round_trip(tmp_path, vocab_size):
    tokens = np.array([0, 5, vocab_size - 1, 7], dtype=np.uint32)
    path = tmp_path / "t.bin"
    write_token_file(path, tokens, _numbered(vocab_size), num_bytes=9)
    (file,) = open_token_files(str(path)).train
    assert concatenated([file], "t").tokens[:].tolist() == tokens.tolist()
    assert (file.vocab_size, file.num_bytes) == (vocab_size, 9)
    assert path.stat().st_size == 4 * (2 if vocab_size == 256 else 4)


def _spoil(path, **changes):
    header = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps(header | changes))


@pytest.mark.parametrize(("spoil", "arg"), [
    (lambda path: path.unlink(), "no such token file"),
    (lambda path: path.with_suffix(".json").unlink(), "the header t.json is missing; `fsdpctl tok"),
    (lambda path: path.with_suffix(".json").write_text("{"), "not JSON"),
    (lambda path: path.with_suffix(".json").write_text("{}"), "not the header"),
    (lambda path: path.write_bytes(b"abc"), "3 bytes"),
    (lambda path: _spoil(path, dtype="int3"), "int3"),
    (lambda path: _spoil(path, num_tokens=99), "99 tokens"),
    (lambda path: (path.write_bytes(b""), _spoil(path, num_tokens=0)), "contains no tokens"),
])  # fmt: skip
def test_corrupted_token_files_are_rejected(tmp_path, spoil, arg):
    path = tmp_path / "t.bin"
    write_token_file(path, np.arange(9, dtype=np.uint16), ByteTokenizer(), num_bytes=9)
    spoil(path)
    with pytest.raises(UsageError, match=arg):
        open_token_files(str(path))


def test_tokens_of_a_tokenizer_end_documents_and_are_cached(tmp_path, monkeypatch, word_tokenizer):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "1").write_text("a b a")
    (tmp_path / "text" / "2").write_text("b zzz")
    config = DataConfig("text", f"{tmp_path}/text", val_fraction=0, tokenizer=str(word_tokenizer))
    first = open_data(config)
    assert stream(first).tokens[:].tolist() == [0, 1, 0, 3, 1, 2, 3]
    assert len(list((tmp_path / "cache" / "fsdpctl").glob("text-*"))) == 1
    assert open_data(config).fingerprint == first.fingerprint
    assert (first.vocab_size, first.val) == (4, None)


@pytest.mark.parametrize("limits", [
    {"truncation": {"max_length": 3, "stride": 0, "strategy": "LongestFirst",
     "direction": "Right"}},
    {"padding": {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None,
     "pad_id": 3, "pad_type_id": 0, "pad_token": "<end>"}},
], ids=["truncation", "padding"])  # fmt: skip
def test_truncation_and_padding_of_files_are_ignored(tmp_path, monkeypatch, word_tokenizer, limits):
    """Compare with transformers. The file itself is unchanged."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = "a b a b a b a b"
    (tmp_path / "text").write_text(text)
    config = DataConfig("text", f"{tmp_path}/text", val_fraction=0, tokenizer=str(word_tokenizer))
    without = open_data(config)
    file = word_tokenizer / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | limits))
    limited = open_data(config)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(file))
    results = (stream(each).tokens[:].tolist() for each in (limited, without))
    assert [*results] == [[0, 1] * 4 + [3]] * 2
    assert limited.tokenizer.encode_prompt(text) == theirs(text)["input_ids"] == [0, 1] * 4
    assert limited.tokenizer.files()["tokenizer.json"] == file.read_bytes()


def test_a_token_file_uses_the_tokenizer_that_made_it_unless_that_changed(tmp_path, word_tokenizer):
    path = tmp_path / "t.bin"
    tokenizer = open_tokenizer(str(word_tokenizer))
    write_token_file(path, np.tile(np.arange(4, dtype=np.uint16), 99), tokenizer, num_bytes=None)
    config = DataConfig(name="tokens", path=str(path), val_fraction=0)
    assert open_data(config).tokenizer.decode([0, 1]) == "a b"
    file = word_tokenizer / "tokenizer.json"
    file.write_text(file.read_text().replace('"a"', '"c"'))
    assert open_data(config).tokenizer.name == "bytes"
