"""The files of a comparison: JSON, CSV, charts, and a self-contained page."""

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from struct import unpack

from jinja2 import Environment, StrictUndefined

from fsdpctl.tools.compare.about import ComparisonInfo
from fsdpctl.tools.compare.charts import Chart, draw_charts
from fsdpctl.tools.compare.recommendation import Recommendation, failures, losses, recommend
from fsdpctl.tools.compare.row import OK, Row
from fsdpctl.tools.compare.table import as_csv, columns

JSON, CSV, PAGE, ABOUT = "compare.json", "compare.csv", "compare.html", "about.json"
_TEMPLATE = Path(__file__).with_name("page.html.j2")
_WIDTH_AT, _SCALE = 16, 1.5  # offset of the width in a PNG; its pixels per pixel of the page


def as_json(rows: Sequence[Row]) -> str:
    """Return the list of rows that `compare --json` prints."""
    return json.dumps([row.to_dict() for row in rows], indent=2)


def write_report(rows: Sequence[Row], about: ComparisonInfo, folder: Path) -> None:
    """Write all results into an existing directory.

    Raises:
        OSError: If a file cannot be written.
    """
    found = recommend(rows)
    content = {**asdict(about), "recommendation": found.text}
    charts = draw_charts(rows, about.title, found.best, folder)
    for name, text in (
        (JSON, as_json(rows) + "\n"),
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
