"""Operators of fsdpctl, which torch.compile calls as they are.

`torch.library.custom_op` would define them in as many lines, and takes 15% more time per call.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

_LIBRARY = torch.library.Library("fsdpctl", "DEF")
OPERATORS: dict[Any, Callable[..., Any]] = {}
"""The functions that compute products and what these need, by operator."""


def operator(
    name: str,
    function: Callable[..., Any],
    fake: Callable[..., Any] | None,
    *,
    writes: Iterable[str] = (),
    is_product: bool = True,
) -> Any:
    """Return the operator that `function` computes; `fake` returns a result without values.

    The types of `function` make its schema; it `writes` to these arguments.
    """
    schema = torch.library.infer_schema(function, mutates_args=[*writes])
    _LIBRARY.define(f"{name}{schema}")
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    if fake is not None:
        torch.library.register_fake(f"fsdpctl::{name}", fake, lib=_LIBRARY)
    made = getattr(torch.ops.fsdpctl, name).default
    if is_product:
        OPERATORS[made] = function
    return made
