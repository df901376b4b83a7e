"""A run from the first command to the exported model, with every way to interrupt it."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM

from fsdpctl.commands.train import _show_failure
from fsdpctl.config.compose import compose_config
from fsdpctl.config.launch import LaunchConfig
from fsdpctl.config.serialize import config_to_yaml
from fsdpctl.io.run_files import RUN_CONFIG
from fsdpctl.launch.outcome import Failure, RoundOutcome
from fsdpctl.launch.run_summary import _strategy
from fsdpctl.resolve.launchers import LaunchRole
from fsdpctl.resolve.machine import assign_ranks
from fsdpctl.run.environment import read_start_events
from tests.commands.run import command, environment, figures, fsdpctl, run_args
from tests.commands.test_interruptions import ended, has_stepped, start, wait_for

STEPS = 150


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("finished")
    result = fsdpctl("train", *run_args(folder, STEPS), cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder / "run"


def test_a_run_leaves_what_it_promises(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    short = ["train.steps=30", "checkpoint.every=10", "optimizer.lr=1e-2"]
    result = fsdpctl("train", *run_args(tmp_path, STEPS, *short), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    run = tmp_path / "run"
    assert {each.name for each in run.iterdir()} >= {
        "config.yaml", "overrides.txt", "metrics.jsonl", "checkpoints", "logs", "estimate.json",
    }  # fmt: skip
    (held,) = read_start_events(run)
    assert (held.step, held.longest_save_seconds > 0) == (0, True)
    names = sorted(each.name for each in (run / "checkpoints").iterdir())
    assert names == ["latest", "step-00000020", "step-00000030"]
    assert (run / "checkpoints" / "latest").resolve().name == "step-00000030"
    assert not list((run / "logs").glob("rank-*.log"))
    (start,) = json.loads((run / "environment.json").read_text())["starts"]
    assert start["variables"]["OMP_WAIT_POLICY"] == "PASSIVE"  # idle OpenMP threads do not spin
    losses = [line[1] for line in figures(run) if line[1] is not None]
    assert len(losses) == 30
    assert losses[-1] < losses[0] - 1
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    parts = ("compute", "exposed_communication", "data", "optimizer")
    assert all("loss" in line or "val_loss" in line for line in lines)
    for line in (line for line in lines if "loss" in line):
        seconds = [line[f"{part}_seconds"] for part in parts]
        assert all(each >= 0 for each in seconds)
        assert sum(seconds) == pytest.approx(line["seconds"], abs=1e-5)


@pytest.mark.slow
def test_the_same_command_again_reports_that_the_run_is_finished(finished):
    before = (finished / "metrics.jsonl").read_bytes()
    result = fsdpctl("train", *run_args(finished.parent, STEPS), cwd=finished.parent)
    assert (result.returncode, "finished at step 150" in result.stdout) == (0, True)
    dry = fsdpctl("train", *run_args(finished.parent, STEPS), "--dry-run", cwd=finished.parent)
    assert ("finished at step 150" in dry.stdout, "it would run" in dry.stdout) == (True, False)
    assert (finished / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_another_length_and_strategy_resume_the_run(finished, tmp_path):
    subprocess.run(["cp", "-r", finished, tmp_path / "run"], check=True)
    changed = [arg for arg in run_args(finished.parent, STEPS) if not arg.startswith("train.steps")]
    result = fsdpctl(
        "train", *changed, "train.steps=160", "strategy=no_shard", "launch.nproc_per_node=3",
        cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "changed train.steps was 150, is 160" in result.stdout
    assert "changed strategy was full_shard, is no_shard" in result.stdout
    assert figures(tmp_path / "run")[-1][0] == 160


@pytest.mark.slow
def test_commands_on_its_checkpoint(finished, tmp_path):
    verified = fsdpctl("verify-checkpoint", str(finished), "--json", cwd=tmp_path)
    assert json.loads(verified.stdout)["verified"] is True
    shown = fsdpctl("inspect-checkpoint", str(finished / "checkpoints"), "--json", cwd=tmp_path)
    assert json.loads(shown.stdout)["progress"]["step"] == STEPS
    sampled = fsdpctl("sample", str(finished), "--prompt", "line 7", "--tokens", "5", cwd=tmp_path)
    assert sampled.stdout.startswith("line 7")
    exported = fsdpctl("consolidate-checkpoint", str(finished), "hf", cwd=tmp_path)
    assert exported.returncode == 0, exported.stderr
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert theirs(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 256)


def workers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def is_living(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two calls
        return False


def signal_it(number: int) -> Callable[[subprocess.Popen[str]], None]:
    return lambda process: os.kill(process.pid, number)


INTERRUPTIONS: dict[str, tuple[Callable[[subprocess.Popen[str]], None], int, str]] = {
    "SIGINT": (signal_it(signal.SIGINT), 130, "saved"),
    "SIGTERM": (signal_it(signal.SIGTERM), 75, "saved"),
    "SIGUSR1": (signal_it(signal.SIGUSR1), 75, "saved"),
    "SIGQUIT": (signal_it(signal.SIGQUIT), 75, "saved"),
    "SIGQUIT of a worker": (lambda process: workers(process)[1].send_signal(3), 75, "saved"),
    "SIGKILL of a worker": (lambda process: workers(process)[1].kill(), 1, "killed by signal 9"),
    "SIGKILL of the launcher": (signal_it(signal.SIGKILL), -9, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", INTERRUPTIONS)
def test_an_interrupted_run_resumes_bit_for_bit(finished, tmp_path, how):
    interrupt, code, message = INTERRUPTIONS[how]
    process = start(tmp_path, STEPS)
    wait_for(has_stepped(tmp_path))
    family = workers(process)
    interrupt(process)
    actual, text = ended(process)
    assert (actual, message in text) == (code, True), text
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not [each for each in alive if is_living(each)]
    result = fsdpctl("train", *run_args(tmp_path, STEPS), cwd=tmp_path)
    assert (result.returncode, "resumes at step" in result.stdout) == (0, True), result.stderr
    assert figures(tmp_path / "run") == figures(finished)


@pytest.mark.slow
def test_the_tokenizer_is_kept_with_the_run(tmp_path):
    vocabulary = {"?": 0, "and": 1, "is": 2, "line": 3}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    (tmp_path / "mine").mkdir()
    tokenizer.save(str(tmp_path / "mine" / "tokenizer.json"))
    typed = [arg for arg in run_args(tmp_path, STEPS) if not arg.startswith("train.steps")]
    result = fsdpctl("train", *typed, "train.steps=3", "data.tokenizer=mine", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (tmp_path / "mine" / "tokenizer.json").unlink()
    exported = fsdpctl("consolidate-checkpoint", "run", "hf", cwd=tmp_path)
    assert exported.returncode == 0, exported.stderr
    assert Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json")).get_vocab() == vocabulary
    assert fsdpctl("sample", "run", "--tokens", "3", cwd=tmp_path).returncode == 0


@pytest.mark.slow
def test_resume_never_and_resume_path_start_new_runs(finished, tmp_path):
    subprocess.run(["cp", "-r", finished, tmp_path / "run"], check=True)
    typed = run_args(finished.parent, STEPS)
    again = fsdpctl("train", *typed, "--resume", "never", cwd=tmp_path)
    assert (again.returncode, figures(tmp_path / "run-2")) == (0, figures(finished)), again.stderr
    longer = [arg for arg in typed if not arg.startswith("train.steps")]
    source = str(finished / "checkpoints" / "step-00000125")
    other = ["train.steps=151", "optimizer.lr=1e-4", "precision=bf16"]
    forked = fsdpctl("train", *longer, *other, "--resume", source, cwd=tmp_path)
    assert forked.returncode == 0, forked.stderr
    assert "resumes at step 125 of" in forked.stdout
    assert "is 0.0001, which changes the losses" in forked.stdout
    assert "precision.param_dtype was float32, is bfloat16, which changes" in forked.stdout
    assert "changed train.steps was 150, is 151\n" in forked.stdout
    steps = [step for step, loss, _ in figures(tmp_path / "run-3") if loss is not None]
    assert steps == list(range(126, 152))
    twice = fsdpctl("train", *typed, "model.num_layers=1", "--resume", source, cwd=tmp_path)
    assert twice.returncode == 2
    remaining = [arg for arg in typed if not arg.startswith("model.num_layers")]
    smaller = fsdpctl("train", *remaining, "model.num_layers=1", "--resume", source, cwd=tmp_path)
    assert (smaller.returncode, "model.num_layers 2 -> 1" in smaller.stderr) == (2, True)


HERE = LaunchRole(LaunchConfig())
LACKING = ["model.vocab_size=256", "cluster.memory=0.75", "train.seq_len=2048"]
REFUSES = """
import os
def refuse(pid): raise OSError(38, "Function not implemented")
os.pidfd_open = refuse
"""


@pytest.mark.slow
def test_a_run_says_that_its_ranks_cannot_share_memory(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(REFUSES)
    environ = environment()
    result = subprocess.run(
        command("train", *run_args(tmp_path, 1, f"train.run_dir={tmp_path / 'run'}")),
        env=environ | {"PYTHONPATH": f"{tmp_path}:{environ['PYTHONPATH']}"}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert "ranks do not share memory: not supported on " in result.stdout + result.stderr


@pytest.mark.parametrize(("args", "text"), [
    ([], "full_shard (ZeRO-3, FSDP), sharing memory"),
    (["strategy=shard_optimizer"], "shard_optimizer (ZeRO-1), sharing memory"),
    (["launch.share_memory=false"], "full_shard (ZeRO-3, FSDP)"),
    (["launch.nnodes=2"], "full_shard (ZeRO-3, FSDP)"),
    (["engine=fsdp2"], "full_shard (ZeRO-3, FSDP)"),
])  # fmt: skip
def test_the_first_lines_say_whether_ranks_share_memory(args: list[str], text: str) -> None:
    config = compose_config(["launch.device=cpu", "launch.nproc_per_node=2", *args]).config
    assert _strategy(config, 2 * config.launch.nnodes) == text


@pytest.mark.parametrize(("exit_code", "message"), [
    (1, "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …"),
    pytest.param(-9, "", marks=pytest.mark.slow),
])  # fmt: skip
def test_the_panel_says_what_was_needed_and_what_would_fit(tmp_path, capsys, exit_code, message):
    config = assign_ranks(compose_config(LACKING).config, HERE)
    (tmp_path / RUN_CONFIG).write_text(config_to_yaml(config))
    failure = Failure(1, "here", exit_code, message, 0)
    _show_failure(failure, tmp_path, RoundOutcome((failure,), None))
    text = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "estimated" in text
    assert "768.0 MiB available per rank" in text
    assert "peak " in text
    assert "to fit" in text
    assert "activation_checkpointing=" in text or "train.micro_batch_size=" in text
    fits = assign_ranks(compose_config([LACKING[0], "train.seq_len=16"]).config, HERE)
    (tmp_path / RUN_CONFIG).write_text(config_to_yaml(fits))
    killed = Failure(1, "here", -9, "", 0)
    _show_failure(killed, tmp_path, RoundOutcome((killed,), None))
    assert "to fit" not in capsys.readouterr().err  # it was killed for another reason
