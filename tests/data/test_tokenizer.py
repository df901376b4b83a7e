"""Tokens and the begin and end of documents, compared with transformers."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from fsdpctl.config.compose import compose_config
from fsdpctl.config.data import DataConfig
from fsdpctl.data.open_data import open_data
from fsdpctl.data.packing import DocumentSet
from fsdpctl.data.tokenizer import BYTE_TOKENIZER, FileTokenizer, open_tokenizer
from fsdpctl.errors import UsageError
from fsdpctl.resolve.prepare import prepare
from fsdpctl.run.directory import StartKind, inspect_run_dir
from tests.chats.families import write_lines
from tests.commands.run import TINY, make_text
from tests.data.layouts import POSTS, TEXTS, Layout, layouts, write_layout
from tests.data.token_file import encoded, write_token_file


def _once(theirs: Any, text: str) -> list[int]:
    """Return transformers' tokens without a begin or end token that repeats one in the text."""
    whole = theirs(text)["input_ids"]
    plain, dash = (theirs(each, add_special_tokens=False)["input_ids"] for each in (text, "-"))
    added = theirs("-")["input_ids"]
    before = next(n for n in range(len(added) + 1) if added[n : n + len(dash)] == dash)
    after = len(added) - before - len(dash)
    doubles = len(whole) == len(plain) + before + after  # some classes add no second end
    if before and plain[:1] == added[:1] and doubles:
        whole = whole[before:]
    if after and plain[-1:] == added[-1:] and doubles:
        whole = whole[:-after]
    return [*whole]


def _difference(folder: Path, layout: Layout) -> str:
    """Return the difference from transformers; both may refuse a layout."""
    try:
        theirs = AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        with pytest.raises(UsageError, match=r"^[^\n]*$"):
            open_tokenizer(str(folder))
        return f"refused: {error!r:.60}"
    ours = open_tokenizer(str(folder))
    assert isinstance(ours, FileTokenizer)
    for text in TEXTS:
        expected = theirs(text)["input_ids"]
        end, once = theirs.eos_token_id, _once(theirs, text)
        has_end = end is None or end in theirs("-")["input_ids"] or once[-1:] == [end]
        document = encoded(ours, text).tolist()
        assert document == [*once, *([] if has_end else [end])], (layout.name, text)
        assert ours.encode_prompt(text) == (expected or [end or 0]), (layout.name, text)
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)
        if theirs.is_fast:
            plain = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
            result = ours.encode_texts([text])[0]
            assert result.tokens.tolist() == plain["input_ids"]
            offsets = list(zip(result.starts.tolist(), result.stops.tolist(), strict=True))
            assert offsets == plain["offset_mapping"]
            assert [*ours.prefix, *plain["input_ids"], *ours.suffix] == expected, (
                layout.name,
                text,
            )
    again = FileTokenizer("again", ours.files() | {"config.json": ours.model_config or b"{}"})
    assert again.checksum == ours.checksum
    return ""


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.filterwarnings("ignore")
def test_tokens_are_those_of_transformers_in_every_layout(every, tmp_path):
    result = {
        each.name: _difference(write_layout(tmp_path / str(number), each), each)
        for number, each in enumerate([*layouts()][::every])
    }
    refused = {name: why for name, why in result.items() if why}
    assert len(result) >= 100 // every
    assert len(refused) < 5, refused


CONFIGS: dict[str, str] = {
    "not JSON": "{", "a list": "[]", "an end that is a number": '{"eos_token": 5}',
    "a lone surrogate": '{"eos_token": "\\ud800"}',
    "a surrogate in a token": '{"extra_special_tokens": ["\\udfff"]}',
    "foreign code": '{"auto_map": {"AutoTokenizer": ["x.Slow", "x.Fast"]}, "tokenizer_class": "X"}',
    "another file": '{"fast_tokenizer_files": ["../tokenizer.5.0.0.json"]}',
    "a template that is a number": '{"chat_template": [3]}',
}  # fmt: skip


def _refused(folder: Path) -> str:
    start = time.monotonic()
    with pytest.raises(UsageError) as caught:
        open_tokenizer(str(folder))
    assert time.monotonic() - start < 20
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("case", ["no model", *CONFIGS])
def test_a_damaged_or_hostile_tokenizer_is_refused_in_one_line(tmp_path, case):
    folder = write_layout(tmp_path / "tok", Layout("hostile"))
    file = folder / "tokenizer.json"
    if case in CONFIGS:
        (folder / "tokenizer_config.json").write_text(CONFIGS[case])
    else:
        file.write_text(json.dumps(json.loads(file.read_text()) | {"model": None}))
    _refused(folder)


def test_nothing_outside_the_directory_is_read(tmp_path):
    outside = write_layout(tmp_path / "outside", Layout("outside", slow=True))
    config = {"tokenizer_class": "GPT2Tokenizer", "vocab_file": str(outside / "vocab.json"),
              "merges_file": str(outside / "merges.txt"), "tokenizer_file": str(outside / "x"),
              "gguf_file": str(outside / "vocab.json")}  # fmt: skip
    folder = write_layout(tmp_path / "tok", Layout("tok", config=config))
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json not found" in _refused(folder)
    for name in ("tokenizer.json", "added_tokens.json", "additional_chat_templates"):
        (folder / name).symlink_to(outside / "vocab.json")
        assert "link" in _refused(folder)
        (folder / name).unlink()


def test_a_tokenizer_without_positions_makes_text_but_no_chats(tmp_path):
    config = {"tokenizer_class": "CTRLTokenizer"}
    folder = write_layout(tmp_path / "tok", Layout("slow", config=config, slow=True))
    tokenizer = open_tokenizer(str(folder))
    assert isinstance(tokenizer, FileTokenizer)
    assert len(encoded(tokenizer, "ab"))
    with pytest.raises(UsageError, match="CTRLTokenizer returns no positions of tokens"):
        tokenizer.encode_texts(["ab"])


