"""The files of a comparison: JSON, CSV, charts, and a page that needs nothing else."""

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from struct import unpack

from jinja2 import Environment, StrictUndefined

from fsdpctl.tools.compare.about import About
from fsdpctl.tools.compare.charts import Chart, draw_charts
from fsdpctl.tools.compare.curves import draw_scaling
from fsdpctl.tools.compare.judge import Recommendation, failures, losses, recommend
from fsdpctl.tools.compare.row import OK, Row
from fsdpctl.tools.compare.table import as_csv, columns

JSON, CSV, PAGE, ABOUT = "compare.json", "compare.csv", "compare.html", "about.json"
_TEMPLATE = Path(__file__).with_name("page.html.j2")
_WIDTH_AT, _SHARPER = 16, 1.5  # of a PNG: where its width stands; pixels of it for one of the page


def as_json(rows: Sequence[Row]) -> str:
    """The list of rows that `compare --json` prints."""
    return json.dumps([row.to_dict() for row in rows], indent=2)


def write_report(rows: Sequence[Row], about: About, folder: Path) -> None:
    """Write everything that is known of `rows` into an existing directory.

    Raises:
        OSError: something cannot be written.
    """
    said = recommend(rows)
    (folder / JSON).write_text(as_json(rows) + "\n", encoding="utf-8")
    (folder / CSV).write_text(as_csv(rows), encoding="utf-8")
    told = {**asdict(about), "recommendation": said.text}
    (folder / ABOUT).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    charts = draw_charts(rows, about.title, said.best, folder)
    charts += draw_scaling(rows, about.title, folder)
    (folder / PAGE).write_text(page(rows, about, said, charts), encoding="utf-8")


def page(rows: Sequence[Row], about: About, said: Recommendation, charts: Sequence[Chart]) -> str:
    """One HTML file with everything in it; it loads nothing and runs nothing."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    lines = [{"number": n, "kind": _kind(row, said)} for n, row in enumerate(rows)]
    return template.render(
        about=about,
        recommendation=said.text,
        columns=columns(rows),
        lines=lines,
        notes=[*failures(rows), *losses(rows)],
        charts=[_embedded(chart) for chart in charts],
        runs=[
            (row.label, ", ".join(each.run_dir for each in row.rounds if each.run_dir))
            for row in rows
            if any(each.run_dir for each in row.rounds)
        ],
    )


def _kind(row: Row, said: Recommendation) -> str:
    """The class of its line in the table."""
    if row is said.best:
        return "best-row"
    return "" if row.status == OK else "failed"


def _embedded(chart: Chart) -> dict[str, str | int]:
    content = chart.path.read_bytes()
    (width,) = unpack(">I", content[_WIDTH_AT : _WIDTH_AT + 4])
    return {
        "source": f"data:image/png;base64,{base64.b64encode(content).decode()}",
        "width": round(width / _SHARPER),
        "caption": chart.caption,
    }
