"""The charts of a comparison, as PNG files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpctl.tools.compare.row import OK, Row
from fsdpctl.tools.compare.table import names_of

_WIDTH, _BAR, _AROUND = 9.5, 0.42, 1.75  # inches: of all, of a bar, of what is around the bars
_DPI = 144
_THICK = 0.62  # of a bar, of its room
# Okabe and Ito's colours, which people with colour-blindness tell apart.
_BLUE, _SKY, _GREEN, _ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
_RED, _PURPLE, _GREY = "#D55E00", "#CC79A7", "#BBBBBB"
_TIMES = {
    "compute_seconds": ("forward and backward", _BLUE),
    "exposed_communication_seconds": ("waiting for other ranks", _RED),
    "optimizer_seconds": ("optimizer", _ORANGE),
    "data_seconds": ("data", _GREY),
}
_MEMORY = {
    "parameters": _BLUE,
    "optimizer_states": _GREEN,
    "gathered_units": _SKY,
    "gradients": _ORANGE,
    "reduce_buffers": _PURPLE,
}
_REST = "#DDDDDD"
COLORS = (_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _SKY, "black")  # of lines
_SCALES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_COUNTS = ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands"))


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture, and what it shows in words."""

    path: Path
    caption: str


def draw_charts(rows: Sequence[Row], title: str, best: Row | None, folder: Path) -> list[Chart]:
    """Those for which something is known of `rows`; `best` stands out.

    Args:
        rows: measured or foreseen.
        title: what was measured where; it stands below what a chart shows.
        best: of the rows the recommended one.
        folder: an existing directory.
    """
    import matplotlib

    matplotlib.use("agg")
    return [
        chart
        for draw in (_draw_speed, _draw_time, _draw_memory, _draw_largest)
        for chart in draw(rows, title, best, folder)
    ]


def _draw_speed(rows: Sequence[Row], title: str, best: Row | None, folder: Path) -> Iterator[Chart]:
    shown = [row for row in rows if row.status == OK and row.tokens_per_second]
    if not shown:
        return
    figure, axes = _figure("Throughput", title, shown)
    speeds = [row.speed for row in shown]
    colors = [_BLUE if row is best else _SKY for row in shown]
    places = range(len(shown))
    axes.barh(places, speeds, height=_THICK, color=colors)
    for place, row in zip(places, shown, strict=True):
        low, high = row.spread
        if high > low:
            axes.errorbar(
                row.speed, place, xerr=[[row.speed - low], [high - row.speed]],
                color="black", capsize=4, linewidth=1.2,
            )  # fmt: skip
        axes.annotate(
            f"{row.speed:,.0f}", (0, place), xytext=(6, 0), textcoords="offset points", va="center",
            color="white" if row is best else "black",
        )  # fmt: skip
    axes.set_xlim(0, max(row.spread[1] for row in shown) * 1.04)
    axes.set_xlabel("tokens per second, of all ranks")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    several = any(len(row.rounds) > 1 for row in shown)
    spread = "its slowest and fastest round" if several else "the middle half of its steps"
    whiskers = f"; whiskers: {spread}" if any(row.tokens_per_second_spread for row in shown) else ""
    dark = " The dark bar is the recommended one." if best in shown else ""
    caption = f"Tokens per second of all ranks, median of the rounds{whiskers}.{dark}"
    yield saved(figure, folder / "throughput.png", caption)


def _draw_time(rows: Sequence[Row], title: str, best: Row | None, folder: Path) -> Iterator[Chart]:
    shown = [row for row in rows if row.status == OK and row.compute_seconds is not None]
    if not shown:
        return
    figure, axes = _figure("Where the time of a step goes", title, shown)
    seconds = [[getattr(row, name) or 0.0 for row in shown] for name in _TIMES]
    totals = [sum(parts) for parts in zip(*seconds, strict=True)]
    scale, unit = (1, "seconds") if max(totals) >= 1 else (1e3, "milliseconds")
    stacks = [
        (label, color, [value * scale for value in values])
        for values, (label, color) in zip(seconds, _TIMES.values(), strict=True)
    ]
    left = _stacked(axes, stacks)
    for place, total in enumerate(left):
        axes.annotate(
            f"{total:,.3g}" if total < 100 else f"{total:,.0f}", (total, place), xytext=(6, 0),
            textcoords="offset points", va="center",
        )  # fmt: skip
    axes.set_xlim(0, max(left) * 1.12)
    axes.set_xlabel(f"{unit} of a step, on rank 0")
    _legend(axes)
    caption = "What a step consists of on rank 0, medians of the rounds."
    yield saved(figure, folder / "time.png", caption)


