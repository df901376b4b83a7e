"""Malicious checkpoints, models and tokens: every command rejects them in one line."""

import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.commands.run import invoke, make_text
from tests.hostile import (
    RANK_FILE,
    attach,
    everything_in,
    make_checkpoint,
    make_hugging_face,
    make_tokens,
    read_header,
    refit_header,
    reseal,
    rewrite_header,
    write_refitted,
)

WIDE = 4  # cases of a table that are fast


def some_of(table: Iterable[Any]) -> list[Any]:
    """Return the cases of a table; all but a few drawn ones are marked slow."""
    every = list(table)
    drawn = random.Random(0).sample(range(len(every)), min(WIDE, len(every)))
    return [
        each if number in drawn else pytest.param(each, marks=pytest.mark.slow)
        for number, each in enumerate(every)
    ]


DEEP = ("[" * 100_000 + "]" * 100_000).encode()


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("originals")
    make_checkpoint(folder / "step-00000001")
    make_hugging_face(folder / "step-00000001", folder / "hf")
    make_tokens(folder / "t.bin")
    return folder


@pytest.fixture
def checkpoint(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "step-00000001", tmp_path / "in" / "step-00000001"))


@pytest.fixture
def hugging_face(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "hf", tmp_path / "in" / "hf"))


@pytest.fixture
def tokens(originals: Path, tmp_path: Path) -> Path:
    for name in ("t.bin", "t.json"):
        shutil.copy(originals / name, tmp_path / name)
    return tmp_path / "t.bin"


def dry_run(tmp_path: Path, *args: str) -> tuple[int, str]:
    return invoke("train", "--dry-run", f"train.run_dir={tmp_path / 'run'}", *args)


def every_reader(path: Path, tmp_path: Path) -> list[tuple[int, str]]:
    """Run each command that reads a checkpoint; return exit codes and messages."""
    text = f"data.path={make_text(tmp_path)}"
    return [
        invoke("verify-checkpoint", str(path)), invoke("inspect-checkpoint", str(path)),
        invoke("consolidate-checkpoint", str(path), str(tmp_path / "out")),
        invoke("consolidate-checkpoint", str(path), str(tmp_path / "o.gguf"), "--format", "gguf"),
        invoke("sample", str(path), "--tokens", "2"),
        dry_run(tmp_path, "model=hf", f"model.path={path}", "data=text", text),
    ]  # fmt: skip


ATTACHMENTS = [
    "../../../.bashrc", "../x.json", "/x.json", "sub/x.json", "modeling.py",
    "x.safetensors", "config.yaml", ".hidden.json", "x.json\n", "manifest.json",
]  # fmt: skip


@pytest.mark.parametrize("name", some_of(ATTACHMENTS))
def test_an_attachment_is_a_file_of_the_checkpoint(checkpoint, tmp_path, name):
    options = {name: {"size": 1, "xxh3": ""}}
    reseal(checkpoint, lambda content: content["attachments"].update(options))
    before = everything_in(tmp_path)
    for code, out in every_reader(checkpoint, tmp_path):
        assert (code, "manifest.json" in out) == (4, True), out
    assert everything_in(tmp_path).keys() - before.keys() == {"words.txt"}


@pytest.mark.parametrize("name", ["../a.safetensors", "model.safetensors", "rank-0.safetensors"])
def test_a_file_of_tensors_is_one_of_a_rank(checkpoint, tmp_path, name):
    reseal(checkpoint, lambda content: content["files"].update({name: content["files"][RANK_FILE]}))
    assert {code for code, _ in every_reader(checkpoint, tmp_path)} == {4}


def test_links_out_of_a_checkpoint_are_not_followed(checkpoint, tmp_path):
    for name in (RANK_FILE, "tokenizer.json", "manifest.json"):
        copy = Path(shutil.copytree(checkpoint, tmp_path / name / "c"))
        (copy / name).rename(tmp_path / f"aside-{name}")
        (copy / name).symlink_to(tmp_path / f"aside-{name}")
        for code, out in every_reader(copy, tmp_path):
            assert (code, "outside its directory" in out) == (4, True), (name, out)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/hosts", "a/b.safetensors", "x.bin"])
