"""The charts of a comparison, as PNG files."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpctl.tools.compare.row import OK, Row, names_of
from fsdpctl.tools.drawing import (
    BLUE,
    GREEN,
    GREY,
    LIGHT,
    MEMORY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    annotate,
    bar_axes,
    bars,
    mark,
    new_figure,
    outer_legend,
    stacked,
)

_LINES = 4.6  # inches, the height of a chart of lines
_DPI = 144
_COLORS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, "black")  # of lines
_TIMES = {
    "compute_seconds": ("forward and backward", BLUE),
    "exposed_communication_seconds": ("exposed communication", RED),
    "optimizer_seconds": ("optimizer", ORANGE),
    "data_seconds": ("data", GREY),
}
_SCALES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_COUNTS = ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands"))
_RANKS = ("launch.nnodes", "launch.nproc_per_node")
_Point = tuple[int, float, bool]  # ranks, tokens per second per rank, whether it fits
_Drawing = tuple[Any, str, str]  # figure, name of the file, caption


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture and its caption."""

    path: Path
    caption: str


def draw_charts(rows: Sequence[Row], title: str, best: Row | None, folder: Path) -> list[Chart]:
    """Draw every chart for which `rows` have values; the row `best` is highlighted."""
    ran = [row for row in rows if row.status == OK]
    drawings = (
        _throughput([row for row in ran if row.tokens_per_second], title, best),
        _time([row for row in ran if row.compute_seconds is not None], title),
        _memory([row for row in rows if row.estimated_breakdown], title),
        _largest([row for row in rows if row.largest is not None], title),
        _scaling(rows, title),
    )
    charts = []
    for figure, name, caption in filter(None, drawings):
        figure.savefig(folder / name, dpi=_DPI)
        charts.append(Chart(folder / name, caption))
    return charts


def _throughput(rows: Sequence[Row], title: str, best: Row | None) -> _Drawing | None:
    if not rows:
        return None
    figure, axes = _bar_axes("Throughput", title, rows)
    colors = [BLUE if row is best else SKY for row in rows]
    bars(axes, [row.speed for row in rows], color=colors)
    for place, row in enumerate(rows):
        low, high = row.spread
        if high > low:
            axes.errorbar(
                row.speed, place, xerr=[[row.speed - low], [high - row.speed]],
                color="black", capsize=4, linewidth=1.2,
            )  # fmt: skip
        annotate(axes, 0, place, f"{row.speed:,.0f}", "white" if row is best else "black")
    axes.set_xlim(0, max(row.spread[1] for row in rows) * 1.04)
    axes.set_xlabel("tokens per second, all ranks")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    several = any(len(row.rounds) > 1 for row in rows)
    spread = "slowest and fastest round" if several else "quartiles of its steps"
    whiskers = f"; whiskers: {spread}" if any(row.tokens_per_second_spread for row in rows) else ""
    dark = " The dark bar is recommended." if best in rows else ""
    caption = f"Tokens per second of all ranks, median of the rounds{whiskers}.{dark}"
    return figure, "throughput.png", caption


def _time(rows: Sequence[Row], title: str) -> _Drawing | None:
    if not rows:
        return None
    figure, axes = _bar_axes("Time of a step", title, rows)
    seconds = {name: [getattr(row, name) or 0.0 for row in rows] for name in _TIMES}
    longest = max(sum(parts) for parts in zip(*seconds.values(), strict=True))
    scale, unit = (1, "seconds") if longest >= 1 else (1e3, "milliseconds")
    stacks = [
        (*_TIMES[name], [each * scale for each in values]) for name, values in seconds.items()
    ]
    ends = stacked(axes, stacks)
    for place, total in enumerate(ends):
        annotate(axes, total, place, f"{total:,.3g}" if total < 100 else f"{total:,.0f}")
    axes.set_xlim(0, max(ends) * 1.12)
    axes.set_xlabel(f"{unit} per step, on rank 0")
    outer_legend(axes)
    return figure, "time.png", "Parts of a step on rank 0, medians of the rounds."


