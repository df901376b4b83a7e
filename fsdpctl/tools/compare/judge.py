"""Which variant is best, and what the differences between variants are worth."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdpctl.resolve.run import decides_losses
from fsdpctl.run.progress import format_bytes
from fsdpctl.tools.compare.row import OK, Row

_PARTS = {  # of a step, and how it is said that there is less of it
    "compute_seconds": "computes for",
    "exposed_communication_seconds": "waits for communication for",
    "optimizer_seconds": "spends in the optimizer",
    "data_seconds": "waits for data for",
}
_MOST_OF_IT = 0.5  # of a difference
_ROUNDING = 1e-5  # of a loss: what another order of additions changes in fp32
_NAMED = 3
_OVERLAP = "their spreads overlap"
_ALIKE = 0.01  # of memory: no reason to prefer one


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The best variant, if any ran, and why in a paragraph."""

    best: Row | None
    text: str


def as_fast_as_the_fastest(rows: Sequence[Row]) -> list[Row]:
    """The fastest, and those whose speed cannot be told from its: their spreads overlap.

    Where the number of ranks varies, it is the speed of a rank that counts.
    """
    timed = sorted((row for row in rows if row.speed), key=lambda row: -row.speed / _ranks(row))
    if not timed:
        return []
    fastest, *others = timed
    least = fastest.spread[0] / _ranks(fastest)
    return [fastest, *(row for row in others if row.spread[1] / _ranks(row) >= least)]


def _ranks(row: Row) -> int:
    return row.world_size or 1


def recommend(rows: Sequence[Row]) -> Recommendation:
    """The fastest that ran; among those as fast the one that takes least memory."""
    alike = as_fast_as_the_fastest(rows)
    if not alike:
        came = "fits" if any(row.is_foreseen for row in rows) else "ran to its end"
        return Recommendation(None, f"No variant {came}, so there is none to recommend.")
    best = _best_of(alike)
    others = [row for row in rows if row is not best]
    following = as_fast_as_the_fastest(others)
    runner_up = _best_of(following) if following else None
    told = [f"{best.label}: {_figures(best)}.", _why(best, alike, runner_up)]
    if runner_up is None:
        told.append("There is no other to compare it with.")
    else:
        told.append(f"Runner-up: {runner_up.label}, {_figures(runner_up, than=best)}.")
    told += _reservations(best, rows)
    return Recommendation(best, " ".join(filter(None, told)))


def _best_of(alike: Sequence[Row]) -> Row:
    """The one with least memory; the first, which is fastest, where that is not known or alike."""
    known = [row.memory for row in alike if row.memory is not None]
    if len(known) < len(alike):
        return alike[0]
    least = min(known)
    return next(row for row in alike if (row.memory or 0) <= least * (1 + _ALIKE))


def _figures(row: Row, *, than: Row | None = None) -> str:
    """Its speed and memory in words; of a runner-up also how they are beside the best's."""
    told = f"{row.speed:,.0f} tokens/s"
    if than is not None:
        change = row.speed / _ranks(row) / (than.speed / _ranks(than)) - 1
        faster = "faster" if change > 0 else "slower"
        told += f" ({abs(change):.1%} {faster})"
    elif row.tokens_per_second_spread is not None:
        low, high = row.tokens_per_second_spread
        over = f"in {len(row.rounds)} rounds" if len(row.rounds) > 1 else "in half of its steps"
        told += f" ({low:,.0f} to {high:,.0f} {over})"
    if row.memory is not None:
        told += f", {format_bytes(row.memory)} a rank{_source(row)}"
    return told


def _source(row: Row) -> str:
    if row.peak_tensor_bytes is not None:
        return " measured"
    return " estimated" if row.estimated_peak_tensor_bytes is not None else " without activations"


