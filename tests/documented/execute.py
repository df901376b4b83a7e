"""Execute a documented command line, with smaller sizes."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.commands.run import environment
from tests.documented.lines import ROOT, Line
from tests.launch.test_nodes import free_endpoint

# Parts of lines that only their program's parser checks (`check.py`), and the reason.
ONLY_CHECKED = {
    "make": "builds an environment, or runs everything",
    "pip": "installs from a network", "uv": "installs from a network",
    "uvx": "installs from a network: tests/test_wheel.py", "pipx": "installs from a network",
    "docker": "needs Docker: tests/test_wheel.py runs the steps of the file",
    "sbatch": "needs Slurm: tests/launch/test_slurm.py runs the script",
    "srun": "needs Slurm: tests/launch/test_slurm.py",
    "kubectl": "needs a cluster: tests/examples runs the command in the file",
    "sky": "needs a cluster: tests/examples runs the command in the file",
    "model.attention=flash3": "needs a GPU and its kernels",
    "log.trackers=wandb,mlflow": "needs accounts; tests/training/test_trackers.py",
    "--install-completion": "changes files of the user's shell",
    "python -m": "a benchmark or a campaign, up to hours",
}  # fmt: skip
PACKAGES = {"log.trackers=tensorboard": "tensorboard", "gguf": "gguf"}  # in extras
# Sizes in a line and their smaller replacements.
_SMALLER = {
    "train.tokens=5e6": "train.tokens=1e4",
    "train.steps=600": "train.steps=3",
    "model.max_seq_len=131072": "model.max_seq_len=128",
    "train.seq_len=131072": "train.seq_len=128",
    "model.max_seq_len=524288": "model.max_seq_len=256",
    "1234": "2",  # steps of long runs
    "10": "2",
}
_SHORT = {
    "train.steps": "2", "train.final_eval_batches": "1", "train.sample_tokens": "4",
    "train.global_batch_size": "4", "train.seq_len": "32", "launch.nproc_per_node": "2",
}  # fmt: skip
_NARROW = {
    "model.num_layers": "2", "model.hidden_size": "64", "model.intermediate_size": "96",
    "model.num_heads": "4", "model.num_kv_heads": "2", "model.vocab_size": "256",
}  # fmt: skip
_RECIPES = {
    "llama3_8b_512k_8xh100": {"train.context_parallel": "2"},
    **dict.fromkeys((
        "lora_70b_4x24gb", "qlora_70b_2x24gb", "qlora_30b_a3b_1x24gb", "qlora_gpt_oss_120b_8x24gb",
        "llama3_8b_1x24gb",
    ), {"train.micro_batch_size": "1"}),
}  # fmt: skip
_COMPLETE = ("train", "status", "list", "--help", "--version", "--install-completion")
_SECONDS = 600


def reason_to_only_check(line: Line) -> str | None:
    """Return why a line isn't executed; None if it is."""
    args = line.args
    if args[0] == "fsdpctl" and len(args) == 2 and args[1] not in _COMPLETE:
        return "the name of a command, in a sentence"
    if args[1:] == ["compare", "--simulate"]:
        return "a command and its option, in a sentence: a simulation needs a cluster"
    for name, why in ONLY_CHECKED.items():
        if args[: len(name.split())] == name.split() or name in args:
            return why
    return None


def execute(line: Line, folder: Path) -> list["subprocess.CompletedProcess[str]"]:
    """Run a line to its end, on two nodes of this machine if it needs several."""
    args = [_SMALLER.get(arg, arg) for arg in line.args]
    args += shrinking(args)
    if "launch.nnodes=2" not in args:
        return [_finished(_start(args, folder))]
    args = [f"train.run_dir={folder / 'shared'}" if "run_dir=" in each else each for each in args]
    args = [each for each in args if "node_rank=" not in each and "rdzv_endpoint=" not in each]
    args += [f"launch.rdzv_endpoint={free_endpoint()}"]
    nodes = [_start([*args, f"launch.node_rank={node}"], folder) for node in range(2)]
    return [_finished(each) for each in nodes]


def shrinking(args: Sequence[str]) -> list[str]:
    """Return the arguments that make a line take seconds."""
    if "fsdpctl" not in args:
        return ["--steps", "4"] if "docs/examples/conv_net.py" in args else []
    command = args[args.index("fsdpctl") + 1]
    if command == "compare" and "--simulate" not in args:
        added = [] if "--steps" in args else ["--steps", "4"]
        return [*added, *_settings(args, _SHORT, "train.steps")]
    if command != "train" or "--dry-run" in args:
        return []
    more = [each for name, each in _RECIPES.items() if name in args]
    without = "train.steps" if any("train.tokens=" in each for each in args) else ""
    sizes = _SHORT | (_NARROW if "model=llama3_8b" in args else {}) | (more[0] if more else {})
    return _settings(args, sizes, without)


def _settings(args: Sequence[str], sizes: dict[str, str], without: str) -> list[str]:
    set_names = {arg.partition("=")[0] for arg in args} | {without}
    return [f"{name}={text}" for name, text in sizes.items() if name not in set_names]


def _start(args: Sequence[str], folder: Path) -> "subprocess.Popen[str]":
    """Start the program of this checkout; files of the repository are named from its root."""
    programs = {
        "fsdpctl": [sys.executable, "-m", "fsdpctl"], "python": [sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    }  # fmt: skip
    (program, *others) = args
    others = [str(ROOT / each) if (ROOT / each).is_file() else each for each in others]
    return subprocess.Popen(
        [*programs[program], *others], cwd=folder,
        env={**environment(), "XDG_CACHE_HOME": str(folder), "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def _finished(process: "subprocess.Popen[str]") -> "subprocess.CompletedProcess[str]":
    try:
        output, _ = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, output)
