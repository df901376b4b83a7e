"""Data files of a directory: layouts of published data sets, and layouts that need a setting."""

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fsdpctl.config.compose import compose_config
from fsdpctl.config.data import DataConfig
from fsdpctl.config.data_files import kind_of_file, kind_of_path, local_data_files
from fsdpctl.data.data_set import contents_of
from fsdpctl.data.open_data import open_data
from fsdpctl.data.packing import DocumentSet
from fsdpctl.data.streams import TokenStream
from fsdpctl.data.token_formats import open_token_files
from fsdpctl.data.tokenizer import ByteTokenizer
from fsdpctl.data.tokenizing import TokenOutput, tokenize_files
from fsdpctl.errors import UsageError
from tests.chats.families import say, write_lines, write_tokenizer
from tests.data.token_file import write_token_file

ROW = json.dumps({"text": "a b"}) + "\n"
CONTENTS = {
    ".bin": b"\0\1", ".npy": b"\0\1", ".pkl": b"\0\1", ".db": b"\0\1", ".gz": b"\x1f\x8b\0",
    ".parquet": b"PAR1\0", ".arrow": b"\xff\xff\xff\xff\0", ".idx": b"\0", ".png": b"\0",
    ".jsonl": ROW.encode(),
}  # fmt: skip


NAMED = {"ROWS": ROW * 2, "ARRAY": json.dumps([{"messages": []}], indent=1), "OTHER": '{"a": 1}',
         "EMPTY": "", "NONE": "[]", "SQUAD": '{"version": "1", "data": [{"title": "a"}]}',
         "COLUMNS": json.dumps([{"document": "a", "summary": "b"}], indent=1)}  # fmt: skip


def write(folder, names):
    """Write files with contents of their kind, or with one of `NAMED`, as in `a.json=ROWS`."""
    for each in names.split():
        name, _, content = each.partition("=")
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        usual = CONTENTS.get(file.suffix.lower(), b"text")
        file.write_bytes(NAMED[content].encode() if content else usual)
    return str(folder)


