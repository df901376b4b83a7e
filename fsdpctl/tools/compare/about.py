"""How a comparison was made: where, with what, by which command."""

import os
import platform
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from fsdpctl import __version__
from fsdpctl.config.schema import KEYS, Config
from fsdpctl.tools.compare.row import Row

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class About:
    """What a report says of how its figures came about."""

    what: str  # "measured" or "foreseen"
    subject: str  # the model, in a few words
    where: str  # the machine, in a few words
    how: str  # how often and how long
    command: str
    versions: dict[str, str]
    machine: dict[str, str]
    made: str  # when, UTC
    is_whole: bool = True  # nobody stopped it

    @property
    def title(self) -> str:
        """What was measured where."""
        return f"{self.subject}, {self.what} on {self.where}"


def about_comparison(
    configs: Sequence[Config],
    rows: Sequence[Row],
    *,
    is_foreseen: bool,
    how: str,
    command: str,
    is_whole: bool,
) -> About:
    """Of a comparison that ran on this machine, or was foreseen for a cluster.

    Args:
        configs: of its variants.
        rows: what came of them.
        is_foreseen: nothing ran.
        how: how often and how long each ran.
        command: what was typed.
        is_whole: whether nobody stopped it.
    """
    where = _cluster(configs) if is_foreseen else _here(configs)
    return About(
        what="foreseen" if is_foreseen else "measured",
        subject=subject_of(configs),
        where=f"{_ranks(rows)} {where.name}",
        how=how,
        command=command,
        versions=where.versions,
        machine=where.machine,
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        is_whole=is_whole,
    )


class _Where(NamedTuple):
    """As in `About`."""

    name: str
    versions: dict[str, str]
    machine: dict[str, str]


def _here(configs: Sequence[Config]) -> _Where:
    import torch

    on_cuda = torch.cuda.is_available() and configs[0].launch.device != "cpu"
    processor = _processor()
    device = torch.cuda.get_device_name() if on_cuda else f"the CPU ({processor})"
    versions = {**_versions(), "python": platform.python_version()}
    machine = {
        "processor": f"{processor}, {os.cpu_count()} cores",
        "memory": f"{psutil.virtual_memory().total / _GIB:.1f} GiB",
        "system": platform.platform(terse=True),
    }
    if on_cuda:
        versions["CUDA"] = str(torch.version.cuda)
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        machine["devices"] = f"{torch.cuda.device_count()} x {device}"
    return _Where(device, versions, machine)


def _cluster(configs: Sequence[Config]) -> _Where:
    clusters = dict.fromkeys(each.cluster.profile or each.cluster.name for each in configs)
    figures = {
        name: str(value)
        for name, value in asdict(configs[0].cluster).items()
        if value is not None and name != "name"
    }
    return _Where(", ".join(clusters), _versions(), figures)


def _versions() -> dict[str, str]:
    import torch

    return {"fsdpctl": __version__, "torch": torch.__version__}


def subject_of(configs: Sequence[Config]) -> str:
    """What is trained, in a few words."""
    models = ", ".join(dict.fromkeys(each.model.name for each in configs))
    lengths = sorted({each.train.seq_len for each in configs})
    between = f"{lengths[0]} to {lengths[-1]}" if len(lengths) > 1 else f"{lengths[0]}"
    return f"{models}, {between} tokens a sample"


def _ranks(rows: Sequence[Row]) -> str:
    sizes = sorted({row.world_size for row in rows if row.world_size})
    if not sizes:
        return ""
    between = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"{sizes[0]}"
    return f"{between} {'rank' if sizes == [1] else 'ranks'} of"


def _processor() -> str:
    """Its name, as Linux has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def command_of(words: Sequence[str], options: Sequence[str]) -> str:
    """What was typed, without what is executed: that is nobody else's business."""
    told = [word for word in words if not _is_executed(word.partition("=")[0])]
    return shlex.join(["fsdpctl", "compare", *told, *options])


def _is_executed(name: str) -> bool:
    return name in KEYS and KEYS[name].is_executed
