"""Charts of estimates."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdpctl.tools.drawing import (
    MEMORY,
    annotate,
    bar_axes,
    bars,
    mark,
    new_figure,
    outer_legend,
    stacked,
)

if TYPE_CHECKING:
    from fsdpctl.estimate.fit import Fit
    from fsdpctl.estimate.run_estimate import RunEstimate

_GIB = 1 << 30
_HEIGHT = 5.5  # inches, of the chart of a step


def draw_estimates(
    estimates: Sequence["RunEstimate"], folder: Path, name: str = "step"
) -> Iterator[Path]:
    """Draw memory over a step for each estimate, and a comparison of all; yield the files' paths.

    The files of single steps are named NAME-STRATEGY.png.
    """
    for each in estimates:
        strategy = each.config.strategy.name
        yield _saved(_step(each), folder / f"{name}-{strategy}.png")
    if len(estimates) > 1 and name == "step":
        yield _saved(_strategies(estimates), folder / "strategies.png")


def draw_largest(fits: Sequence["Fit"], names: Sequence[str], folder: Path) -> Path:
    """Draw the largest size that fits, a bar for each strategy."""
    config = next(each.estimate.config for each in fits if each.estimate is not None)
    is_model = fits[0].key == "model.num_layers"
    heading = f"Largest {'model' if is_model else fits[0].key} that fits"
    figure, axes = bar_axes(heading, f"{config.model.name}, {config.cluster.name}", names)
    counts = [float(each.value) for each in fits]
    if is_model:
        axes.set_xlabel("billions of parameters")
        counts = [each.estimate.num_params / 1e9 if each.estimate else 0.0 for each in fits]
    bars(axes, counts, color=MEMORY["parameters"])
    for place, count in enumerate(counts):
        annotate(axes, count, place, f"{count:.1f}" if is_model else f"{count:.0f}")
    axes.set_xlim(0, max(counts) * 1.15)
    return _saved(figure, folder / "largest.png")


def _saved(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def _title(found: "RunEstimate") -> str:
    from fsdpctl.resolve.machine import world_size

    config = found.config
    return (
        f"{config.model.name}, {config.model.num_layers} blocks, on {world_size(config)} ranks, "
        f"{found.batches.micro_batch_size} x {config.train.seq_len} tokens per micro-batch"
    )


def _step(found: "RunEstimate") -> Any:
    """Draw the memory at each moment of a step, stacked by category."""
    from fsdpctl.predict.peak import peaks_by_moment

    moments = peaks_by_moment(found.step.script, found.step.recorder.item)
    heading = f"Memory of a step with {found.config.strategy.name}"
    figure, axes = new_figure(heading, _title(found), _HEIGHT)
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
    outer_legend(axes, reverse=True)
    return figure


def _strategies(estimates: Sequence["RunEstimate"]) -> Any:
    """Draw the memory at the peak, a bar for each strategy."""
    names = [each.config.strategy.name for each in estimates]
    figure, axes = bar_axes("Memory at the peak", _title(estimates[0]), names)
    stacks = [
        (name.replace("_", " "), color, [each.step.breakdown[name] / _GIB for each in estimates])
        for name, color in MEMORY.items()
    ]
    longest = max(stacked(axes, stacks))
    reserved = [(each.peak_reserved / _GIB, place) for place, each in enumerate(estimates)]
    mark(axes, reserved, "reserved", "black")
    limit = estimates[0].available / _GIB
    if limit < 2 * longest:
        axes.axvline(limit, color="black", linewidth=1, linestyle="--", label=_limit(estimates[0]))
    axes.set_xlabel("GiB per rank")
    outer_legend(axes)
    return figure


def _limit(found: "RunEstimate") -> str:
    return f"available ({found.config.cluster.name})"
