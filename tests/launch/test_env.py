"""Ranks that another launcher starts: torchrun, on one machine and as two nodes; and Slurm."""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.commands.run import environment, figures, make_text
from tests.faults.running import fault_env
from tests.launch.hosts import hosts
from tests.launch.test_nodes import SMALL, alone, free_endpoint

pytestmark = pytest.mark.slow
_SECONDS = 180
_HANGS = ["train.steps=99", "launch.hang_timeout=10"]


def _settings(folder: Path, *more: str) -> list[str]:
    return [*SMALL, f"data.path={make_text(folder)}", f"train.run_dir={folder / 'run'}", *more]


def _torchrun(
    folder: Path, options: list[str], *more: str, env: dict[str, str] | None = None
) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options,
         "-m", "fsdpctl", "train", "launch=env", *_settings(folder, *more)],
        cwd=folder, env=env or environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.mark.parametrize("nodes", [1, 2])
def test_torchrun_starts_ranks(tmp_path, nodes):
    host, _, port = free_endpoint().rpartition(":")
    options = [f"--nproc-per-node={2 // nodes}"]
    if nodes == 2:
        options += ["--nnodes=2", f"--master-addr={host}", f"--master-port={port}"]
    for is_again in (False, True):
        started = [
            _torchrun(tmp_path, [*options, f"--node-rank={node}"], "train.steps=30")
            for node in range(nodes)
        ]
        out = "".join(each.communicate(timeout=_SECONDS)[0] for each in started)
        assert [each.returncode for each in started] == [0] * nodes, out
        assert ("finished at step 30; nothing to do" in out) == is_again
        if not is_again:
            result = figures(tmp_path / "run")
            assert out.count("validation loss") == len([1 for *_, val in result if val])
            assert result == alone(tmp_path, 2, "train.steps=30")


def test_an_invalid_setting_ends_all_ranks(tmp_path):
    started = _torchrun(tmp_path, ["--nproc-per-node=2"], "strategy.owner_map=balanced")
    out, _ = started.communicate(timeout=_SECONDS)
    assert started.returncode == 1  # the exit code of torchrun
    assert "fsdpctl: strategy.owner_map=balanced: only" in out
    assert "fsdpctl: rank 0: strategy.owner_map=balanced: only" in out


def _fault(folder: Path, rank: int, kind: str) -> dict[str, str]:
    """Return an environment in which a rank hangs after some steps."""
    return fault_env(folder, {"rank": rank, "call": 4, "kind": kind, "mark": str(folder / "hangs")})


def _check_report(error: str, rank: int, waits: str) -> None:
    """Check that one line names the hung rank, its step, and the collective of those that wait."""
    (line,) = (line for line in error.splitlines() if "no progress" in line)
    assert re.search(rf"hang_timeout=10 s: rank {rank} on \S+: (step \d|last seen)", line), line
    assert re.search(rf"; {waits} in [\w -]+ over (gloo|shared memory), step \d+$", line), line


@pytest.mark.parametrize(
    ("rank", "kind"), [(1, "collective that never comes"), (0, "interpreter held")]
)
def test_a_hang_is_named_under_torchrun(tmp_path, rank, kind):
    started = _torchrun(tmp_path, ["--nproc-per-node=2"], *_HANGS, env=_fault(tmp_path, rank, kind))
    out, _ = started.communicate(timeout=_SECONDS)
    assert started.returncode == 1
    _check_report(out, rank, f"rank {1 - rank} waits")
    stacks = tmp_path / "run" / "logs" / f"rank-{rank:05d}.log"
    assert "tests/faults/plant.py" in stacks.read_text()
    seconds = stacks.stat().st_mtime - (tmp_path / "hangs").stat().st_mtime
    assert 9 < seconds < 10 + 20  # as docs/clusters.md states


@pytest.mark.parametrize(("launcher", "each"), [("slurm", 2), ("env", 1)])
def test_a_hang_is_named_among_hosts_without_a_run_directory(tmp_path, launcher, each):
    """A rank that holds its interpreter is named by its neighbor, or by another host."""
    hangs, env = each, _fault(tmp_path, each, "interpreter held")  # first rank of the second host
    with hosts(2) as machines:
        endpoint = [f"launch.rdzv_endpoint={machines.addresses[0]}:29500"] * (launcher == "slurm")
        started = []
        for rank in range(2 * each):
            ids = {"RANK": rank, "WORLD_SIZE": 2 * each, "LOCAL_RANK": rank % each}
            ids |= {
                "LOCAL_WORLD_SIZE": each, "MASTER_ADDR": machines.addresses[0],
                "MASTER_PORT": 29500,
            }  # fmt: skip
            if launcher == "slurm":
                ids = {"PROCID": rank, "NODEID": rank // each, "LOCALID": rank % each}
                ids |= {
                    "STEP_NUM_TASKS": 2 * each,
                    "STEP_NUM_NODES": 2,
                    "STEP_NODELIST": "h[0-1]",
                }
                ids = {f"SLURM_{name}": n for name, n in ids.items()}
                ids["SLURM_STEP_TASKS_PER_NODE"] = f"{each}(x2)"
            environ = {**env, **{name: str(n) for name, n in ids.items()}}
            typed = ["train", f"launch={launcher}", *_settings(tmp_path, *_HANGS), *endpoint]
            started.append(machines.start(rank // each, *typed, cwd=tmp_path, env=environ))
        deadline = time.monotonic() + _SECONDS
        while not (tmp_path / "hangs").exists():
            assert time.monotonic() < deadline
            time.sleep(0.2)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        out = [one.communicate(timeout=_SECONDS)[0] for one in started[:each]]
        if each == 1:  # its host has no other rank to end it
            started[1].kill()
        out += [one.communicate(timeout=_SECONDS)[0] for one in started[each:]]
    assert 0 not in [one.returncode for one in started]
    others = f"{2 * each - 1} ranks wait, rank \\d" if each > 1 else "rank 0 waits"
    _check_report("".join(out), hangs, others)
