"""Files of conversations: arrays, compression, tables, directories, and files that are damaged."""

import gzip
import json
import tracemalloc
from collections import Counter
from decimal import Decimal
from typing import Any

import pytest

from fsdpctl.chats.formats import Chat, PlainText
from fsdpctl.chats.rows import read_rows
from fsdpctl.data.find_data import find_data
from fsdpctl.errors import UsageError
from tests.chats.families import say, write_lines

TEXTS: list[dict[str, Any]] = [{"text": "a"}, {"text": "b [] é", "id": 1}, {"text": "c"}]


def read(file):
    return [line.content for line, _ in read_rows(str(file))[1]]


def refusal(file, content=None):
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read(file)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    return str(caught.value).removeprefix(f"{file}")


def test_an_array_has_the_rows_of_json_lines(tmp_path):
    file = tmp_path / "a.json"
    for content in (
        json.dumps(TEXTS),
        json.dumps(TEXTS, indent=2, ensure_ascii=False),
        "\ufeff\n [ " + " ,\r\n".join(map(json.dumps, TEXTS)) + "]\n",
    ):
        for data in (content.encode(), gzip.compress(content.encode())):
            file.write_bytes(data)
            assert read(file) == [PlainText(each["text"]) for each in TEXTS]
            assert [line.location for line, _ in read_rows(str(file))[1]][2] == f"{file}, element 3"


def test_an_array_takes_memory_of_its_size(tmp_path):
    row = json.dumps({"text": "x" * 100_000})
    (tmp_path / "a.json").write_text("[" + ",".join([row] * 80) + "]")
    tracemalloc.start()
    assert sum(1 for _ in read_rows(str(tmp_path / "a.json"))[1]) == 80
    assert tracemalloc.get_traced_memory()[1] < 24 << 20  # of 8 MB
    tracemalloc.stop()


DAMAGED = {
    b'[{"text": "a"}, {"text": }]': ", array: not JSON: JSON is malformed: invalid character",
    b'[{"text": "a"}, {"text": "b"': ", array: not JSON: Input data was truncated",
    b'[{"text": "a"}': ", array: not JSON: Input data was truncated",
    b'[{"text": "a"} {"text": "b"}]': ", array: not JSON: JSON is malformed: expected ',' or ']'",
    b'[{"text": "a"},]': ", array: not JSON: JSON is malformed: trailing comma",
    b'[{"text": "a"}, 5]': ", element 2: Expected `object`, got `int`",
    b'[{"text": "a"}]\n[]': ", array: not JSON: JSON is malformed: trailing characters",
    b'[{"text": "a"}, {"text": "\xff"}]': ", array: not JSON: 'utf-8' codec can't decode",
    b'[{"text": "a"}, {"text": 1, "text": 2}]': ", element 2: not JSON: text appears twice",
    b'[{"text": "a"}, {"t": ' + b"[" * 9000: ", array: not JSON: maximum recursion depth exceeded",
    b"[]": ": empty; expected at least one row",
    '{"text": "a"}'.encode("utf-16"): ": UTF-16: not supported; expected UTF-8",
    b"%PDF-1.7\n%\xe2\xe3\n": ", line 1: not JSON: ",
    b"PK\x03\x04\xff": ", line 1: not UTF-8: ",
    gzip.compress(b"[" + b" " * (1 << 20)): ", array: not JSON: Input data was truncated",
    gzip.compress(b'{"text": "a"}\n')[:-6]: ", line 1: cannot be read: ",
    b"PAR1 and more": ", row 1: cannot be read: ",
    b"ARROW1 and more": ", row 1: cannot be read: ",
}


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file_is_refused_with_its_place(content, tmp_path):
    assert refusal(tmp_path / "a.jsonl", content).startswith(DAMAGED[content])


def test_zstd_is_read_if_pyarrow_is_installed(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    file = tmp_path / "a.jsonl.zst"
    with pyarrow.CompressedOutputStream(str(file), "zstd") as out:
        out.write(b"".join(json.dumps(each).encode() + b"\n" for each in TEXTS))
    expected = [PlainText(each["text"]) for each in TEXTS]
    frame, skipped = file.read_bytes(), b"\x50\x2a\x4d\x18\4\0\0\0abcd"  # as pzstd writes
    other = b"\x5f\x2a\x4d\x18\0\0\0\0"
    for content in (frame, skipped + frame, other + skipped + frame + skipped):
        file.write_bytes(content)
        assert read(file) == expected
    file.write_bytes(skipped + frame + skipped + frame)
    assert read(file) == expected * 2
    assert ", line 1: cannot be read: " in refusal(file, frame[:20])


def test_parts_of_gzip_are_one_file(tmp_path):
    rows = [json.dumps(each).encode() + b"\n" for each in TEXTS]
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(map(gzip.compress, rows)))
    assert read(tmp_path / "a.jsonl.gz") == [PlainText(each["text"]) for each in TEXTS]


