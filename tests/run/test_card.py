"""The model card of an export: facts of the run, and none of the machine."""

import json

import pytest
import yaml
from huggingface_hub import ModelCard

from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.run.card import model_card
from tests.commands.run import invoke
from tests.hostile import make_checkpoint, reseal

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SNAPSHOT = f"/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/{COMMIT}"
WORDS = {
    "model": "hf", "model.path": SNAPSHOT, "model.init": "auto", "model.lora.rank": "8",
    "data": "chat", "data.path": "hf://org/chats:0.7,/home/me/secret dir/a|b.jsonl:0.3",
    "data.template": "/home/me/t.jinja", "data.new_tokens": '["hf_S3CR3TS3CR3T", "/home/me/x"]',
    "checkpoint.remote": "s3://bucket/runs", "train.run_dir": "/home/me/run", "train.epochs": "3",
    "launch.rdzv_endpoint": "node17:29500",
}  # fmt: skip
TYPED = ["--recipe", "/home/me/own.yaml", "model.path=Qwen/Qwen3-0.6B", "model.lora.rank=8",
         "data.path=../secret dir/a|b.jsonl", "train.run_dir=/home/me/run",
         "train.epochs=3"]  # fmt: skip


@pytest.fixture
def reader(tmp_path):
    folder = make_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000001")
    reseal(folder, lambda content: content["config"].update(WORDS))
    lines = [
        {"step": 1, "samples": 8, "loss": 2.5, "tokens": 100}, {"step": 1, "val_loss": 2.25},
        {"step": 2, "samples": 16, "loss": 2.0, "tokens": 900},
    ]  # fmt: skip
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    (tmp_path / "run" / "overrides.txt").write_text("".join(f"{x}\n" for x in TYPED))
    return CheckpointReader(folder)


def test_the_front_matter_has_names_of_the_hub_and_no_license(reader):
    front = yaml.safe_load(model_card(reader, is_peft=True).decode().split("---")[1])
    assert front == {
        "library_name": "peft", "base_model": "Qwen/Qwen3-0.6B", "datasets": ["org/chats"],
        "tags": ["fsdpctl", "lora"],
    }  # fmt: skip
    assert ModelCard(model_card(reader).decode()).data.to_dict()["library_name"] == "transformers"


def test_the_card_has_what_the_run_had_until_its_checkpoint(reader):
    text = model_card(reader).decode()
    for row in (
        "| tokens | 100 |", "| training loss | 2.5000 at step 1 |", "    train.epochs=3",
        "| validation loss | 2.2500 at step 1 |", "| base model | Qwen/Qwen3-0.6B@0123456 |",
        "| data | hf://org/chats:0.7,a&#124;b.jsonl:0.3 |",
    ):  # fmt: skip
        assert row in text
    assert "    fsdpctl train --recipe own.yaml model.path=Qwen/Qwen3-0.6B@0123456" in text


def test_the_card_names_no_directory_of_the_machine_and_no_secret(reader, tmp_path):
    text = model_card(reader).decode()
    for each in ("/home", "secret dir", "S3CR3T", "bucket", "node17", "run_dir", str(tmp_path)):
        assert each not in text


def test_a_card_is_replaced_unless_it_was_edited(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["consolidate-checkpoint", str(make_checkpoint(tmp_path / "step-00000001")), "out"]
    assert invoke(*command)[0] == 0
    assert invoke(*command, "--overwrite")[0] == 0
    card = tmp_path / "out" / "README.md"
    card.write_text(card.read_text().replace("# Trained", "# My model, trained"))
    assert invoke("verify-checkpoint", "out")[0] == 0
    code, out = invoke(*command, "--overwrite")
    assert (code, out) == (
        2, f"{tmp_path / 'out'}: not an earlier export; --overwrite replaces only exports"
    )  # fmt: skip
    assert "My model" in card.read_text()
