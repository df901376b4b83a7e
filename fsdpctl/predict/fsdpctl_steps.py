"""The training step of fsdpctl's engine: the plan's events, and the computation between them."""

from collections import defaultdict, deque
from collections.abc import Iterator

from fsdpctl.plan.buffers import planned_step, planned_update
from fsdpctl.plan.layout import FlatLayout
from fsdpctl.plan.schedule import BufferKind, Event, EventKind
from fsdpctl.plan.step_plan import SUM_CHUNK, ShardPlacement, StepPlan, StorageLocation, Transport
from fsdpctl.plan.strategy import Offload
from fsdpctl.predict import fsdpctl_update
from fsdpctl.predict.hardware import CollectiveKind, HostQueue
from fsdpctl.predict.model_pass import PassPart
from fsdpctl.predict.step_recorder import (
    CATEGORY_OF,
    GATHERS,
    REDUCTIONS,
    REPLICA_SUMS,
    Category,
    RankGroup,
    StepRecorder,
)
from fsdpctl.predict.training_plan import TrainingPlan

K = EventKind
C = CollectiveKind
_ACTIVITIES = {
    BufferKind.PARAMS: "gathering",
    BufferKind.UNSHARDED_GRADS: "collecting the gradients of",
}


class _EngineBuffers:
    """The buffers of a step, which the planned events allocate and free.

    The plan has the bytes. What it doesn't know is when autograd's gradients are freed, and what a
    rank needs for a moment while it adds.
    """

    def __init__(self, plan: TrainingPlan, recorder: StepRecorder) -> None:
        self._plan, self._recorder = plan, recorder
        self._keys: dict[tuple[BufferKind, str, int], int] = {}
        self._offloaded: set[str] = set()  # units whose gradients went there
        self._gradient_bytes: dict[str, int] = {}  # bytes of new gradients, by unit
        self._dropped: set[str] = set()  # parameters whose gradients were freed in this pass

    def begin_pass(self) -> None:
        self._dropped.clear()

    def change(self, event: Event) -> None:
        """Allocate or free the buffer of an event, or let it become another one."""
        assert event.buffer is not None
        own = event.buffer, event.unit, event.index
        if event.kind is K.ALLOCATE:
            self._allocate(event.buffer, event)
            return
        if event.buffer is BufferKind.REPLICA_WORKSPACE:
            self._add_up_replicas(event.nbytes)
        key = self._keys.pop(own)
        if event.into is None:
            self._recorder.free(key)
        else:
            buffer, index = event.into
            self._keys[buffer, event.unit, index] = key
            self._recorder.recategorize(key, CATEGORY_OF[buffer], buffer.value)

    def drop_gradients(self, unit: str) -> None:
        for layout in self._plan.step.trained[unit]:
            self._drop(layout)

    def offload_gradients(self, unit: str) -> None:
        """Let the reduced gradients of a unit leave, if they do; what the host has is added."""
        nbytes = self._gradient_bytes.pop(unit, None)
        if nbytes is not None:
            if unit in self._offloaded:
                self._recorder.allocate_temporary(nbytes)
            self._offloaded.add(unit)

    def take_gradients(self) -> dict[str, list[int]]:
        """Return the keys of the reduced gradients by unit, which `end_step` then keeps."""
        taken: dict[str, list[int]] = {}
        for buffer, unit, index in [each for each in self._keys if each[0] is BufferKind.GRADS]:
            taken.setdefault(unit, []).append(self._keys.pop((buffer, unit, index)))
        return taken

    def end_step(self) -> None:
        self._offloaded.clear()
        left = [
            each for each in self._keys if each[0] in (BufferKind.GRADS, BufferKind.UNSHARDED_GRADS)
        ]
        self._recorder.free(*map(self._keys.pop, left))

    def _allocate(self, buffer: BufferKind, event: Event) -> None:
        unit, recorder = event.unit, self._recorder
        number, piece = event.index, 0
        if buffer is not BufferKind.PARAMS:
            piece, number = divmod(event.index, len(self._plan.step.trained[unit]))
        collected = event.is_last and not piece  # at once: autograd's gradients are not needed
        recorder.begin_phase(_ACTIVITIES.get(buffer, "reducing"), unit)
        if buffer is BufferKind.GRADS and Offload.GRADIENTS in self._plan.step.offload:
            self._gradient_bytes[unit] = event.nbytes
        if buffer is BufferKind.WORKSPACE and collected:
            self._drop(self._plan.step.trained[unit][number])  # held gradients include them
        own, of = (buffer, unit, event.index), CATEGORY_OF[buffer]
        if own not in self._keys:  # it has not become this one
            self._keys[own] = recorder.allocate(of, unit, buffer.value, event.nbytes)
        if buffer is BufferKind.UNSHARDED_GRADS and collected:
            self._drop(self._plan.step.trained[unit][number])
        if buffer is BufferKind.SUM:
            self._add_up(self._plan.step.trained[unit][number])

    def _add_up(self, layout: FlatLayout) -> None:
        """Allocate what a rank that adds gradients itself takes: one chunk at a time."""
        place, dtypes = self._plan.step.position, self._plan.step.dtypes_of(layout)
        if place.size > 1 and place.transport is not Transport.NCCL:  # one kernel adds its sums
            own = layout.shard_spans[place.rank].numel
            itemsize = max(dtypes.reduce.itemsize, dtypes.gradient.itemsize)
            self._recorder.allocate_temporary(min(own, SUM_CHUNK) * itemsize)

    def _add_up_replicas(self, workspace: int) -> None:
        """Allocate the same for the sums over replicas, which are in a workspace."""
        replicas, itemsize = (
            self._plan.step.position.num_replicas,
            self._plan.dtypes.gradient.itemsize,
        )
        own = workspace // (replicas - 1)
        self._recorder.allocate_temporary(min(own, SUM_CHUNK * itemsize))

    def _drop(self, layout: FlatLayout) -> None:
        for param in layout.params:
            key = self._recorder.gradient(param.name)
            if key is not None and param.name not in self._dropped:
                self._dropped.add(param.name)
                self._recorder.free(key)


