"""`fsdpctl evaluate`: the loss of a checkpoint or directory equals that of transformers."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from tests.commands.run import invoke
from tests.hostile import make_checkpoint, make_hugging_face

LENGTH = 32
TEXT = "".join(f"line {n} is {n * n % 97}\n" for n in range(300)).encode()


@pytest.fixture
def places(tmp_path):
    (tmp_path / "words.txt").write_bytes(TEXT)
    checkpoint = make_checkpoint(tmp_path / "step-00000001")
    return {"checkpoint": checkpoint, "hf": make_hugging_face(checkpoint, tmp_path / "hf")}


def expected(folder: Path) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.tensor(list(TEXT))
    losses = []
    for start in range(0, len(tokens) - LENGTH, LENGTH):
        with torch.no_grad():
            logits = model(tokens[None, start : start + LENGTH]).logits[0]
        targets = tokens[start + 1 : start + LENGTH + 1]
        losses.append(F.cross_entropy(logits, targets, reduction="none"))
    return float(torch.cat(losses).double().mean())


@pytest.mark.parametrize("kind", ["checkpoint", "hf"])
def test_the_loss_is_that_of_transformers(places, tmp_path, kind):
    args = ["data=text", f"data.path={tmp_path / 'words.txt'}", "data.val_fraction=0"]
    code, out = invoke("evaluate", str(places[kind]), *args, f"train.seq_len={LENGTH}", "--json")
    assert code == 0, out
    content = json.loads(out)
    assert content["loss"] == pytest.approx(expected(places["hf"]), abs=1e-5)
    assert content["perplexity"] == pytest.approx(math.exp(content["loss"]))
    bits_per_token = content["loss"] / math.log(2)  # a token is a byte
    assert content["bits_per_byte"] == pytest.approx(bits_per_token)
    assert (content["part"], content["tokens"]) == ("all", (len(TEXT) - 1) // LENGTH * LENGTH)


def test_without_words_it_is_the_data_of_the_run(places):
    code, out = invoke("evaluate", str(places["checkpoint"]), "data.val_fraction=0.0001")
    assert (code, "Python's standard library" in out) == (0, True)
    code, out = invoke("evaluate", str(places["checkpoint"] / "none"))
    assert (code, "directory not found" in out) == (2, True)


def test_another_share_of_the_runs_data_is_still_of_its_data(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_bytes(TEXT)
    of_run = make_checkpoint(tmp_path / "step-00000001", "data=text", f"data.path={file}")
    code, out = invoke("evaluate", str(of_run), "data.val_fraction=0.2", f"train.seq_len={LENGTH}")
    assert (code, "mine.txt" in out, "training data" in out) == (0, True, False), out
    code, out = invoke("evaluate", str(of_run), "data.val_fraction=0", f"train.seq_len={LENGTH}")
    assert (code, "training data (no validation data)" in out) == (0, True)
    other = tmp_path / "other.txt"
    other.write_bytes(TEXT * 2)
    code, out = invoke("evaluate", str(of_run), f"data.path={other}", "data=text")
    assert (code, "other.txt" in out) == (0, True)
