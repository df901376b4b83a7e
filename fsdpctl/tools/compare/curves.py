"""How speed goes with the number of ranks, as a PNG file."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fsdpctl.tools.compare.charts import COLORS, Chart, saved
from fsdpctl.tools.compare.row import OK, Row

_RANKS = ("launch.nnodes", "launch.nproc_per_node")
_SIZE = (9.5, 4.6)  # inches
_Point = tuple[int, float, bool]  # ranks, speed of each, whether it fits


def draw_scaling(rows: Sequence[Row], title: str, folder: Path) -> Iterator[Chart]:
    """A line for each variant that was tried on several numbers of ranks."""
    curves = _curves(rows)
    if all(len(points) < 2 for points in curves.values()):
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    figure.suptitle("Throughput of a rank", x=0.01, ha="left", fontsize=13, fontweight="bold")
    axes.set_title(title, loc="left", fontsize=9, color="#444444", x=0)
    for number, (name, points) in enumerate(curves.items()):
        _draw(axes, name, points, COLORS[number % len(COLORS)])
    sizes = sorted({size for points in curves.values() for size, _, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ranks")
    axes.set_ylabel("tokens per second of each rank")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(visible=True, color="#e6e6e6")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9)
    caption = (
        "Tokens per second of each rank over the number of ranks: level is perfect scaling. "
        "Hollow points do not fit."
    )
    yield saved(figure, folder / "scaling.png", caption)


def _curves(rows: Sequence[Row]) -> dict[str, list[_Point]]:
    """By what is varied besides the ranks; each in the order of these."""
    curves: dict[str, list[_Point]] = defaultdict(list)
    for row in rows:
        if row.tokens_per_second and row.world_size:
            others = [text for name, text in row.varied.items() if name not in _RANKS]
            point = row.world_size, row.tokens_per_second / row.world_size, row.status == OK
            curves[" · ".join(others) or row.strategy].append(point)
    return {name: sorted(points) for name, points in curves.items()}


def _draw(axes: Any, name: str, points: Sequence[_Point], color: str) -> None:
    axes.plot([size for size, _, _ in points], [speed for _, speed, _ in points], color=color,
              label=name)  # fmt: skip
    for size, speed, fits in points:
        face = color if fits else "white"
        axes.scatter([size], [speed], color=color, facecolor=face, zorder=3)