def test_the_checksum_has_what_decides_tokens_and_no_more(tmp_path):
    def checksum(name: str, **kwargs: Any) -> str:
        return open_tokenizer(str(write_layout(tmp_path / name, Layout(name, **kwargs)))).checksum

    plain = checksum("plain", config={"eos_token": "</s>"})
    assert plain == checksum("map", special_map={"eos_token": "</s>"})
    assert plain == checksum("size", config={"eos_token": "</s>", "model_max_length": 9})
    others = [
        checksum("end", config={"eos_token": "<s>"}),
        checksum("begin", config={"eos_token": "</s>"}, post=POSTS["begin"]),
        checksum("more", config={"eos_token": "</s>"}, added={"<call>": 0}),
    ]
    assert len({plain, *others}) == 4


def test_tokens_of_another_tokenizer_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_layout(tmp_path / "mine", Layout("mine", config={"eos_token": "</s>"}))
    mine, raw = open_tokenizer(str(folder)), open_tokenizer(BYTE_TOKENIZER)
    for name, tokenizer in (("mine", mine), ("raw", raw)):
        tokens = encoded(tokenizer, "the ab " * 9)
        write_token_file(tmp_path / f"{name}.bin", tokens, tokenizer, num_bytes=63)

    def opened(name: str) -> str:
        path = str(tmp_path / f"{name}.bin")
        return open_data(DataConfig("tokens", path, tokenizer=str(folder))).tokenizer.name

    assert opened("mine") == str(folder)
    with pytest.raises(UsageError, match=rf"expected tokens of .*{folder}, got tokens of bytes"):
        opened("raw")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    with pytest.raises(UsageError, match="got tokens of an earlier version"):
        opened("mine")


OWN = {  # post-processors, and texts that contain their begin or end token
    "begin": ("<s>ab", "<s>ab the", "<s>"),
    "both": ("<s>ab</s>", "ab</s>", "<s></s>"),
    "bert": ("[CLS]ab[SEP]", "ab[SEP]"),
}


@pytest.mark.parametrize("post", OWN)
def test_a_text_with_its_own_begin_and_end_token_gets_no_other(post, tmp_path):
    layout = Layout("own", config={"eos_token": "</s>"}, post=POSTS[post])
    ours = open_tokenizer(str(write_layout(tmp_path / "t", layout)))
    assert isinstance(ours, FileTokenizer)
    for text in OWN[post]:
        plain = ours.hf(text, add_special_tokens=False)["input_ids"]
        own_begin = plain[0] == ours.prefix[0]
        own_end = bool(ours.suffix) and plain[-1] == ours.suffix[-1]
        expected = [*ours.prefix * (not own_begin), *plain, *ours.suffix * (not own_end)]
        if ours.eos_id not in (expected[-1], *ours.suffix):
            expected.append(ours.eos_id)
        assert encoded(ours, text).tolist() == expected


def test_a_begin_token_that_is_split_as_text_is_no_begin_token(tmp_path):
    config = {"eos_token": "</s>", "split_special_tokens": True}
    layout = Layout("split", config=config, post=POSTS["begin"])
    ours = open_tokenizer(str(write_layout(tmp_path / "t", layout)))
    assert isinstance(ours, FileTokenizer)
    result = encoded(ours, "<s>ab").tolist()
    assert result[0] == ours.prefix[0] != result[1]


def test_rows_that_were_rendered_have_one_begin_token(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    layout = Layout("own", config={"eos_token": "</s>"}, post=POSTS["begin"])
    folder = str(write_layout(tmp_path / "t", layout))
    rows = [{"text": "<s>ab"}, {"text": "ab"}]
    pairs = [{"prompt": "<s>ab", "completion": " the"}, {"prompt": "ab", "completion": " the"}]
    for number, some in enumerate((rows, pairs)):
        file = write_lines(tmp_path / f"{number}.jsonl", some)
        data = open_data(DataConfig("chat", str(file), val_fraction=0.0, tokenizer=folder))
        assert isinstance(data.train, DocumentSet)
        tokens = [data.train[index][0].tolist() for index in range(2)]
        assert tokens[0] == tokens[1]
        if some is pairs:
            trained = [data.train[index][1][1:].tolist() for index in range(2)]
            assert trained[0] == trained[1]


@pytest.mark.parametrize(("home", "more", "cache"), [
    ("/sys", ["train.run_dir=run"], "run/cache"),
    ("/dev/null", ["train.run_dir=a/run"], "a/run/cache"),
    ("/proc/none", [], "runs/cache"),
])  # fmt: skip
def test_without_a_writable_home_the_cache_is_in_the_run(home, more, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", home)
    for name in ("XDG_CACHE_HOME", "FSDPCTL_CACHE"):
        monkeypatch.setenv(name, "")
    folder = write_layout(tmp_path / "t", Layout("own", config={"eos_token": "</s>"}))
    files = [f"data.path={make_text(tmp_path)}", f"data.tokenizer={folder}"]
    typed = [*TINY, *files, "launch.device=cpu", *more]
    resolved = prepare(compose_config(typed))
    (messages,) = (note for note in resolved.notes if note.startswith("cache: "))
    assert re.fullmatch(rf"cache: {home}/.cache/fsdpctl: [A-Z][\w ]+; using {cache}", messages)
    assert inspect_run_dir(resolved.config, "auto").start_kind is StartKind.NEW
    monkeypatch.delattr(FileTokenizer, "encode_pieces")  # the cache has the tokens
    prepare(compose_config(typed))
    assert {each.name[:5] for each in (tmp_path / cache).iterdir()} == {"text-", "texts"}