def _memory(rows: Sequence[Row], title: str) -> _Drawing | None:
    if not rows:
        return None
    figure, axes = _bar_axes("Peak memory of the rank with the highest peak", title, rows)
    parts = [row.estimated_breakdown or {} for row in rows]
    scale, unit = _scaled(max(sum(each.values()) for each in parts), _SCALES)
    stacks = [
        (
            f"{name.replace('_', ' ')} (estimated)",
            MEMORY.get(name, LIGHT),
            [each.get(name, 0) / scale for each in parts],
        )
        for name in dict.fromkeys(name for each in parts for name in each)
    ]
    longest = max(stacked(axes, stacks))
    _mark(axes, rows, "peak_engine_bytes", scale, "engine, measured", "black")
    _mark(axes, rows, "peak_tensor_bytes", scale, "all tensors, measured", RED)
    limit = min((row.memory_bytes / scale for row in rows if row.memory_bytes), default=None)
    axes.set_xlim(0, longest * 1.06)
    if limit is not None and limit < 1.6 * longest:
        axes.set_xlim(0, max(longest, limit) * 1.06)
        axes.axvline(limit, color="black", linestyle="--", linewidth=1, label="available to a rank")
    axes.set_xlabel(f"{unit} per rank")
    outer_legend(axes)
    caption = (
        "Memory of a rank at its peak, by the estimate; marks show measured peaks. Parts that the "
        "engine owns are shown at the engine's own peak."
    )
    return figure, "memory.png", caption


def _largest(rows: Sequence[Row], title: str) -> _Drawing | None:
    if not rows:
        return None
    several = len({row.engine for row in rows}) > 1
    names = [f"{row.strategy} ({row.engine})" if several else row.strategy for row in rows]
    figure, axes = bar_axes("Largest model that fits, by the estimate", title, names, "strategy")
    sizes = [row.largest for row in rows if row.largest]
    scale, unit = _scaled(max(each.num_params for each in sizes), _COUNTS)
    counts = [each.num_params / scale for each in sizes]
    bars(axes, counts, color=GREEN)
    for place, (each, count) in enumerate(zip(sizes, counts, strict=True)):
        annotate(axes, count, place, f"{count:,.1f} ({each.num_layers:,} blocks)")
    axes.set_xlim(0, max(counts) * 1.28)
    axes.set_xlabel(f"{unit} of parameters")
    caption = (
        "The same model with as many blocks as fit, on the same number of ranks, with the other "
        "settings of the first variant of each strategy. Above 256 blocks, the number is "
        "approximate."
    )
    return figure, "largest.png", caption


def _scaling(rows: Sequence[Row], title: str) -> _Drawing | None:
    curves: dict[str, list[_Point]] = defaultdict(list)
    for row in rows:
        if row.tokens_per_second and row.world_size:
            others = [text for name, text in row.varied.items() if name not in _RANKS]
            point = row.world_size, row.tokens_per_second / row.world_size, row.status == OK
            curves[" · ".join(others) or row.strategy].append(point)
    if all(len(points) < 2 for points in curves.values()):
        return None
    figure, axes = new_figure("Throughput per rank", title, _LINES)
    for number, (name, points) in enumerate(curves.items()):
        color = _COLORS[number % len(_COLORS)]
        sizes, speeds, fits = zip(*sorted(points), strict=True)
        axes.plot(sizes, speeds, color=color, label=name)
        faces = [color if each else "white" for each in fits]
        axes.scatter(sizes, speeds, edgecolors=color, c=faces, zorder=3)
    ticks = sorted({size for points in curves.values() for size, _, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{size:,}" for size in ticks])
    axes.minorticks_off()
    highest = max(speed for points in curves.values() for _, speed, _ in points)
    axes.set_ylim(0, highest * 1.08)
    axes.set_xlabel("ranks")
    axes.set_ylabel("tokens per second per rank")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(visible=True, color="#e6e6e6")
    outer_legend(axes)
    caption = (
        "Tokens per second per rank over the number of ranks: a level line is perfect scaling. "
        "Hollow points do not fit."
    )
    return figure, "scaling.png", caption


def _bar_axes(heading: str, title: str, rows: Sequence[Row]) -> tuple[Any, Any]:
    """Return a figure and axes with a bar for each row."""
    labels = [" · ".join(row.varied.values()) or row.strategy for row in rows]
    return bar_axes(heading, title, labels, " · ".join(names_of(rows)))


def _mark(axes: Any, rows: Sequence[Row], name: str, scale: float, label: str, color: str) -> None:
    """Mark the measured value of each row, if known."""
    known = [(value / scale, at) for at, row in enumerate(rows) if (value := getattr(row, name))]
    if known:
        mark(axes, known, label, color)


def _scaled(most: float, scales: Sequence[tuple[float, str]]) -> tuple[float, str]:
    return next((each for each in scales if most >= each[0]), scales[-1])
