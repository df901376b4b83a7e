"""The command line on CUDA devices, as a user types it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import emulated
from tests.commands.run import command, figures
from tests.commands.run import environment as usual_environment
from tests.training.chats import make_chat_model, make_chats
from tests.training.ranks import run_args

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(emulated.missing() is not None, reason=str(emulated.missing())),
]
FP32 = "precision=fp32"


def environment(folder: Path, **settings: object) -> dict[str, str]:
    """Return the environment of a process with devices, which report to a file in `folder`."""
    usual = usual_environment()
    environ = emulated.environment(problems=folder / "problems", **settings)
    return {**usual, **environ, "PYTHONPATH": f"{environ['PYTHONPATH']}:{usual['PYTHONPATH']}"}


def run(
    folder: Path, *typed: str, code: int = 0, **settings: object
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(*typed), cwd=folder, env=environment(folder, **settings),
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert not (folder / "problems").exists(), (folder / "problems").read_text()
    return done


def train(folder: Path, name: str, device: str, *more: str, ranks: int = 2, code: int = 0) -> str:
    args = [FP32, f"train.run_dir={folder / name}", f"launch.device={device}", *more]
    return run(folder, "train", *run_args(folder, ranks, "train.steps=8", *args), code=code).stdout


def assert_close(result: Path, expected: Path) -> None:
    ours, theirs = (
        sorted((step, loss or 0.0, val_loss or 0.0) for step, loss, val_loss in figures(each))
        for each in (result, expected)
    )
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize("more", [
    ["strategy=full_shard", "checkpoint.mode=async", "checkpoint.every=2"],
    ["strategy=shard_optimizer", "strategy.owner_map=balanced"],
    ["strategy=shard_grad_op", "activation_checkpointing=full", "accumulation=last",
     "train.micro_batch_size=2"],
    ["model.lora.rank=4", "optimizer.max_grad_norm=1"],
    ["train.context_parallel=2", "activation_checkpointing=full", "train.self_check=auto"],
    ["strategy.offload=all", "checkpoint.every=2"],
    ["engine=fsdp2"],
    ["engine=ddp", "strategy=no_shard"],
], ids=lambda more: more[0])  # fmt: skip
def test_a_run_has_the_losses_of_cpu_ranks(tmp_path: Path, more: list[str]) -> None:
    for device in ("cuda", "cpu"):
        train(tmp_path, device, device, *more)
    assert_close(tmp_path / "cuda", tmp_path / "cpu")


def test_a_run_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    train(tmp_path, "cuda", "cuda", "train.steps=4")
    train(tmp_path, "cuda", "cuda", ranks=1)
    train(tmp_path, "cpu", "cpu")
    assert_close(tmp_path / "cuda", tmp_path / "cpu")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_is_evaluated_and_sampled(tmp_path: Path, ranks: int) -> None:
    more = ["strategy.offload=states,params"] if ranks == 1 else []
    train(tmp_path, "run", "cuda", *more, ranks=ranks)
    sampled = run(tmp_path, "sample", "run", "--prompt", "line", "--tokens", "4", "--greedy")
    assert sampled.stdout.startswith("line")
    evaluated = run(tmp_path, "evaluate", "run", "data.val_fraction=0.1", "--json")
    assert json.loads(evaluated.stdout)["loss"] > 0


@pytest.mark.parametrize("packing", ["false", "true"])
def test_a_fine_tune_on_chats_has_the_losses_of_cpu_ranks(tmp_path: Path, packing: str) -> None:
    make_chat_model(tmp_path / "model", "llama")
    make_chats(tmp_path / "chat.jsonl")
    for device in ("cuda", "cpu"):
        run(
            tmp_path, "train", "model=hf", "model.path=model", "data=chat", "data.path=chat.jsonl",
            f"data.packing={packing}", "train.seq_len=64", "train.global_batch_size=6",
            "train.steps=6", "train.sample_tokens=8", f"train.run_dir={device}", FP32,
            "launch.nproc_per_node=2", f"launch.device={device}", "data.val_fraction=0.1",
        )  # fmt: skip
    assert_close(tmp_path / "cuda", tmp_path / "cpu")


def test_torchrun_starts_ranks_on_devices(tmp_path: Path) -> None:
    for device in ("cuda", "cpu"):
        args = [FP32, f"launch.device={device}", f"train.run_dir={device}", "train.steps=6"]
        typed = [each for each in run_args(tmp_path, 2, *args) if "nproc_per_node" not in each]
        start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        done = subprocess.run(
            [*start, "-m", "fsdpctl", "train", "launch=env", *typed], cwd=tmp_path,
            env=environment(tmp_path), capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "problems").exists(), (tmp_path / "problems").read_text()
    assert_close(tmp_path / "cuda", tmp_path / "cpu")
    (start,) = json.loads((tmp_path / "cuda/environment.json").read_text())["starts"]
    allocator = "expandable_segments:True"  # launch.allocator's default, under any launcher
    assert start["variables"]["PYTORCH_ALLOC_CONF"] == allocator


def test_a_strategy_is_chosen(tmp_path: Path) -> None:
    train(tmp_path, "cuda", "cuda", "strategy=auto", "prefetch=auto")
    train(tmp_path, "cpu", "cpu")
    assert_close(tmp_path / "cuda", tmp_path / "cpu")


def test_a_device_without_room_is_answered_with_advice(tmp_path: Path) -> None:
    wide = ["model.hidden_size=256", "model.intermediate_size=1024", "train.seq_len=256"]
    args = [FP32, "launch.device=cuda", "train.steps=3", "train.run_dir=run", *wide]
    done = run(tmp_path, "train", *run_args(tmp_path, 1, *args), code=1, memory_mb=24)
    assert "out of memory" in done.stderr
    assert "to fit  no settings found with which the run fits" in done.stderr
    assert "train.micro_batch_size" not in done.stderr


def test_variants_are_compared(tmp_path: Path) -> None:
    args = run_args(tmp_path, 2, FP32, "launch.device=cuda")
    args = [each for each in args if not each.startswith(("train.run_dir", "checkpoint."))]
    varied = ["strategy=full_shard,no_shard", "--steps", "4", "--json"]
    rows = json.loads(run(tmp_path, "compare", *args, *varied).stdout)
    losses = [row["final_loss"] for row in rows]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
