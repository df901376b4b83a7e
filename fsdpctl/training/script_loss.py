"""The loss function of a script, and the named sums that it returns besides the loss."""

import re
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdpctl.comm.collectives import Collectives
from fsdpctl.data.script_data import ScriptBatch
from fsdpctl.errors import UsageError
from fsdpctl.models.module_spec import dtype_name
from fsdpctl.models.packed_documents import copy_to_device
from fsdpctl.run.step_metrics import RESERVED_NAMES

_NAME = re.compile(r"(?!val_)[A-Za-z_][A-Za-z0-9_./-]{0,63}")
_MAX_SUMS = 100


def script_loss(
    model: Any, batch: ScriptBatch, device: torch.device, named: "NamedSums"
) -> tuple[Tensor, int | Tensor]:
    """Return the sum and the count of a script's loss function; add its named sums to `named`.

    `model` is a ShardedModel.
    """
    dtype = model.compute_dtype
    with torch.autocast(device.type, dtype, enabled=dtype == torch.bfloat16):
        result = batch.data.loss(model, _to_device(batch.value, device))
        total, count, *others = _check_result(result)
    sums = check_sums(others[0]) if others else {}
    named.add(sums if batch.is_counted else dict.fromkeys(sums, 0.0))
    # A batch that only pads: all ranks must run its backward, which adds nothing.
    return (total, count) if batch.is_counted else (0 * total, 0)


def _to_device(value: Any, device: torch.device) -> Any:
    """Send the tensors of a batch to the device; containers keep their class."""
    if isinstance(value, Tensor):
        can_pin = not value.is_cuda and value.layout is torch.strided
        return copy_to_device(value, device) if can_pin else value.to(device)
    if callable(getattr(value, "to", None)):  # such as BatchEncoding, PackedSequence
        sent = value.to(device)
        return value if sent is None else sent
    if isinstance(value, tuple):
        each = [_to_device(each, device) for each in value]
        return type(value)(*each) if hasattr(value, "_fields") else type(value)(each)
    if is_dataclass(value) and not isinstance(value, type):
        copied: Any = copy(value)
        for name in (each.name for each in fields(value) if hasattr(value, each.name)):
            # The dataclass may be frozen.
            object.__setattr__(copied, name, _to_device(getattr(value, name), device))
        return copied
    if isinstance(value, list | MutableMapping):
        items = value.items() if isinstance(value, MutableMapping) else enumerate(value)
        copied = copy(value)
        for key, each in items:
            copied[key] = _to_device(each, device)
        return copied
    if isinstance(value, Mapping):
        return {name: _to_device(each, device) for name, each in value.items()}
    return value


def _check_result(result: Any) -> tuple[Tensor, int | Tensor, *tuple[Any, ...]]:
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        raise UsageError(f"loss: expected a tuple (sum, count) or (sum, count, dict), got {got}")
    total, count, *others = result
    if not isinstance(total, Tensor) or total.numel() != 1:
        got = f"shape {list(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        raise UsageError(f"loss: expected a sum, a tensor with one element, got {got}")
    if torch.is_grad_enabled() and not total.requires_grad:
        raise UsageError("loss: the sum depends on no trained parameter; was it detached?")
    if isinstance(count, Tensor):
        is_whole = count.numel() == 1 and not (count.is_floating_point() or count.is_complex())
        count = count.detach().reshape(()) if is_whole else count
    else:
        is_whole = isinstance(count, int | np.integer) and int(count) >= 0
    if not is_whole:
        raise UsageError(f"loss: expected a whole number as the count, got {count!r:.60}")
    return total.reshape(()), count, *others


class NamedSums:
    """The named sums over the passes of this rank; all passes and ranks have equal names."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] | None = None  # None: no pass has run
        self._names_checked = False
        self._sums: dict[str, float | Tensor] = {}

    def add(self, sums: Mapping[str, float | Tensor]) -> None:
        """Add the sums of a pass, without waiting for the device."""
        names = tuple(sorted(sums))
        self.names = names if self.names is None else self.names
        if names != self.names:
            expected = f"{_listed(self.names)}, as in its first call"
            raise UsageError(f"loss: expected sums named {expected}, got {_listed(names)}")
        self._sums = {name: self._sums.get(name, 0.0) + each for name, each in sums.items()}

    def take(self, collectives: Collectives, device: torch.device) -> Tensor:
        """Return the sums of this rank in the order of their names, and reset them.

        The first call after a pass is collective: UsageError if the names of another rank differ.
        """
        if self.names is not None and not self._names_checked:
            for rank, names in enumerate(collectives.all_gather_values(self.names)):
                if names != self.names:
                    both = f"{_listed(self.names)}, rank {rank} {_listed(names)}"
                    raise UsageError(f"loss: rank {collectives.rank} has sums named {both}")
            self._names_checked = True
        sums = torch.zeros(len(self.names or ()), dtype=torch.float64, device=device)
        for index, name in enumerate(self.names or ()):
            sums[index] += self._sums.pop(name)
        return sums


def check_sums(sums: Any) -> dict[str, float | Tensor]:
    """Return the named sums of a loss function without gradients; UsageError if invalid."""
    if not isinstance(sums, Mapping) or len(sums) > _MAX_SUMS:
        got = len(sums) if isinstance(sums, Mapping) else type(sums).__name__
        raise UsageError(f"loss: expected a dict of at most {_MAX_SUMS} named sums, got {got}")
    return {_check_name(name): _to_number(name, value) for name, value in sums.items()}


def _check_name(name: Any) -> str:
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        expected = "letters, digits and ._/- after a letter, at most 64, not val_*"
        raise UsageError(f"loss: {name!r:.80}: expected as the name of a sum {expected}")
    if name in RESERVED_NAMES:
        raise UsageError(f"loss: {name}: this name is used in metrics.jsonl; rename the sum")
    return name


def _to_number(name: str, value: Any) -> float | Tensor:
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