def _draw_memory(
    rows: Sequence[Row], title: str, best: Row | None, folder: Path
) -> Iterator[Chart]:
    shown = [row for row in rows if row.estimated_breakdown]
    if not shown:
        return
    figure, axes = _figure("Memory of the fullest rank at its peak", title, shown)
    parts = [row.estimated_breakdown or {} for row in shown]
    totals = [sum(each.values()) for each in parts]
    scale, unit = _scaled(max(totals), _SCALES)
    left = _stacked(
        axes,
        [
            (
                f"{name.replace('_', ' ')} (estimated)",
                _MEMORY.get(name, _REST),
                [each.get(name, 0) / scale for each in parts],
            )
            for name in dict.fromkeys(name for each in parts for name in each)
        ],
    )
    _mark(axes, shown, "peak_allocated_bytes", scale, "engine", "black")
    _mark(axes, shown, "peak_tensor_bytes", scale, "all tensors", _RED)
    limits = [row.memory_bytes / scale for row in shown if row.memory_bytes]
    axes.set_xlim(0, max(left) * 1.06)
    if limits and min(limits) < 1.6 * max(left):
        axes.set_xlim(0, max(max(left), min(limits)) * 1.06)
        axes.axvline(
            min(limits), color="black", linestyle="--", linewidth=1, label="what a rank may use"
        )
    axes.set_xlabel(f"{unit} on a rank")
    _legend(axes)
    caption = (
        "What a rank holds at its peak, by the estimate; the marks are what was measured. What the "
        "engine owns is shown as it is at the engine's own peak."
    )
    yield saved(figure, folder / "memory.png", caption)


def _draw_largest(
    rows: Sequence[Row], title: str, best: Row | None, folder: Path
) -> Iterator[Chart]:
    shown = [row for row in rows if row.largest is not None]
    if not shown:
        return
    several = len({row.engine for row in shown}) > 1
    names = [f"{row.strategy} ({row.engine})" if several else row.strategy for row in shown]
    figure, axes = _figure("The largest model that fits, by the estimate", title, shown, names)
    counts = [row.largest.num_params for row in shown if row.largest]
    scale, unit = _scaled(max(counts), _COUNTS)
    axes.barh(range(len(shown)), [count / scale for count in counts], height=_THICK, color=_GREEN)
    for place, row in enumerate(shown):
        assert row.largest is not None
        axes.annotate(
            f"{row.largest.num_params / scale:,.1f} ({row.largest.num_layers:,} blocks)",
            (row.largest.num_params / scale, place), xytext=(6, 0), textcoords="offset points",
            va="center",
        )  # fmt: skip
    axes.set_xlim(0, max(counts) / scale * 1.28)
    axes.set_xlabel(f"{unit} of parameters")
    caption = (
        "The same model with as many blocks as fit, on as many ranks as this was measured on, with "
        "the other settings of the first variant of each strategy; above 256 blocks, about."
    )
    yield saved(figure, folder / "largest.png", caption)


def _figure(
    what: str, title: str, rows: Sequence[Row], names: Sequence[str] | None = None
) -> tuple[Any, Any]:
    """Axes with a place for each row, the first on top."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, _AROUND + _BAR * len(rows)), layout="constrained")
    axes = figure.subplots()
    figure.suptitle(what, x=0.01, ha="left", fontsize=13, fontweight="bold")
    axes.set_title(title, loc="left", fontsize=9, color="#444444", x=0)
    keys = names_of(rows) if names is None else ("strategy",)
    labels = names or [" · ".join(row.varied.values()) or row.strategy for row in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylabel(" · ".join(keys), fontsize=9, color="#444444")
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.grid(visible=True, color="#e6e6e6")
    axes.set_axisbelow(True)
    return figure, axes


def _stacked(axes: Any, stacks: Sequence[tuple[str, str, list[float]]]) -> list[float]:
    """Draw bars of several parts, each with its label and colour; returns where they end."""
    left = [0.0] * len(stacks[0][2])
    for label, color, lengths in stacks:
        if any(lengths):
            axes.barh(range(len(left)), lengths, left=left, height=_THICK, color=color, label=label)
        left = [start + length for start, length in zip(left, lengths, strict=True)]
    return left


def _mark(axes: Any, rows: Sequence[Row], name: str, scale: float, what: str, color: str) -> None:
    """A stroke where a figure of each row is, as far as it was measured."""
    known = [(at, nbytes) for at, row in enumerate(rows) if (nbytes := getattr(row, name))]
    if known:
        axes.scatter(
            [nbytes / scale for _, nbytes in known], [at for at, _ in known], marker="|",
            color=color, s=420, linewidth=2.4, label=f"{what}, measured", zorder=3,
        )  # fmt: skip


def _legend(axes: Any) -> None:
    axes.legend(
        loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9, markerscale=0.45
    )


def _scaled(most: float, scales: Sequence[tuple[float, str]]) -> tuple[float, str]:
    return next((each for each in scales if most >= each[0]), scales[-1])


def saved(figure: Any, path: Path, caption: str) -> Chart:
    """Write a picture."""
    figure.savefig(path, dpi=_DPI)
    return Chart(path, caption)
