"""The results of a comparison: their order, what losses say, and the files, JSON and a page."""

import base64
import io
import json
import platform
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, StrictUndefined

from fsdpctl.commands.compare.row import OK, Row, columns, names_of
from fsdpctl.commands.drawing import BLUE, SKY, annotate, bar_axes, bars
from fsdpctl.config.schema import Config
from fsdpctl.io.units import figure as short
from fsdpctl.resolve.open import decides_losses

JSON, PAGE = "compare.json", "compare.html"
_TEMPLATE = Path(__file__).with_name("page.html.j2")
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
    """Return the recommended row first, then the others in order; rows without results are last.

    Of the rows that are tied with the best, it is one with the fewest ranks, and of those that are
    tied with the best of them the one with the least memory.
    """
    in_order = sorted(rows, key=lambda row: _amount(row, by))
    found = [row for row in in_order if row.speed]
    for cost in (lambda row: row.world_size or 0, lambda row: row.memory or float("inf")):
        tied = [row for row in found if _is_tied(found[0], row, by)]
        least = min(map(cost, tied), default=0)
        found = [row for row in tied if cost(row) == least]
    return [*found[:1], *(row for row in in_order if row not in found[:1])]


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


def _is_tied(best: Row, row: Row, by: str) -> bool:
    """Return whether a row may be as good, as the spread or the error band of times is.

    Predictions for as many ranks err alike.
    """
    amount, least = _amount(row, by), _amount(best, by)
    if by == "memory":
        return amount <= least
    if best.error_band is not None and best.world_size != row.world_size:
        return amount <= least * best.error_band.high
    return amount * row.speed / row.spread[1] <= least * best.speed / best.spread[0]


def recommendation(rows: Sequence[Row], by: str) -> Iterator[str]:
    """Yield why the first row is recommended, if another one is better by `by`."""
    best = min(rows, key=lambda row: _amount(row, by))
    if _amount(best, by) < _amount(rows[0], by):
        is_smaller = (rows[0].world_size or 0) < (best.world_size or 0)
        why = "has fewer ranks" if is_smaller else "needs less memory"
        yield f"recommended: {rows[0].label}, which {why}; {best.label} is tied by {by}"


def failures(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each variant without results, with the reason."""
    return (f"{row.label}: {row.status}" for row in rows if row.status != OK)


def losses(rows: Sequence[Row]) -> Iterator[str]:
    """Describe whether losses are equal where they should be, and which ones are not."""
    known = [row for row in rows if row.final_loss is not None]
    for row in known:
        ends = {each.final_loss for each in row.rounds}
        if len(ends) > 1:
            yield f"{row.label}: final losses of its rounds differ: {', '.join(map(repr, ends))}"
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


@dataclass(frozen=True, slots=True)
class ComparisonInfo:
    """The conditions under which the rows of a report were obtained."""

    what: str  # "measured" or "predicted"
    title: str  # the model and the machine, in a few words
    how: str  # number and length of the runs
    command: str
    created_at: str  # UTC
    is_complete: bool = True  # False: stopped early


def describe(
    configs: Sequence[Config],
    rows: Sequence[Row],
    how: str,
    command: str,
    *,
    is_predicted: bool,
    is_complete: bool,
) -> ComparisonInfo:
    """Describe a comparison on this machine, or its prediction for a cluster."""
    first = configs[0]
    if is_predicted:
        device = ", ".join(dict.fromkeys(each.cluster.name for each in configs))
    elif torch.cuda.is_available() and first.launch.device != "cpu":
        device = torch.cuda.get_device_name()
    else:
        device = f"the CPU ({platform.machine()})"
    models = ", ".join(dict.fromkeys(each.model.title for each in configs))
    lengths = _range({each.train.seq_len for each in configs})
    sizes = {row.world_size for row in rows if row.world_size}
    ranks = f"{_range(sizes)} {'rank' if sizes == {1} else 'ranks'} of " if sizes else ""
    what = "predicted" if is_predicted else "measured"
    title = f"{models}, {lengths} tokens per sample, {what} on {ranks}{device}"
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return ComparisonInfo(what, title, how, command, now, is_complete)


def _range(values: set[int]) -> str:
    least, most = min(values), max(values)
    return f"{least}" if least == most else f"{least} to {most}"


def command_of(words: Sequence[str], options: Sequence[str]) -> str:
    return shlex.join(["fsdpctl", "compare", *words, *options])


def rows_as_json(rows: Sequence[Row]) -> str:
    """Return the list of rows that `compare --json` prints."""
    return json.dumps([asdict(row) for row in rows], indent=2)


def write_report(rows: Sequence[Row], about: ComparisonInfo, folder: Path, by: str = BY[0]) -> None:
    """Write all results, in the order of `rows`, into an existing directory."""
    (folder / JSON).write_text(rows_as_json(rows) + "\n", encoding="utf-8")
    (folder / PAGE).write_text(_page(rows, about, by), encoding="utf-8")


def _page(rows: Sequence[Row], about: ComparisonInfo, by: str) -> str:
    """Return one HTML file with everything in it, which loads nothing and runs nothing."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    ran = [row for row in rows if row.speed]
    picture = io.BytesIO()
    if ran:
        draw_rows(ran, about.title, by).savefig(picture, dpi=_DPI)
    return template.render(
        about=about,
        by=by,
        columns=columns(rows),
        kinds=["" if row.status == OK else "failed" for row in rows],
        notes=[*recommendation(rows, by), *failures(rows), *losses(rows)],
        picture=base64.b64encode(picture.getvalue()).decode(),
    )


def draw_rows(rows: Sequence[Row], title: str, by: str) -> Any:
    """Return a figure with a bar per variant: what they are compared by, or tokens per second."""
    name, heading, unit = _DRAWN.get(by, _SPEED)
    if any(getattr(row, name) is None for row in rows):
        name, heading, unit = _SPEED
    values = [getattr(row, name) for row in rows]
    edges = [tuple(speed / row.speed for speed in row.expected) for row in rows]
    if name != _SPEED[0]:  # the slowest takes longest
        edges = [(1 / high, 1 / low) for low, high in edges]
    labels = [" · ".join(row.varied.values()) or row.strategy for row in rows]
    figure, axes = bar_axes(heading, title, labels, " · ".join(names_of(rows)))
    bars(axes, values, color=[BLUE, *[SKY] * (len(rows) - 1)])
    for place, (value, (low, high)) in enumerate(zip(values, edges, strict=True)):
        axes.errorbar(
            value, place, xerr=[[value * (1 - low)], [value * (high - 1)]],
            color="black", capsize=4, linewidth=1.2,
        )  # fmt: skip
        annotate(axes, value * high, place, short(value))
    axes.set_xlim(0, 1.12 * max(v * high for v, (_, high) in zip(values, edges, strict=True)))
    axes.set_xlabel(unit)
    axes.xaxis.set_major_formatter("{x:,g}")
    return figure
