"""Token files of other programs, written by a few lines for each format."""

import os
import struct

import numpy as np
import pytest

from fsdpctl.config.data import DataConfig
from fsdpctl.data.open_data import open_data
from fsdpctl.data.packing import IGNORE_INDEX
from fsdpctl.data.streams import TokenStream
from fsdpctl.data.token_formats import check_tokens, open_token_files
from fsdpctl.errors import UsageError

TOKENS = np.random.default_rng(0).integers(0, 500, 999)
ENDS = [0, 7, 8, 300, 301, 555, 999]


def write_llm_c(path, tokens=TOKENS, magic=20240520, version=1, dtype="<u2", count=None):
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + tokens.astype(dtype).tobytes())
    return path


def write_megatron(path, code=8, dtype="<u2", documents=(), version=1):
    lengths = np.diff(ENDS)
    TOKENS.astype(dtype).tofile(path)
    starts = np.array(ENDS[:-1]) * np.dtype(dtype).itemsize
    places = documents or range(len(lengths) + 1)
    path.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", version, code, len(lengths), len(places))
        + lengths.astype("<i4").tobytes()
        + starts.astype("<i8").tobytes()
        + np.array(places, dtype="<i8").tobytes()
    )
    return path


def write_datatrove(path, dtype="<u2", name="gpt2|2"):
    TOKENS.astype(dtype).tofile(path)
    np.array(ENDS[1:], dtype="<u8").tofile(f"{path}.index")
    path.with_name(path.name + ".metadata").write_text(f"{name}\n{len(TOKENS)}\n1 kT")
    return path


def write_raw(path, dtype="<u2"):
    TOKENS.astype(dtype).tofile(path)
    return path


def write_numpy(path):
    np.save(path, TOKENS.astype(np.uint16))
    return path


WRITERS = {
    "llm.c": lambda folder: write_llm_c(folder / "a.bin"),
    "llm.c of Llama 3": lambda folder: write_llm_c(
        folder / "a.bin", magic=20240801, version=7, dtype="<u4"
    ),
    "megatron": lambda folder: write_megatron(folder / "a.bin"),
    "megatron int32": lambda folder: write_megatron(folder / "a.bin", 4, "<i4"),
    "datatrove": lambda folder: write_datatrove(folder / "a.ds"),
    "datatrove uint32": lambda folder: write_datatrove(folder / "a.ds", "<u4", "org/big|4"),
    "numpy": lambda folder: write_numpy(folder / "a.npy"),
    "uint16": lambda folder: write_raw(folder / "a.bin"),
    "uint32": lambda folder: write_raw(folder / "a.npy", "<u4"),
}


def opened(path, **kwargs):
    data = open_data(DataConfig(name="tokens", path=str(path), val_fraction=0, **kwargs)).train
    assert isinstance(data, TokenStream)
    return data


@pytest.mark.parametrize("kind", WRITERS)
def test_each_format_gives_its_tokens_and_documents(tmp_path, kind):
    path = WRITERS[kind](tmp_path)
    options = {"format": kind} if kind in ("uint16", "uint32") else {}
    if options:
        with pytest.raises(UsageError, match=r"data\.format=uint16"):
            opened(path)
    assert opened(path, **options).tokens[:].tolist() == TOKENS.tolist()
    if kind.startswith(("megatron", "datatrove")):
        rows = opened(path, packing=True).samples(100)
        for number in range(len(rows)):
            sample, start = rows[number], 100 * number
            inside = [e for e in ENDS if start < e <= start + 100]
            assert sample.tokens.tolist() == TOKENS[start : start + 100].tolist()
            masked = np.flatnonzero(sample.targets == IGNORE_INDEX) + start + 1
            assert masked.tolist() == inside
            assert (start + np.cumsum(sample.lengths)).tolist() == sorted({*inside, start + 100})
    else:
        with pytest.raises(UsageError, match="does not record the ends of documents"):
            opened(path, packing=True, **options)


def test_several_sequences_of_megatron_are_one_document(tmp_path):
    path = write_megatron(tmp_path / "a.bin", documents=(0, 2, 6))
    assert opened(path, packing=True).samples(998)[0].lengths == (8, 990)