def test_an_index_names_files_beside_it(hugging_face, tmp_path, name):
    index = hugging_face / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = dict.fromkeys(content["weight_map"], name)
    index.write_text(json.dumps(content))
    code, out = dry_run(tmp_path, "model=hf", f"model.path={hugging_face}")
    assert (code, "index.json" in out, "not a valid file name" in out) == (4, True, True)


MANIFESTS = {
    "files is a list": lambda c: c.update(files=[]),
    "a size is text": lambda c: c["files"][RANK_FILE].update(size="9"),
    "a size is null": lambda c: c["files"][RANK_FILE].update(size=None),
    "a size is a fraction": lambda c: c["files"][RANK_FILE].update(size=9.5),
    "a size is huge": lambda c: c["files"][RANK_FILE].update(size=10**30),
    "a shape is text": lambda c: first(c["tensors"]).update(shape=["9" * 10_000, 9]),
    "a shape is negative": lambda c: first(c["tensors"]).update(shape=[-1]),
    "a shape has a fraction": lambda c: first(c["tensors"]).update(shape=[2.0, 16]),
    "a shape is infinite": lambda c: first(c["tensors"]).update(shape=[float("inf")]),
    "a shape is huge": lambda c: first(c["tensors"]).update(shape=[1 << 60, 1 << 60]),
    "a shape has many axes": lambda c: first(c["tensors"]).update(shape=[1] * 10**5),
    "a dtype is unknown": lambda c: first(c["tensors"]).update(dtype="F7"),
    "a dtype is null": lambda c: first(c["tensors"]).update(dtype=None),
    "a step is text": lambda c: c["progress"].update(step="1"),
    "a step is infinite": lambda c: c["progress"].update(step=float("inf")),
    "extra is a list": lambda c: c["progress"].update(extra=[]),
    "a word is a number": lambda c: c["config"].update({"model.num_layers": 2}),
    "config is text": lambda c: c.update(config="x"),
    "a layer too many": lambda c: c["config"].update({"model.num_layers": "100000"}),
    "a word is unknown": lambda c: c["config"].update({"model.nonsense": "1"}),
    "no world": lambda c: c.pop("world_size"),
    "versions are numbers": lambda c: c.update(versions={"torch": 2}),
}  # fmt: skip


def first(tensors):
    return tensors[sorted(tensors)[0]]


@pytest.mark.parametrize("case", some_of(MANIFESTS))
def test_a_manifest_of_other_types_is_damaged(checkpoint, tmp_path, case):
    reseal(checkpoint, MANIFESTS[case])
    answers = every_reader(checkpoint, tmp_path)
    of_words = case in ("a layer too many", "a word is unknown")  # reading tensors ignores settings
    for code, message in answers[2:] if of_words else answers:
        assert (code, "\n" in message.strip()) == (4, False), message


HEADERS = {
    "a shape has a fraction": lambda c: second(c).update(shape=[2.0]),
    "offsets have fractions": lambda c: second(c).update(data_offsets=[0.0, 8.0]),
    "offsets are text": lambda c: second(c).update(data_offsets=["0", "8"]),
    "offsets overlap": lambda c: second(c).update(data_offsets=first_tensor(c)["data_offsets"]),
    "offsets are reversed": lambda c: second(c)["data_offsets"].reverse(),
    "a shape is huge": lambda c: second(c).update(shape=[1 << 62, 1 << 62]),
    "spans are no JSON": lambda c: c["__metadata__"].update({"fsdpctl.spans": "x"}),
    "spans are deep": lambda c: c["__metadata__"].update({"fsdpctl.spans": DEEP.decode()}),
    "spans are infinite": lambda c: spans(c, [0, float("inf"), ""]),
    "spans are fractions": lambda c: spans(c, [0.0, 9.0, ""]),
    "spans are null": lambda c: spans(c, None),
    "spans are short": lambda c: spans(c, [0]),
    "checksums are no digits": lambda c: spans(c, [0, 9, "xyz"]),
    "a span is negative": lambda c: spans(c, [-9, 0, ""]),
    "no spans": lambda c: c.pop("__metadata__"),
}  # fmt: skip


def first_tensor(header):
    return header[next(name for name in header if name != "__metadata__")]


def second(header):
    return header[[name for name in header if name != "__metadata__"][1]]


