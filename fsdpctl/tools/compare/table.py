"""The table of a comparison: the same columns on the screen, in the page and, whole, in CSV."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fsdpctl.run.progress import format_bytes
from fsdpctl.tools.compare.row import Row, figures_of

_NOTHING = "-"
Cell = Callable[[Row], str | None]


@dataclass(frozen=True, slots=True)
class Column:
    """One column: what stands over it, what it means, and a cell for each row."""

    title: str
    meaning: str
    cells: tuple[str, ...]
    is_text: bool = False


def columns(rows: Sequence[Row]) -> list[Column]:
    """Those of which anything is known."""
    return [*_varied(rows), *(each for each in _figures(rows) if set(each.cells) != {_NOTHING})]


def names_of(rows: Sequence[Row]) -> tuple[str, ...]:
    """What tells the variants apart."""
    return tuple(rows[0].varied) or ("strategy",)


def _varied(rows: Sequence[Row]) -> Iterator[Column]:
    for name in names_of(rows):
        cells = tuple(row.varied.get(name, row.strategy) for row in rows)
        yield Column(name, "what is varied", cells, is_text=True)


def _figures(rows: Sequence[Row]) -> Iterator[Column]:
    for title, meaning, cell in _COLUMNS:
        yield Column(title, meaning, tuple(cell(row) or _NOTHING for row in rows))


def _speed(row: Row) -> str | None:
    return None if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"


def _spread(row: Row) -> str | None:
    if row.tokens_per_second_spread is None or not row.tokens_per_second:
        return None
    low, high = (edge / row.tokens_per_second - 1 for edge in row.tokens_per_second_spread)
    return f"{low:+.1%} {high:+.1%}"


def _step(row: Row) -> str | None:
    return None if row.step_seconds is None else f"{row.step_seconds * 1e3:,.1f}"


def _share(name: str) -> Cell:
    def cell(row: Row) -> str | None:
        seconds = getattr(row, name)
        if seconds is None or not row.step_seconds:
            return None
        return f"{seconds / row.step_seconds:.0%}"

    return cell


def _bytes(name: str) -> Cell:
    def cell(row: Row) -> str | None:
        nbytes = getattr(row, name)
        return None if nbytes is None else format_bytes(nbytes)

    return cell


def _mfu(row: Row) -> str | None:
    return None if row.mfu is None else f"{row.mfu:.1%}"


def _loss(row: Row) -> str | None:
    return None if row.final_loss is None else f"{row.final_loss:.6f}"


_COLUMNS: tuple[tuple[str, str, Cell], ...] = (
    ("tokens/s", "of all ranks; the median of the rounds, the machine's drift divided out", _speed),
    ("spread", "the slowest and the fastest round; of a single one its quartiles", _spread),
    ("ms/step", "median", _step),
    ("compute", "share of a step in forward and backward", _share("compute_seconds")),
    (
        "waiting",
        "in which it stands still for other ranks",
        _share("exposed_communication_seconds"),
    ),
    ("optimizer", "in the optimizer, norm of the gradients included", _share("optimizer_seconds")),
    ("data", "in making batches", _share("data_seconds")),
    ("MFU", "model FLOPs utilisation", _mfu),
    (
        "engine bytes",
        "model, optimizer and buffers of the fullest rank",
        _bytes("peak_allocated_bytes"),
    ),
    ("estimated", "engine bytes, by the estimate", _bytes("estimated_peak_allocated_bytes")),
    ("all tensors", "of rank 0, activations too", _bytes("peak_tensor_bytes")),
    ("all estimated", "all tensors, by the estimate", _bytes("estimated_peak_tensor_bytes")),
    ("reserved", "by the allocator of rank 0", _bytes("peak_reserved_bytes")),
    ("sent/step", "by a rank, as planned", _bytes("sent_bytes_per_step")),
    ("final loss", "of the last step", _loss),
)


def as_csv(rows: Sequence[Row]) -> str:
    """All single figures, a line for each row; bytes and seconds as they are."""
    names = names_of(rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    figures = [figures_of(row) for row in rows]
    extra = ("spread_low", "spread_high", "largest_num_params", "largest_num_layers", "run_dirs")
    # What is varied has the name that it is typed with, as `config.strategy` beside `strategy`.
    writer.writerow([*(f"config.{name}" for name in names), *figures[0], *extra])
    for row, known in zip(rows, figures, strict=True):
        low, high = row.tokens_per_second_spread or (None, None)
        fits = row.largest
        size = (fits.num_params, fits.num_layers) if fits else (None, None)
        dirs = " ".join(each.run_dir for each in row.rounds if each.run_dir)
        varied = (row.varied.get(name, row.strategy) for name in names)
        writer.writerow([*varied, *known.values(), low, high, *size, dirs])
    return text.getvalue()
