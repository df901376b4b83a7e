"""Data by its name on the Hub: in a prepared cache, or fetched from a local server."""

import json

import pytest

from fsdpctl.config.data import DataConfig
from fsdpctl.config.data_files import kind_of_path
from fsdpctl.config.data_sources import absolute_paths, sources_in
from fsdpctl.data.find_data import find_data
from fsdpctl.data.open_estimated import open_estimated
from fsdpctl.data.tokenizer import ByteTokenizer
from fsdpctl.data.tokenizing import TokenOutput, tokenize_files
from fsdpctl.errors import UsageError
from fsdpctl.resolve.run_data import is_data_here
from tests.hub_server import SHA, Hub, serving

BYTES = ByteTokenizer()
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
        snapshot = folder / "snapshots" / SHA
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(SHA)
        (folder / "blobs").mkdir()
        for number, file in enumerate([*files, *(["README.md"] if card else [])]):
            content = card if file == "README.md" else json.dumps({"text": f"in {file}"})
            (folder / "blobs" / str(number)).write_text(str(content))
            (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
            (snapshot / file).symlink_to(folder / "blobs" / str(number))
        return snapshot

    return put


def names(path):
    return [each.name for each in find_data(path).files]


def test_a_card_with_several_configurations_asks_for_one(cached):
    files = ["en/train-0.jsonl", "en/train-1.jsonl", "en/test-0.jsonl", "de/x/a.jsonl", "b.jsonl"]
    cached("org/texts", files, CARD)
    assert names("hf://org/texts:en") == ["train-0.jsonl", "train-1.jsonl"]
    assert names(f"hf://org/texts@{SHA}:en/test") == ["test-0.jsonl"]
    assert names("hf://datasets/org/texts:de") == ["a.jsonl"]
    for path, arg in {
        "hf://org/texts": "name a configuration after a :, of en, de",
        "hf://org/texts:fr": "name a configuration after a :, of en, de",
        "hf://org/texts:en/val": "name a split after a /, of train, test",
        "hf://org/texts@v2:en": r"run `hf download --repo-type dataset org/texts --revision v2`",
        "hf://org/other": "run `hf download --repo-type dataset org/other`",
        "hf://texts": "expected hf://ORG/NAME",
    }.items():
        with pytest.raises(UsageError, match=arg):
            names(path)
    cached("org/bare", ["a.jsonl", "b.jsonl"])
    assert names("hf://org/bare/train") == ["a.jsonl", "b.jsonl"]
    with pytest.raises(UsageError, match="text: not found"):
        names("hf://org/bare/test")
    for number, (options, arg) in enumerate({
        "- config_name: en\n  data_dir: en\n": "data_dir without data_files in the card",
        "- config_name: en\n  data_dir: en\n  - split: x\n": "README.md: not YAML",
    }.items()):  # fmt: skip
        cached(
            f"org/dirs{number}", ["en/train.jsonl", "fr/train.jsonl"],
            f"---\nconfigs:\n{options}---\n",
        )  # fmt: skip
        with pytest.raises(UsageError, match=arg):
            names(f"hf://org/dirs{number}")


def test_files_that_a_card_names_are_fetched_once(tmp_path, monkeypatch):
    def rows(*texts):
        return "".join(json.dumps({"text": each}) + "\n" for each in texts).encode()

    configs = [
        {"config_name": "a", "default": True, "data_files": [
            {"split": "train", "path": "x/**/*.jsonl"}, {"split": "dev", "path": ["y.jsonl"]}]},
        {"config_name": "sft", "data_files": [
            {"split": "train_sft", "path": "x/1.jsonl"}, {"split": "test_sft", "path": "y.jsonl"}]},
        {"config_name": "table", "data_dir": "t", "data_files": "*.csv"},
        *({"config_name": name, "data_files": path} for name, path in (
            ("local", "/etc/passwd"), ("above", "../../x.jsonl"), ("web", "http://127.0.0.1:9/x"),
            ("pictures", "p.png"))),
        {"config_name": "other", "data_files": "t/1.csv", "sep": ";"},
    ]  # fmt: skip
    files = {
        "README.md": f"---\n{json.dumps({'configs': configs})}\n---\n".encode(), "p.png": b"x",
        "x/1.jsonl": rows("a"), "x/z/2.jsonl": rows("b", "c"), "z/3.jsonl": rows("d"),
        "y.jsonl": rows("e"), "t/1.csv": b'text,n\n"a, b",1\nc,2\n', "load.py": b"bad()",
    }  # fmt: skip
    plain = {"data/train-0.jsonl": rows("a"), "data/test-0.jsonl": rows("b"), "x.pkl": b"x"}
    table = {"a.csv": b"text\nx\n"}
    served = Hub(datasets={"org/cards": files, "org/plain": plain, "org/csv": table})
    with serving(served, tmp_path, monkeypatch) as hub:
        assert not is_data_here(options := DataConfig(name="text", path="hf://org/cards"))
        assert hub.requests == []  # an estimate asks this without a request
        for _ in range(2):
            data = find_data("hf://org/cards")
            assert [x.name for x in data.files] == ["1.jsonl", "2.jsonl"]
            assert [x.name for x in data.validation] == ["y.jsonl"]
            assert hub.fetched() == {"README.md", "x/1.jsonl", "x/z/2.jsonl", "y.jsonl"}
            count = len(hub.requests)
        assert (is_data_here(options), len(hub.requests)) == (True, count)
        (trees,) = tmp_path.rglob("datasets--org--cards/trees")
        trees = trees.rename(tmp_path / "trees")  # as if another program had fetched the files
        assert open_estimated(options).train.num_tokens == 3
        assert len(hub.requests) == count
        trees.rename(next(tmp_path.rglob("datasets--org--cards")) / "trees")
        assert names("hf://org/cards:sft/test_sft") == ["y.jsonl"]
        assert [x.name for x in find_data("hf://org/cards", "data.val_path").files] == ["y.jsonl"]
        assert (len(hub.requests), names("hf://org/plain")) == (count, ["train-0.jsonl"])
        assert hub.fetched().isdisjoint({"data/test-0.jsonl", "x.pkl", "load.py"})
        for path in ("org/cards:table", "org/csv"):
            done = tokenize_files(f"hf://{path}", TokenOutput(tmp_path / f"{path[-3:]}.bin"), BYTES)
            assert done.tokens == {"org/csv": 1}.get(path, 5)
        for path, errors in {
            "cards:sft": "name a split after a /, of train_sft, test_sft",
            "cards:local": "/etc/passwd in the card of the data set matches no file",
            "cards:above": "../../x.jsonl in the card of the data set matches no file",
            "cards:web": "http://127.0.0.1:9/x in the card of the data set matches no file",
            "cards:pictures": "p.png: not supported",
            "cards:other": "sep of the data set's card",
            "cards:b": "name a configuration after a :, of a",
            "none": "no such dataset on 127.0.0.1",
        }.items():  # fmt: skip
            with pytest.raises(UsageError, match=f"^data.path=hf://org/{path}: .*{errors}"):
                find_data(f"hf://org/{path}")


FILES = [
    "a/0.jsonl", "a/1.jsonl", "a/10.jsonl", "a/b/2.jsonl", "a/b/c/3.jsonl", "{a,b}.jsonl",
    "part-[0].jsonl", ".h/4.jsonl", "a/.5.jsonl", "__x/6.jsonl", "a/README.md", "7.jsonl",
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "expected"), {
    "a/[0-9].jsonl": "0 1", "a/[!1].jsonl": "0", "a/?.jsonl": "0 1", "a/[0-9]*.jsonl": "0 1 10",
    "**/*.jsonl": "7 0 1 10 2 3 part-[0] {a,b}", "a/**": "0 1 10 2 3", "a/**/c/*": "3",
    "a/**/[0-3].jsonl": "0 1 2 3", "*": "7 part-[0] {a,b}", "{a,b}.jsonl": "{a,b}",
    "part-[[]0].jsonl": "part-[0]", ".h/*": "4", ".*/*": "4", "a/.*": ".5", "__x/*": "6",
    "./7.*": "7",
}.items())  # fmt: skip
def test_patterns_of_a_card_are_those_of_datasets(cached, pattern, expected):
    """Compared with datasets 5.2.0 and fsspec 2026.9.0, like 8,400 drawn patterns."""
    card = f"---\nconfigs:\n- config_name: default\n  data_files: '{pattern}'\n---\n"
    cached("org/globs", FILES, card)
    assert [each.removesuffix(".jsonl") for each in names("hf://org/globs")] == expected.split()


