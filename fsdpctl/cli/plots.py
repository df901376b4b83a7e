"""Pictures of estimates."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdpctl.estimate.fit import Fit
    from fsdpctl.estimate.run_estimate import RunEstimate

_GIB = 1 << 30
_INCHES = (10, 5.5)
_COLORS = {
    "parameters": "#4269d0",
    "optimizer_states": "#6cc5b0",
    "gathered_units": "#a6bce8",
    "gradients": "#efb118",
    "reduce_buffers": "#ff725c",
    "activations": "#3ca951",
    "logits_and_loss": "#d88cc9",
    "workspaces": "#9c6b4e",
}


def draw_estimates(
    estimates: Sequence["RunEstimate"], folder: Path, name: str = "step"
) -> Iterator[Path]:
    """Draw memory over a step for each estimate, and all beside each other; the files' paths.

    `name` is what those of single steps begin with.
    """
    import matplotlib

    matplotlib.use("agg")
    folder.mkdir(parents=True, exist_ok=True)
    for each in estimates:
        path = folder / f"{name}-{each.config.strategy.name}.png"
        _draw_step(each, path)
        yield path
    if len(estimates) > 1 and name == "step":
        path = folder / "strategies.png"
        _draw_strategies(estimates, path)
        yield path


def _figure(title: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left")
    axes.set_ylabel("GiB on a rank")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _title(found: "RunEstimate") -> str:
    from fsdpctl.resolve.machine import world_size

    config = found.config
    return (
        f"{config.model.name}, {config.model.num_layers} blocks, on {world_size(config)} ranks, "
        f"{found.batches.micro_batch_size} x {config.train.seq_len} tokens a pass"
    )


def _limit(axes: Any, found: "RunEstimate") -> None:
    top = axes.get_ylim()[1]
    limit = found.available / _GIB
    if limit < 2 * top:
        axes.axhline(limit, color="black", linewidth=1, linestyle="--")
        axes.annotate(
            f"what the allocator may have ({found.config.cluster.name})",
            (0.01, limit),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
        )


def _draw_step(found: "RunEstimate", path: Path) -> None:
    """What is held over the moments of a step, stacked."""
    from fsdpctl.predict.peak import peaks_by_moment

    moments = peaks_by_moment(found.step.script, found.step.recorder.item)
    figure, axes = _figure(f"{_title(found)}: a step with {found.config.strategy.name}")
    values = {
        name: [held[category] / _GIB for _, held in moments]
        for name in _COLORS
        for category in moments[0][1]
        if category.value == name
    }
    axes.stackplot(
        range(len(moments)), *values.values(), labels=_labels(values), colors=_COLORS.values()
    )
    backward = [i for i, (when, _) in enumerate(moments) if when.doing.startswith("backward")]
    forward = [i for i, (when, _) in enumerate(moments) if when.doing.startswith("forward")]
    ticks = {forward[0]: "forward", backward[0]: "backward"} if forward and backward else {}
    axes.set_xticks([*ticks, len(moments) - 1], [*ticks.values(), "optimizer"])
    axes.margins(x=0)
    _limit(axes, found)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, reverse=True)
    figure.savefig(path, dpi=120)


def _labels(names: Sequence[str] | dict[str, Any]) -> list[str]:
    return [name.replace("_", " ") for name in names]


def _wrapped(name: str) -> str:
    """On two lines where it is long."""
    return name.replace("_shard_", "_shard\n_").replace("shard_opt", "shard\n_opt")


def draw_largest(fits: Sequence["Fit"], names: Sequence[str], folder: Path) -> Path:
    """Draw the parameters of the largest model that fits, a bar for each strategy."""
    import matplotlib

    matplotlib.use("agg")
    folder.mkdir(parents=True, exist_ok=True)
    first = next(each.estimate for each in fits if each.estimate is not None)
    config = first.config
    figure, axes = _figure(f"{config.model.name}: the largest that fits ({config.cluster.name})")
    if fits[0].key == "model.num_layers":
        axes.set_ylabel("billions of parameters")
        counts = [each.estimate.num_params / 1e9 if each.estimate else 0.0 for each in fits]
        labels = [f"{count:.1f}" for count in counts]
    else:
        axes.set_ylabel(fits[0].key)
        counts = [float(each.value) for each in fits]
        labels = [f"{each.value}" for each in fits]
    bars = axes.bar([_wrapped(name) for name in names], counts, color="#4269d0", width=0.6)
    axes.bar_label(bars, labels)
    path = folder / "largest.png"
    figure.savefig(path, dpi=120)
    return path


def _draw_strategies(estimates: Sequence["RunEstimate"], path: Path) -> None:
    """What is held at the peak, a bar for each strategy."""
    figure, axes = _figure(f"{_title(estimates[0])}: at the peak")
    names = [_wrapped(each.config.strategy.name) for each in estimates]
    bottom = [0.0] * len(estimates)
    for (name, color), label in zip(_COLORS.items(), _labels(_COLORS), strict=True):
        heights = [each.step.breakdown[name] / _GIB for each in estimates]
        axes.bar(names, heights, bottom=bottom, color=color, label=label, width=0.6)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    reserved = [each.peak_reserved / _GIB for each in estimates]
    axes.plot(names, reserved, "_", color="black", markersize=30, label="reserved")
    _limit(axes, estimates[0])
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, reverse=True)
    figure.savefig(path, dpi=120)
