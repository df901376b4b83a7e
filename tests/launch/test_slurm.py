"""Runs under a real Slurm on one machine: both ways to start, preemption and requeueing."""

import sys
from pathlib import Path

import pytest

from fsdpctl.run.metrics import last_step
from tests.commands.run import figures, make_text
from tests.commands.test_interruptions import wait_for
from tests.launch.slurm import Slurm, slurm
from tests.launch.test_nodes import SMALL, alone, free_endpoint

pytestmark = pytest.mark.slow
_SCRIPT = Path(__file__).parent.parent.parent / "examples" / "slurm" / "train.sbatch"
_SECONDS = 120


def slurm_args(folder: Path, *more: str) -> list[str]:
    """Return the arguments of a run; its endpoint is set since node names do not resolve here."""
    return [
        "train", "launch=slurm", *SMALL, f"data.path={make_text(folder)}",
        f"train.run_dir={folder / 'run'}", f"launch.rdzv_endpoint={free_endpoint()}", *more,
    ]  # fmt: skip


@pytest.mark.parametrize(("tasks", "more"), [
    (["--nodes=2", "--ntasks-per-node=1"], ["launch.nproc_per_node=1"]),
    (["--nodes=1", "--ntasks-per-node=2"], []),
], ids=["a task per node", "a task per rank"])  # fmt: skip
def test_both_launchers_train_normally(tmp_path, tasks, more):
    (tmp_path / "slurm").mkdir()
    with slurm(tmp_path / "slurm") as cluster:
        command = [sys.executable, "-m", "fsdpctl", *slurm_args(tmp_path, "train.steps=30", *more)]
        started = cluster.start("srun", "--overcommit", *tasks, *command, cwd=tmp_path)
        out, _ = started.communicate(timeout=_SECONDS)
    assert started.returncode == 0, out
    assert figures(tmp_path / "run") == alone(tmp_path, 2, "train.steps=30")


def _submit(cluster: Slurm, folder: Path) -> str:
    """Submit the job of the example, changed for this machine: no GPUs, few cores."""
    text = _SCRIPT.read_text()
    for option in ("--gpus-per-node=8", "--cpus-per-task=64", "--time=24:00:00"):
        assert f"#SBATCH {option}\n" in text
        text = text.replace(f"#SBATCH {option}\n", "")
    assert " fsdpctl train launch=slurm" in text
    text = text.replace(" fsdpctl train", f" {sys.executable} -m fsdpctl train")
    (folder / "job.sbatch").write_text(text)
    result = slurm_args(folder, "train.steps=100000", "launch.nproc_per_node=1")[2:]
    return cluster.run("sbatch", "--parsable", "job.sbatch", *result, cwd=folder)


def test_a_preempted_job_saves_and_resumes(tmp_path):
    (tmp_path / "slurm").mkdir()
    run = tmp_path / "run"
    with slurm(tmp_path / "slurm") as cluster:
        job = _submit(cluster, tmp_path)
        wait_for(lambda: last_step(run / "metrics.jsonl") > 3)
        cluster.run("scancel", "--signal=USR1", job, cwd=tmp_path)
        show = ["scontrol", "show", "job", job]
        wait_for(lambda: "Restarts=1" in cluster.run(*show, cwd=tmp_path))
        log = tmp_path / f"slurm-{job}.log"
        assert "saved" in log.read_text()
        saved = last_step(run / "metrics.jsonl")
        wait_for(lambda: "JobState=PENDING" in cluster.run(*show, cwd=tmp_path))
        cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now", cwd=tmp_path)
        wait_for(lambda: last_step(run / "metrics.jsonl") > saved + 3)
        cluster.run("scancel", job, cwd=tmp_path)
        wait_for(lambda: "JobState=CANCELLED" in cluster.run(*show, cwd=tmp_path))
        assert f"goes on from step {saved}" in log.read_text() or "resumes" in log.read_text()
        steps = [step for step, loss, _ in figures(run) if loss is not None]
    assert steps == sorted(set(steps))  # none twice, none lost
    assert steps == list(range(1, len(steps) + 1))
