"""The files of a comparison, with its conditions: JSON, CSV, charts, and a self-contained page."""

import base64
import json
import os
import platform
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from struct import unpack

import psutil
from jinja2 import Environment, StrictUndefined

from fsdpctl import __version__
from fsdpctl.config.schema import KEYS, Config
from fsdpctl.tools.compare.charts import Chart, draw_charts
from fsdpctl.tools.compare.recommendation import Recommendation, failures, losses, recommend
from fsdpctl.tools.compare.row import OK, Row, as_csv, columns

JSON, CSV, PAGE, ABOUT = "compare.json", "compare.csv", "compare.html", "about.json"
_GIB = 1 << 30
_TEMPLATE = Path(__file__).with_name("page.html.j2")
_WIDTH_AT, _SCALE = 16, 1.5  # offset of the width in a PNG; its pixels per pixel of the page


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
    how: str,
    command: str,
    *,
    is_predicted: bool,
    is_complete: bool,
) -> ComparisonInfo:
    """Describe a comparison on this machine, or its prediction for a cluster."""
    import torch

    first = configs[0]
    versions = {"fsdpctl": __version__, "torch": torch.__version__}
    if is_predicted:
        names = dict.fromkeys(each.cluster.name for each in configs)
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


def rows_as_json(rows: Sequence[Row]) -> str:
    """Return the list of rows that `compare --json` prints."""
    return json.dumps([asdict(row) for row in rows], indent=2)


def write_report(rows: Sequence[Row], about: ComparisonInfo, folder: Path) -> None:
    """Write all results into an existing directory.

    Raises:
        OSError: If a file cannot be written.
    """
    found = recommend(rows)
    content = {**asdict(about), "recommendation": found.text}
    charts = draw_charts(rows, about.title, found.best, folder)
    for name, text in (
        (JSON, rows_as_json(rows) + "\n"),
        (CSV, as_csv(rows)),
        (ABOUT, json.dumps(content, indent=2) + "\n"),
        (PAGE, _page(rows, about, found, charts)),
    ):
        (folder / name).write_text(text, encoding="utf-8")


def _page(
    rows: Sequence[Row], about: ComparisonInfo, found: Recommendation, charts: Sequence[Chart]
) -> str:
    """Return one HTML file with everything in it, which loads nothing and runs nothing."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    kinds = {OK: ""}
    return template.render(
        about=about,
        recommendation=found.text,
        columns=columns(rows),
        kinds=[
            "best-row" if row is found.best else kinds.get(row.status, "failed") for row in rows
        ],
        notes=[*failures(rows), *losses(rows)],
        charts=[_embedded(chart) for chart in charts],
        runs=[
            (row.label, ", ".join(each.run_dir for each in row.rounds if each.run_dir))
            for row in rows
            if any(each.run_dir for each in row.rounds)
        ],
    )


def _embedded(chart: Chart) -> dict[str, str | int]:
    content = chart.path.read_bytes()
    (width,) = unpack(">I", content[_WIDTH_AT : _WIDTH_AT + 4])
    return {
        "source": f"data:image/png;base64,{base64.b64encode(content).decode()}",
        "width": round(width / _SCALE),
        "caption": chart.caption,
    }
