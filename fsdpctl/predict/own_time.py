"""The tasks of our engine: the plan's events, and the computation between them."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from fsdpctl.plan.order import UnitOrder
from fsdpctl.plan.schedule import Event, EventKind
from fsdpctl.plan.sizes import Itemsizes
from fsdpctl.plan.strategy import Strategy
from fsdpctl.plan.transport import Transport, adds_whole
from fsdpctl.predict.network import CollectiveKind, Group
from fsdpctl.predict.tasks import Task
from fsdpctl.predict.writer import COPIES, GATHERS, REDUCTIONS, TaskWriter

K = EventKind
C = CollectiveKind


@dataclass(frozen=True, slots=True)
class OwnStep:
    """What our engine does in a step."""

    order: UnitOrder
    strategy: Strategy  # the one that runs
    sizes: Itemsizes
    events: Sequence[Event]
    update: Sequence[Event]  # after the optimizer's step
    transport: Transport
    owned: float  # elements that a rank steps
    moments: int  # that the optimizer keeps


class OwnTasks:
    """Writes a step down; gathers that the optimizer's step makes are waited for in the next."""

    def __init__(self, step: OwnStep, writer: TaskWriter) -> None:
        self._step = step
        self._writer = writer
        self._gathers: dict[str, int] = {}
        self._renewing: dict[str, int] = {}
        self._reducing: dict[str, deque[tuple[int, int]]] = defaultdict(deque)  # keys and bytes
        self._combining: dict[str, deque[int]] = defaultdict(deque)
        self._last_reduced: dict[str, int] = {}

    def step(self) -> list[Task]:
        """All passes, the reductions, and the optimizer's step."""
        writer, step = self._writer, self._step
        writer.compute("before")
        passes = sum(e.kind is K.LEAVE and e.unit == step.order.root for e in step.events)
        for event in step.events:
            if event.kind is K.LEAVE and event.unit == step.order.root:
                writer.compute("end")
                passes -= 1
                if passes:
                    writer.compute("before")
            else:
                self._do(event)
        writer.step_over(step.owned, step.sizes.master, step.moments)
        for event in step.update:
            group = (
                writer.machine.copies if step.strategy.shards_over_copies else writer.machine.shard
            )
            key = writer.start(C.GATHER, event.nbytes, group, f"renew {event.unit}", queue=GATHERS)
            self._renewing[event.unit] = key
        writer.spend(writer.machine.device.per_step, "between steps")
        return writer.take()

    def _do(self, event: Event) -> None:
        writer, unit = self._writer, event.unit
        if event.kind is K.FORWARD:
            self._forward(unit)
        elif event.kind is K.LEAVE:
            writer.compute("around", unit)
            if unit == self._step.order.forward[-1]:
                writer.compute("loss")
        elif event.kind is K.BACKWARD:
            writer.compute("backward", unit)
        elif event.kind is K.GATHER:
            self._gather(unit, event.nbytes)
        elif event.kind is K.READY:
            writer.wait(self._gathers.pop(unit, None))
        elif event.kind is K.REDUCE:
            self._reduce(unit, event.nbytes)
        elif event.kind is K.REDUCED:
            key, nbytes = self._reducing[unit].popleft()
            writer.wait(key)
            self._add_up(unit, nbytes)
            self._last_reduced[unit] = key
        elif event.kind is K.COMBINE:
            self._combine(unit, event.nbytes)
        elif event.kind is K.COMBINED:
            writer.wait(self._combining[unit].popleft())

    def _forward(self, unit: str) -> None:
        writer, order = self._writer, self._step.order
        writer.wait(self._renewing.pop(unit, None))
        if unit != order.root:
            writer.compute("forward", unit)
            return
        writer.compute("start")
        if not order.forward:
            writer.compute("loss")

    def _gather(self, unit: str, nbytes: int) -> None:
        writer, sizes, group = self._writer, self._step.sizes, self._writer.machine.shard
        writer.wait(self._renewing.pop(unit, None))
        widened = 1 + sizes.master / sizes.param  # what is cast into this rank's part
        writer.copy(widened * nbytes / group.ranks, f"cast {unit}")
        self._gathers[unit] = writer.start(C.GATHER, nbytes, group, f"gather {unit}", queue=GATHERS)

    def _reduce(self, unit: str, nbytes: int) -> None:
        writer, step = self._writer, self._step
        if step.transport is Transport.NCCL or not step.strategy.shards_grads:
            writer.copy(2 * nbytes, f"collect gradients of {unit}")
        kind = self._reduction()
        key = writer.start(
            kind, nbytes, writer.machine.shard, f"reduce {unit}", queue=REDUCTIONS,
            is_held=kind is C.ALL_REDUCE and step.transport is Transport.GLOO,
        )  # fmt: skip
        self._reducing[unit].append((key, nbytes))
        self._last_reduced[unit] = key

    def _reduction(self) -> CollectiveKind:
        whole = adds_whole(self._step.transport, self._writer.machine.shard.ranks)
        return C.ALL_REDUCE if whole and not self._step.strategy.shards_grads else C.REDUCE_SCATTER

    def _add_up(self, unit: str, nbytes: int) -> None:
        """What a rank adds itself, or only scales."""
        group = self._writer.machine.shard
        adds = self._step.transport is Transport.GLOO and self._reduction() is C.REDUCE_SCATTER
        passes = group.ranks + 1 if adds else 2
        own = nbytes if self._reduction() is C.ALL_REDUCE else nbytes / group.ranks
        if group.ranks > 1:
            self._writer.copy(passes * own, f"sum of {unit}")

    def _combine(self, unit: str, nbytes: int) -> None:
        writer, strategy = self._writer, self._step.strategy
        kind, group, queue = self._over_copies()
        after = self._last_reduced.get(unit) if strategy.replicates else None
        label = f"sum over copies of {unit}"
        key = writer.start(kind, nbytes, group, label, queue=queue, after=after)
        self._combining[unit].append(key)

    def _over_copies(self) -> tuple[CollectiveKind, Group, str]:
        machine, strategy = self._writer.machine, self._step.strategy
        if machine.copies.ranks == 1:
            return C.GATHER, machine.shard, GATHERS  # whole gradients, put together
        kind = C.REDUCE_SCATTER if strategy.shards_over_copies else C.ALL_REDUCE
        return kind, machine.copies, COPIES