def test_shards_are_one_stream_in_the_order_of_their_names(tmp_path):
    for number in range(5):
        write_llm_c(tmp_path / f"train_{number}.bin", TOKENS[100 * number : 100 * number + 100])
    whole = opened(tmp_path)
    assert whole.num_tokens == 500
    first, rest = whole.split(123)
    assert [*first.tokens[:], *rest.tokens[:]] == TOKENS[:500].tolist()
    assert rest.samples(50)[3].tokens.tolist() == TOKENS[273:323].tolist()
    assert opened(tmp_path / "*_[13].bin").tokens[:].tolist() == [
        *TOKENS[100:200], *TOKENS[300:400],
    ]  # fmt: skip


@pytest.mark.parametrize(("spoil", "arg"), [
    (lambda at: write_llm_c(at / "a.bin", count=1000), "a.bin: expected 1000 ids"),
    (lambda at: write_llm_c(at / "a.bin", version=3), "is missing"),
    (lambda at: os.truncate(write_megatron(at / "a.bin"), 998), "a.bin: expected [0-9]+ ids"),
    (lambda at: os.truncate(write_megatron(at / "a.bin").with_suffix(".idx"), 70), "idx: trunc"),
    (lambda at: write_megatron(at / "a.bin", version=2), "not supported"),
    (lambda at: write_megatron(at / "a.bin", documents=(0, 2, 5)), "its documents do not have"),
    (lambda at: write_megatron(at / "a.bin", documents=(1, 2, 6)), "its documents do not have"),
    (lambda at: write_megatron(at / "a.bin", documents=(0, 4, 2, 6)), "its documents do not have"),
    (lambda at: write_megatron(at / "a.bin", documents=(0,)), "its documents do not have"),
    (lambda at: os.truncate(write_datatrove(at / "a.ds"), 500), "a.ds: expected 999"),
    (lambda at: os.truncate(f"{write_datatrove(at / 'a.ds')}.index", 9), "index: truncated"),
    (lambda at: np.save(at / "a.npy", np.zeros((3, 3))), "expected a 1-D array"),
    (lambda at: (at / "a.bin").write_bytes(b""), "is missing"),
    (lambda at: (write_llm_c(at / "a.bin"), write_numpy(at / "b.npy")), "expected 50257"),
    (lambda at: write_raw(at / "test.bin"), "no files to train on, but test.bin"),
])  # fmt: skip
def test_damaged_and_unlike_files_are_named(tmp_path, spoil, arg):
    spoil(tmp_path)
    with pytest.raises(UsageError, match=arg):
        open_token_files(str(tmp_path))


@pytest.mark.parametrize("change", [
    lambda path: os.truncate(path, 1100), lambda path: write_llm_c(path, TOKENS[::-1]),
    lambda path: os.replace(write_llm_c(path.with_name("b.bin"), TOKENS[::-1]), path),
], ids=["cut", "overwritten", "replaced"])  # fmt: skip
def test_a_file_that_changes_while_it_is_read_is_named(tmp_path, change):
    path = write_llm_c(tmp_path / "a.bin")
    os.utime(path, ns=(0, 10**18))
    rows = opened(path).samples(10)
    assert len(rows[5].tokens) == 10
    change(path)
    with pytest.raises(UsageError, match=r"a\.bin: changed since the run started"):
        rows[5]


WIDTHS = {
    ("<u4", "uint16", 500): "set data.format=uint32",
    ("<u4", "uint16", 150_000): "set data.format=uint32",  # upper halves are 0, 1 and 2
    ("<i8", "uint16", 500): "set data.format=uint32",
    ("<i8", "uint32", 500): "convert them to uint32",
    ("<u2", "uint32", 500): "set data.format=uint16",
    ("<u2", "uint32", 50_000): "set data.format=uint16",
    ("<u2", "uint16", 500): "",
    ("<u2", "uint16", 50_000): "",
    ("<u4", "uint32", 500): "",
    ("<u4", "uint32", 150_000): "",
}


