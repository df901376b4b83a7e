"""Counts the bytes of all tensors of a real run."""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdpctl.comm.collectives import Handle
from fsdpctl.comm.gloo import GlooCollectives
from fsdpctl.engine.host_worker import HostWorker
from fsdpctl.engine.offloaded_inputs import HostInputs
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.models.custom_ops import PRODUCT_OPERATORS
from fsdpctl.plan.schedule import BufferKind, Event
from tests.engine.events import gathered_nbytes, recording


class TensorBytes(TorchDispatchMode):
    """A mode that counts the bytes of every tensor that an operator allocates."""

    def __init__(
        self, existing: Iterable[Tensor], buffers: Iterable[Tensor], in_buffers: Callable[[], int]
    ) -> None:
        """Count `existing` tensors; `in_buffers` returns the bytes that `buffers` have now."""
        super().__init__()
        self._in_buffers = in_buffers
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._total = 0
        self.peak = 0
        for tensor in buffers:
            self.leave_out(tensor)
        for tensor in existing:
            self._add(tensor)

    def leave_out(self, tensor: Tensor) -> None:
        """Do not count a tensor in host memory or in a buffer."""
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = (weakref.ref(storage), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCT_OPERATORS:
            with self:
                return PRODUCT_OPERATORS[func](*args)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        self.peak = max(self.peak, self._total + self._in_buffers())
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        nbytes = storage.nbytes()
        self._total += nbytes
        self._known[key] = (weakref.ref(storage, lambda _: self._on_free(key)), nbytes)

    def _on_free(self, key: int) -> None:
        _, nbytes = self._known.pop(key)
        self._total -= nbytes


@contextmanager
def _threads_released() -> Iterator[None]:
    """End collectives when gloo's threads have released the memory of their tensors.

    Handles end earlier: with more ranks than cores, threads can hold memory in the next forward.
    """

    def until_released(start: Callable[..., Handle]) -> Callable[..., Handle]:
        def started(collectives: GlooCollectives, values: Any, **options: Any) -> Handle:
            tensors = [values] if isinstance(values, Tensor) else [each.full for each in values]
            uses = [_uses(each) for each in tensors]
            handle = start(collectives, values, **options)

            def finish() -> Tensor:
                result = handle.wait()
                while any(_uses(e) > before for e, before in zip(tensors, uses, strict=True)):
                    time.sleep(0)
                return result

            return Handle(finish)

        return started

    all_to_all = GlooCollectives.all_to_all

    def released(collectives: GlooCollectives, values: Tensor) -> Tensor:
        uses, unused = _uses(values), torch.empty(1)
        received = all_to_all(collectives, values)
        while _uses(values) > uses or _uses(received) > _uses(unused):
            time.sleep(0)
        return received

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(GlooCollectives, "all_to_all", released))
        for name in ("start_all_reduce", "all_gather"):
            patched = until_released(getattr(GlooCollectives, name))
            patches.enter_context(mock.patch.object(GlooCollectives, name, patched))
        yield


def _uses(tensor: Tensor) -> int:
    """Count references to the memory: by views, and by threads that hold the tensor itself."""
    views: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    holders: int = tensor._use_count()  # type: ignore[attr-defined]  # not in torch's stubs
    return views + holders


def host_inputs(module: nn.Module) -> HostInputs | None:
    """Return the host memory to which blocks offload their inputs, if they do."""
    block: Any = next((x for x in module.modules() if hasattr(x, "_offload_input")), None)
    inputs: HostInputs | None = None if block is None else block._offload_input.func.__self__
    return inputs


def watched_step(model: ShardedModel, step: Callable[[], None]) -> tuple[int, list[Event]]:
    """Return the peak bytes of all tensors in the second step, and the events of the engine."""
    buffers = [buffer for unit in model._runtime.units.values() for buffer in unit.buffers]
    existing = [each.param_shard for each in buffers if not each.is_on_host]
    existing += [each.shard.master for each in buffers if not each.shard.is_on_host]
    uncounted = [buffer.full for buffer in buffers]
    uncounted += [each.param_shard for each in buffers if each.is_on_host]
    uncounted += getattr(model.mesh.shard, "_outboxes", [])
    if model.host is not None:
        uncounted += [*model.host._slabs.values(), *model.host._gradient_slabs.values()]
    outbox = model.accounting.total(BufferKind.OUTBOX)
    watch = TensorBytes(existing, uncounted, lambda: gathered_nbytes(model) + outbox)
    del buffers, existing, uncounted  # otherwise the lists keep tensors alive
    allocate = HostWorker.allocate

    def left_out(*args: Any, **options: Any) -> Tensor:
        slab = allocate(*args, **options)
        watch.leave_out(slab)
        return slab

    with watch, _threads_released(), mock.patch.object(HostWorker, "allocate", left_out):
        step()  # allocates optimizer states, and cached tables
        watch.peak = 0
        with recording(model) as trace:
            step()
    return watch.peak, trace