@pytest.mark.parametrize(("patterns", "arg"), {
    "[a/0.jsonl, 'a/[2-9].jsonl']": r"a/\[2-9\]\.jsonl in the card of the data set matches no file",
    "[a/0.jsonl, '{a,b}/0.jsonl']": r"\{a,b\}/0\.jsonl in the card of the data set matches no file",
    "'a/*.json'": r"a/\*\.json in the card", "a": "a in the card of the data set matches no file",
    "a/**.jsonl": r"a/\*\*\.jsonl in the data set's card: expected /\*\*/",
    "{train: a/0.jsonl}": "expected split and path",
    "[{path: a/0.jsonl}, 7.jsonl]": "expected split",
}.items())  # fmt: skip
def test_a_pattern_of_a_card_that_selects_nothing_is_an_error(cached, patterns, arg):
    card = f"---\nconfigs:\n- config_name: default\n  data_files: {patterns}\n---\n"
    cached("org/globs", FILES, card)
    with pytest.raises(UsageError, match=f"^data.path=hf://org/globs: .*{arg}"):
        names("hf://org/globs")


def test_without_a_card_names_tell(cached):
    cached("org/plain", ["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"])
    assert names("hf://org/plain") == ["train-00000-of-00001.parquet"]
    assert names("hf://org/plain/test") == ["test-00000-of-00001.parquet"]
    cached("org/words", ["training.jsonl", "validation.jsonl"])
    data = find_data("hf://org/words", option="chat")
    assert [each.name for each in (*data.files, *data.validation)] == [
        "training.jsonl", "validation.jsonl"
    ]  # fmt: skip
    cached("org/part", ["data/train-00000-of-00003.parquet", "data/train-00002-of-00003.parquet"])
    with pytest.raises(UsageError, match="train-00001-of-00003.parquet is missing in the Hugging"):
        names("hf://org/part")


def test_a_missing_file_is_refused(cached):
    (cached("org/texts", ["en/train-0.jsonl"], CARD) / "en" / "train-0.jsonl").resolve().unlink()
    with pytest.raises(UsageError, match=r"en/train-0\.jsonl is missing in the Hugging Face cache"):
        names("hf://org/texts:en")


def test_names_are_sources_and_are_tokenized(cached, tmp_path):
    cached("org/texts", ["a/train.jsonl"])
    assert kind_of_path("hf://org/texts") == "chat"
    path = f"hf://org/texts:a:0.3,{tmp_path}/x.jsonl:0.7"
    (tmp_path / "x.jsonl").write_text('{"text": "x"}')
    assert absolute_paths(path) == path
    assert [(each.path, each.share) for each in sources_in(path)] == [
        ("hf://org/texts:a", 0.3), (f"{tmp_path}/x.jsonl", 0.7),
    ]  # fmt: skip
    assert DataConfig(name="chat", path=path).path == path
    done = tokenize_files("hf://org/texts", TokenOutput(tmp_path / "t.bin"), ByteTokenizer())
    assert ((tmp_path / "t.bin").read_bytes()[::2], done.tokens) == (b"in a/train.jsonl", 16)
