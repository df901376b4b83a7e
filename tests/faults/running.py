"""The runs of a campaign: processes on this machine, or a launcher on each of two hosts."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.commands.run import TINY, environment, make_text
from tests.faults.cases import SAVES_EVERY, STEPS, VALIDATES_EVERY
from tests.launch.hosts import Hosts

HANG_SECONDS, CUT_SECONDS = 12, 130  # of launch.hang_timeout
_ORPHAN_SECONDS = 15
_RANKS = "launch.nproc_per_node=2"
SETTINGS = [
    *(each for each in TINY if "eval_every" not in each and "checkpoint.every" not in each),
    f"train.steps={STEPS}", f"checkpoint.every={SAVES_EVERY}", "train.log_every=10",
    f"train.eval_every={VALIDATES_EVERY}",
]  # fmt: skip
_PLANTS = "import os\nif os.environ.keys() & {'RANK', 'SLURM_PROCID'}: import tests.faults.plant\n"


def fault_env(folder: Path, fault: dict[str, Any]) -> dict[str, str]:
    """Return an environment that plants a fault in one of the ranks."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_PLANTS)
    env = environment()
    return {**env, "PYTHONPATH": f"{site}:{env['PYTHONPATH']}", "FSDPCTL_FAULT": json.dumps(fault)}


class Run:
    """One run directory, and the processes that work on it."""

    def __init__(
        self, folder: Path, args: Sequence[str] = (), *, fault: dict[str, Any] | None = None,
        hosts: Hosts | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.run_dir, self.hosts = folder, folder / "disk" / "run", hosts
        self.run_dir.parent.mkdir(exist_ok=True)
        seconds = CUT_SECONDS if hosts else HANG_SECONDS
        self._settings = [
            *SETTINGS, f"data.path={make_text(folder)}", f"train.run_dir={self.run_dir}",
            f"launch.hang_timeout={seconds}", f"launch.timeout={5 * seconds}", *args,
        ]  # fmt: skip
        self._env = environment() if fault is None else fault_env(folder, fault)

    def start(self, *more: str) -> list["subprocess.Popen[str]"]:
        """Start the command on each host; its output is appended to a file."""
        if self.hosts is None:
            ranks = [] if any("nproc_per_node" in each for each in more) else [_RANKS]
            return [self._begin([], [*ranks, *more])]
        node_settings = [f"launch.rdzv_endpoint={self.hosts.addresses[0]}:29500", "launch.nnodes=2"]
        return [
            self._begin(
                ["ip", "netns", "exec", name],
                ["launch.nproc_per_node=1", *node_settings, f"launch.node_rank={host}", *more],
            )
            for host, name in enumerate(self.hosts.names)
        ]

    def _begin(self, before: list[str], more: list[str]) -> "subprocess.Popen[str]":
        with (self.folder / "said.log").open("a") as log:
            return subprocess.Popen(
                [*before, sys.executable, "-m", "fsdpctl", "train", *self._settings, *more],
                cwd=self.folder, env=self._env, text=True, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    @property
    def out(self) -> str:
        """The output of all starts so far."""
        return (self.folder / "said.log").read_text(errors="replace")

    def workers(self) -> list[psutil.Process]:
        """Return all worker processes of this run."""
        results = []
        for each in psutil.process_iter(["cmdline"]):
            line = each.info["cmdline"] or []
            if "fsdpctl.training.worker" in line and str(self.run_dir) in line:
                results.append(each)
        return results

    def end_orphans(self) -> int:
        """Kill the workers that outlive their launchers by some seconds; return how many."""
        deadline = time.monotonic() + _ORPHAN_SECONDS
        while (result := self.workers()) and time.monotonic() < deadline:
            time.sleep(0.2)
        for each in result:
            each.kill()
        return len(result)


def codes_of(processes: list["subprocess.Popen[str]"], seconds: float) -> list[int | None]:
    """Return the exit codes; processes that do not end within `seconds` are killed (None)."""
    deadline, codes = time.monotonic() + seconds, list[int | None]()
    for each in processes:
        try:
            codes.append(each.wait(timeout=max(0.1, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            each.kill()
            codes.append(None)
    return codes