def _why(best: Row, alike: Sequence[Row], runner_up: Row | None) -> str:
    others = [row for row in alike if row is not best]
    if others:
        named = _listed([row.label for row in others[:_NAMED]])
        if len(others) > _NAMED:
            named = f"{len(others)} others, of which the fastest are {named}"
        overlap = "the difference is too small to foresee" if best.is_foreseen else _OVERLAP
        said = f"It is a tie with {named}: {overlap}"
        more = [row.memory for row in others if row.memory is not None]
        if best.memory is not None and len(more) == len(others):
            if max(more) > best.memory * (1 + _ALIKE):
                return f"{said}, and none of them takes much less memory."
            return f"{said}, and they take as much memory; it was the fastest."
        return f"{said}."
    if runner_up is None:
        return ""
    reason = explain(best, runner_up)
    clear = (
        "foreseen to be the fastest" if best.is_foreseen else "the fastest, by more than the spread"
    )
    return f"It is {clear}{f': {reason}' if reason else ''}."


def explain(faster: Row, slower: Row) -> str:
    """Which part of a step makes most of the difference between two; nothing where none does."""
    if not (faster.step_seconds and slower.step_seconds) or _ranks(faster) != _ranks(slower):
        return ""
    gap = slower.step_seconds - faster.step_seconds
    known = [name for name in _PARTS if getattr(faster, name) is not None]
    if gap <= 0 or not all(getattr(slower, name) is not None for name in known):
        return ""
    for name in known:
        mine, other = getattr(faster, name), getattr(slower, name)
        if other - mine > _MOST_OF_IT * gap:
            return f"it {_PARTS[name]} {mine * 1e3:.1f} ms of a step instead of {other * 1e3:.1f}"
    return ""


def _reservations(best: Row, rows: Sequence[Row]) -> Iterator[str]:
    """What speaks against taking it at its word."""
    varied = sorted({name for row in rows for name in row.varied if decides_losses(name)})
    if varied:
        yield f"What decides the losses varies ({', '.join(varied)}): look at those too."
    if any(row is best for row in odd_losses(rows)):
        yield "Its loss is not that of the others, which has to be understood first."


# ---- losses --------------------------------------------------------------------------------


def losses(rows: Sequence[Row]) -> Iterator[str]:
    """Whether the losses are equal where they should be, and whose are not."""
    known = [row for row in rows if row.final_loss is not None]
    for row in known:
        ends = {each.final_loss for each in row.rounds}
        if len(ends) > 1:
            yield f"{row.label}: its rounds ended at different losses, {_listed(map(repr, ends))}"
    groups = _comparable(known)
    if all(len({row.final_loss for row in group}) == 1 for group in groups):
        if len(known) > 1:
            yield "all losses are equal" + (
                "" if len(groups) == 1 else " where the same is trained"
            )
        return
    for group in groups:
        usual = _usual_loss(group)
        for row in group:
            if row.final_loss != usual:
                assert row.final_loss is not None
                off = row.final_loss - usual
                about = "by rounding" if abs(off) <= _ROUNDING * abs(usual) else "by more than that"
                yield f"{row.label}: its loss differs {about}, {off:+.3g} from {usual:.6f}"


def odd_losses(rows: Sequence[Row]) -> list[Row]:
    """Those whose loss differs from that of most, and by more than rounding."""
    return [
        row
        for group in _comparable([row for row in rows if row.final_loss is not None])
        for usual in [_usual_loss(group)]
        for row in group
        if abs((row.final_loss or 0.0) - usual) > _ROUNDING * abs(usual)
    ]


def _comparable(rows: Sequence[Row]) -> list[list[Row]]:
    """Those that train the same together."""
    groups: dict[tuple[tuple[str, str], ...], list[Row]] = {}
    for row in rows:
        decisive = tuple(pair for pair in row.varied.items() if decides_losses(pair[0]))
        groups.setdefault(decisive, []).append(row)
    return list(groups.values())


def _usual_loss(group: Sequence[Row]) -> float:
    counted = Counter(row.final_loss for row in group if row.final_loss is not None)
    return counted.most_common(1)[0][0]


def failures(rows: Sequence[Row]) -> Iterator[str]:
    """Why a variant has no figures, a line each."""
    return (f"{row.label}: {row.status}" for row in rows if row.status != OK)


def _listed(words: Sequence[str] | Iterator[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last
