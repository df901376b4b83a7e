"""A run reads its base in full while it trains, and saves nothing if the base has changed."""

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdpctl.checkpoint.base import OnBytes
from fsdpctl.checkpoint.folders import complete_checkpoints
from fsdpctl.checkpoint.manifest import BaseInfo
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.comm.collectives import ObjectExchange
from fsdpctl.errors import CheckpointError
from fsdpctl.io.run_files import CHECKPOINTS
from fsdpctl.training.callbacks import checkpoints
from tests.checkpoint.test_killed_saves import at, make_saver
from tests.checkpoint.test_round_trip import trained
from tests.commands.run import invoke
from tests.models.families import _SIZES
from tests.training.ranks import train
from tests.training.test_lora import words

EMBEDDING = "model.embed_tokens.weight"  # 2.2 MiB, of which samples are read


def test_a_byte_that_no_start_reads_is_found_before_the_first_save(tmp_path: Path) -> None:
    """Of a run that resumes, and of one that starts from its checkpoint."""
    base, run = tmp_path / "base", tmp_path / "run"
    config = LlamaConfig(**_SIZES | {"vocab_size": 12000})
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    once = words(tmp_path, 1, "train.steps=1")
    train(world_size=1, typed=once, plants={}, result=str(tmp_path / "first"))
    (first,) = complete_checkpoints(run / CHECKPOINTS)
    assert invoke("verify-checkpoint", str(first))[0] == 0
    weights = load_file(base / "model.safetensors")
    weights[EMBEDDING].view(-1)[100_000] += 1
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    assert invoke("sample", str(first), "--tokens", "1", "--prompt", "a")[0] == 0
    code, said = invoke("verify-checkpoint", str(first))
    assert (code, f"base model {base} has changed" in said) == (4, True), said
    shutil.copytree(first, tmp_path / "copy")
    other = f"train.run_dir={tmp_path / 'other'}", f"model.path={tmp_path / 'copy'}"
    for more in (), other:
        typed = words(tmp_path, 1, *more)
        train(world_size=1, typed=typed, plants={}, result=str(tmp_path / "end"))
        error = (tmp_path / "end.error").read_text()
        assert error.startswith("4 ")
        assert f"base model {base} has changed" in error
    assert complete_checkpoints(run / CHECKPOINTS) == [first]
    assert not complete_checkpoints(tmp_path / "other" / CHECKPOINTS)


class _Slow:
    """A base whose checksum takes half a second."""

    info, is_named, error = BaseInfo("base", "", "0"), True, ""

    def verified(self, ranks: ObjectExchange, on_bytes: OnBytes) -> BaseInfo:
        time.sleep(0.5)
        if self.error:
            raise CheckpointError(self.error)
        return BaseInfo("base", "1", "0")


@pytest.mark.parametrize("error", ["", "base model base has changed"])
def test_a_save_waits_for_the_checksum_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    monkeypatch.setattr(checkpoints, "_TOLD_SECONDS", 0.1)
    monkeypatch.setattr(_Slow, "error", error)
    model, optimizer = trained("full_shard", steps=1)
    slow: Any = _Slow()
    saver, run = make_saver(tmp_path, "async", bases=[slow]), at(model, optimizer, 2)
    saver.begin(at(model, optimizer, 1))
    saver.save(run)
    if error:
        with pytest.raises(CheckpointError, match=error):
            saver.finish(run)
    else:
        saver.finish(run)
    found = complete_checkpoints(tmp_path / CHECKPOINTS)
    assert len(found) == (not error)
    for folder in found:
        assert CheckpointReader(folder).manifest.base == BaseInfo("base", "1", "0")
    journal: Any = saver._journal
    said = [each.args[0] for each in journal.remark.call_args_list]
    assert said == ["step 2: waiting for the checksum of base model base"]
