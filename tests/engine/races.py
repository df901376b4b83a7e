"""A happens-before race detector for the CUDA path, on the CPU.

Streams are vector clocks (Fidge, 1988; Mattern, 1989): an access may follow another on another
stream only if that stream's clock had reached it. Every operator is logged with the storages that
it reads and writes, on the stream that is current; so are the collectives, which torch's fake
process group answers, and the ends of memory. Autograd runs in the calling thread here; a
collective is one operation.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdpctl.comm import collectives, nccl
from fsdpctl.engine.collecting import Collector
from fsdpctl.engine.slots import Slot

Clock = dict[int, int]  # by stream, how far it has got
# Operators that look at where a tensor lies and at no element.
_VIEWS = (
    "view", "slice", "detach", "aten::t", "transpose", "expand", "unsqueeze", "squeeze", "alias",
    "as_strided", "split", "select", "set_", "permute", "empty", "sym_", "storage", "unbind",
    "chunk", "reshape_alias", "unfold",
)  # fmt: skip


class Stream:
    """What stands for torch.cuda.Stream, and for its events: copies of its clock."""

    _numbers = itertools.count()

    def __init__(self, *about: Any, **more: Any) -> None:
        self.number = next(self._numbers)
        self.clock: Clock = {self.number: 0}

    def has_seen(self, clock: Clock) -> bool:
        return all(self.clock.get(number, 0) >= time for number, time in clock.items())

    def wait_event(self, event: Clock) -> None:
        for number, time in event.items():
            self.clock[number] = max(self.clock.get(number, 0), time)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.clock)

    def record_event(self, event: object = None) -> Clock:
        return dict(self.clock)


class _Accesses:
    """Of one storage, by stream the last of each kind."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = StorageWeakRef(storage)
        self.writes: Clock = {}
        self.reads: Clock = {}


class RaceDetector(TorchDispatchMode):
    """Logs every access within its block; `problems` are those that nothing orders."""

    def __init__(self) -> None:
        super().__init__()
        self.compute = Stream()
        self.problems: Counter[str] = Counter()
        self.num_operations = 0
        self._current = [self.compute]
        self._accesses: dict[int, _Accesses] = {}

    def current_stream(self, *device: Any) -> Stream:
        return self._current[-1]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def operation(self, name: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        self.num_operations += 1
        stream = self._current[-1]
        stream.clock[stream.number] += 1
        for each in reads:
            self._touch(each, name, writes=False)
        for each in writes:
            self._touch(each, name, writes=True)

    def _touch(self, tensor: Tensor, name: str, *, writes: bool) -> None:
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return
        self._sweep(storage._cdata)
        found = self._accesses.setdefault(storage._cdata, _Accesses(storage))
        stream = self._current[-1]
        if not stream.has_seen(found.writes):
            self.problems[f"{name} while another stream writes"] += 1
        if writes and not stream.has_seen(found.reads):
            self.problems[f"{name} writes while another stream reads"] += 1
        kind = found.writes if writes else found.reads
        kind[stream.number] = stream.clock[stream.number]

    def memory_ends(self, key: int) -> None:
        """Whoever gets this memory next uses it on the compute stream."""
        found = self._accesses.pop(key, None)
        if found and not (
            self.compute.has_seen(found.writes) and self.compute.has_seen(found.reads)
        ):
            self.problems["memory ends while another stream uses it"] += 1

    def _sweep(self, *keys: int) -> None:
        for key in keys or list(self._accesses):
            if key in self._accesses and self._accesses[key].storage.expired():
                self.memory_ends(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._sweep()
        name = func._schema.name
        if any(view in name for view in _VIEWS) and "copy" not in name:
            return out
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False))
        written = [
            (given | kwargs).get(each.name)
            for each in func._schema.arguments
            if each.alias_info is not None and each.alias_info.is_write
        ]
        self.operation(name, _tensors((args, kwargs)), _tensors(written) + _tensors(out))
        return out


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


class NcclOnCpu(nccl.NcclCollectives):
    """The collectives of CUDA, streams and all, on tensors of the CPU."""

    _device_type = "cpu"


@contextmanager
def detecting_races(patch: pytest.MonkeyPatch) -> Iterator[RaceDetector]:
    """Streams, collectives and ends of memory are the detector's within the block."""
    found = RaceDetector()

    def gather(out: Tensor, own: Tensor, **group: Any) -> None:
        found.operation("all_gather", [own], [out])

    def scatter(own: Tensor, whole: Tensor, **group: Any) -> None:
        found.operation("reduce_scatter", [whole], [own])

    def exchange(received: Tensor, whole: Tensor, *about: Any, **group: Any) -> None:
        found.operation("all_to_all", [whole], [received])

    def in_place(name: str) -> Any:
        class Work:
            def wait(self) -> None:
                pass

        def collective(values: Tensor, *about: Any, **more: Any) -> Work:
            found.operation(name, [values], [values])
            return Work()

        return collective

    give_back = Slot.give_back

    def gives_back(slot: Slot) -> None:
        if not slot.resident:
            found.memory_ends(slot._bytes.untyped_storage()._cdata)
        give_back(slot)

    patch.setattr(torch.cuda, "Stream", Stream)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "current_stream", found.current_stream)
    patch.setattr(torch.cuda, "stream", found.on)
    patch.setattr(nccl, "all_gather_single", gather)
    patch.setattr(nccl, "reduce_scatter_single", scatter)
    patch.setattr(dist, "all_to_all_single", exchange)
    for name in ("all_reduce", "broadcast", "reduce"):
        patch.setattr(dist, name, in_place(name))
    patch.setattr(Slot, "give_back", gives_back)
    patch.setattr(Collector, "_keeps", lambda *about: False)  # as where there is a CUDA device
    with found:
        yield found
        found._sweep()


@contextmanager
def nccl_path() -> Iterator[None]:
    """Models are sharded over the collectives of CUDA, whose streams are one."""
    stream = Stream()
    with ExitStack() as stack:
        for name, value in {
            "Stream": Stream,
            "current_device": lambda: 0,
            "current_stream": lambda *device: stream,
            "stream": lambda stream: nullcontext(),
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(Collector, "_keeps", return_value=False))
        device = torch.device("cpu")
        stack.enter_context(
            mock.patch.object(
                collectives, "GlooCollectives", lambda groups=None: NcclOnCpu(device, groups)
            )
        )
        yield
