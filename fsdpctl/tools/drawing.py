"""Figures, bars and colors that the charts of comparisons and of estimates share."""

from collections.abc import Sequence
from typing import Any

_WIDTH, _BAR, _AROUND = 9.5, 0.42, 1.75  # inches: width, height per bar, margin
_THICK = 0.62  # of a bar, relative to its space
# Okabe and Ito's colors, which people with color blindness can distinguish.
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
RED, PURPLE, GREY, LIGHT = "#D55E00", "#CC79A7", "#BBBBBB", "#DDDDDD"
MEMORY = {  # by category
    "parameters": BLUE,
    "optimizer_states": GREEN,
    "gathered_units": SKY,
    "gradients": ORANGE,
    "reduce_buffers": PURPLE,
    "activations": LIGHT,
    "logits_and_loss": GREY,
    "workspaces": RED,
}


def new_figure(heading: str, title: str, height: float) -> tuple[Any, Any]:
    """Return a figure of a height in inches, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots()
    figure.suptitle(heading, x=0.01, ha="left", fontsize=13, fontweight="bold")
    axes.set_title(title, loc="left", fontsize=9, color="#444444", x=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    return figure, axes


def bar_axes(heading: str, title: str, names: Sequence[str], ylabel: str = "") -> tuple[Any, Any]:
    """Return a figure and axes with a position for each horizontal bar, the first at the top."""
    figure, axes = new_figure(heading, title, _AROUND + _BAR * len(names))
    axes.set_yticks(range(len(names)), names)
    axes.set_ylabel(ylabel, fontsize=9, color="#444444")
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.xaxis.grid(visible=True, color="#e6e6e6")
    return figure, axes


def bars(axes: Any, lengths: Sequence[float], **style: Any) -> None:
    """Draw a bar at each position."""
    axes.barh(range(len(lengths)), lengths, height=_THICK, **style)


def stacked(axes: Any, stacks: Sequence[tuple[str, str, list[float]]]) -> list[float]:
    """Draw stacked bars from parts with label, color and lengths; return the bars' lengths."""
    left = [0.0] * len(stacks[0][2])
    for label, color, lengths in stacks:
        if any(lengths):
            bars(axes, lengths, left=left, color=color, label=label)
        left = [start + length for start, length in zip(left, lengths, strict=True)]
    return left


def annotate(axes: Any, x: float, place: int, text: str, color: str = "black") -> None:
    """Write a text to the right of `x` at the position of a bar."""
    axes.annotate(
        text, (x, place), xytext=(6, 0), textcoords="offset points", va="center", color=color
    )


def mark(axes: Any, points: Sequence[tuple[float, int]], label: str, color: str) -> None:
    """Mark values at the positions of bars."""
    values, places = zip(*points, strict=True)
    axes.scatter(
        values, places, marker="|", s=420, linewidth=2.4, color=color, label=label, zorder=3
    )


def outer_legend(axes: Any, *, reverse: bool = False) -> None:
    """Add a legend to the right of the axes."""
    axes.legend(
        loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9, markerscale=0.45,
        reverse=reverse,
    )  # fmt: skip
