"""Data by its name on the Hub, in a cache that is written here."""

import json

import pytest

from fsdpctl.config.data import DataConfig
from fsdpctl.config.data_files import option_of_data
from fsdpctl.config.sources import absolute_paths, sources_in
from fsdpctl.data.find_data import find_data
from fsdpctl.data.tokenizer import ByteTokenizer
from fsdpctl.data.tokenizing import Output, tokenize_files
from fsdpctl.errors import UsageError

CARD = """---
license: mit
configs:
- config_name: en
  data_files:
  - split: train
    path: en/train-*
  - split: test
    path: [en/test-0.jsonl]
- config_name: de
  data_files: "de/**/*.jsonl"
---
# Texts
"""


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Return a function that puts a data set into the cache."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))

    def put(name, files, card=None):
        folder = tmp_path / "hub" / f"datasets--{name.replace('/', '--')}"
        snapshot = folder / "snapshots" / "abc123"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("abc123")
        (folder / "blobs").mkdir()
        for number, file in enumerate([*files, *(["README.md"] if card else [])]):
            content = card if file == "README.md" else json.dumps({"text": f"in {file}"})
            (folder / "blobs" / str(number)).write_text(str(content))
            (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
            (snapshot / file).symlink_to(folder / "blobs" / str(number))
        return snapshot

    return put


def names(path):
    return [each.name for each in find_data(path).train]


def test_a_card_with_several_configurations_asks_for_one(cached):
    files = ["en/train-0.jsonl", "en/train-1.jsonl", "en/test-0.jsonl", "de/x/a.jsonl", "b.jsonl"]
    cached("org/texts", files, CARD)
    assert names("hf://org/texts:en") == ["train-0.jsonl", "train-1.jsonl"]
    assert names("hf://org/texts@abc123:en/test") == ["test-0.jsonl"]
    assert names("hf://datasets/org/texts:de") == ["a.jsonl"]
    for path, word in {
        "hf://org/texts": "several sets to train on, .*de, en",
        "hf://org/texts:fr": "no such files in",
        "hf://org/texts:en/val": "no such files in",
        "hf://org/texts@v2:en": r"run `hf download --repo-type dataset org/texts --revision v2`",
        "hf://org/other": "run `hf download --repo-type dataset org/other`",
        "hf://texts": "expected hf://ORG/NAME",
    }.items():
        with pytest.raises(UsageError, match=word):
            names(path)
    directories = CARD.replace("data_files:\n  - split", "data_dir: en\n  - split")
    cached("org/dirs", ["en/train.jsonl", "fr/train.jsonl"], directories)
    with pytest.raises(UsageError, match="several sets to train on, de, en, fr"):
        names("hf://org/dirs")


def test_without_a_card_names_tell(cached):
    cached("org/plain", ["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"])
    assert names("hf://org/plain") == ["train-00000-of-00001.parquet"]
    assert names("hf://org/plain/test") == ["test-00000-of-00001.parquet"]
    cached("org/words", ["training.jsonl", "validation.jsonl"])
    found = find_data("hf://org/words", option="chat")
    assert [each.name for each in (*found.train, *found.validation)] == [
        "training.jsonl", "validation.jsonl"
    ]  # fmt: skip
    cached("org/part", ["data/train-00000-of-00003.parquet", "data/train-00002-of-00003.parquet"])
    with pytest.raises(UsageError, match="train-00001-of-00003.parquet is missing in the Hugging"):
        names("hf://org/part")


def test_a_missing_file_is_refused(cached):
    snapshot = cached("org/texts", ["en/train-0.jsonl"], CARD)
    (snapshot / "en" / "train-0.jsonl").resolve().unlink()
    with pytest.raises(UsageError, match=r"en/train-0\.jsonl is missing in the Hugging Face cache"):
        names("hf://org/texts:en")


def test_names_are_sources_and_are_tokenized(cached, tmp_path):
    cached("org/texts", ["a/train.jsonl"])
    assert option_of_data("hf://org/texts") == "chat"
    path = f"hf://org/texts:a:0.3,{tmp_path}/x.jsonl:0.7"
    (tmp_path / "x.jsonl").write_text('{"text": "x"}')
    assert absolute_paths(path) == path
    assert [(each.path, each.share) for each in sources_in(path)] == [
        ("hf://org/texts:a", 0.3),
        (f"{tmp_path}/x.jsonl", 0.7),
    ]
    assert DataConfig(name="chat", path=path).path == path
    done = tokenize_files("hf://org/texts", Output(tmp_path / "t.bin"), ByteTokenizer())
    assert (tmp_path / "t.bin").read_bytes()[::2] == b"in a/train.jsonl"
    assert done.tokens == 16