def spans(header, value):
    content = json.loads(header["__metadata__"]["fsdpctl.spans"])
    content[next(iter(content))] = value
    header["__metadata__"]["fsdpctl.spans"] = json.dumps(content)


@pytest.mark.parametrize("case", some_of(HEADERS))
def test_a_header_of_other_types_is_damaged(checkpoint, tmp_path, case):
    refit_header(checkpoint, HEADERS[case])
    for code, out in every_reader(checkpoint, tmp_path):
        assert (code, RANK_FILE in out) == (4, True), out


@pytest.mark.parametrize("text", [DEEP, b"{}", b"[]", b"null", b"\xff", b'{"a":' * 10**5])
def test_a_header_that_is_something_else_is_damaged(checkpoint, hugging_face, tmp_path, text):
    write_refitted(checkpoint, text)
    assert {code for code, _ in every_reader(checkpoint, tmp_path)} == {4}
    rewrite_header(sorted(hugging_face.glob("*.safetensors"))[0], text)
    assert dry_run(tmp_path, "model=hf", f"model.path={hugging_face}")[0] == 4


def test_a_key_that_is_there_twice_is_damage(checkpoint, tmp_path):
    text, _ = read_header(checkpoint / RANK_FILE)
    write_refitted(checkpoint, text.replace(b'"dtype":"F32"', b'"dtype":"F16","dtype":"F32"', 1))
    for code, out in every_reader(checkpoint, tmp_path):
        assert (code, "duplicate field `dtype`" in out) == (4, True), out


@pytest.mark.parametrize("byte", some_of(range(0, 400, 40)))
def test_a_damaged_manifest_is_damage_by_every_way_in(checkpoint, tmp_path, byte):
    file = checkpoint / "manifest.json"
    content = bytearray(file.read_bytes())
    content[byte] ^= 0x04
    file.write_bytes(content)
    assert {code for code, _ in every_reader(checkpoint, tmp_path)} == {4}


CONFIGS = {
    "deep": DEEP, "list": b"[]", "layers 1e6": {"num_hidden_layers": 10**6},
    "layers 1e10": {"num_hidden_layers": 10**10}, "layers of text": {"num_hidden_layers": "many"},
    "layers of layers": {"num_hidden_layers": [1]}, "wide": {"hidden_size": 10**15},
    "infinite": b'{"model_type": "llama", "hidden_size": Infinity}',
    "twice": b'{"model_type": "llama", "model_type": "gpt2"}',
    "rope of a list": {"rope_scaling": [1]}, "rope of text": {"rope_parameters": "long"},
    "vocabulary of 2^53": {"vocab_size": 1 << 53}, "family of a list": {"model_type": ["llama"]},
}  # fmt: skip


@pytest.mark.parametrize("case", some_of(CONFIGS))
def test_a_config_json_that_nobody_means_is_refused(hugging_face, tmp_path, case):
    change, file = CONFIGS[case], hugging_face / "config.json"
    if isinstance(change, dict):
        change = json.dumps(json.loads(file.read_text()) | change).encode()
    file.write_bytes(change)
    code, out = dry_run(tmp_path, "model=hf", f"model.path={hugging_face}")
    assert (code, "\n" in out.strip()) == (2, False), out
    assert str(hugging_face) in out or "model." in out


def tokenizer_json(**changes: object) -> bytes:
    content = json.loads(Tokenizer(WordLevel({"a": 0, "?": 1}, unk_token="?")).to_str())
    return json.dumps(content | changes).encode()


