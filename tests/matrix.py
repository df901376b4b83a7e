"""Parameter matrices: all pairs in the fast suite, the rest in the slow one."""

import random
from collections.abc import Sequence
from itertools import combinations, count, product
from typing import Any

import pytest


def matrix(**factors: Sequence[object]) -> pytest.MarkDecorator:
    """Parametrize over the product of `factors`.

    A Latin square of it is fast: every combination of the other factors has one value of the last
    factor, and these values take turns. The other cases are marked slow.
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
    """Return the values of a parameter; those of `slow` are marked slow."""
    return [*chosen, *(pytest.param(value, marks=pytest.mark.slow) for value in slow)]


WHOLE = pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])


HALF = pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])


def half_of(drawn_from: Sequence[tuple[Any, ...]], half: int) -> list[tuple[Any, ...]]:
    """Return a half of the cases, drawn so that the first half has every value of every factor."""
    values = list(map(set, zip(*drawn_from, strict=True)))
    for seed in count():
        order = random.Random(seed).sample(drawn_from, len(drawn_from))
        if list(map(set, zip(*order[::2], strict=True))) == values:
            return order[half::2]
    raise AssertionError


def cases(*factors: Sequence[Any], whole: bool) -> list[tuple[Any, ...]]:
    """Return the product of `factors`, or a few cases that have every pair of two values.

    For a test that loops over its matrix, because starting ranks takes longer than a case.
    """
    columns = list(product(*(range(len(values)) for values in factors)))
    chosen = columns if whole else _covering(columns)
    return [tuple(values[n] for values, n in zip(factors, row, strict=True)) for row in chosen]


def _covering(columns: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Select cases greedily: always the earliest one that adds the most new pairs."""
    pairs = {
        column: {(a, column[a], b, column[b]) for a, b in combinations(range(len(column)), 2)}
        for column in columns
    }
    chosen = []
    most = max(map(len, pairs.values()))
    while most:
        for column in columns:
            new = pairs[column]
            if len(new) == most:
                chosen.append(column)
                for others in pairs.values():
                    if others is not new:
                        others -= new
                new.clear()
        most = max(map(len, pairs.values()))
    return chosen
