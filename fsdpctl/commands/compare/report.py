"""The report of a comparison: order, table, notes on losses, JSON and chart."""

import json
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fsdpctl.commands.charts import BLUE, SKY, bar_axes, bars
from fsdpctl.config.schema import Config
from fsdpctl.io.texts import format_bytes, three_digits
from fsdpctl.resolve.auto_values import decides_losses

if TYPE_CHECKING:
    from fsdpctl.estimate.accuracy import ErrorBand

JSON, PICTURE = "compare.json", "compare.png"
_DPI = 144
SORT_KEYS = ("time", "gpu-hours", "cost", "memory")  # the order of variants
_THROUGHPUT_CHART = "tokens_per_second", "Throughput", "tokens per second, all ranks"
_CHARTS = {  # for each order: the field of a result, the heading and the unit of its chart
    "time": ("hours", "Time of the run", "hours"),
    "gpu-hours": ("gpu_hours", "GPU time of the run", "GPU hours"),
    "cost": ("cost", "Cost of the run", "cost at cluster.price"),
}
_ROUNDING = 1e-5  # relative change of a loss by another order of additions in fp32
# The status of a variant, or its beginning.
OK, REFUSED, TOO_LARGE, FAILED = "ok", "cannot run: ", "does not fit: ", "failed: "
NOT_REACHED = "not measured: the comparison was stopped first"


@dataclass(slots=True)
class VariantResult:
    """The result of a variant; None for unknown values.

    Measured speeds and times are medians over the steps after warm-up, on rank 0.
    """

    varied: dict[str, str]  # the settings that differ between variants
    strategy: str
    engine: str = "fsdpctl"
    world_size: int | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    error_band: "ErrorBand | None" = None  # factors of the predicted step time
    steps: int | None = None  # length of the run, for which hours and cost are predicted
    hours: float | None = None
    gpu_hours: float | None = None
    cost: float | None = None
    price: float | None = None  # per GPU hour
    budget_steps: int | None = None  # that --budget buys, if the variant fits
    budget_tokens: int | None = None  # in these steps
    exposed_communication_seconds: float | None = None  # per step
    mfu: float | None = None  # model FLOPs utilization; None: peak FLOP/s of the device unknown
    sent_bytes_per_step: int | None = None  # per rank, as planned
    peak_tensor_bytes: int | None = None  # all tensors of rank 0; CUDA only
    estimated_peak_tensor_bytes: int | None = None
    peak_reserved_bytes: int | None = None  # caching allocator of rank 0; CUDA only
    estimated_peak_reserved_bytes: int | None = None
    memory_bytes: int | None = None  # available to a rank's tensors
    final_loss: float | None = None
    status: str = OK
    run_dir: str | None = None  # below the directory of the comparison; None: not kept

    @property
    def label(self) -> str:
        """The settings that identify the variant."""
        return " ".join(f"{name}={text}" for name, text in self.varied.items()) or (
            f"strategy={self.strategy}"
        )

    @property
    def speed(self) -> float:
        """Tokens per second; 0 if the variant did not finish."""
        return self.tokens_per_second or 0.0 if self.status == OK else 0.0

    @property
    def memory(self) -> int | None:
        """The device memory of a rank, if known: measured, else estimated."""
        return self.peak_tensor_bytes or self.estimated_peak_tensor_bytes


Cell = Callable[[VariantResult], str | None]


def cells(row: VariantResult, names: Sequence[str]) -> list[str]:
    """Return the values of the varied settings, then a cell for each column of COLUMNS."""
    settings = {"strategy": row.strategy, **row.varied}
    return [
        *(settings.get(name, "-") for name in names),
        *(show(row) or "-" for show in COLUMNS.values()),
    ]


def varied_names(rows: Sequence[VariantResult]) -> tuple[str, ...]:
    """Return the names of the settings that differ between the variants."""
    return tuple(dict.fromkeys(name for row in rows for name in row.varied)) or ("strategy",)


def _cell(name: str, form: Callable[[Any], str]) -> Cell:
    return lambda row: None if getattr(row, name) is None else form(getattr(row, name))


def _number(name: str, form: str, scale: float = 1.0) -> Cell:
    return _cell(name, lambda value: format(value * scale, form))


def _status(row: VariantResult) -> str | None:
    return None if row.status == OK else row.status.partition(":")[0]


def _exposed(row: VariantResult) -> str | None:
    seconds = row.exposed_communication_seconds
    return None if seconds is None or not row.step_seconds else f"{seconds / row.step_seconds:.0%}"


COLUMNS: dict[str, Cell] = {  # cells by the column's title
    "status": _status,  # only of variants without results
    "tokens/s": _number("tokens_per_second", ",.0f"),
    "ms/step": _number("step_seconds", ",.1f", 1e3),
    "error band": _cell("error_band", lambda band: f"{band.low - 1:+.0%} {band.high - 1:+.0%}"),
    "hours": _cell("hours", three_digits),
    "GPU hours": _cell("gpu_hours", three_digits),
    "cost": _cell("cost", three_digits),
    "exposed comm": _exposed,
    "MFU": _number("mfu", ".1%"),
    "tensor peak": _cell("peak_tensor_bytes", format_bytes),
    "tensor est.": _cell("estimated_peak_tensor_bytes", format_bytes),
    "reserved": _cell("peak_reserved_bytes", format_bytes),
    "sent/step": _cell("sent_bytes_per_step", format_bytes),
    "final loss": _number("final_loss", ".6f"),
}