_WORDS = {"type": "WordLevel"}
TOKENIZERS = {
    "deep": DEEP,
    "empty": b"{}",
    "panics": tokenizer_json(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "lacks its unknown": tokenizer_json(model=_WORDS | {"vocab": {"a": 0}, "unk_token": "b"}),
    "far token": tokenizer_json(model=_WORDS | {"vocab": {"a": 1 << 31}, "unk_token": "a"}),
    "twice": b'{"version": "1.0", "version": "1.0"}',
    "no UTF-8": b"\xff\xfe",
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_tokenizer_that_nobody_means_is_refused(tmp_path, capfd, case):
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").write_bytes(TOKENIZERS[case])
    args = ["data=text", f"data.path={make_text(tmp_path)}", f"data.tokenizer={tmp_path / 'tok'}"]
    code, out = dry_run(tmp_path, *args)
    assert (code, "tokenizer" in out, "\n" in out.strip()) == (2, True, False), out
    assert "panicked" not in capfd.readouterr().err


def test_files_that_are_pipes_or_too_large_are_not_waited_for(checkpoint, hugging_face, tmp_path):
    for name in (RANK_FILE, "manifest.json", "tokenizer.json"):
        copy = Path(shutil.copytree(checkpoint, tmp_path / name / "c"))
        (copy / name).unlink()
        os.mkfifo(copy / name)
        for code, out in every_reader(copy, tmp_path):
            assert (code, name in out) == (4, True), out
    (hugging_face / "model.safetensors.index.json").unlink()
    os.mkfifo(hugging_face / "model.safetensors")
    assert dry_run(tmp_path, "model=hf", f"model.path={hugging_face}")[0] in (2, 4)
    os.truncate(hugging_face / "config.json", (1 << 30) + 1)
    assert dry_run(tmp_path, "model=hf", f"model.path={hugging_face}")[0] == 2


def header(tokens: Path, **changes: object) -> None:
    content = json.loads(tokens.with_suffix(".json").read_text()) | changes
    tokens.with_suffix(".json").write_text(json.dumps(content))


def far_token(tokens: Path) -> None:
    content = bytearray(tokens.read_bytes())
    content[11] = 1
    tokens.write_bytes(content)


TOKEN_FILES = {
    "wrong checksum": (lambda file: header(file, xxh3="0" * 16), "corrupted"),
    "another version": (lambda file: header(file, version=2), "version 2"),
    "no version": (lambda file: header(file, version=None), "version None"),
    "a token above": (far_token, "the size of the vocabulary"),
    "count of text": (lambda file: header(file, num_tokens="2000"), "num_tokens"),
    "infinite count": (lambda file: header(file, num_tokens=float("inf")), "not a number"),
    "vocabulary of 2^53": (lambda file: header(file, vocab_size=1 << 53), "vocab_size"),
    "bytes of a fraction": (lambda file: header(file, num_bytes=1.5), "num_bytes"),
    "deep": (lambda file: file.with_suffix(".json").write_bytes(DEEP), "deeper"),
}


@pytest.mark.parametrize("case", TOKEN_FILES)
def test_a_token_file_is_what_its_header_says(tokens, tmp_path, case):
    spoil, arg = TOKEN_FILES[case]
    assert dry_run(tmp_path, "data=tokens", f"data.path={tokens}")[0] == 0
    spoil(tokens)
    code, out = dry_run(tmp_path, "data=tokens", f"data.path={tokens}")
    assert (code, arg in out) == (2, True), out


@pytest.mark.parametrize("arg", [
    "model.num_layers=1e5", "train.global_batch_size=1e9", "model.vocab_size=9007199254740992",
    "model.hidden_size=1e15", "train.seq_len=1e12", "launch.nproc_per_node=1e9",
    "launch.nnodes=1e9", "accumulation.steps=1e12",
])  # fmt: skip
def test_what_no_machine_can_hold_is_refused(tmp_path, arg):
    code, out = dry_run(tmp_path, arg)
    assert (code, f"{arg}: expected" in out) == (2, True), out


def test_folders_may_be_deep(tmp_path):
    folder = tmp_path / "data"
    deep = str(folder)
    for _ in range(1100):  # more than Python's recursion limit
        os.mkdir(deep)
        deep += "/d"
    make_text(Path(deep).parent)
    try:
        assert dry_run(tmp_path, "data=text", f"data.path={folder}")[0] == 0
        code, out = dry_run(tmp_path, "data=text", f"data.path={folder}/**/*.txt")
        assert (code, "\n" in out.strip()) == (2, False), out
    finally:
        subprocess.run(["rm", "-rf", folder], check=True)


def test_the_screen_is_not_steered_by_names_of_others(checkpoint, capsys):
    attach(checkpoint, "a.json", b"{}")
    reseal(checkpoint, lambda content: content["config"].update({"model": "\x1b[2J\x9bX"}))
    code, out = invoke("inspect-checkpoint", str(checkpoint))
    assert (code, "\x1b" in out, "\x9b" in out) == (0, False, False)
