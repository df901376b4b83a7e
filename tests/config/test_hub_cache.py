"""Models by their name on the Hub, in the cache of huggingface_hub, without a network."""

import json
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download

from fsdpctl.config.compose import compose_config
from fsdpctl.config.hub import local_model, model_directory
from fsdpctl.errors import UsageError

SHA = "0123456789abcdef0123456789abcdef01234567"
NAME = "org/tiny-model"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def fill(cache: Path, *names: str, ref: str = "main") -> Path:
    """Write a snapshot with the layout of huggingface_hub: links into blobs."""
    folder = cache / "models--org--tiny-model"
    snapshot = folder / "snapshots" / SHA
    for name in ("blobs", f"snapshots/{SHA}", "refs"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
    (folder / "refs" / ref).write_text(SHA)
    for name in names:
        content = {}
        if name == "config.json":
            content = {"model_type": "llama", "vocab_size": 300, "hidden_size": 64}
            content |= {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        elif name.endswith("index.json"):
            content = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
        (folder / "blobs" / name).write_text(json.dumps(content))
        (snapshot / name).symlink_to(Path("../../blobs") / name)
    return snapshot


def test_a_name_is_the_directory_that_huggingface_hub_finds(cache):
    snapshot = fill(cache, "config.json", "model.safetensors")
    assert local_model(NAME) == str(snapshot)
    assert local_model(NAME) == snapshot_download(NAME, cache_dir=cache, local_files_only=True)
    assert (local_model(f"{NAME}@{SHA}"), model_directory(Path(NAME))) == (str(snapshot), snapshot)


def test_a_model_is_composed_by_its_name(cache):
    snapshot = fill(cache, "config.json", "model.safetensors")
    config = compose_config(["model=hf", f"model.path={NAME}"]).config
    assert (config.model.path, config.model.hidden_size) == (str(snapshot), 64)


def test_the_name_of_a_revision_may_be_a_path(cache):
    snapshot = fill(cache, "config.json", "model.safetensors", ref="refs/pr/1")
    assert local_model(f"{NAME}@refs/pr/1") == str(snapshot)
    with pytest.raises(UsageError, match=r"`hf download org/tiny-model`$"):
        local_model(NAME)
    with pytest.raises(UsageError, match=r"`hf download org/tiny-model --revision v2`$"):
        local_model(f"{NAME}@v2")


@pytest.mark.parametrize(("names", "missing"), [
    (["model.safetensors"], "config.json"), (["config.json"], "model.safetensors"),
    (["config.json", "model.safetensors.index.json", "model-1.safetensors"], "model-2"),
])  # fmt: skip
def test_an_incomplete_model_is_rejected(names, missing, cache):
    fill(cache, *names)
    problem = "is missing in the Hugging Face cache; HF_HUB_OFFLINE is set. On a machine"
    with pytest.raises(UsageError, match=f"{missing}.* {problem}"):
        local_model(NAME)


def test_a_broken_link_is_a_missing_file(cache):
    snapshot = fill(cache, "config.json", "model.safetensors")
    (snapshot / "../../blobs/model.safetensors").resolve().unlink()
    with pytest.raises(UsageError, match=r"model.safetensors is missing"):
        local_model(NAME)
    assert local_model(NAME, "config") == str(snapshot)


def test_directories_take_precedence_and_paths_are_unchanged(cache):
    fill(cache, "config.json", "model.safetensors")
    Path(NAME).mkdir(parents=True)
    assert local_model(NAME) == NAME
    for path in ("a/b/c", "./x", "../y", "/z", "plain", "~/m"):
        assert local_model(path) == path
