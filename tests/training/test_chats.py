"""Training on conversations: losses of a plain loop, on any number of ranks, packed or not."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from fsdpctl.run.directory import read_config
from tests.commands.run import figures, fsdpctl
from tests.training.chats import make_chat_model, make_chats, open_in_transformers, plain_losses

pytestmark = pytest.mark.slow
STEPS = 8


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def trained(folder: Path, family: str, ranks: int, *more: str, name: str = "run") -> Path:
    """Train in `folder`, which gets a model and chats if it has none; return the run directory."""
    if not (folder / "model").exists():
        make_chat_model(folder / "model", family)
        make_chats(folder / "chat.jsonl")
    typed = {
        "model": "hf", "model.path": "model", "data": "chat", "data.path": "chat.jsonl",
        "train.seq_len": "64", "train.global_batch_size": "7", "train.steps": str(STEPS),
        "optimizer.lr": "1e-3", "lr_scheduler.warmup_steps": "2", "train.sample_tokens": "8",
        "train.run_dir": name, "launch.nproc_per_node": str(ranks), "data.val_fraction": "0.1",
        "checkpoint.every": "4", **dict(arg.split("=", 1) for arg in more),
    }  # fmt: skip
    args = [f"{key}={value}" for key, value in typed.items() if value]
    done = fsdpctl("train", *args, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / name


def losses(run: Path) -> list[float]:
    return [loss for _, loss, _ in figures(run) if loss is not None]


def check_losses(folder: Path, run: Path) -> list[float]:
    expected = plain_losses(open_in_transformers(folder / "model"), read_config(run), STEPS)
    assert losses(run) == pytest.approx(expected, rel=1e-5)
    return expected


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("family", "more"), [
    ("llama", []), ("qwen3", []), ("gemma", []), ("gemma3", []), ("phi3", []), ("gpt2", []),
    ("qwen3", ["data.packing=false"]),
])  # fmt: skip
def test_losses_are_those_of_a_plain_loop(tmp_path, family, ranks, more):
    expected = check_losses(tmp_path, trained(tmp_path, family, ranks, *more))
    assert expected[-1] < expected[0]


@pytest.mark.parametrize(
    ("family", "packs"),
    [
        ("qwen3_moe", True), ("mixtral", True), ("gemma2", True), ("granite", True),
        ("deepseek_v3", True), ("qwen3_next", False), ("gpt_oss", True), ("bloom", True),
        ("falcon_h1", False), ("nemotron_h", False), ("jamba", False),
    ],
)  # fmt: skip
def test_decoders_of_transformers_train_on_chats(tmp_path, family, packs):
    """Families whose layers cannot separate packed documents train without packing."""
    run = trained(tmp_path, family, 2, "model=hf")
    assert read_config(run).data.packing is (None if packs else False)
    check_losses(tmp_path, run)


def test_a_run_resumes_in_its_second_epoch_with_other_ranks(tmp_path):
    constant = ["lr_scheduler=constant", "train.eval_every=5"]
    whole = trained(tmp_path, "llama", 1, "train.steps=", "train.epochs=3", *constant, name="whole")
    total = max(step for step, _, _ in figures(whole))
    left = total // 2
    trained(tmp_path, "llama", 3, f"train.steps={left}", *constant)
    run = trained(tmp_path, "llama", 2, f"train.steps={total}", *constant)
    assert 1 < 3 * left / total < 2
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)
    (ours, theirs) = ([each for _, _, each in figures(r) if each][-1] for r in (run, whole))
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_losses_are_equal_with_recomputation_compilation_and_chunks(tmp_path):
    plain = losses(trained(tmp_path, "qwen3", 2))
    for number, arg in enumerate(
        ("activation_checkpointing=full", "activation_checkpointing=selective",
         "train.loss_chunk_tokens=50", "train.compile=true", "accumulation.steps=2")
    ):  # fmt: skip
        result = losses(trained(tmp_path, "qwen3", 2, arg, name=f"run-{number}"))
        assert result == pytest.approx(plain, rel=1e-5), arg


def test_an_exported_model_stops_at_the_end_of_a_message(tmp_path):
    run = trained(tmp_path, "llama", 2)
    done = fsdpctl("consolidate-checkpoint", str(run), "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ends = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    assert ends[0] == 2  # <|im_end|>
    theirs = open_in_transformers(tmp_path / "out")
    assert theirs.generation_config.eos_token_id == ends


def test_a_chat_renders_messages_as_in_training(tmp_path):
    long = ["train.steps=", "train.epochs=12", "optimizer.lr=1e-2", "data.val_fraction=0"]
    run = trained(tmp_path, "llama", 2, *long)
    options = ["--chat", "--greedy", "--tokens", "30", "--prompt", "dog"]
    done = fsdpctl("sample", str(run), *options, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "dog\n"), done.stderr
    exported = fsdpctl("consolidate-checkpoint", str(run), "out", cwd=tmp_path)
    assert exported.returncode == 0, exported.stderr
    theirs = open_in_transformers(tmp_path / "out")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    messages = [{"role": "user", "content": "dog"}]
    kwargs = {"add_generation_prompt": True, "return_tensors": "pt"}
    prompt = tokenizer.apply_chat_template(messages, **kwargs)
    message = theirs.generate(**prompt, do_sample=False, max_new_tokens=30)[0]
    assert tokenizer.decode(message[prompt["input_ids"].shape[1] :]) == "dog<|im_end|>"
