"""Import of models and export of checkpoints by the command line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from fsdpctl.checkpoint.tensor_file import open_tensor_file
from tests.commands.run import figures, fsdpctl, make_text
from tests.models.decoders import save_decoder
from tests.models.families import save_model

RUN = ["train.seq_len=16", "train.global_batch_size=8", "train.steps=6", "checkpoint.every=2",
       "checkpoint.keep_last=3", "train.eval_every=0", "data=text"]  # fmt: skip


def train(folder: Path, name: str, *args: str, code: int = 0) -> str:
    """Train, and return standard output and error."""
    fixed = [*RUN, f"data.path={make_text(folder)}", f"train.run_dir={name}"]
    typed = {arg.partition("=")[0]: arg for arg in [*fixed, *args]}
    result = fsdpctl("train", *typed.values(), cwd=folder)
    assert result.returncode == code, result.stderr
    return result.stdout + result.stderr


def give_tokenizer(folder: Path, text: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(text)], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a pretrained model, its tokenizer, and a run that continued its training."""
    folder = tmp_path_factory.mktemp("trained")
    save_model("qwen2", folder / "in")
    give_tokenizer(folder / "in", make_text(folder))
    out = train(folder, "run", "model=hf", "model.path=in")
    assert f"model   {folder / 'in'}, qwen2, " in out
    assert ", pretrained" in out
    return folder


@pytest.mark.slow
def test_a_pretrained_model_is_trained_and_exported_with_its_tokenizer(trained, tmp_path):
    result = fsdpctl("consolidate-checkpoint", str(trained / "run"), "out", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    before = load_file(trained / "in" / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("line 7 of")["input_ids"]
    assert ids == AutoTokenizer.from_pretrained(trained / "in")("line 7 of")["input_ids"]
    assert model(torch.tensor([ids])).logits.shape == (1, len(ids), 320)
    sampled = fsdpctl("sample", str(trained / "run"), "--tokens", "3", cwd=tmp_path)
    assert sampled.returncode == 0, sampled.stderr
    exported = fsdpctl(
        "consolidate-checkpoint", str(trained / "run"), "m.gguf", "--format", "gguf", cwd=tmp_path
    )
    assert (exported.returncode, "no tokenizer" in exported.stdout) == (0, False), exported.stderr
    assert len(GGUFReader(tmp_path / "m.gguf").tensors) == len(after)


@pytest.mark.slow
def test_exports_of_runs_have_lost_nothing_of_their_base(trained, tmp_path):
    base = trained / "moe"
    save_decoder("qwen3_moe", base)
    give_tokenizer(base, make_text(trained))
    config = AutoConfig.from_pretrained(base, vocab_size=320, initializer_range=0.1)
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    lora = ("model.lora.rank=8", "model.lora.targets=[all_linear,experts]", "optimizer.lr=1e-2")
    train(trained, "experts", "model=hf", f"model.path={base}", *lora)
    for run, of, *options in (("run", "in"), ("experts", "moe", "--merge"),
                              ("experts", "moe", "--format", "peft")):  # fmt: skip
        out = str(tmp_path / "-".join((run, *options)))
        result = fsdpctl("consolidate-checkpoint", run, out, *options, cwd=trained)
        assert result.returncode == 0, result.stderr
        result = fsdpctl("verify-checkpoint", out, "--base", of, "--json", cwd=trained)
        content = json.loads(result.stdout)
        assert (result.returncode, content["verified"]) == (0, True), result.stderr
        lines = {x["subject"]: x["figures"] for x in content["findings"] if x["figures"]}
        assert all(lines[kind]["changed"] for kind in {"attention", "experts"} & lines.keys())


@pytest.mark.slow
def test_a_run_starts_from_the_weights_of_another(trained):
    out = train(trained, "second", "model=hf", "model.path=run", "optimizer.lr=1e-9")
    newest = trained / "run" / "checkpoints" / "step-00000006"
    assert f"weights from {newest}" in out
    assert f"({trained / 'run' / 'assets'})" in out
    random = train(trained, "third", "model=hf", "model.path=run", "model.init=random")
    assert ", random weights" in random
    first, second = (figures(trained / name)[0][1] for name in ("second", "third"))
    assert first is not None
    assert second is not None
    assert first < second


@pytest.mark.slow
def test_shard_and_consolidate_keep_every_byte(trained, tmp_path):
    args = ["shard-checkpoint", str(trained / "in"), "sharded", "--world-size", "3"]
    assert fsdpctl(*args, cwd=tmp_path).returncode == 0
    again = fsdpctl(*args, cwd=tmp_path)
    assert (again.returncode, "already exists" in again.stderr) == (2, True)
    assert fsdpctl("verify-checkpoint", "sharded", cwd=tmp_path).returncode == 0
    shown = json.loads(fsdpctl("inspect-checkpoint", "sharded", "--json", cwd=tmp_path).stdout)
    spans = shown["tensors"]["model/lm_head.weight"]["spans"]
    assert [each["file"] for each in spans] == [f"rank-0000{n}.safetensors" for n in range(3)]
    assert fsdpctl("consolidate-checkpoint", "sharded", "out", cwd=tmp_path).returncode == 0
    folders = trained / "in", tmp_path / "out"
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run, which a test may damage."""
    shutil.copytree(trained / "run", tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def resume(run: Path, trained: Path, code: int = 0) -> str:
    """Resume the run for two more steps."""
    args = ["model=hf", f"model.path={trained / 'in'}", f"data.path={trained / 'words.txt'}"]
    return train(run.parent, "run", *args, "train.steps=8", code=code)


def corrupt(file: Path, key: str) -> None:
    opened = open_tensor_file(file)
    content = bytearray(file.read_bytes())
    content[opened.data_start + opened.entries[key].start] ^= 1
    file.write_bytes(content)


@pytest.mark.slow
def test_a_run_with_a_corrupted_newest_checkpoint_names_it_and_the_next_step(run, trained):
    newest = run / "checkpoints" / "step-00000006"
    corrupt(newest / "rank-00001.safetensors", "model/lm_head.weight")
    metrics = (run / "metrics.jsonl").read_bytes()
    out = resume(run, trained, code=4)
    assert (run / "metrics.jsonl").read_bytes() == metrics
    assert "rank-00001.safetensors: corrupted: the checksum of model/lm_head.weight" in out
    before = run / "checkpoints" / "step-00000004"
    assert "--resume run/checkpoints/step-00000004 starts a new run" in out
    assert before.is_dir()
    for command in (["verify-checkpoint", "run"], ["consolidate-checkpoint", "run", "out"]):
        result = fsdpctl(*command, cwd=run.parent)
        assert result.returncode == 4
        assert "rank-00001.safetensors: corrupted" in result.stderr
    assert not (run.parent / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_both_ways_to_save_give_the_same_checkpoints(trained, mode):
    args = ["model=hf", "model.path=in", f"checkpoint.mode={mode}", "checkpoint.keep_every=4"]
    train(trained, mode, *args, "checkpoint.keep_last=1")
    names = sorted(each.name for each in (trained / mode / "checkpoints").iterdir())
    assert names == ["latest", "step-00000004", "step-00000006"]
    ours, theirs = (
        load_file(trained / name / "checkpoints" / "latest" / "rank-00000.safetensors")
        for name in (mode, "run")
    )
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
