"""A Slurm cluster of two nodes on this machine, for one test."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.commands.run import environment

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
_CONFIG = """
ClusterName=one; SlurmctldHost={host}(127.0.0.1); SlurmUser=root; SlurmdUser=root
AuthType=auth/munge; AuthInfo=socket={root}/munge.socket; SlurmctldPort={port}
StateSaveLocation={root}/state; SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid; SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log; SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc; TaskPlugin=task/none; JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none; MpiDefault=none; SwitchType=switch/none
SelectType=select/cons_tres; SelectTypeParameters=CR_Core; ReturnToService=2; KillWait=5
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=4
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=4
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
""".replace("; ", "\n")


class Slurm:
    """Starts commands of a Slurm cluster whose two nodes are this machine."""

    def __init__(self, root: Path) -> None:
        self._env = {**environment(), "SLURM_CONF": str(root / "slurm.conf")}

    def start(self, *args: str, cwd: Path) -> "subprocess.Popen[str]":
        """Start a command, with standard output and error in one pipe."""
        return subprocess.Popen(
            args, cwd=cwd, env=self._env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, *args: str, cwd: Path) -> str:
        """Run a command, which must succeed, and return its output."""
        started = self.start(*args, cwd=cwd)
        out, _ = started.communicate(timeout=60)
        assert started.returncode == 0, out
        return out.strip()


@contextmanager
def slurm(root: Path) -> Iterator[Slurm]:
    """Start munge, the controller and two node daemons; skip the test if one is not installed."""
    if os.geteuid() != 0 or not all(map(shutil.which, _PROGRAMS)):
        pytest.skip("needs root, and Slurm and munge to be installed")
    root.chmod(0o755)  # munge requires it
    (root / "state").mkdir()
    key = root / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    port = 16000 + os.getpid() % 4000
    host = socket.gethostname().split(".")[0]
    text = _CONFIG.format(root=root, host=host, port=port, first=port + 1, second=port + 2)
    (root / "slurm.conf").write_text(text)
    munge = {name: str(root / f"munge.{name}") for name in ("socket", "pid", "log", "seed")}
    env = {**os.environ, "SLURM_CONF": str(root / "slurm.conf")}
    begin = [
        ["munged", "--force", f"--key-file={key}", f"--socket={munge['socket']}",
         f"--pid-file={munge['pid']}", f"--log-file={munge['log']}",
         f"--seed-file={munge['seed']}"],
        ["slurmctld", "-c"], ["slurmd", "-N", "n1"], ["slurmd", "-N", "n2"],
    ]  # fmt: skip
    try:
        for args in begin:
            subprocess.run(args, env=env, check=True, capture_output=True, timeout=30)
        _wait_for_nodes(env)
        yield Slurm(root)
    finally:
        for file in root.glob("*.pid"):
            subprocess.run(["kill", file.read_text().strip()], check=False, capture_output=True)


def _wait_for_nodes(env: dict[str, str]) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        args = ["sinfo", "--noheader", "--format=%T %D"]
        out = subprocess.run(args, env=env, capture_output=True, text=True, check=False).stdout
        if out.split() == ["idle", "2"]:
            return
        time.sleep(0.3)
    raise AssertionError("Slurm's nodes did not come up")
