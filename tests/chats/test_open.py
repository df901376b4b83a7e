"""Data sets of conversations: cached, split, repeated, and previewed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdpctl.commands.chat_preview import histogram, preview
from fsdpctl.config.data import DataConfig
from fsdpctl.data import chat_tokens, open_chats, token_cache
from fsdpctl.data.documents import is_held_out
from fsdpctl.data.open_data import open_data
from fsdpctl.data.packing import DocumentSet
from fsdpctl.errors import UsageError
from fsdpctl.io.files import cache_folder
from tests.chats.families import say, write_lines, write_tokenizer
from tests.chats.opened import opened, trained_texts
from tests.io.activity import shown_activities


def numbered(count: int, first: int = 0, arg: str = "ok") -> list[dict[str, Any]]:
    return [{"messages": say(f"say {n}", f"{arg} {n}")} for n in range(first, first + count)]


def texts_in(part, tokenizer):
    return [text for texts in trained_texts(part, tokenizer) for text in texts]


def cached_folder():
    (folder,) = cache_folder("x").parent.glob("chats-*")
    return folder


def test_tokens_are_mapped_from_the_cache(tmp_path, monkeypatch):
    first = opened(tmp_path, "qwen3", numbered(20), val_fraction=0.3)
    monkeypatch.setattr(chat_tokens, "render_chats", None)  # rendering again would fail
    with monkeypatch.context() as same:  # reading the file again would fail
        same.setattr("tests.chats.opened.write_lines", lambda file, rows: file)
        for module in (token_cache, open_chats):
            same.setattr(module, "_checksum", None)
        again = opened(tmp_path, "qwen3", numbered(20), val_fraction=0.3)
    assert isinstance(again.train.tokens, np.memmap)
    assert (again.fingerprint, again.notes) == (first.fingerprint, first.notes)
    assert (again.end_tokens, again.train.loss_mask.dtype) == (first.end_tokens, np.bool_)
    assert again.train.starts.tolist() == first.train.starts.tolist()
    with pytest.raises(TypeError):
        opened(tmp_path, "qwen3", numbered(21), val_fraction=0.3)


@pytest.mark.parametrize("damage", ["cut", "changed", "header", "gone"])
def test_a_corrupted_cache_entry_is_rebuilt(damage, tmp_path):
    first = opened(tmp_path, "chatml", numbered(5))
    file = cached_folder() / ("header.json" if damage == "header" else "train.tokens.npy")
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(content[:-2] if damage != "changed" else content[:-1] + b"\xff")
    assert opened(tmp_path, "chatml", numbered(5)).fingerprint == first.fingerprint
    assert (cached_folder() / file.name).read_bytes()[-2:] == content[-2:]


def test_a_read_only_cache_is_ignored(tmp_path, monkeypatch):
    first = opened(tmp_path, "chatml", numbered(3))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert opened(tmp_path, "chatml", numbered(3)).fingerprint == first.fingerprint


@pytest.mark.parametrize(
    "change", [{"train_on": "all"}, {"rewritten_turns": "keep"}, {"date": "2026-02-01"}]
)
def test_settings_that_change_the_tokens_have_their_own_cache_entries(change, tmp_path):
    rows = [{"messages": say("a", "b", "c", "d")}]
    first = opened(tmp_path, "gpt_oss", rows)
    assert opened(tmp_path, "gpt_oss", rows, **change).fingerprint != first.fingerprint


def test_keys_are_named_once_per_file(tmp_path):
    tool = {"name": "f", "parameters": {}}
    call = {"function": {"name": "f", "arguments": {"wei": 10**21}}}
    row: dict[str, Any] = {
        "messages": say("a", "b"), "source": "x", "system_prompt": "be kind", "functions": [tool],
    }  # fmt: skip
    row["messages"][0]["weird\n"] = 1
    row["messages"][1] |= {"tool_calls": [call], "loss": True}
    rows = [row, *numbered(3)]
    path = tmp_path / "chats.jsonl"
    with_keys = "messages[].loss (1 row), system_prompt (1 row)"
    for name in ("qwen25", "chatml"):
        data = opened(tmp_path, name, rows)
        assert opened(tmp_path, name, rows).notes == data.notes  # from the cache
        ignored = "messages[].weird? (1 row), source (1 row)"
        if name == "qwen25":  # its template renders tools
            assert "1000000000000000000000" in texts_in(data.train, data.tokenizer)[0]
            expected = f"functions (1 row), {with_keys}"
        else:
            ignored, expected = f"functions (1 row), {ignored}", with_keys
        assert (
            data.notes[:2]
            == data.format_notes
            == (f"{path}: format messages, with {expected}", f"{path}: ignored: {ignored}")
        )


def test_more_data_moves_no_conversation_to_the_other_part(tmp_path):
    few = opened(tmp_path, "chatml", numbered(60), val_fraction=0.2)
    more = opened(tmp_path, "chatml", [*numbered(60, 500), *numbered(60)], val_fraction=0.2)
    held = set(texts_in(few.val, few.tokenizer))
    assert 0 < len(held) < 30
    assert held <= set(texts_in(more.val, more.tokenizer))
    assert not held & set(texts_in(more.train, more.tokenizer))
    assert few.val is not None
    assert len(few.train) + len(few.val) == 60


def test_a_share_is_held_out_of_many():
    assert 1900 < sum(is_held_out(f"{number}".encode(), 0.1) for number in range(20_000)) < 2100


def test_a_file_can_validate_instead(tmp_path):
    write_lines(tmp_path / "held.jsonl", numbered(3, 900))
    data = opened(tmp_path, "chatml", numbered(4), val_path=str(tmp_path / "held.jsonl"))
    assert data.val is not None
    assert (len(data.train), len(data.val)) == (4, 3)
    assert "ok 900" in texts_in(data.val, data.tokenizer)[0]


def test_chats_are_mixed_by_share_of_sequences(tmp_path):
    a = write_lines(tmp_path / "a.jsonl", numbered(300, arg="good"))
    b = write_lines(tmp_path / "b.jsonl", numbered(100, 900, arg="maybe"))
    held = write_lines(tmp_path / "held.jsonl", numbered(9, 2000))
    options: Any = {"path": f"{a}:1,more={b}:3", "val_path": f"{held},{b}", "packing": False}
    data = opened(tmp_path, "chatml", [], **options)
    rows = data.train.samples(64)
    assert [(each.name, each.share) for each in rows.sources] == [("a", 0.25), ("more", 0.75)]
    assert np.bincount([rows.source_of(int(n)) for n in rows.order(0, 64, 0)]).tolist() == [16, 48]
    texts = [data.tokenizer.decode(rows[int(n)].tokens.tolist()) for n in rows.order(0, 64, 0)]
    assert sum("maybe" in text for text in texts) == 48
    assert rows.to_line(400)["tokens/more"] == rows.per_source[1].num_tokens * 3
    assert [len(each.content) for each in data.val.sources] == [9, 100]
    assert data.description == "a (25.0%), more (75.0%)"
    assert any(note.startswith("more: train: 100 conversations") for note in data.notes)
    assert any(note.startswith("held: validation: 9 conversations") for note in data.notes)
    with pytest.raises(UsageError, match=r"data\.val_path=.*shares are only valid in data\.path"):
        opened(tmp_path, "chatml", numbered(1), val_path=f"{a}:1,{b}:1")


def test_rows_are_counted_while_they_are_read(tmp_path):
    tokenizer = write_tokenizer(tmp_path / "tokenizer", "chatml")
    file = write_lines(tmp_path / "a.jsonl", numbered(70))
    config = DataConfig(name="chat", path=str(file), tokenizer=str(tokenizer), val_fraction=0)
    with shown_activities() as seen:
        data: Any = open_data(config)
    assert seen[-1].text().startswith("tokenizing: 70 conversations")
    assert len(data.train) == 70
    # Rows keep the order of the file with any number of processes.
    assert [text.split()[1][:2].strip("<") for text in texts_in(data.train, data.tokenizer)] == [
        str(n) for n in range(70)
    ]


@pytest.mark.parametrize(("change", "error"), [
    ({"path": None}, "data=chat: data.path is required"),
    ({"tokenizer": None}, "requires a model's tokenizer"),
    ({"tokenizer": "bytes"}, "requires a model's tokenizer"),
    ({"val_path": "x.jsonl"}, "data.val_path=x.jsonl: not found"),
    ({"template": "x.jinja"}, "data.template=x.jinja: not found"),
])  # fmt: skip
def test_errors_name_what_is_missing(change, error, tmp_path):
    tokenizer = write_tokenizer(tmp_path / "tokenizer", "chatml")
    file = write_lines(tmp_path / "a.jsonl", numbered(1))
    options = {"path": str(file), "tokenizer": str(tokenizer), **change}
    with pytest.raises(UsageError, match=error):
        open_data(DataConfig(name="chat", **options))


def test_chat_keys_require_chats(tmp_path):
    with pytest.raises(UsageError, match="data.train_on=all: only valid with data=chat"):
        open_data(DataConfig(name="text", path=str(tmp_path), train_on="all"))


def test_a_note_reports_that_nothing_was_held_out(tmp_path):
    data = opened(tmp_path, "chatml", numbered(2), val_fraction=0.0001)
    assert (data.val, any("selects none" in note for note in data.notes)) == (None, True)


def of_lengths(*lengths, trained=None):
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    flags = np.ones(starts[-1], bool) if trained is None else np.array(trained, bool)
    return DocumentSet(np.arange(starts[-1], dtype=np.uint16), flags, starts)


def test_a_preview_highlights_trained_tokens(tmp_path):
    data = opened(tmp_path, "chatml", numbered(3))
    first, second = preview(data.train, data.tokenizer)
    assert "ok 0<|im_end|>" in first.plain
    assert [first.plain[span.start : span.end] for span in first.spans] == ["ok 0<|im_end|>"]
    (bare,) = preview(data.train, data.tokenizer, count=1, color=False)
    assert "assistant\n⟦ok 0<|im_end|>⟧\n" in bare.plain
    assert "say 1" in second.plain
    assert "more tokens" not in first.plain


def test_a_preview_of_a_long_sample_counts_the_tokens_that_it_leaves_out(tmp_path: Path) -> None:
    data = opened(tmp_path, "chatml", [{"messages": say("a", "b c " * 2000)}])
    (only,) = preview(data.train, data.tokenizer)
    assert only.plain.endswith(f" … {len(data.train.tokens) - 2000:,} more tokens")


def test_lengths_are_counted_by_powers_of_two():
    lines = histogram([of_lengths(3, 4), of_lengths(9, 1)])
    assert [int(line.split("tokens")[1].split()[0]) for line in lines] == [1, 0, 2, 0, 1]
    assert [line.split("tokens")[0].split()[-1] for line in lines] == ["1", "2", "4", "8", "16"]
    assert lines[2].count("█") == 2 * lines[0].count("█")