@pytest.mark.parametrize("empty", ["", None])
def test_rows_without_text_are_passed_over_and_counted(empty, tmp_path):
    rows = [{"text": empty, "id": 1}, *TEXTS, {"text": empty}, {"text": "d", "label": 1}]
    counts = Counter[str]()
    name, rows_read = read_rows(str(write_lines(tmp_path / "a.jsonl", rows)), counts)
    texts = [(line.content, line.keys.ignored) for line, _ in rows_read]
    assert name == "text"
    assert texts == [
        (PlainText("a"), set()), (PlainText("b [] é"), {"id"}), (PlainText("c"), set()),
        (PlainText("d"), {"label"}),
    ]  # fmt: skip
    assert counts == {"empty": 2}


def test_unused_columns_of_a_table_do_not_matter(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    columns = {
        "messages": pa.array([messages] * 3),
        "system": pa.array(["be kind"] * 3).dictionary_encode(),
        "at": pa.array([1, 2, 3], pa.timestamp("ns")), "price": pa.array([Decimal("1.5")] * 3),
        "dotted.name": pa.array(["x"] * 3, pa.large_string()),
    }  # fmt: skip
    table = pa.table(columns)
    parquet.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_stream(tmp_path / "b.arrow", table.schema) as out:
        out.write_table(table)
    for file in (tmp_path / "a.parquet", tmp_path / "b.arrow"):
        lines = [line for line, _ in read_rows(str(file))[1]]
        contents = [Chat(say("a", "b", system="be kind"), [True] * 3)] * 3
        assert [each.content for each in lines] == contents
        assert [each.location for each in lines][2] == f"{file}, row 3"
        assert lines[0].keys.ignored == {"at", "price", "dotted.name"}


def test_tables_give_the_conversations_of_json_lines(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    call = {"function": {"name": "f", "arguments": {"a": "1"}}}
    other = {"function": {"name": "g", "arguments": {"b": [{"c": 2}]}}}
    rows = [
        {"messages": say("a", "b", system="be kind")},
        {"messages": [*say("x"), {"role": "assistant", "content": "y", "tool_calls": [call]}]},
        {"messages": [*say("x"), {"role": "assistant", "content": "y", "tool_calls": [other]}]},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == read(write_lines(tmp_path / "a.jsonl", rows))


def test_values_that_json_lacks_are_refused_by_row(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "a.parquet"
    for values, messages in (
        ([{"x": float("nan")}], ", row 1: x: nan is not a number in JSON"),
        ([{"x": Decimal("1.5")}], ", row 1: x: value of type Decimal: not supported"),
    ):
        parquet.write_table(pa.table({"text": ["a"], "chat_template_kwargs": values}), file)
        assert refusal(file) == messages
    parquet.write_table(pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), file)
    assert refusal(file) == ": column text: appears twice; rename one of them"
    parquet.write_table(pa.table({"dialog": ["a"]}), file)
    assert ", row 1: unknown format with keys dialog; expected messages" in refusal(file)


def test_directories_and_globs_are_sorted_files_of_conversations(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["b.jsonl", "a.json", "sub/c.parquet", "d.jsonl.gz", "e.txt", "README.md", ".f.jsonl",
        "dataset_info.json"]  # fmt: skip
    row = json.dumps({"text": "x"})
    for name in names:
        file = tmp_path / "chats" / name
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text({"dataset_info.json": "{}", "e.txt": "x"}.get(name, row))
    paths = ["chats/a.json", "chats/b.jsonl", "chats/d.jsonl.gz", "chats/sub/c.parquet"]
    files = find_data("chats", option="chat")
    assert [*map(str, files.files)] == paths
    assert {name for _, name in files.left_out} == {"e.txt", "README.md", "dataset_info.json"}
    assert [*map(str, find_data("chats/*.jsonl*").files)] == [paths[1], paths[2]]
    with pytest.raises(UsageError, match="not found"):
        find_data("none/*")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_text("x")
    with pytest.raises(UsageError, match="data.path=empty: no conversations found; expected"):
        find_data("empty", option="chat")


@pytest.mark.parametrize("line", [b'"a"b,2', b"\xff,2"], ids=["quotes", "encoding"])
def test_a_damaged_line_of_csv_is_named(line, tmp_path):
    text = b"prompt,completion\n1,2\n" + line + b"\n3,4\n"
    assert refusal(tmp_path / "a.csv", text).startswith(", line 3: cannot be read: ")
