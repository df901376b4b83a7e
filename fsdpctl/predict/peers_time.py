"""The tasks of PyTorch's own engines, as their sources have them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdpctl.plan.sizes import Itemsizes
from fsdpctl.predict.network import CollectiveKind
from fsdpctl.predict.tasks import Task
from fsdpctl.predict.writer import COPIES, GATHERS, TaskWriter

C = CollectiveKind
_BUCKET = 25 << 20  # bytes, of DistributedDataParallel
_ONE_QUEUE = "collectives"  # of one communicator, which does one after another


@dataclass(frozen=True, slots=True)
class PeerStep:
    """What a model is to PyTorch's engines."""

    root: str
    units: Sequence[str]  # in the order of their forward, without the root
    numel: Mapping[str, int]  # of each group of parameters: the root, and blocks
    sizes: Itemsizes
    reduces: tuple[bool, ...]  # per pass
    reshards: bool = True
    overlaps: bool = True  # whether a gather goes on beside what is computed in forward
    moments: int = 2


class FullyShardTasks:
    """`fully_shard`: gathered into a buffer, copied out of it, reduced from another one."""

    def __init__(self, step: PeerStep, writer: TaskWriter) -> None:
        self._step = step
        self._writer = writer
        self._blocks = [name for name in step.units if name in step.numel]
        self._gathers: dict[str, int] = {}
        self._whole: set[str] = set()
        self._reduced: list[int] = []

    def step(self) -> list[Task]:
        """All passes, the reductions, and the optimizer's step."""
        writer, step = self._writer, self._step
        for reduces in step.reduces:
            writer.compute("before")
            self._forward()
            self._backward(reduces=reduces)
            writer.compute("end")
        owned = sum(step.numel.values()) / writer.machine.shard.ranks
        writer.step_over(owned, step.sizes.master, step.moments)
        writer.spend(writer.machine.device.per_step, "between steps")
        return writer.take()

    def _gather(self, unit: str) -> None:
        if unit in self._gathers or unit in self._whole:
            return
        writer, step, group = self._writer, self._step, self._writer.machine.shard
        nbytes = step.numel[unit] * step.sizes.param
        writer.copy((1 + step.sizes.master / step.sizes.param) * nbytes / group.ranks, "copy in")
        self._gathers[unit] = writer.start(
            C.GATHER, nbytes, group, f"gather {unit}", queue=_ONE_QUEUE
        )

    def _use(self, unit: str) -> None:
        if unit in self._whole:
            return
        self._gather(unit)
        self._whole.add(unit)
        self._writer.wait(self._gathers.pop(unit))
        if self._writer.machine.shard.ranks > 1:
            nbytes = self._step.numel[unit] * self._step.sizes.param
            self._writer.copy(2 * nbytes, f"copy out {unit}")

    def _forward(self) -> None:
        writer, step = self._writer, self._step
        self._use(step.root)
        writer.compute("start")
        for name in step.units:
            index = self._blocks.index(name) if name in step.numel else None
            if index is not None:
                self._use(name)
                for ahead in self._blocks[index + 1 : index + 2] if step.overlaps else ():
                    self._gather(ahead)
            writer.compute("forward", name)
            if index is not None and step.reshards and name != self._blocks[-1]:
                self._whole.discard(name)
            writer.compute("around", name)
        writer.compute("loss")

    def _backward(self, *, reduces: bool) -> None:
        writer = self._writer
        for name in reversed(self._step.units):
            if name not in self._step.numel:
                writer.compute("backward", name)
                continue
            self._use(name)
            index = self._blocks.index(name)
            for ahead in self._blocks[max(0, index - 1) : index]:
                self._gather(ahead)
            writer.compute("backward", name)
            self._whole.discard(name)
            self._reduce(name, reduces=reduces)
        self._whole.discard(self._step.root)
        self._reduce(self._step.root, reduces=reduces)
        for key in self._reduced:
            writer.wait(key)
        self._reduced.clear()

    def _reduce(self, unit: str, *, reduces: bool) -> None:
        writer, step, machine = self._writer, self._step, self._writer.machine
        nbytes = step.numel[unit] * step.sizes.reduce
        if not reduces:
            writer.copy(2 * nbytes, f"keep gradients of {unit}")
            return
        if machine.shard.ranks > 1:
            writer.copy(2 * nbytes, f"copy gradients of {unit}")
        key = writer.start(
            C.REDUCE_SCATTER, nbytes, machine.shard, f"reduce {unit}", queue=_ONE_QUEUE
        )
        if machine.copies.ranks > 1:
            label, own = f"sum over copies of {unit}", nbytes / machine.shard.ranks
            key = writer.start(C.ALL_REDUCE, own, machine.copies, label, queue=COPIES, after=key)
        self._reduced.append(key)


class DataParallelTasks:
    """DistributedDataParallel: buckets of gradients are all-reduced as they fill in backward."""

    def __init__(self, step: PeerStep, writer: TaskWriter) -> None:
        self._step = step
        self._writer = writer
        self._filled = 0.0
        self._sent: list[int] = []

    def step(self) -> list[Task]:
        """All passes, and the optimizer's step."""
        writer, step = self._writer, self._step
        for reduces in step.reduces:
            writer.compute("before")
            writer.compute("start")
            for name in step.units:
                self._cast(name)
                writer.compute("forward", name)
                writer.compute("around", name)
            writer.compute("loss")
            for name in reversed(step.units):
                writer.compute("backward", name)
                self._collect(name, reduces=reduces)
            self._collect(step.root, reduces=reduces)
            self._send(reduces=reduces)
            for key in self._sent:
                writer.wait(key)
            self._sent.clear()
            writer.compute("end")
        writer.step_over(sum(step.numel.values()), step.sizes.master, step.moments)
        writer.spend(writer.machine.device.per_step, "between steps")
        return writer.take()

    def _cast(self, unit: str) -> None:
        sizes = self._step.sizes
        if sizes.param != sizes.master:
            nbytes = self._step.numel.get(unit, 0) * (sizes.param + sizes.master)
            self._writer.copy(nbytes, f"cast {unit}")

    def _collect(self, unit: str, *, reduces: bool) -> None:
        nbytes = self._step.numel.get(unit, 0) * self._step.sizes.master
        self._writer.copy(2 * nbytes, f"copy gradients of {unit}")
        self._filled += nbytes
        while self._filled >= _BUCKET:
            self._send(reduces=reduces, nbytes=_BUCKET)

    def _send(self, *, reduces: bool, nbytes: float | None = None) -> None:
        sent = self._filled if nbytes is None else nbytes
        self._filled -= sent
        if reduces and sent:
            world = self._writer.machine.world
            key = self._writer.start(C.ALL_REDUCE, sent, world, "reduce a bucket", queue=GATHERS)
            self._sent.append(key)
