"""The spans of a flat buffer that the optimizer updates as one tensor."""

from collections.abc import Callable
from dataclasses import dataclass

from fsdpctl.plan.layout import FlatLayout, ParamSpec, Span

DECAY, NO_DECAY = 0, 1


def decay_group(param: ParamSpec) -> int:
    """Return the default group of a parameter: only matrices decay."""
    return DECAY if len(param.shape) > 1 else NO_DECAY


@dataclass(frozen=True, slots=True)
class Run:
    """A maximal span of parameters of one group; begins and ends on a multiple of 64."""

    span: Span
    group: int


def optimizer_runs(
    layout: FlatLayout, within: Span, group_of: Callable[[ParamSpec], int]
) -> tuple[Run, ...]:
    """Cut `within` wherever the group changes; padding belongs to the parameter before it.

    `within` must begin and end on a multiple of 64. A span without parameters has no run.
    """
    runs: list[Run] = []
    for piece in layout.pieces(within):
        group = group_of(piece.param)
        if runs and runs[-1].group == group:
            continue
        if runs:
            runs[-1] = Run(Span(runs[-1].span.start, piece.in_flat.start), runs[-1].group)
        runs.append(Run(Span(piece.in_flat.start, within.stop), group))
    return tuple(runs)
