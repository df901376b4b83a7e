"""The order of variants, the recommended one first, and how their losses compare."""

from collections import Counter
from collections.abc import Iterator, Sequence

from fsdpctl.commands.compare.row import OK, Row
from fsdpctl.resolve.run import decides_losses

_ROUNDING = 1e-5  # relative, of a loss: what another order of additions changes in fp32


def ordered(rows: Sequence[Row]) -> list[Row]:
    """Return the recommended row first, then the others by speed; rows without results are last.

    Of the rows whose spread overlaps that of the fastest, it is the one with the fewest ranks, then
    the one with the least memory.
    """
    fastest, found = sorted(rows, key=lambda row: -row.speed), list[Row]()
    if fastest and fastest[0].speed:
        least = fastest[0].spread[0]
        found = [min((row for row in fastest if row.spread[1] >= least), key=_cost)]
    return [*found, *(row for row in fastest if row not in found)]


def _cost(row: Row) -> tuple[int, float]:
    return row.world_size or 0, float("inf") if row.memory is None else row.memory


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
