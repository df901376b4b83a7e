"""Charts of estimates, and the bars and colors of all charts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdpctl.estimate.run_estimate import RunEstimate

_FIGURE_WIDTH, _BAR_HEIGHT, _MARGIN_HEIGHT = 9.5, 0.42, 1.75  # inches
_BAR_SHARE = 0.62  # share of the height per bar
# Okabe and Ito's colors, which people with color blindness can distinguish.
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
RED, PURPLE, GREY, LIGHT = "#D55E00", "#CC79A7", "#BBBBBB", "#DDDDDD"
_COLORS = {
    "parameters": BLUE, "optimizer_states": GREEN, "gathered_units": SKY, "gradients": ORANGE,
    "reduce_buffers": PURPLE, "activations": LIGHT, "logits_and_loss": GREY, "workspaces": RED,
}  # fmt: skip
_GIB = 1 << 30


def bar_axes(heading: str, title: str, names: Sequence[str], ylabel: str = "") -> tuple[Any, Any]:
    """Return a figure and axes with a position for each horizontal bar, the first at the top."""
    from matplotlib.figure import Figure

    height = _MARGIN_HEIGHT + _BAR_HEIGHT * len(names)
    figure = Figure(figsize=(_FIGURE_WIDTH, height), layout="constrained")
    axes = figure.subplots()
    figure.suptitle(heading, x=0.01, ha="left", fontsize=13, fontweight="bold")
    axes.set_title(title, loc="left", fontsize=9, color="#444444", x=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylabel(ylabel, fontsize=9, color="#444444")
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.xaxis.grid(visible=True, color="#e6e6e6")
    return figure, axes


def bars(axes: Any, lengths: Sequence[float], **style: Any) -> None:
    """Draw a bar at each position."""
    axes.barh(range(len(lengths)), lengths, height=_BAR_SHARE, **style)


def draw_estimates(estimates: Sequence[RunEstimate], folder: Path) -> Path:
    """Draw the memory at the peak by category, a bar per strategy; return the path of the file."""
    config, names = estimates[0].config, [each.config.strategy.name for each in estimates]
    title = (
        f"{config.model.title}, {config.model.num_layers} blocks, on {config.num_ranks} ranks, "
        f"{estimates[0].batches.micro_batch_size} x {config.train.seq_len} tokens per micro-batch"
    )
    figure, axes = bar_axes("Memory at the peak", title, names)
    left = [0.0] * len(estimates)
    for name, color in _COLORS.items():
        lengths = [each.step.breakdown[name] / _GIB for each in estimates]
        if any(lengths):
            bars(axes, lengths, left=left, color=color, label=name.replace("_", " "))
        left = [start + length for start, length in zip(left, lengths, strict=True)]
    axes.scatter(
        [each.peak_reserved / _GIB for each in estimates], range(len(estimates)), marker="|", s=420,
        linewidth=2.4, color="black", label="reserved", zorder=3,
    )  # fmt: skip
    limit = estimates[0].available / _GIB
    if limit < 2 * max(left):
        label = f"available ({config.cluster.name})"
        axes.axvline(limit, color="black", linewidth=1, linestyle="--", label=label)
    axes.set_xlabel("GiB per rank")
    axes.legend(
        loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9, markerscale=0.45
    )
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(path := folder / "strategies.png", dpi=120)
    return path
