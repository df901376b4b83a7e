"""The lines that describe a ranking of `auto`, and suggestions with which a run fits."""

from collections.abc import Iterator, Sequence

from fsdpctl.estimate.accuracy import TIE
from fsdpctl.estimate.candidates import Candidate, Ranking
from fsdpctl.estimate.memory_savings import Suggestion
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.io.texts import format_bytes
from fsdpctl.resolve.machine import LOCAL


def describe_ranking(ranking: Ranking) -> Iterator[str]:
    """Yield the selection, its reason, and the runner-up; or what is missing if nothing fits."""
    yield f"{'auto':<8}{ranking.summary}"
    if not ranking.ranked:
        return
    yield f"{'reason':<8}{_reason(ranking)}"
    # With defaults that do not fit, the selection is not compared with others.
    if len(ranking.ranked) > 1 or ranking.defaults is None:
        yield f"{'next':<8}{_runner_up(ranking)}"


def _reason(ranking: Ranking) -> str:
    first = ranking.ranked[0]
    fastest = min(ranking.ranked, key=lambda each: each.seconds)
    ranks = first.estimate.config.num_ranks
    scope = f"of {ranking.count} combinations on {ranks} rank{'' if ranks == 1 else 's'}"
    reason = f"fastest {scope} that fits"
    if fastest.seconds < first.seconds:
        tied = (x for x in ranking.ranked if x.seconds <= fastest.seconds * (1 + TIE))
        least = min(each.estimate.peak_reserved for each in tied)
        is_least = first.estimate.peak_reserved <= least
        # The search selects the least memory, and then lowers the recomputation as far as it fits.
        criterion = "least memory" if is_least else "least recomputation"
        reason = f"{criterion} among the fastest {scope} that fit"
    error_band = ranking.band_of(first)
    basis = ranking.spec_source if error_band is None else f"{ranking.spec_source}; {error_band}"
    seconds = f": {first.seconds:.3g} s/step predicted" if ranking.predicts else ""
    return f"{reason}{seconds} ({basis}), {_memory_of(first)}"


def _runner_up(ranking: Ranking) -> str:
    if len(ranking.ranked) == 1:
        return "nothing else fits"
    first, second = ranking.ranked[:2]
    time = f"{second.seconds:.3g} s/step predicted ({second.seconds / first.seconds - 1:+.1%}), "
    text = f"{second.selection.text(ranking.names)}: {time if ranking.predicts else ''}"
    return f"{text}{_memory_of(second)}"


def _memory_of(candidate: Candidate) -> str:
    estimate = candidate.estimate
    needed, available = estimate.peak_reserved, max(0, estimate.available)
    return f"{format_bytes(needed)} of {format_bytes(available)} per rank"


def note_on_local_cpu(estimate: RunEstimate) -> tuple[str, ...]:
    """Return a note if an estimate is for this machine's CPU because no cluster is set."""
    if (estimate.config.cluster.name, estimate.config.launch.device) != (LOCAL, "cpu"):
        return ()
    sizes = "`fsdpctl estimate-memory … cluster=8xh100` for GPUs (`fsdpctl list cluster`)"
    return (f"{'cluster':<8}sized for this machine's CPU; {sizes}",)


def describe_suggestions(suggestions: Sequence[tuple[Suggestion, RunEstimate]]) -> list[str]:
    """Return a line for each suggestion with which a run fits into memory."""
    if not suggestions:
        return ["to fit  no settings found with which the run fits"]
    return [
        f"{'to fit' if number == 1 else '':<8}{number}. {' '.join(suggestion.settings)}: "
        f"{format_bytes(estimate.peak_reserved)}, {suggestion.figures}".rstrip(", ")
        for number, (suggestion, estimate) in enumerate(suggestions, start=1)
    ]
