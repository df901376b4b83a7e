"""Numbers with units, as text, and items in batches of a size."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

_GIB, _MIB = 1 << 30, 1 << 20
T = TypeVar("T")


def format_bytes(count: float) -> str:
    """Format a number of bytes in GiB or MiB."""
    sign, size = "-" * (count < 0), abs(count)
    return f"{sign}{size / _GIB:.2f} GiB" if size >= _GIB else f"{sign}{size / _MIB:.1f} MiB"


def figure(amount: float) -> str:
    """Format a number with three digits, or all before the point."""
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:#.3g}"


def batches(items: Iterable[T], size: Callable[[T], int], least: int) -> Iterator[list[T]]:
    """Yield items in order, as many as have `least` together; the last ones may have less."""
    batch, total = list[T](), 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= least:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch
