"""The recommended variant, and how speeds and losses of variants compare."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fsdpctl.io.units import format_bytes
from fsdpctl.resolve.run import decides_losses
from fsdpctl.tools.compare.row import OK, Row

_PARTS = {  # of a step
    "compute_seconds": "compute",
    "exposed_communication_seconds": "exposed communication",
    "optimizer_seconds": "optimizer",
    "data_seconds": "data",
}
_MAIN_SHARE = 0.5  # of a difference, that makes a part its main reason
_ROUNDING = 1e-5  # relative, of a loss: what another order of additions changes in fp32
_NAMED = 3
_SIMILAR = 0.01  # relative, of memory: not a reason to prefer a variant


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The best variant, if any ran, and the reasons in a paragraph."""

    best: Row | None
    text: str


def as_fast_as_the_fastest(rows: Sequence[Row]) -> list[Row]:
    """Return the fastest row, and those whose spread overlaps its spread.

    If the number of ranks varies, the speed per rank is compared.
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
    """Recommend the fastest variant that ran; among tied ones the one that needs least memory."""
    tied = as_fast_as_the_fastest(rows)
    if not tied:
        problem = "fits" if any(row.is_predicted for row in rows) else "finished"
        return Recommendation(None, f"No variant {problem}, so none is recommended.")
    best = _best_of(tied)
    following = as_fast_as_the_fastest([row for row in rows if row is not best])
    runner_up = _best_of(following) if following else None
    sentences = [f"{best.label}: {_summary(best)}.", _why(best, tied, runner_up)]
    if best.is_suggested:
        sentences.insert(0, "No variant fits; the cheapest change with which one does is")
    elif runner_up is None:
        sentences.append("No other variant is comparable.")
    if runner_up is not None:
        sentences.append(f"Runner-up: {runner_up.label}, {_summary(runner_up, than=best)}.")
    sentences.append(_in_doubt(best, rows))
    varied = sorted({name for row in rows for name in row.varied if decides_losses(name)})
    if varied:
        sentences.append(
            f"Varied settings change the losses ({', '.join(varied)}): compare those too."
        )
    if any(row is best for row in odd_losses(rows)):
        sentences.append("Its loss differs from that of the others: find out why first.")
    return Recommendation(best, " ".join(filter(None, sentences)))


def _best_of(tied: Sequence[Row]) -> Row:
    """Return the row with least memory; the first, which is fastest, if unknown or similar."""
    known = [row.memory for row in tied if row.memory is not None]
    if len(known) < len(tied):
        return tied[0]
    least = min(known)
    return next(row for row in tied if (row.memory or 0) <= least * (1 + _SIMILAR))


def _summary(row: Row, *, than: Row | None = None) -> str:
    """Return its speed and memory as text; its speed relative to `than`, if that is given."""
    text = f"{row.speed:,.0f} tokens/s"
    if than is not None:
        change = row.speed / _ranks(row) / (than.speed / _ranks(than)) - 1
        each = "" if _ranks(row) == _ranks(than) else " per rank"
        text += f" ({abs(change):.1%} {'faster' if change > 0 else 'slower'}{each})"
    elif row.tokens_per_second_spread is not None:
        low, high = row.tokens_per_second_spread
        over = f"in {len(row.rounds)} rounds" if len(row.rounds) > 1 else "in half of its steps"
        text += f" ({low:,.0f} to {high:,.0f} {over})"
    if row.memory is not None:
        source = "without activations"
        if row.peak_tensor_bytes is not None:
            source = "measured"
        elif row.estimated_peak_tensor_bytes is not None:
            source = "estimated"
        text += f", {format_bytes(row.memory)} per rank {source}"
    return text


def _in_doubt(best: Row, rows: Sequence[Row]) -> str:
    """Return which variants of another kind may be as fast, by the error bands of predictions."""
    band = best.error_band
    if band is None:
        return ""
    found = [
        row
        for row in rows
        if row.speed
        and row.error_band is not None
        and row.error_band.kind != band.kind
        and row.speed / _ranks(row) / row.error_band.low >= best.speed / _ranks(best) / band.high
    ]
    if not found:
        return ""
    first = max(found, key=lambda row: row.speed / _ranks(row))
    more = f" and {len(found) - 1} others" if len(found) > 1 else ""
    return (
        f"By the error bands, {first.label}{more} may be as fast ({first.error_band}; {band}): "
        "measure both."
    )


def _why(best: Row, tied: Sequence[Row], runner_up: Row | None) -> str:
    others = [row for row in tied if row is not best]
    if others:
        return _why_of_tied(best, others)
    if runner_up is None:
        return ""
    reason = explain(best, runner_up)
    each = "" if _ranks(best) == _ranks(runner_up) else " per rank"
    clear = f"fastest{each}, by more than the spread"
    if best.is_predicted:
        clear = f"predicted to be fastest{each}"
    return f"It is {clear}{f': {reason}' if reason else ''}."


def _why_of_tied(best: Row, others: Sequence[Row]) -> str:
    named = _listed([row.label for row in others[:_NAMED]])
    if len(others) > _NAMED:
        named = f"{len(others)} others, the fastest of them {named}"
    overlap = "the difference is below the accuracy of predictions"
    tie = f"It is tied with {named}: {overlap if best.is_predicted else 'their spreads overlap'}"
    more = [row.memory for row in others if row.memory is not None]
    if best.memory is None or len(more) < len(others):
        return f"{tie}."
    if max(more) > best.memory * (1 + _SIMILAR):
        return f"{tie}. None of them needs much less memory."
    return f"{tie}. They need as much memory; it was the fastest."


def explain(faster: Row, slower: Row) -> str:
    """Return the part of a step that causes most of a difference, or an empty string."""
    if not (faster.step_seconds and slower.step_seconds) or _ranks(faster) != _ranks(slower):
        return ""
    gap = slower.step_seconds - faster.step_seconds
    known = [name for name in _PARTS if getattr(faster, name) is not None]
    if gap <= 0 or not all(getattr(slower, name) is not None for name in known):
        return ""
    for name in known:
        own, other = getattr(faster, name), getattr(slower, name)
        if other - own > _MAIN_SHARE * gap:
            return f"{_PARTS[name]} takes {own * 1e3:.1f} instead of {other * 1e3:.1f} ms/step"
    return ""


# ---- losses --------------------------------------------------------------------------------


def losses(rows: Sequence[Row]) -> Iterator[str]:
    """Describe whether losses are equal where they should be, and which ones are not."""
    known = [row for row in rows if row.final_loss is not None]
    for row in known:
        ends = {each.final_loss for each in row.rounds}
        if len(ends) > 1:
            yield f"{row.label}: final losses of its rounds differ: {_listed(map(repr, ends))}"
    groups = _comparable(known)
    if all(len({row.final_loss for row in group}) == 1 for group in groups):
        if len(known) > 1:
            limit = "" if len(groups) == 1 else " among variants with the same training settings"
            yield f"all losses are equal{limit}"
        return
    odd = odd_losses(rows)
    for group in groups:
        usual = _usual_loss(group)
        for row in group:
            if off := (row.final_loss or 0.0) - usual:
                size = "more than rounding" if any(row is each for each in odd) else "rounding"
                yield f"{row.label}: loss differs by {size}, {off:+.3g} from {usual:.6f}"


def odd_losses(rows: Sequence[Row]) -> list[Row]:
    """Return the rows whose loss differs from that of most by more than rounding."""
    odd = []
    for group in _comparable([row for row in rows if row.final_loss is not None]):
        usual = _usual_loss(group)
        most = _ROUNDING * abs(usual)
        odd += [row for row in group if abs((row.final_loss or 0.0) - usual) > most]
    return odd


def _comparable(rows: Sequence[Row]) -> list[list[Row]]:
    """Group the rows that train the same."""
    groups: dict[tuple[tuple[str, str], ...], list[Row]] = {}
    for row in rows:
        decisive = tuple(pair for pair in row.varied.items() if decides_losses(pair[0]))
        groups.setdefault(decisive, []).append(row)
    return list(groups.values())


def _usual_loss(group: Sequence[Row]) -> float:
    counted = Counter(row.final_loss for row in group if row.final_loss is not None)
    return counted.most_common(1)[0][0]


def failures(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each variant without results, with the reason."""
    return (f"{row.label}: {row.status}" for row in rows if row.status != OK)


def _listed(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last
