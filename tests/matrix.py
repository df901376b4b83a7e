"""Parameter matrices: all pairs in the fast suite, the rest in the slow one."""

from collections.abc import Sequence
from itertools import product

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
    for place in indices:
        values = [factors[name][index] for name, index in zip(names, place, strict=True)]
        is_fast = place[-1] == sum(place[:-1]) % last
        cases.append(pytest.param(*values, marks=() if is_fast else pytest.mark.slow))
    return pytest.mark.parametrize(names, cases)
