"""Sums by name that a script's loss returns besides its own, such as correct predictions."""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdpctl.comm.collectives import Collectives
from fsdpctl.errors import UsageError
from fsdpctl.models.describe import dtype_name
from fsdpctl.run.step_metrics import RESERVED

_NAME, _MOST = re.compile(r"(?!val_)[A-Za-z_][A-Za-z0-9_./-]{0,63}"), 100


class NamedSums:
    """Sums of the passes on this rank, with the names of the first pass, which all ranks share."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] | None = None  # None: no pass has run
        self._are_shared = False
        self._sums: dict[str, float | Tensor] = {}

    def add(self, sums: Mapping[str, float | Tensor]) -> None:
        """Add the sums of a pass, without waiting for the device."""
        names = tuple(sorted(sums))
        self.names = names if self.names is None else self.names
        if names != self.names:
            expected = f"{_listed(self.names)}, as in its first call"
            raise UsageError(f"loss: expected sums named {expected}, got {_listed(names)}")
        self._sums = {name: self._sums.get(name, 0.0) + each for name, each in sums.items()}

    def take(self, ranks: Collectives, device: torch.device) -> Tensor:
        """Return the sums of this rank in the order of their names, and reset them.

        Collective the first time after a pass: UsageError if the names of another rank differ.
        """
        if self.names is not None and not self._are_shared:
            for rank, names in enumerate(ranks.gather_objects(self.names)):
                if names != self.names:
                    both = f"{_listed(self.names)}, rank {rank} {_listed(names)}"
                    raise UsageError(f"loss: rank {ranks.rank} has sums named {both}")
            self._are_shared = True
        found = torch.zeros(len(self.names or ()), dtype=torch.float64, device=device)
        for place, name in enumerate(self.names or ()):
            found[place] += self._sums.pop(name)
        return found


def checked_sums(found: Any) -> dict[str, float | Tensor]:
    """Return the sums that a loss function has returned, without gradients."""
    if not isinstance(found, Mapping) or len(found) > _MOST:
        got = len(found) if isinstance(found, Mapping) else type(found).__name__
        raise UsageError(f"loss: expected a dict of at most {_MOST} named sums, got {got}")
    return {_checked_name(name): _checked_sum(name, each) for name, each in found.items()}


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        expected = "letters, digits and ._/- after a letter, at most 64, not val_*"
        raise UsageError(f"loss: {name!r:.80}: expected as the name of a sum {expected}")
    if name in RESERVED:
        raise UsageError(f"loss: {name}: metrics.jsonl has another value of this name; rename it")
    return name


def _checked_sum(name: str, value: Any) -> float | Tensor:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().reshape(()).double()
    if isinstance(value, int | float | np.integer | np.floating):
        with suppress(OverflowError):
            return float(value)
    got = f"{value!r:.60}"
    if isinstance(value, Tensor):
        got = f"shape {[*value.shape]} of {dtype_name(value.dtype)}"
    raise UsageError(f"loss: {name}: expected a number, or a tensor with one element, got {got}")


def _listed(names: tuple[str, ...] | None) -> str:
    return ", ".join(names or ()) or "nothing"
