"""Charts of estimates, and the bars and colors that they share with those of comparisons."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.predict.peak import peaks_by_moment

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
_GIB = 1 << 30
_HEIGHT = 5.5  # inches, of the chart of a step


def _new_figure(heading: str, title: str, height: float) -> tuple[Any, Any]:
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
    figure, axes = _new_figure(heading, title, _AROUND + _BAR * len(names))
    axes.set_yticks(range(len(names)), names)
    axes.set_ylabel(ylabel, fontsize=9, color="#444444")
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.xaxis.grid(visible=True, color="#e6e6e6")
    return figure, axes


def bars(axes: Any, lengths: Sequence[float], **style: Any) -> None:
    """Draw a bar at each position."""
    axes.barh(range(len(lengths)), lengths, height=_THICK, **style)


def annotate(axes: Any, x: float, place: int, text: str, color: str = "black") -> None:
    """Write a text to the right of `x` at the position of a bar."""
    axes.annotate(
        text, (x, place), xytext=(6, 0), textcoords="offset points", va="center", color=color
    )


def _legend_at_the_right(axes: Any, *, reverse: bool = False) -> None:
    axes.legend(
        loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9, markerscale=0.45,
        reverse=reverse,
    )  # fmt: skip


def draw_estimates(
    estimates: Sequence[RunEstimate], folder: Path, name: str = "step"
) -> Iterator[Path]:
    """Draw memory over a step for each estimate, and a comparison of all; yield the files' paths.

    The files of single steps are named NAME-STRATEGY.png.
    """
    for each in estimates:
        strategy = each.config.strategy.name
        yield _saved(_step(each), folder / f"{name}-{strategy}.png")
    if len(estimates) > 1 and name == "step":
        yield _saved(_strategies(estimates), folder / "strategies.png")


def _saved(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def _title(found: RunEstimate) -> str:
    config = found.config
    return (
        f"{config.model.title}, {config.model.num_layers} blocks, on {config.num_ranks} ranks, "
        f"{found.batches.micro_batch_size} x {config.train.seq_len} tokens per micro-batch"
    )


def _step(found: RunEstimate) -> Any:
    moments = peaks_by_moment(found.step.script, found.step.recorder.item)
    heading = f"Memory of a step with {found.config.strategy.name}"
    figure, axes = _new_figure(heading, _title(found), _HEIGHT)
    values = {
        name: [held[category] / _GIB for _, held in moments]
        for name in MEMORY
        for category in moments[0][1]
        if category.value == name
    }
    labels = [name.replace("_", " ") for name in values]
    colors = [MEMORY[name] for name in values]
    axes.stackplot(range(len(moments)), *values.values(), labels=labels, colors=colors)
    starts = {}
    for name in ("forward", "backward"):
        at = [i for i, (when, _) in enumerate(moments) if when.doing.startswith(name)]
        starts.update({at[0]: name} if at else {})
    axes.set_xticks([*starts, len(moments) - 1], [*starts.values(), "optimizer"])
    axes.margins(x=0)
    axes.set_ylabel("GiB per rank")
    limit = found.available / _GIB
    if limit < 2 * axes.get_ylim()[1]:
        axes.axhline(limit, color="black", linewidth=1, linestyle="--", label=_limit(found))
    _legend_at_the_right(axes, reverse=True)
    return figure


def _strategies(estimates: Sequence[RunEstimate]) -> Any:
    names = [each.config.strategy.name for each in estimates]
    figure, axes = bar_axes("Memory at the peak", _title(estimates[0]), names)
    left = [0.0] * len(estimates)
    for name, color in MEMORY.items():
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
        axes.axvline(limit, color="black", linewidth=1, linestyle="--", label=_limit(estimates[0]))
    axes.set_xlabel("GiB per rank")
    _legend_at_the_right(axes)
    return figure


def _limit(found: RunEstimate) -> str:
    return f"available ({found.config.cluster.name})"