@pytest.mark.parametrize(("stored", "read", "vocabulary"), WIDTHS)
def test_ids_that_look_like_another_width_name_the_setting(tmp_path, stored, read, vocabulary):
    ids = np.random.default_rng(0).integers(0, vocabulary, 5000)
    for name in ("a.bin", "b.npy"):
        ids.astype(stored).tofile(tmp_path / name)
        data = open_data(DataConfig(name="tokens", path=str(tmp_path / name), format=read))
        setting = WIDTHS[stored, read, vocabulary]
        assert [note for note in data.notes if setting in note] == [*data.notes]
        assert len(data.notes) == bool(setting)
    if stored == "<u2" and setting:
        with pytest.raises(UsageError, match=r"expected less than 50000.*; .*data\.format=uint16"):
            check_tokens(data.token_files[0], 50_000)


def test_an_array_with_a_header_is_not_read_without_it(tmp_path):
    np.save(tmp_path / "a.npy", TOKENS.astype(np.uint32))
    with pytest.raises(UsageError, match=r"a\.npy: data\.format=uint16: .* set data\.format=auto"):
        opened(tmp_path / "a.npy", format="uint16")
    assert opened(tmp_path / "a.npy").tokens[:].tolist() == TOKENS.tolist()


def write_flags(path, flags):
    np.array(flags, dtype=np.bool_).tofile(f"{path}.loss")
    return path


def test_tokens_whose_flag_is_false_are_no_targets(tmp_path):
    flags = np.random.default_rng(1).random(len(TOKENS)) < 0.4
    path = write_flags(write_datatrove(tmp_path / "a.ds"), flags)
    plain, packed = (opened(path, packing=each) for each in (False, True))
    for number in range(9):
        start = 100 * number + 1
        inside = np.isin(np.arange(start, start + 100), ENDS)
        for stream, trained in ((plain, True), (packed, ~inside)):
            sample = stream.samples(100)[number]
            has_target = flags[start : start + 100] & trained
            expected = np.where(has_target, TOKENS[start:][:100], IGNORE_INDEX)
            assert sample.tokens.tolist() == TOKENS[start - 1 : start + 99].tolist()
            assert sample.targets.tolist() == expected.tolist()
    assert plain.fingerprint != opened(write_datatrove(tmp_path / "b.ds")).fingerprint
    data = open_data(DataConfig(name="tokens", path=str(path), val_fraction=0.5))
    assert data.notes == ("the loss masks NAME.loss are used",)
    assert data.val is not None
    held = data.val.samples(100)[1].targets != IGNORE_INDEX
    assert held.tolist() == flags[len(TOKENS) - 499 + 101 :][:100].tolist()


def test_flags_of_several_files_are_those_of_their_tokens(tmp_path):
    flags = np.random.default_rng(2).random((3, len(TOKENS))) < 0.5
    for name, each in zip("abc", flags, strict=True):
        write_flags(write_raw(tmp_path / f"{name}.bin"), each)
    rows = opened(tmp_path, format="uint16").samples(200)
    trained = np.concatenate([rows[number].targets != IGNORE_INDEX for number in range(len(rows))])
    assert trained.tolist() == flags.reshape(-1)[1 : len(trained) + 1].tolist()
    both = f"{tmp_path / 'a.bin'}:0.5,{tmp_path / 'b.bin'}:0.5"
    mixed = open_data(DataConfig(name="tokens", path=both, format="uint16"))
    assert "NAME.loss" in mixed.notes[-1]
    targets = mixed.train.samples(50)[3].targets
    assert (targets == IGNORE_INDEX).sum() == (~flags[0, 151:201]).sum()


def test_flags_that_do_not_match_the_tokens_are_refused(tmp_path):
    for name in "ab":
        write_flags(write_datatrove(tmp_path / f"{name}.ds"), np.ones(len(TOKENS)))
    for size in (998, 1000, 0):
        write_flags(tmp_path / "b.ds", np.ones(size))
        with pytest.raises(UsageError, match=rf"b\.ds\.loss: .*expected 999 .* got {size}"):
            opened(tmp_path)
    (tmp_path / "b.ds.loss").unlink()
    with pytest.raises(UsageError, match=r"b\.ds\.loss: not found; expected one next to every"):
        opened(tmp_path)