# The files, the option of `data`, the files to train on and to validate on, the description.
LAYOUTS = {
    "rows and their papers": (
        "a.jsonl README.md LICENSE.txt dataset_infos.json=OTHER .gitattributes .DS_Store Thumbs.db "
        "card.md data-card.md CITATION.cff config.yaml _SUCCESS CHANGELOG",
        "chat", "a.jsonl", "",
        "1 file of 11; left out: CHANGELOG, CITATION.cff, LICENSE.txt, README.md, Thumbs.db "
        "and 5 more",
    ),
    "splits by name": ("train.jsonl validation.jsonl test.jsonl README.md",
     "chat", "train.jsonl", "validation.jsonl",
     "2 files of 4, 1 of them to validate; left out: 1 test, README.md"),
    "splits of the Hub": ("data/train-00000-of-00002.parquet data/train-00001-of-00002.parquet "
     "data/test-00000-of-00001.parquet README.md",
     "chat", "data/train-00000-of-00002.parquet data/train-00001-of-00002.parquet", "",
     "2 files of 4; left out: 1 test, README.md"),
    "other words": ("Training.jsonl my_dev_set.jsonl eval.jsonl testing2.jsonl.gz evaluation.jsonl",
     "chat", "Training.jsonl", "my_dev_set.jsonl",
     "2 files of 5, 1 of them to validate; left out: 3 test"),
    "words within words": ("trainer.jsonl contest.jsonl devils.jsonl invalid.jsonl", "chat",
     "contest.jsonl devils.jsonl invalid.jsonl trainer.jsonl", "", "4 files"),
    "directories": ("train/a.jsonl train/more/test.jsonl val/a.jsonl test/train.jsonl eval/a.jsonl",
     "chat", "train/a.jsonl train/more/test.jsonl", "val/a.jsonl",
     "3 files of 5, 1 of them to validate; left out: 2 test"),
    "held out without a word for the rest": (
        "chats.jsonl val.jsonl test.jsonl", "chat", "chats.jsonl", "val.jsonl",
        "2 files of 3, 1 of them to validate; left out: 1 test",
    ),
    "others beside the splits": (
        "train.jsonl extra.jsonl", "chat", "train.jsonl", "", "1 file of 2; left out: extra.jsonl",
    ),
    "save_to_disk with caches of a map": (
        "data-00000-of-00001.arrow cache-0713a6e1ece098ab.arrow cache-1_00001_of_00004.arrow "
        "tmpab12cd3_ state.json=OTHER dataset_info.json=OTHER",
        "chat", "data-00000-of-00001.arrow", "", None,
    ),
    "save_to_disk of splits": (
        "dataset_dict.json=OTHER train/data-00000-of-00001.arrow train/state.json=OTHER "
        "train/cache-1.arrow test/data-00000-of-00001.arrow validation/data-00000-of-00001.arrow",
        "chat", "train/data-00000-of-00001.arrow", "validation/data-00000-of-00001.arrow", None,
    ),
    "rows called .json": ("train.json=ARRAY dev.json=ROWS package.json=OTHER",
     "chat", "train.json", "dev.json",
     "2 files of 3, 1 of them to validate; left out: package.json"),
    "rows without a suffix": (
        "part-00000=ROWS part-00001.txt=ROWS _SUCCESS", "chat", "part-00000 part-00001.txt", "",
        "2 files of 3; left out: _SUCCESS",
    ),
    "a source tree": ("train.py tests/test_a.py README.md package.json=OTHER .git/config",
     "text", "README.md tests/test_a.py train.py", "", "3 files of 4; left out: package.json"),
    "texts and files of other formats": (
        "LICENSE a.py b.pdf data.jsonl.bz2 c.idx", "text", "LICENSE a.py", "",
        "2 files of 5; left out: b.pdf, c.idx, data.jsonl.bz2",
    ),
    "a README next to a table": (
        "README.md data.csv more.tsv LICENSE", "text", "data.csv more.tsv", "",
        "2 files of 4; left out: LICENSE, README.md",
    ),
    "papers in the directory of a split": (
        "train/a.py train/README.md test/b.py test/LICENSE dev/c.py dev/requirements.txt",
        "text", "train/README.md train/a.py", "dev/c.py dev/requirements.txt",
        "4 files of 6, 2 of them to validate; left out: 2 test",
    ),
    "an empty shard of rows": (
        "a.jsonl b.jsonl=EMPTY part-0=EMPTY README.md", "chat", "a.jsonl", "",
        "1 file of 4; left out: README.md, b.jsonl (empty), part-0 (empty)",
    ),
    "empty rows to validate": ("train.jsonl val.jsonl=EMPTY", "chat", "train.jsonl", "",
     "1 file of 2; left out: val.jsonl (empty)"),
    "an empty text to validate": ("train.txt val.txt=EMPTY", "text", "train.txt", "",
     "1 file of 2; left out: val.txt (empty)"),
    "an empty token file, which is damaged":
        ("a.bin b.bin=EMPTY", "tokens", "a.bin b.bin", "", "2 files"),
    "rows of any columns, called .json": (
        "a.json=COLUMNS README.md squad.json=SQUAD none.json=NONE", "chat", "a.json", "",
        "1 file of 4; left out: README.md, none.json, squad.json",
    ),
    "Markdown": ("README.md guide/train.md", "text", "README.md guide/train.md", "", "2 files"),
    "only a README": ("README.md", "text", "README.md", "", "1 file"),
    "tests as text": ("test_a.py test_b.py", "text", "test_a.py test_b.py", "", "2 files"),
    "texts that all have a split": (
        "wiki.train.tokens wiki.valid.tokens wiki.test.tokens README.txt",
        "text", "wiki.train.tokens", "wiki.valid.tokens",
        "2 files of 4, 1 of them to validate; left out: 1 test, README.txt",
    ),
    "token files": (
        "train.bin val.bin test.bin meta.pkl README.md", "tokens", "train.bin", "val.bin", None,
    ),
    "Megatron's": ("a_train.bin a_train.idx a_valid.bin a_valid.idx", "tokens", "a_train.bin",
        "a_valid.bin", "2 files, 1 of them to validate"),
    "shards of tokenize": ("x-00000.bin x-00000.json=OTHER x-00001.bin x-00001.json=OTHER",
     "tokens", "x-00000.bin x-00001.bin", "", "2 files"),
    "names of papers for rows": ("requirements.jsonl changes.jsonl CARD.JSONL", "chat",
     "CARD.JSONL changes.jsonl requirements.jsonl", "", "3 files"),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_data_of_a_directory_follows_from_its_names(name, tmp_path):
    names, option, train, validation, options = LAYOUTS[name]
    path = write(tmp_path, names)
    data = local_data_files(path)

    def relative(files):
        return " ".join(each.relative_to(tmp_path).as_posix() for each in files)

    assert (relative(data.files), relative(data.validation)) == (train, validation)
    assert kind_of_path(path) == data.kind == option
    assert compose_config([f"data.path={path}"]).config.data.name == option
    assert local_data_files(path, option=option) == data
    if options is not None:
        assert data.summary(validates=True) == options
    if validation:
        held = local_data_files(path, "data.val_path", option)
        assert (relative(held.files), held.validation) == (validation, ())
        assert f"{len(data.validation)} validation" in data.summary(validates=False)


ASKS = {
    "a.jsonl notes.txt": "several kinds, 1 of rows (a.jsonl) and 1 of text (notes.txt); set "
        "data=chat, or to read all, set data=text 'data.path=",
    "a.jsonl notes.txt train.bin": "1 of text (notes.txt); set data=chat or "
        "data=tokens, or to read text and rows, set data=text 'data.path=",
    "README.md train.jsonl.bz2": "no text found, got README.md, train.jsonl.bz2; train.jsonl.bz2: "
        "compressed; unpack it",
    "README.md squad.json=SQUAD": "squad.json: JSON without rows; expected JSON Lines or an array",
    "LICENSE none.json=NONE": "none.json: JSON without rows",
    "LICENSE data.xlsx a.pkl": "got LICENSE, a.pkl, data.xlsx; data.xlsx: a table; set data=chat",
    "README.md weights.db": "no text found, got README.md, weights.db",
    "a.jsonl=EMPTY b.txt=EMPTY README.md": "got README.md, a.jsonl (empty), b.txt (empty)",
    "state.json=OTHER cache-1.arrow": "no text found, got cache-1.arrow, state.json",
    "input.txt prepare.py train.bin val.bin": "2 of tokens (train.bin) and 2 of text (input.txt)",
    "en/train.jsonl fr/train.jsonl": "several sets to train on, en, fr; name the directory",
    "data/train_sft-00000-of-00001.parquet data/train_gen-00000-of-00001.parquet":
        "several sets to train on, data/train_gen, data/train_sft",
    "dataset_dict.json=OTHER en/data-00000-of-00001.arrow fr/data-00000-of-00001.arrow":
        "several sets to train on, en, fr",
    "train_test.jsonl a.jsonl": "train_test.jsonl: name matches several splits, test and train",
    "test/train/a.jsonl": "a.jsonl: name matches several splits, test and train",
    "test.jsonl val.jsonl": "no files to train on, but val.jsonl, test.jsonl; name those to read",
    ".gitattributes": "no text found",
}  # fmt: skip


@pytest.mark.parametrize("names", ASKS)
def test_a_directory_that_stays_ambiguous_asks_in_one_line(names, tmp_path):
    path = write(tmp_path, names)
    with pytest.raises(UsageError, match=r"^[^\n]*$") as caught:
        local_data_files(path)
    assert str(caught.value).startswith(f"data.path={path}: ")
    assert ASKS[names] in str(caught.value)


def test_a_card_with_several_configurations_asks_for_one(tmp_path):
    path = write(tmp_path, "a.jsonl b.jsonl")
    card = "---\nconfigs:\n- config_name: en\n  data_files: a.jsonl\n{}---\n# Texts\n"
    (tmp_path / "README.md").write_text(card.format("- config_name: fr\n  data_files: b.jsonl\n"))
    with pytest.raises(UsageError, match="several sets to train on, en, fr"):
        local_data_files(path)
    (tmp_path / "README.md").write_text(card.format(""))
    assert len(local_data_files(path).files) == 2


def test_a_typed_option_selects_among_several_kinds(tmp_path):
    path = write(tmp_path, "a.jsonl notes.txt train.bin README.md")
    assert local_data_files(path, option="chat").summary(validates=True) == (
        "1 file of 4; left out: README.md, notes.txt, train.bin"
    )
    for option, key in (("text", "data.path"), ("tokenize", "SRC")):
        message = r"=.*several kinds, 1 of text \(notes.txt\) and 1 of rows \(a.jsonl\); "
        with pytest.raises(UsageError, match=f"^{key}{message}.*name the files of one kind$"):
            local_data_files(path, key, option)
    rows = local_data_files(write(tmp_path / "rows", "a.jsonl README.md b.bin"), option="text")
    assert [each.name for each in rows.files] == ["a.jsonl"]
    text = local_data_files(write(tmp_path / "code", "a.py README.md b.bin"), option="text")
    assert [each.name for each in text.files] == ["README.md", "a.py"]
    assert text.left_out == (("", "b.bin"),)
    assert [each.name for each in local_data_files(path, option="tokens").files] == ["train.bin"]
    for option, message in (("chat", "no conversations found"), ("tokens", "no token files")):
        with pytest.raises(UsageError, match=message):
            local_data_files(write(tmp_path / "texts", "a.txt"), option=option)


def test_a_path_that_names_files_reads_them(tmp_path):
    path = write(tmp_path, "test.jsonl test2.jsonl train.jsonl README.md dataset_info.json")
    for name in ("test.jsonl", "README.md"):
        assert [each.name for each in local_data_files(f"{path}/{name}").files] == [name]
    for content in NAMED["OTHER"], NAMED["SQUAD"], NAMED["NONE"], "[1]", '{\n "text": "a"\n}':
        (tmp_path / "dataset_info.json").write_text(content)
        for option, way in ((None, ", or set data=text$"), ("tokenize", " objects$")):
            with pytest.raises(UsageError, match=f"JSON without rows; expected .*{way}"):
                local_data_files(f"{path}/dataset_info.json", option=option)
        assert local_data_files(f"{path}/dataset_info.json", option="text").kind == "text"
    tests = local_data_files(f"{path}/test*")
    assert [each.name for each in tests.files] == ["test.jsonl", "test2.jsonl"]
    everything = local_data_files(f"{path}/*", option="chat")
    assert [each.name for each in everything.files] == ["train.jsonl"]
    assert "2 test" in everything.summary(validates=True)
    with pytest.raises(UsageError, match=r"data.val_path=.*no files to validate on, but train"):
        local_data_files(path, "data.val_path", "chat")
    alone = write(tmp_path / "held", "test-0.jsonl test-1.jsonl")
    assert len(local_data_files(alone, "data.val_path", "chat").files) == 2


CONTENT = {
    '{"text": "a"}\n{"text": "b"}\n': "chat", '\ufeff\n {"url": "u", "text": "a"}': "chat",
    '{"id": 1}\n\n{"id": 2}': "chat", '[ {"messages": []}]': "chat",
    '{"text": "' + "a" * 70_000: "chat", '[{"id": 1, "text": "' + "a" * 70_000: "chat",
    '{"text": }\n{"text": "b"}': "chat", "": "text", '{"name": "package", "version": 1}': "text",
    '{\n "text": "a"\n}': "text", '[{"id": 1}]': "chat",
    '[\n {\n  "document": "' + "a" * 70_000: "chat",
    '{"id": 1, "text": "' + "a" * 70_000 + '", "messages": 1}\n': "chat",
    '{ "id": "' + "a" * 70_000 + '"}\n{"id": "b"}\n': "chat",
    '{\n "data": "' + "a" * 70_000: "text", "[" + "1, " * 70_000: "text", "[]": "text",
    '{"version": 1, "data": [{"text": "a"}]}': "text", "{}\nif (a) {\n}": "text", "[1, 2]": "text",
    "[section]\nkey = 1": "text", "{" * 5000: "text",
}  # fmt: skip


@pytest.mark.parametrize("content", CONTENT, ids=range(len(CONTENT)))
def test_json_lines_are_rows_whatever_their_name(content, tmp_path):
    file = tmp_path / "a.json"
    file.write_text(content, "utf-8")
    assert kind_of_file(file) == CONTENT[content]
    for name in ("a.txt", "part-00000"):
        assert kind_of_file(file.rename(tmp_path / name)) == CONTENT[content]
        (tmp_path / name).rename(file)
    for name in ("a.jsonl", "a.json.gz", "a.jsonl.zst", "a.ndjson", "missing.json", "A.JSONL"):
        assert kind_of_file(tmp_path / name) == "chat"


def numbered(count, arg):
    return [{"messages": say(f"{arg} {n}", "yes")} for n in range(count)]


@pytest.mark.parametrize(("typed", "counts"), [
    ({}, (30, 9)), ({"val_fraction": 0.0}, (30, 0)), ({"val_path": "other.jsonl"}, (30, 4)),
    ({"val_fraction": 0.02}, (30, 0)),  # the hashes of the 30 select none
])  # fmt: skip
def test_chats_are_validated_on_files_that_are_called_so(tmp_path, monkeypatch, typed, counts):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats").mkdir()
    for name, count in (("chats/train", 30), ("chats/valid", 9), ("chats/test", 7), ("other", 4)):
        write_lines(tmp_path / f"{name}.jsonl", numbered(count, name))
    tokenizer = write_tokenizer(tmp_path / "tokenizer", "chatml", None)
    data = open_data(DataConfig("chat", "chats", tokenizer=str(tokenizer), **typed))
    parts = [each for each in (data.train, data.val) if isinstance(each, DocumentSet)]
    assert [len(each) for each in parts] == [each for each in counts if each]
    left_out = "1 test" if not typed else "1 test, 1 validation"
    assert data.description.endswith(f"; left out: {left_out}")


@pytest.mark.parametrize(("typed", "counts"), [
    ([], (600, 300)), (["data.val_fraction=0.02"], (588, 12)), (["data.val_fraction=0"], (600, 0)),
    (["data.val_fraction=0.25"], (450, 150)), (["data.val_fraction=auto"], (600, 300)),
])  # fmt: skip
@pytest.mark.parametrize("option", ["text", "tokens"])
def test_a_typed_fraction_is_of_the_files_to_train_on(tmp_path, option, typed, counts):
    for name, size in (("train", 600), ("valid", 300), ("test", 200)):
        tokens = np.full(size, ord(name[0]), np.uint16)
        if option == "text":
            (tmp_path / f"corpus.{name}.txt").write_text(name[0] * size)
        else:
            write_token_file(tmp_path / f"{name}.bin", tokens, ByteTokenizer(), num_bytes=size)
    args = [f"data={option}", f"data.path={tmp_path}", *typed]
    data = open_data(compose_config(args).config.data)
    assert (data.train.num_tokens, data.val.num_tokens if data.val else 0) == counts
    assert isinstance(data.train, TokenStream)
    assert {*data.train.samples(10)[0].tokens.tolist()} == {ord("t")}
    others = ", 1 of them to validate; left out: 1 test"
    if "=0" in str(typed):
        others = "; left out: 1 test, 1 validation"
    assert data.description.endswith(others)


def test_token_files_are_validated_on_those_that_are_called_so(tmp_path):
    for name, start in (("train", 0), ("val", 100), ("test", 200)):
        tokens = np.arange(start, start + 50, dtype=np.uint16) % 256
        write_token_file(tmp_path / f"{name}.bin", tokens, ByteTokenizer(), num_bytes=50)
    data = open_data(DataConfig("tokens", str(tmp_path)))
    assert [part.num_tokens for part in (data.train, data.val) if part] == [50, 50]
    assert isinstance(data.val, TokenStream)
    assert data.val.samples(10)[0].tokens.tolist() == [*range(100, 110)]
    assert "left out: 1 test" in data.description
    assert (data.has_val_files, len(data.token_files)) == (True, 2)
    typed = open_data(DataConfig("tokens", str(tmp_path), val_fraction=0.1))
    assert [part.num_tokens for part in (typed.train, typed.val) if part] == [45, 5]
    assert "1 validation" in typed.description
    assert len(open_token_files(str(tmp_path / "*")).train) == 1
    (tmp_path / "val.bin").write_bytes(b"abc")
    assert open_data(DataConfig("tokens", str(tmp_path), val_fraction=0.0)).val is None
    with pytest.raises(UsageError, match=r"val\.bin: expected 50 tokens"):
        open_data(DataConfig("tokens", str(tmp_path)))


def test_files_that_turn_out_not_to_be_text_are_not_counted_as_used(tmp_path):
    for name, content in (("train/a.py", b"a"), ("train/b.py", b"\xe9"), ("val/c.py", b"c"),
                          ("val/d.py", b"\0")):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    message = "2 skipped: b.py (not UTF-8 at byte 1), d.py (binary)"
    data = open_data(DataConfig("text", str(tmp_path))).description
    message = message.replace(" sk", " files sk")
    assert data.endswith(f"2 files of 4, 2 of them to validate, {message}")
    done = tokenize_files(str(tmp_path / "train"), TokenOutput(tmp_path / "t.bin"), ByteTokenizer())
    assert done.summary == "1 file of 2, 1 file skipped: b.py (not UTF-8 at byte 1)"
    (tmp_path / "val/c.py").write_bytes(b"\0")
    with pytest.raises(UsageError, match=r"/val/c.py, .*/val/d.py: no text found, 2 files skipped"):
        open_data(DataConfig("text", str(tmp_path)))


def test_text_and_tokenize_read_the_rows_that_chats_do(tmp_path):
    rows = [{"text": "a b", "label": 1}, {"text": ""}, {"text": None}, {"text": "c", "label": 0}]
    write_lines(tmp_path / "train.jsonl", rows)
    (tmp_path / "README.md").write_text("# Texts")
    data = open_data(DataConfig("text", str(tmp_path), val_fraction=0))
    assert isinstance(data.train, TokenStream)
    assert bytes(data.train.tokens[:]) == b"a bc"
    notes = ("2 documents without text, skipped", "columns ignored: label (2 rows)")
    assert data.notes == notes
    done = tokenize_files(str(tmp_path), TokenOutput(tmp_path / "t.bin"), ByteTokenizer())
    assert (done.tokens, done.summary) == (4, "1 file of 2; left out: README.md")
    assert done.notes == notes
    write_lines(tmp_path / "train.jsonl", numbered(2, "a"))
    with pytest.raises(UsageError, match=r"line 1: a conversation; expected `text`, or set data="):
        open_data(DataConfig("text", str(tmp_path)))


OTHERS = {
    "tools": [{"a": 1}], "functions": "f", "label": True, "chosen": "x", "loss_mask": [0],
    "messages": [{"role": "user", "content": "no answer"}], "prompt": "p", "labels": None,
}  # fmt: skip


@pytest.mark.parametrize("end", ["jsonl", "json", "parquet"])
def test_rows_of_text_may_have_any_other_column(tmp_path, end):
    rows = [{"text": "a b", **OTHERS}, {"text": None, **OTHERS}, {"text": "c", **OTHERS}]
    file = tmp_path / f"a.{end}"
    if end == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("\n".join(map(json.dumps, rows)) if end == "jsonl" else json.dumps(rows))
    data = open_data(compose_config(["data=text", f"data.path={file}"]).config.data)
    done = tokenize_files(str(file), TokenOutput(tmp_path / "t.bin"), ByteTokenizer())
    assert data.train.num_tokens + (data.val.num_tokens if data.val else 0) == done.tokens == 4
    assert data.notes == done.notes
    (ignored,) = (note for note in done.notes if note.startswith("columns ignored: "))
    assert all(key in ignored for key in OTHERS if OTHERS[key] is not None)
    write_lines(tmp_path / "b.jsonl", [{"text": "a"}, {"label": 1}])
    with pytest.raises(UsageError, match="line 2: text: required, as in the file's first row"):
        tokenize_files(str(tmp_path / "b.jsonl"), TokenOutput(tmp_path / "u.bin"), ByteTokenizer())


@pytest.mark.parametrize("other", [
    {"messages": say("a", "b")}, {"prompt": "a", "completion": "b"},
    {"instruction": "a", "input": "", "output": "b"}, {"prompt": say("a")[:1], "completion": []},
])  # fmt: skip
def test_rows_that_may_be_text_or_chats_ask_if_data_is_not_set(tmp_path, monkeypatch, other):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_lines(tmp_path / "a.jsonl", [{"text": "a b c", **other}] * 40)
    tokenizer = write_tokenizer(tmp_path / "tokenizer", "chatml", None)
    args = [f"data.path={file}", f"data.tokenizer={tokenizer}"]
    asks = r"a\.jsonl: its first row has text and .*; set data=text or data=chat$"
    with pytest.raises(UsageError, match=asks):
        open_data(compose_config(args).config.data)
    assert open_data(compose_config(["data=text", *args]).config.data).train.num_tokens
    if other.get("completion") != []:
        open_data(compose_config(["data=chat", *args]).config.data)  # which the cache keeps
        with pytest.raises(UsageError, match=asks):
            open_data(compose_config(args).config.data)
    write_lines(file, [{"text": "", **other}] * 40)  # a table fills missing columns
    if other.get("completion") != []:
        open_data(compose_config(args).config.data)


@pytest.mark.parametrize(("names", "listed"), {
    "notes/1.txt notes/2.txt notes/rows.jsonl": "notes/*.txt,notes/rows.jsonl",
    "notes/1.txt notes/sub/a.py notes/a.jsonl notes/b.jsonl notes/x.png":
        "notes/1.txt,notes/*.jsonl,notes/sub/a.py",
    "notes/a.txt=ROWS notes/b.txt notes/c/b.txt":
        "notes/a.txt,part1=notes/b.txt,part2=notes/c/b.txt",
}.items())  # fmt: skip
@pytest.mark.parametrize("typed", [[], ["data=text"]])
def test_a_mixed_folder_gets_the_list_that_reads_all(tmp_path, monkeypatch, names, listed, typed):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, names)
    with pytest.raises(UsageError, match="of several kinds") as error:
        open_data(compose_config([*typed, "data.path=notes"]).config.data)
    match = re.search(r"to read all, set (data=text) '(.*)', or", str(error.value))
    assert match is not None
    assert match[2] == f"data.path={listed}"
    data = open_data(compose_config([match[1], match[2], "data.val_fraction=0"]).config.data)
    assert len(contents_of(data.train)) == len(listed.split(","))


def test_text_and_tokenize_refuse_rows_with_prompts(tmp_path):
    pair = {"prompt": say("a")[:1], "completion": say("a", "b")[1:]}
    rows = {
        "a prompt with its completion": [{"prompt": "a", "completion": "b"}, pair],
        "a conversation": [{"instruction": "a", "output": "b"}, {"messages": say("a", "b")}],
    }
    for kind, row in ((kind, row) for kind, each in rows.items() for row in each):
        for name in ("a.jsonl", "a.json", "a.txt"):
            file = write_lines(tmp_path / name, [row, row])
            with pytest.raises(UsageError, match=f"line 1: {kind}; expected `text`, or set data="):
                tokenize_files(str(file), TokenOutput(tmp_path / "t.bin"), ByteTokenizer())
        (tmp_path / "rows").mkdir(exist_ok=True)
        write_lines(tmp_path / "rows/a.jsonl", [row, row])
        with pytest.raises(UsageError, match=f"line 1: {kind}; expected `text`"):
            open_data(DataConfig("text", str(tmp_path / "rows")))