def sorted_rows(rows: Sequence[VariantResult], by: str = "time") -> list[VariantResult]:
    """Return the rows in the order `by`, the best first; rows without results come last."""
    return sorted(rows, key=lambda row: _amount(row, by))


def _amount(row: VariantResult, by: str) -> float:
    """Return the amount by which rows are sorted, the least first."""
    if not row.speed:
        return float("inf")
    amounts = {
        "time": row.hours or 1 / row.speed,
        "gpu-hours": row.gpu_hours or (row.world_size or 1) / row.speed,
        "cost": row.cost or float("inf"),
        "memory": row.memory or float("inf"),
    }
    return amounts[by]


def loss_lines(rows: Sequence[VariantResult]) -> Iterator[str]:
    """Yield lines about losses of equal training settings: whether they are equal."""
    measured = [row for row in rows if row.final_loss is not None]
    by_settings = dict[tuple[tuple[str, str], ...], list[VariantResult]]()
    for row in measured:
        settings = tuple(pair for pair in row.varied.items() if decides_losses(pair[0]))
        by_settings.setdefault(settings, []).append(row)
    lines = [line for group in by_settings.values() for line in _loss_differences(group)]
    if not lines and len(measured) > 1:
        limit = "" if len(by_settings) == 1 else " among variants with the same training settings"
        yield f"all losses are equal{limit}"
    yield from lines


def _loss_differences(group: Sequence[VariantResult]) -> Iterator[str]:
    most_common = Counter(row.final_loss or 0.0 for row in group).most_common(1)[0][0]
    for row in group:
        if difference := (row.final_loss or 0.0) - most_common:
            is_large = abs(difference) > _ROUNDING * abs(most_common)
            size = "more than rounding" if is_large else "rounding"
            yield f"{row.label}: loss differs by {size}, {difference:+.3g} from {most_common:.6f}"


def comparison_title(
    configs: Sequence[Config], rows: Sequence[VariantResult], *, is_predicted: bool
) -> str:
    """Return a title with the models, the ranks, and this machine or the predicted clusters."""
    device = f"the CPU ({platform.machine()})"
    if is_predicted:
        device = ", ".join(dict.fromkeys(each.cluster.name for each in configs))
    elif torch.cuda.is_available() and configs[0].launch.device != "cpu":
        device = torch.cuda.get_device_name()
    models = ", ".join(dict.fromkeys(each.model.title for each in configs))
    ranks = " or ".join(map(str, sorted({row.world_size for row in rows if row.world_size})))
    method = "predicted" if is_predicted else "measured"
    return f"{models}, {method} on {ranks or 'ranks'} x {device}"


def rows_as_json(rows: Sequence[VariantResult]) -> str:
    """Return the list of rows that `compare --json` prints."""
    return json.dumps([asdict(row) for row in rows], indent=2)


def write_report(
    rows: Sequence[VariantResult], title: str, folder: Path, by: str = SORT_KEYS[0]
) -> list[Path]:
    """Write the results into a directory, in the order of `rows`; return the paths of the files."""
    written = [folder / JSON]
    written[0].write_text(rows_as_json(rows) + "\n", encoding="utf-8")
    if finished := [row for row in rows if row.speed]:
        written.append(folder / PICTURE)
        draw_rows(finished, title, by).savefig(written[-1], dpi=_DPI)
    return written


def draw_rows(rows: Sequence[VariantResult], title: str, by: str) -> Any:
    """Return a figure with a bar per variant: the amount of the order `by`, or tokens per second.

    Predicted amounts have their error band.
    """
    name, heading, unit = _CHARTS.get(by, _THROUGHPUT_CHART)
    if any(getattr(row, name) is None for row in rows):
        name, heading, unit = _THROUGHPUT_CHART
    values = [getattr(row, name) for row in rows]
    edges = [(each.low, each.high) if (each := row.error_band) else (1.0, 1.0) for row in rows]
    if name == _THROUGHPUT_CHART[0]:  # tokens per second are inverse to the time
        edges = [(1 / high, 1 / low) for low, high in edges]
    labels = [" · ".join(row.varied.values()) or row.strategy for row in rows]
    figure, axes = bar_axes(heading, title, labels, " · ".join(varied_names(rows)))
    bars(axes, values, color=[BLUE, *[SKY] * (len(rows) - 1)])
    for position, (value, (low, high)) in enumerate(zip(values, edges, strict=True)):
        if high > low:
            axes.errorbar(
                value, position, xerr=[[value * (1 - low)], [value * (high - 1)]],
                color="black", capsize=4, linewidth=1.2,
            )  # fmt: skip
        offset = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(three_digits(value), (value * high, position), **offset)
    axes.set_xlim(0, 1.12 * max(v * high for v, (_, high) in zip(values, edges, strict=True)))
    axes.set_xlabel(unit)
    axes.xaxis.set_major_formatter("{x:,g}")
    return figure
