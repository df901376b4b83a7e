"""Uploads of exports to a Hub on this machine by the command line, and their model cards."""

from pathlib import Path

import pytest

from tests.commands.run import invoke
from tests.hostile import make_checkpoint
from tests.hub_server import TOKEN, Hub, serving

# The library passes the file of a single part to httpx in a way that httpx deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
TARGET = "hf://me/tiny"


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path / "step-00000001")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub._commit_api.is_xet_available", lambda: False)
    with serving(Hub(), tmp_path, monkeypatch) as served:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield served


def upload(checkpoint: Path, *more: str, target: str = TARGET) -> tuple[int, str]:
    return invoke("consolidate-checkpoint", str(checkpoint), target, *more)


def local(name: str = "tiny") -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in Path(name).iterdir()}


def test_an_export_is_verified_and_then_committed_to_a_private_repository(hub, checkpoint):
    code, out = upload(checkpoint)
    assert code == 0, out
    assert out.splitlines()[-1] == f"{hub.url}/me/tiny: uploaded, private"
    assert hub.models["me/tiny"] == {".gitattributes": b"", **local()}
    assert hub.public == set()
    assert len(hub.stored) == 1  # the weights were uploaded as large files
    posts = [each.split()[1] for each in hub.requests if each.startswith("POST")]
    assert posts.count("/api/models/me/tiny/commit/main") == 1
    assert invoke("verify-checkpoint", "tiny")[0] == 0


def test_only_an_export_that_lost_nothing_is_uploaded(hub, checkpoint, monkeypatch):
    from fsdpctl.checkpoint.findings import Finding

    lost = [Finding("experts", "3 of 4", is_lost=True)]
    monkeypatch.setattr("fsdpctl.checkpoint.verify_export.verify_export", lambda *a, **k: lost)
    code, out = upload(checkpoint)
    assert (code, "1 of 1 findings" in out) == (3, True)
    assert "me/tiny" not in hub.models


def test_an_existing_repository_is_replaced_only_on_request(hub, checkpoint):
    hub.models["me/tiny"] = {".gitattributes": b"", "model-00001-of-00002.safetensors": b"old"}
    code, out = upload(checkpoint)
    assert (code, out) == (2, f"{TARGET}: already exists; pass --overwrite to replace its files")
    assert not Path("tiny").exists()
    assert upload(checkpoint, "--overwrite")[0] == 0
    assert hub.models["me/tiny"] == {".gitattributes": b"", **local()}
    hub.public.add("me/tiny")
    code, out = upload(checkpoint, "--overwrite")
    assert (code, "public; fsdpctl uploads to private" in out) == (2, True)


@pytest.mark.parametrize(("target", "expected"), [
    ("hf://tiny", "expected a directory or hf://ORG/NAME"),
    ("hf://me/a/b", "expected a directory or hf://ORG/NAME"),
    ("hf://me/../x", "expected a directory or hf://ORG/NAME"),
    ("hf:/me/tiny", "expected a directory or hf://ORG/NAME"),
    ("s3://me/tiny", "expected a directory or hf://ORG/NAME"),
    ("hf://mee/tiny", "the token is of me, team, not of mee; did you mean me?"),
    ("hf://me/tiny.gguf", "only valid with --format hf or peft"),
])  # fmt: skip
def test_a_wrong_target_is_one_line_before_any_work(hub, checkpoint, target, expected):
    hub.user["orgs"] = [{"name": "team"}]
    code, out = upload(checkpoint, target=target)
    assert (code, out) == (2, f"{target}: {expected}")
    assert not any(Path.cwd().iterdir())


def test_a_token_that_lacks_or_may_only_read_is_named_before_any_work(hub, checkpoint, monkeypatch):
    hub.user["auth"] = {"accessToken": {"role": "read"}}
    assert "may only read" in upload(checkpoint)[1]
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert "answers 401; check HF_TOKEN" in upload(checkpoint)[1]
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    code, out = upload(checkpoint)
    assert (code, out) == (2, f"{TARGET}: no token; set HF_TOKEN, or run `hf auth login`")
    assert not any(Path.cwd().iterdir())


@pytest.mark.parametrize("drops", ["PUT /lfs/", "POST /api/models/me/tiny/commit"])
def test_after_a_broken_connection_nothing_is_committed_and_the_export_stays(
    hub, checkpoint, drops, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    hub.drops = drops
    code, out = upload(checkpoint)
    assert (code, "broke (" in out) == (2, True), out
    assert "S3CR3T" not in out
    assert hub.models["me/tiny"] == {".gitattributes": b""}
    hub.drops = ""
    assert invoke("verify-checkpoint", "tiny")[0] == 0
    assert upload(checkpoint, "--overwrite")[0] == 0
    assert hub.models["me/tiny"] == {".gitattributes": b"", **local()}
