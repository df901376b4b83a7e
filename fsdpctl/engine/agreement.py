"""Settings and forwards that all ranks must agree on."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import NoReturn, TypeVar

from fsdpctl.comm.base import Collectives
from fsdpctl.errors import EngineError

T = TypeVar("T")


def agreed(
    collectives: Collectives, make: Callable[[], T], describe: Callable[[T], Iterable[str]]
) -> T:
    """Return the result of `make()`, if it is the same on every rank. Collective.

    Args:
        collectives: The ranks.
        make: May raise an exception; then every rank raises one.
        describe: Returns what must be equal, part by part.

    Raises:
        Exception: If `make()` raised it on this rank.
        EngineError: If `make()` failed on another rank, or returned something else there.
    """
    made: T | None = None
    parts: tuple[str, ...] = ()
    error: Exception | None = None
    try:
        made = make()
        parts = tuple(describe(made))
    except Exception as caught:  # of any kind: the others must not wait for this rank
        error = caught
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    answers = collectives.gather_objects([digest] if error is None else [digest, str(error)])
    if error is not None:
        raise error
    for rank, (_, *messages) in enumerate(answers):
        for message in messages:
            raise EngineError(f"rank {rank}: {message}")
    if len({digest for digest, *_ in answers}) > 1:  # the parts are long, and rarely needed
        _report_difference(parts, collectives)
    assert made is not None
    return made


def _report_difference(ours: Sequence[str], collectives: Collectives) -> NoReturn:
    answers = collectives.gather_objects(list(ours))
    other = next(rank for rank, theirs in enumerate(answers) if theirs != answers[0])
    first, second = next(
        (mine, theirs)
        for mine, theirs in zip_longest(answers[0], answers[other], fillvalue="nothing more")
        if mine != theirs
    )
    raise EngineError(
        "the ranks were given different models or settings: "
        f"rank 0 has {first}, rank {other} has {second}"
    )


def agree_on_forwards(
    collectives: Collectives, takes_part: Sequence[bool], *, same_under: str | None
) -> Sequence[bool]:
    """Return which forwards take part in a backward on any rank. Collective.

    Here those in `takes_part` do; empty: unknown. `same_under` is the strategy, if it requires all
    ranks to go through the same ones.

    Raises:
        EngineError: If the ranks go through different forwards, and would gather different units.
    """
    found = collectives.gather_objects(list(takes_part))
    if not all(found):
        return [True] * max(map(len, found))
    if same_under and any(each != found[0] for each in found):
        numbers = [[n for n, is_part in enumerate(each, 1) if is_part] for each in found]
        other = next(rank for rank, each in enumerate(found) if each != found[0])
        raise EngineError(
            f"of {len(takes_part)} forwards, backward goes through {numbers[0]} on rank 0 and "
            f"through {numbers[other]} on rank {other}; {same_under} requires the same ones on "
            "all ranks (add the others' loss times zero)"
        )
    return [any(each) for each in zip(*found, strict=True)]
