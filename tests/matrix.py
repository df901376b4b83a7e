"""Parameter matrices: all pairs in the fast suite, the rest in the slow one."""

import random
from collections.abc import Sequence
from itertools import combinations, count, product
from typing import Any

import pytest


def matrix(**factors: Sequence[object]) -> pytest.MarkDecorator:
    """Parametrize over the product of `factors`.

    A Latin square of it is fast: every combination of all factors but the last is there once, and
    the last one goes round. The others are marked slow.
    """
    names = list(factors)
    indices = product(*(range(len(values)) for values in factors.values()))
    last = len(factors[names[-1]])
    cases = []
    for column in indices:
        values = [factors[name][index] for name, index in zip(names, column, strict=True)]
        is_fast = column[-1] == sum(column[:-1]) % last
        cases.append(pytest.param(*values, marks=() if is_fast else pytest.mark.slow))
    return pytest.mark.parametrize(names, cases)


def fast(*chosen: object, slow: Sequence[object]) -> list[Any]:
    """Values of a parameter, of which some are for the slow suite."""
    return [*chosen, *(pytest.param(value, marks=pytest.mark.slow) for value in slow)]


WHOLE = pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])


HALF = pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])


def half_of(drawn_from: Sequence[tuple[Any, ...]], half: int) -> list[tuple[Any, ...]]:
    """Half of some cases, drawn so that every value of every factor is in the first half."""
    values = list(map(set, zip(*drawn_from, strict=True)))
    for seed in count():
        order = random.Random(seed).sample(drawn_from, len(drawn_from))
        if list(map(set, zip(*order[::2], strict=True))) == values:
            return order[half::2]
    raise AssertionError


def cases(*factors: Sequence[Any], whole: bool) -> list[tuple[Any, ...]]:
    """The product of `factors`, or a few of it in which every two values meet.

    For matrices that a test goes through itself, because starting ranks takes longer than a case.
    """
    places = list(product(*(range(len(values)) for values in factors)))
    chosen = places if whole else _covering(places)
    return [
        tuple(values[index] for values, index in zip(factors, column, strict=True))
        for column in chosen
    ]


def _covering(places: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Greedily, the earliest of those places that bring most new pairs."""
    pairs = {
        column: {(a, column[a], b, column[b]) for a, b in combinations(range(len(column)), 2)}
        for column in places
    }
    chosen = []
    most = max(map(len, pairs.values()))
    while most:
        for column in places:
            new = pairs[column]
            if len(new) == most:
                chosen.append(column)
                for others in pairs.values():
                    if others is not new:
                        others -= new
                new.clear()
        most = max(map(len, pairs.values()))
    return chosen