class FsdpctlSteps:
    """The steps of one rank; the optimizer's gathers are waited for in the next step."""

    def __init__(self, plan: TrainingPlan, recorder: StepRecorder) -> None:
        self._plan, self._step, self._place = plan, plan.step, plan.step.position
        self._recorder = recorder
        self._events = planned_step(plan.step, plan.reduces_gradients)
        self._update = planned_update(plan.step)
        self._buffers = _EngineBuffers(plan, recorder)
        self._gathers: dict[str, int] = {}
        self._updated_gathers: dict[str, int] = {}
        self._reductions: dict[str, deque[tuple[int | None, int]]] = defaultdict(deque)  # and bytes
        self._replica_reductions: dict[str, deque[int]] = defaultdict(deque)
        self._last_reduced: dict[str, int | None] = {}
        self._has_states = plan.step.steps_on_host  # they are on the host
        self._gradient_bytes: dict[str, list[int]] = {}  # gradients that the host steps with
        self._host = fsdpctl_update.HostSchedule(plan, recorder)

    def setup(self, *, draws: bool) -> None:
        _allocate_model(self._step, self._recorder, draws=draws)

    def step(self) -> None:
        recorder, root = self._recorder, self._step.order.root
        recorder.compute(PassPart.BEFORE)
        passes = len(self._plan.reduces_gradients)
        for event in self._events:
            if event.buffer is BufferKind.OFFLOADING:
                recorder.free(*self._gradient_bytes.pop(event.unit, ()))
            elif event.buffer is not None:
                self._buffers.change(event)
            elif event.kind is K.LEAVE and event.unit == root:
                self._host.wait_for_copy()
                recorder.compute(PassPart.END)
                passes -= 1
                if passes:
                    recorder.compute(PassPart.BEFORE)
            else:
                self._do(event)
        self._optimize()

    def _do(self, event: Event) -> None:
        recorder, unit = self._recorder, event.unit
        match event.kind:
            case K.FORWARD:
                self._forward(unit)
            case K.LEAVE:
                recorder.compute(PassPart.BETWEEN, unit)
                if unit == self._step.order.forward[-1]:
                    recorder.compute(PassPart.LOSS)
            case K.BACKWARD:
                recorder.compute(PassPart.BACKWARD, unit)
            case K.SYNC:
                self._host.wait(unit)
                self._gather_updated(event)
            case K.GATHER:
                self._gather(unit, event.nbytes)
            case K.READY:
                recorder.wait(self._gathers.pop(unit, None))
            case K.HOLD:
                self._buffers.drop_gradients(unit)
            case K.REDUCE:
                if event.is_last:
                    self._buffers.drop_gradients(unit)
                self._reduce(unit, event.nbytes)
            case K.REDUCED:
                key, nbytes = self._reductions[unit].popleft()
                recorder.wait(key)
                self._add_up(unit, nbytes)
                self._last_reduced[unit] = key
                self._offload_gradients(unit, is_last=event.is_last and not self._step.combines)
            case K.COMBINE:
                self._reduce_over_replicas(unit, event.nbytes)
            case K.COMBINED:
                recorder.wait(self._replica_reductions[unit].popleft())
                self._offload_gradients(unit, is_last=event.is_last)

    def _offload_gradients(self, unit: str, *, is_last: bool) -> None:
        """Let a unit's gradients leave for the host, unless more of them have to arrive."""
        self._buffers.offload_gradients(unit)
        if is_last:
            self._host.offload_gradients(unit)

    def _forward(self, unit: str) -> None:
        recorder, order = self._recorder, self._step.order
        self._host.wait(unit)
        recorder.wait(self._updated_gathers.pop(unit, None))
        if unit != order.root:
            recorder.compute(PassPart.FORWARD, unit)
            return
        self._buffers.begin_pass()
        recorder.compute(PassPart.START)
        if not order.forward:
            recorder.compute(PassPart.LOSS)

    def _gather(self, unit: str, nbytes: int) -> None:
        recorder, dtypes = self._recorder, self._plan.dtypes
        self._host.wait(unit)
        recorder.wait(self._updated_gathers.pop(unit, None))
        from_host = sum(
            rest.param_span.numel * rest.dtypes.compute.itemsize
            for rest in map(self._step.placement, self._step.layouts[unit])
            if rest.is_gathered_from_host
        )
        if not self._step.steps_on_host:  # which casts, too
            # The cast into this rank's part.
            widened = 1 + dtypes.master.itemsize / dtypes.compute.itemsize
            recorder.copy(widened * (nbytes / self._place.size - from_host), f"cast {unit}")
        arrives: tuple[int, ...] = ()
        if from_host:
            arrives = (recorder.start_on_host(HostQueue.UP, from_host, f"parameters of {unit}"),)
        self._gathers[unit] = recorder.start_collective(
            C.GATHER, nbytes, RankGroup.SHARD, f"gather {unit}", queue=GATHERS, after=arrives
        )

    def _reduce(self, unit: str, nbytes: int) -> None:
        recorder, transport = self._recorder, self._place.transport
        key = None
        recorder.copy(2 * nbytes, f"collect gradients of {unit}")
        if transport is Transport.SHARED:
            others = nbytes - nbytes / self._place.size
            recorder.copy(2 * others, f"copy gradients of {unit}")
        else:
            key = recorder.start_collective(
                self._reduction(), nbytes, RankGroup.SHARD, f"reduce {unit}", queue=REDUCTIONS
            )
        self._reductions[unit].append((key, nbytes))
        self._last_reduced[unit] = key

    def _reduction(self) -> CollectiveKind:
        return C.ALL_REDUCE if self._step.uses_all_reduce else C.REDUCE_SCATTER

    def _add_up(self, unit: str, nbytes: int) -> None:
        """Let the rank add the gradients of all ranks, or only scale the sum."""
        ranks, kind = self._place.size, self._reduction()
        adds = self._place.transport is not Transport.NCCL and kind is C.REDUCE_SCATTER
        passes = ranks + 1 if adds else 2
        own = nbytes if kind is C.ALL_REDUCE else nbytes / ranks
        if ranks > 1:
            self._recorder.copy(passes * own, f"sum of {unit}")

    def _reduce_over_replicas(self, unit: str, nbytes: int) -> None:
        strategy = self._step.strategy
        kind = C.REDUCE_SCATTER if strategy.shards_over_replicas else C.ALL_REDUCE
        group, queue = RankGroup.REPLICAS, REPLICA_SUMS
        if self._place.num_replicas == 1:  # the parts of unsharded gradients are put together
            kind, group, queue = C.GATHER, RankGroup.SHARD, GATHERS
        before = self._last_reduced[unit]
        after = (before,) if strategy.replicates and before is not None else ()
        label = f"sum over replicas of {unit}"
        key = self._recorder.start_collective(kind, nbytes, group, label, queue=queue, after=after)
        self._replica_reductions[unit].append(key)

    def _optimize(self) -> None:
        plan, step, recorder = self._plan, self._step, self._recorder
        recorder.begin_phase("the optimizer's step")
        if not self._has_states:
            self._has_states = True
            fsdpctl_update.allocate_states(plan, recorder)
        by_muon = fsdpctl_update.step_matrices(plan, recorder)
        fsdpctl_update.step_in_tiles(plan, recorder)
        if step.fetches_gradients:
            self._gradient_bytes = self._buffers.take_gradients()
        self._buffers.end_step()
        if step.steps_on_host:
            self._host.step()
        else:
            held = sum(step.master_span(layout).numel for layout in step.all_trained())
            numel, moments = held - by_muon, plan.states.moments
            stored = fsdpctl_update.tiled_traffic(plan, numel)
            recorder.optimizer_step(numel, plan.dtypes.master.itemsize, moments, stored)
        for event in self._update:
            self._gather_updated(event)
        recorder.end_step()

    def _gather_updated(self, event: Event) -> None:
        if self._place.transport is Transport.SHARED:
            return  # ranks read what their owner has written
        over_replicas = self._step.strategy.shards_over_replicas
        group = RankGroup.REPLICAS if over_replicas else RankGroup.SHARD
        self._updated_gathers[event.unit] = self._recorder.start_collective(
            C.GATHER, event.nbytes, group, f"renew {event.unit}", queue=GATHERS
        )


