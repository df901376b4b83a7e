"""The results of a comparison: their order, what losses say, and the files: JSON and a picture."""

import json
import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fsdpctl.commands.compare.row import Row, names_of
from fsdpctl.commands.drawing import BLUE, SKY, bar_axes, bars
from fsdpctl.config.schema import Config
from fsdpctl.io.units import figure as short
from fsdpctl.resolve.open import decides_losses

JSON, PICTURE = "compare.json", "compare.png"
_DPI = 144
BY = ("time", "gpu-hours", "cost", "memory")  # what variants are compared by
_SPEED = "tokens_per_second", "Throughput", "tokens per second, all ranks"
_DRAWN = {  # by what variants are compared by: of a row, heading and unit of its chart
    "time": ("hours", "Time of the run", "hours"),
    "gpu-hours": ("gpu_hours", "GPU time of the run", "GPU hours"),
    "cost": ("cost", "Cost of the run", "cost at cluster.price"),
}
_ROUNDING = 1e-5  # relative, of a loss: what another order of additions changes in fp32


def ordered(rows: Sequence[Row], by: str = "time") -> list[Row]:
    """Return the rows, the best by `by` first; those without results are last."""
    return sorted(rows, key=lambda row: _amount(row, by))


def _amount(row: Row, by: str) -> float:
    """Return what is compared, the less the better."""
    if not row.speed:
        return float("inf")
    amounts = {
        "time": row.hours or 1 / row.speed,
        "gpu-hours": row.gpu_hours or (row.world_size or 1) / row.speed,
        "cost": row.cost or float("inf"),
        "memory": row.memory or float("inf"),
    }
    return amounts[by]


def losses(rows: Sequence[Row]) -> Iterator[str]:
    """Describe whether losses are equal where they should be, and which ones are not."""
    known = [row for row in rows if row.final_loss is not None]
    groups = dict[tuple[tuple[str, str], ...], list[Row]]()  # that train the same
    for row in known:
        decisive = tuple(pair for pair in row.varied.items() if decides_losses(pair[0]))
        groups.setdefault(decisive, []).append(row)
    lines = [line for group in groups.values() for line in _odd(group)]
    if not lines and len(known) > 1:
        limit = "" if len(groups) == 1 else " among variants with the same training settings"
        yield f"all losses are equal{limit}"
    yield from lines


def _odd(group: Sequence[Row]) -> Iterator[str]:
    usual = Counter(row.final_loss or 0.0 for row in group).most_common(1)[0][0]
    for row in group:
        if off := (row.final_loss or 0.0) - usual:
            size = "more than rounding" if abs(off) > _ROUNDING * abs(usual) else "rounding"
            yield f"{row.label}: loss differs by {size}, {off:+.3g} from {usual:.6f}"


def title_of(configs: Sequence[Config], rows: Sequence[Row], *, is_predicted: bool) -> str:
    """Name the models of a comparison, and this machine or the clusters it is predicted for."""
    device = f"the CPU ({platform.machine()})"
    if is_predicted:
        device = ", ".join(dict.fromkeys(each.cluster.name for each in configs))
    elif torch.cuda.is_available() and configs[0].launch.device != "cpu":
        device = torch.cuda.get_device_name()
    models = ", ".join(dict.fromkeys(each.model.title for each in configs))
    ranks = " or ".join(map(str, sorted({row.world_size for row in rows if row.world_size})))
    what = f"{'predicted' if is_predicted else 'measured'} on {ranks or 'ranks'} x {device}"
    return f"{models}, {what}"


def rows_as_json(rows: Sequence[Row]) -> str:
    """Return the list of rows that `compare --json` prints."""
    return json.dumps([asdict(row) for row in rows], indent=2)


def write_report(rows: Sequence[Row], title: str, folder: Path, by: str = BY[0]) -> list[Path]:
    """Write all results, in the order of `rows`, into a directory; return the files' paths."""
    written = [folder / JSON]
    written[0].write_text(rows_as_json(rows) + "\n", encoding="utf-8")
    if ran := [row for row in rows if row.speed]:
        written.append(folder / PICTURE)
        draw_rows(ran, title, by).savefig(written[-1], dpi=_DPI)
    return written


def draw_rows(rows: Sequence[Row], title: str, by: str) -> Any:
    """Return a figure with a bar per variant: what they are compared by, or tokens per second.

    Predicted ones have their error band.
    """
    name, heading, unit = _DRAWN.get(by, _SPEED)
    if any(getattr(row, name) is None for row in rows):
        name, heading, unit = _SPEED
    values = [getattr(row, name) for row in rows]
    edges = [(each.low, each.high) if (each := row.error_band) else (1.0, 1.0) for row in rows]
    if name == _SPEED[0]:  # the slowest takes longest
        edges = [(1 / high, 1 / low) for low, high in edges]
    labels = [" · ".join(row.varied.values()) or row.strategy for row in rows]
    figure, axes = bar_axes(heading, title, labels, " · ".join(names_of(rows)))
    bars(axes, values, color=[BLUE, *[SKY] * (len(rows) - 1)])
    for place, (value, (low, high)) in enumerate(zip(values, edges, strict=True)):
        if high > low:
            axes.errorbar(
                value, place, xerr=[[value * (1 - low)], [value * (high - 1)]],
                color="black", capsize=4, linewidth=1.2,
            )  # fmt: skip
        about = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(short(value), (value * high, place), **about)
    axes.set_xlim(0, 1.12 * max(v * high for v, (_, high) in zip(values, edges, strict=True)))
    axes.set_xlabel(unit)
    axes.xaxis.set_major_formatter("{x:,g}")
    return figure
