"""Whether the memory of devices and hosts suffices for a run, before its workers start."""

from collections.abc import Callable, Sequence

from fsdpctl.errors import DoesNotFitError
from fsdpctl.estimate.accuracy import kind_of
from fsdpctl.estimate.advice import advice
from fsdpctl.estimate.changes import Change
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.io.units import format_bytes


def check_fits(estimate: RunEstimate, estimator: Estimator, say: Callable[[str], None]) -> None:
    """Print what makes a run fit if it doesn't; DoesNotFitError with `train.require_fit`."""
    if not (lacking := estimate.shortages):
        return
    say(f"{'memory':<8}does not suffice; searching for changes that fit")
    for line in change_lines(advice(estimator, estimate.plan, more_ranks=False)):
        say(line)
    if estimate.config.train.require_fit:
        raise DoesNotFitError(
            f"{'; '.join(lacking)}; change the settings, or set train.require_fit=false to start "
            "nevertheless"
        )


def change_lines(changes: Sequence[tuple[Change, RunEstimate]]) -> list[str]:
    """Return lines with the changes that make a configuration fit."""
    if not changes:
        return ["to fit  no change found that makes it fit"]
    lines = [
        f"{' '.join(change.words)}: {format_bytes(estimate.peak_reserved)}; {change.cost}"
        for change, estimate in changes
    ]
    kinds = {kind_of(estimate) for _, estimate in changes}
    if len(kinds) > 1:
        lines.append("in the order of cost where the error bands of predicted times overlap")
    return [f"{'to fit' if not i else '':<8}{line}" for i, line in enumerate(lines)]