def _allocate_model(step: StepPlan, recorder: StepRecorder, *, draws: bool) -> None:
    recorder.begin_phase("building the model")
    scratch: dict[str, int] = {}  # by dtype
    slots = {name: slot for slot in step.unshard_buffers for name in slot.units}
    made: set[str] = set()
    for unit, layouts in step.layouts.items():
        slot = slots[unit]
        is_new = slot.units[0] not in made
        if is_new:
            made.add(slot.units[0])
            nbytes = step.position.local_share(slot.nbytes)
            key = recorder.allocate(Category.GATHERED_UNITS, unit, "slot", nbytes)
        for layout in layouts:
            rest, drawn = step.placement(layout), step.dtypes_of(layout).initial
            for what, nbytes in _on_device(rest, trainable=layout.trainable):
                recorder.allocate(Category.PARAMETERS, unit, what, nbytes)
            if draws and drawn not in scratch:
                alike = (each for of in step.layouts.values() for each in of)
                largest = max(e.numel for e in alike if step.dtypes_of(e).initial == drawn)
                what, nbytes = "values being drawn", largest * drawn.itemsize
                scratch[drawn] = recorder.allocate(Category.PARAMETERS, "", what, nbytes)
        if is_new and step.strategy.shards_params and not slot.is_permanent:
            recorder.free(key)
    recorder.free(*scratch.values())
    if outbox := step.outbox_bytes:
        what = "gradients that other ranks read"
        recorder.allocate(Category.REDUCE_BUFFERS, step.order.root, what, outbox)


def _on_device(rest: ShardPlacement, *, trainable: bool) -> Iterator[tuple[str, int]]:
    """Yield what rests of a flat buffer in memory of its own on the device, with its bytes."""
    if rest.param_location is StorageLocation.DEVICE:
        yield "parts to be gathered", rest.param_span.numel * rest.dtypes.compute.itemsize
    if rest.master_location is StorageLocation.DEVICE:
        nbytes = rest.master_span.numel * rest.dtypes.master.itemsize
        yield "master weights" if trainable else "frozen weights", nbytes
    if rest.master_location is not StorageLocation.HOST and rest.remainder_bytes:
        yield "remainders of master weights", rest.remainder_bytes
