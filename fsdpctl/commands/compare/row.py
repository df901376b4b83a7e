"""The results of one variant, measured or predicted, and the columns that show them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdpctl.io.units import figure, format_bytes

if TYPE_CHECKING:
    from fsdpctl.estimate.accuracy import Band

# The status of a variant, or its beginning.
OK, REFUSED, TOO_LARGE, FAILED = "ok", "cannot run: ", "does not fit: ", "failed: "
NOT_REACHED = "not measured: the comparison was stopped first"


@dataclass(frozen=True, slots=True)
class Row:
    """One variant; None for unknown values.

    Measured speeds and times are medians over the steps after warm-up; times are those of rank 0.
    """

    varied: dict[str, str]  # the settings that differ between variants
    strategy: str
    engine: str = "fsdpctl"
    world_size: int | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    error_band: "Band | None" = None  # of a predicted step time
    steps: int | None = None  # of a run whose length is set, and the predicted figures of the run
    hours: float | None = None
    gpu_hours: float | None = None
    cost: float | None = None
    exposed_communication_seconds: float | None = None  # of a step: computation waits
    mfu: float | None = None  # model FLOPs utilization; None: peak FLOP/s of the device unknown
    sent_bytes_per_step: int | None = None  # by a rank, as planned
    peak_tensor_bytes: int | None = None  # of all tensors, on rank 0; CUDA only
    estimated_peak_tensor_bytes: int | None = None
    peak_reserved_bytes: int | None = None  # by the caching allocator of rank 0; CUDA only
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
        """The device memory that a rank needs, if known: measured, else estimated."""
        return self.peak_tensor_bytes or self.estimated_peak_tensor_bytes


Cell = Callable[[Row], str | None]


def cells(row: Row, names: Sequence[str]) -> list[str]:
    """Return the values of varied settings, then a cell for each of FIGURES."""
    own = {"strategy": row.strategy, **row.varied}
    return [
        *(own.get(name, "-") for name in names),
        *(show(row) or "-" for show in FIGURES.values()),
    ]


def names_of(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the names of the settings that differ between the variants."""
    return tuple(dict.fromkeys(name for row in rows for name in row.varied)) or ("strategy",)


def _cell(name: str, shown: Callable[[Any], str]) -> Cell:
    return lambda row: None if getattr(row, name) is None else shown(getattr(row, name))


def _number(name: str, form: str, scale: float = 1.0) -> Cell:
    return _cell(name, lambda value: format(value * scale, form))


def _status(row: Row) -> str | None:
    return None if row.status == OK else row.status.partition(":")[0]


def _exposed(row: Row) -> str | None:
    seconds = row.exposed_communication_seconds
    return None if seconds is None or not row.step_seconds else f"{seconds / row.step_seconds:.0%}"


FIGURES: dict[str, Cell] = {  # by title
    "status": _status,  # of a variant without results
    "tokens/s": _number("tokens_per_second", ",.0f"),
    "ms/step": _number("step_seconds", ",.1f", 1e3),
    "error band": _cell("error_band", lambda band: f"{band.low - 1:+.0%} {band.high - 1:+.0%}"),
    "hours": _cell("hours", figure),
    "GPU hours": _cell("gpu_hours", figure),
    "cost": _cell("cost", figure),
    "exposed comm": _exposed,
    "MFU": _number("mfu", ".1%"),
    "tensor peak": _cell("peak_tensor_bytes", format_bytes),
    "tensor est.": _cell("estimated_peak_tensor_bytes", format_bytes),
    "reserved": _cell("peak_reserved_bytes", format_bytes),
    "sent/step": _cell("sent_bytes_per_step", format_bytes),
    "final loss": _number("final_loss", ".6f"),
}
