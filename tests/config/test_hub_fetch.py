"""Models by their name, fetched from a local server into an empty cache."""

import json
import os
import re
from pathlib import Path

import pytest
from huggingface_hub import constants

from fsdpctl.config.hub import local_model
from fsdpctl.errors import UsageError
from fsdpctl.io import activity
from tests.hub_server import SHA, TOKEN, Hub, serving

CONFIG = {"model_type": "llama", "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2,
          "num_attention_heads": 4, "intermediate_size": 64}  # fmt: skip
SMALL = {
    "config.json": json.dumps(CONFIG).encode(), "tokenizer.json": b"{}",
    "additional_chat_templates/tools.jinja": b"x", "README.md": b"#", "modeling_x.py": b"bad()",
    "pytorch_model.bin": b"pickled", "onnx/config.json": b"{}", "tokenizer.pkl": b"pickled",
    "consolidated.safetensors": b"twice", "original/model.safetensors": b"twice",
}  # fmt: skip
INDEX = {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "x.bin"}}
SHARDED = {
    **SMALL, "model.safetensors.index.json": json.dumps(INDEX).encode(), "x.bin": b"pickled",
    "m-1.safetensors": os.urandom(200_000), "m-2.safetensors": os.urandom(70_000),
}  # fmt: skip
WANTED = {"config.json", "tokenizer.json", "additional_chat_templates/tools.jinja",
          "model.safetensors.index.json", "m-1.safetensors", "m-2.safetensors"}  # fmt: skip


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serving(Hub({"org/tiny": SHARDED}), tmp_path, monkeypatch) as server:
        yield server


def test_weights_config_and_tokenizer_are_fetched_once_and_nothing_else(hub, monkeypatch, capfd):
    printed = list[str]()
    monkeypatch.setattr(activity.DISPLAY, "print_line", printed.append)
    hub.cuts = 3
    snapshot = Path(local_model("org/tiny"))
    assert snapshot.name == SHA
    files = {each for each in snapshot.rglob("*") if each.is_file()}
    assert {each.relative_to(snapshot).as_posix() for each in files} == WANTED == hub.fetched()
    assert (snapshot / "m-1.safetensors").read_bytes() == SHARDED["m-1.safetensors"]
    # The download of a truncated file resumes at its end, and the cache has no partial file.
    assert {int(each.split()[2]) for each in hub.requests if each.startswith("BODY m-")} > {0}
    assert not [*snapshot.parent.parent.rglob("*.incomplete")]
    assert re.fullmatch(r"fetching org/tiny: 2 files, 0\.3 MiB, .* free in .*hub", printed[-1])
    count = len(hub.requests)
    assert local_model("org/tiny") == local_model(str(snapshot)) == str(snapshot)
    assert (len(hub.requests), capfd.readouterr()) == (count, ("", ""))


def test_estimates_fetch_configurations_and_a_run_the_rest_of_the_same_revision(hub):
    snapshot = local_model("org/tiny@v2", "config")
    assert (hub.fetched(), local_model(snapshot, "tokenizer")) == ({"config.json"}, snapshot)
    assert hub.fetched() == {x for x in WANTED if not x.startswith("m-")}
    assert (local_model(snapshot), hub.fetched()) == (snapshot, WANTED)
    hub.models["org/one"] = {**SMALL, "weights.safetensors": b"w"}
    del hub.models["org/one"]["consolidated.safetensors"]
    assert Path(local_model("org/one"), "weights.safetensors").read_bytes() == b"w"


@pytest.mark.parametrize(("refused", "name", "message"), [
    ((403, "GatedRepo"), "org/tiny", r"gated; ask for access on 127\.0\.0\.1:\d+/org/tiny, and"),
    ((401, "RepoNotFound"), "org/tiny", "no such directory, and no such model on .*HF_TOKEN"),
    ((404, "RepoNotFound"), "org/tiny", "no such directory, and no such model on"),
    ((401, ""), "org/tiny", "HF_TOKEN"),
    ((503, ""), "org/tiny", r"127\.0\.0\.1:\d+ answers 503"),
    ((0, ""), "org/tiny@v3", r"org/tiny has no such revision on 127"),
    ((0, ""), "org/bin", "model.safetensors is missing on the Hub; pytorch_model.bin is not read"),
    ((0, ""), "org/none", "config.json is missing on the Hub$"),
])  # fmt: skip
def test_what_cannot_be_fetched_is_refused_in_one_line(hub, refused, name, message, monkeypatch):
    hub.models["org/bin"] = {x: SMALL[x] for x in ("config.json", "pytorch_model.bin")}
    hub.models["org/none"] = {"README.md": b""}
    hub.refused = {name: refused}
    with pytest.raises(UsageError, match=f"^model.path={name}: .*{message}") as caught:
        local_model(name)
    assert "\n" not in str(caught.value)
    assert "S3CR3T" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    if refused[0]:
        assert local_model(name)
        assert not [x for x in hub.requests if "/cdn/" in x and TOKEN in x]  # not to another host


def test_nothing_is_asked_for_a_path_or_offline_or_without_space(hub, monkeypatch):
    Path("org").mkdir()
    problem = "no such directory; org is a directory, so the Hub is not searched"
    with pytest.raises(UsageError, match=problem):
        local_model("org/tiny")
    Path("org").rmdir()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE is set"):
        local_model("org/tiny")
    assert not hub.requests
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100_000})())
    with pytest.raises(UsageError, match=r"0\.3 MiB, 0\.1 MiB free in .*; set HF_HOME to a dir"):
        local_model("org/tiny")
    assert hub.fetched() == {x for x in WANTED if not x.startswith("m-")}
