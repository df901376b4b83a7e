"""The conditions of a comparison: subject, machine, versions, command."""

import os
import platform
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from fsdpctl import __version__
from fsdpctl.config.schema import KEYS, Config
from fsdpctl.tools.compare.row import Row

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ComparisonInfo:
    """The conditions under which the rows of a report were obtained."""

    what: str  # "measured" or "predicted"
    subject: str  # the model, in a few words
    where: str  # the machine, in a few words
    how: str  # number and length of the runs
    command: str
    versions: dict[str, str]
    machine: dict[str, str]
    created_at: str  # UTC
    is_complete: bool = True  # False: stopped early

    @property
    def title(self) -> str:
        """The subject and the machine."""
        return f"{self.subject}, {self.what} on {self.where}"


def describe(
    configs: Sequence[Config],
    rows: Sequence[Row],
    *,
    is_predicted: bool,
    how: str,
    command: str,
    is_complete: bool,
) -> ComparisonInfo:
    """Describe a comparison on this machine, or its prediction for a cluster.

    Args:
        configs: The variants' configurations.
        rows: The variants' results.
        is_predicted: Whether nothing ran.
        how: Number and length of the runs.
        command: The command line.
        is_complete: Whether all variants were compared.
    """
    import torch

    first = configs[0]
    versions = {"fsdpctl": __version__, "torch": torch.__version__}
    if is_predicted:
        names = dict.fromkeys(each.cluster.profile or each.cluster.name for each in configs)
        device = ", ".join(names)
        specs = asdict(first.cluster).items()
        machine = {n: str(v) for n, v in specs if v is not None and n != "name"}
    else:
        processor = _processor()
        device = f"the CPU ({processor})"
        versions["python"] = platform.python_version()
        machine = {
            "processor": f"{processor}, {os.cpu_count()} cores",
            "memory": f"{psutil.virtual_memory().total / _GIB:.1f} GiB",
            "system": platform.platform(terse=True),
        }
        if torch.cuda.is_available() and first.launch.device != "cpu":
            device = torch.cuda.get_device_name()
            versions["CUDA"] = str(torch.version.cuda)
            versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
            machine["devices"] = f"{torch.cuda.device_count()} x {device}"
    models = ", ".join(dict.fromkeys(each.model.name for each in configs))
    sizes = {row.world_size for row in rows if row.world_size}
    ranks = f"{_range(sizes)} {'rank' if sizes == {1} else 'ranks'} of " if sizes else ""
    return ComparisonInfo(
        what="predicted" if is_predicted else "measured",
        subject=f"{models}, {_range({each.train.seq_len for each in configs})} tokens per sample",
        where=ranks + device,
        how=how,
        command=command,
        versions=versions,
        machine=machine,
        created_at=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        is_complete=is_complete,
    )


def _range(values: set[int]) -> str:
    least, most = min(values), max(values)
    return f"{least}" if least == most else f"{least} to {most}"


def _processor() -> str:
    """Return the processor's name, on Linux that in /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def command_of(words: Sequence[str], options: Sequence[str]) -> str:
    """Return the command line without settings that are executed, which may be confidential."""
    shown = []
    for word in words:
        key = KEYS.get(word.partition("=")[0])
        if key is None or not key.is_executed:
            shown.append(word)
    return shlex.join(["fsdpctl", "compare", *shown, *options])
