"""Counts the bytes of all tensors of a real run."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdpctl.engine.model import ShardedModel
from fsdpctl.plan.schedule import Event


class TensorBytes(TorchDispatchMode):
    """Active, it sees every tensor that an operator makes, until its memory is given back."""

    def __init__(
        self, there: Iterable[Tensor], slots: Iterable[Tensor], in_slots: Callable[[], int]
    ) -> None:
        """`there` exist already; `slots` lie in memory that comes and goes, as `in_slots` says."""
        super().__init__()
        self._in_slots = in_slots
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._total = 0
        self.peak = 0
        for tensor in slots:
            storage = tensor.untyped_storage()
            self._known[storage._cdata] = (weakref.ref(storage), 0)
        for tensor in there:
            self._add(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        self.peak = max(self.peak, self._total + self._in_slots())
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        nbytes = storage.nbytes()
        self._total += nbytes
        self._known[key] = (weakref.ref(storage, lambda _: self._gone(key)), nbytes)

    def _gone(self, key: int) -> None:
        _, nbytes = self._known.pop(key)
        self._total -= nbytes


def watched_step(model: ShardedModel, step: Callable[[], None]) -> tuple[int, list[Event]]:
    """The most bytes of all tensors in a step that is not the first, and what the engine did."""
    there = [shard.master for shard in model.flat_shards()]
    slots = [buffer.whole for unit in model._runtime.units.values() for buffer in unit.buffers]
    watch = TensorBytes(there, slots, model.gathered_nbytes)
    del there, slots
    with watch:
        step()  # makes optimizer states, and tables that stay
        watch.peak = 0
        with model.recorded_events() as trace:
            step()
    return watch.peak, trace
