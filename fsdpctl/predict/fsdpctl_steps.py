"""Records the training step of fsdpctl's engine: planned events, and computation between them."""

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

_ACTIVITIES = {
    BufferKind.PARAMS: "gathering",
    BufferKind.UNSHARDED_GRADS: "collecting the gradients of",
}


class _EngineBuffers:
    """The buffers of a step, which planned events allocate and free.

    The plan defines sizes. This class adds the frees of autograd's gradients, and temporary sums.
    """

    def __init__(self, plan: TrainingPlan, recorder: StepRecorder) -> None:
        self._plan, self._recorder = plan, recorder
        self._keys: dict[tuple[BufferKind, str, int], int] = {}
        self._offloaded: set[str] = set()  # units whose gradients are on the host
        self._gradient_bytes: dict[str, int] = {}  # bytes per unit that are to be offloaded
        self._freed_grads: set[str] = set()  # parameters whose gradients were freed in this pass

    def begin_pass(self) -> None:
        self._freed_grads.clear()

    def change(self, event: Event) -> None:
        """Allocate or free the buffer of an event, or use its memory as another buffer."""
        assert event.buffer is not None
        buffer_key = event.buffer, event.unit, event.index
        if event.kind is EventKind.ALLOCATE:
            self._allocate(event.buffer, event)
            return
        if event.buffer is BufferKind.REPLICA_WORKSPACE:  # freed after the sum over replicas
            self._add_up_replicas(event.nbytes)
        key = self._keys.pop(buffer_key)
        if event.into is None:
            self._recorder.free(key)
        else:
            buffer, index = event.into
            self._keys[buffer, event.unit, index] = key
            self._recorder.recategorize(key, CATEGORY_OF[buffer], buffer.value)

    def free_gradients(self, unit: str) -> None:
        """Free the gradients of a unit that autograd allocated in this pass."""
        self._free_grads(*self._plan.step_plan.trained[unit])

    def offload_gradients(self, unit: str) -> None:
        """Offload the reduced gradients of a unit, added to the gradients that the host has."""
        nbytes = self._gradient_bytes.pop(unit, None)
        if nbytes is not None:
            if unit in self._offloaded:  # earlier gradients return to the device for the sum
                self._recorder.allocate_temporary(nbytes)
            self._offloaded.add(unit)

    def take_gradients(self) -> dict[str, list[int]]:
        """Return the keys of the reduced gradients by unit; `end_step` no longer frees them."""
        keys: dict[str, list[int]] = {}
        for buffer, unit, index in [each for each in self._keys if each[0] is BufferKind.GRADS]:
            keys.setdefault(unit, []).append(self._keys.pop((buffer, unit, index)))
        return keys

    def end_step(self) -> None:
        """Free the gradients of the step."""
        self._offloaded.clear()
        kinds = (BufferKind.GRADS, BufferKind.UNSHARDED_GRADS)
        gradients = [each for each in self._keys if each[0] in kinds]
        self._recorder.free(*map(self._keys.pop, gradients))

    def _allocate(self, buffer: BufferKind, event: Event) -> None:
        unit, recorder, step = event.unit, self._recorder, self._plan.step_plan
        layouts = step.trained[unit]
        piece_index, index = divmod(event.index, len(layouts) or 1)
        # The copy into a whole buffer frees autograd's gradients; the last REDUCE of a unit in
        # pieces frees those of the unit.
        is_whole = event.is_last and piece_index == 0
        recorder.begin_phase(_ACTIVITIES.get(buffer, "reducing"), unit)
        if buffer is BufferKind.GRADS and Offload.GRADIENTS in step.offload:
            self._gradient_bytes[unit] = event.nbytes
        if buffer is BufferKind.WORKSPACE and is_whole:
            # Held gradients get those of this pass before the collective allocates its workspace.
            self._free_grads(layouts[index])
        buffer_key, category = (buffer, unit, event.index), CATEGORY_OF[buffer]
        if buffer_key not in self._keys:  # otherwise `change` has moved another buffer here
            self._keys[buffer_key] = recorder.allocate(category, unit, buffer.value, event.nbytes)
        if buffer is BufferKind.UNSHARDED_GRADS and is_whole:
            self._free_grads(layouts[index])
        if buffer is BufferKind.SUM:
            self._add_up(layouts[index])

    def _add_up(self, layout: FlatLayout) -> None:
        """Allocate the temporary of a rank that adds gradients itself: one chunk at a time."""
        position, dtypes = self._plan.step_plan.position, self._plan.step_plan.dtypes_of(layout)
        # NCCL adds in its kernel.
        if position.num_shards > 1 and position.transport is not Transport.NCCL:
            numel = layout.shard_spans[position.rank].numel
            itemsize = max(dtypes.reduce.itemsize, dtypes.gradient.itemsize)
            self._recorder.allocate_temporary(min(numel, SUM_CHUNK) * itemsize)

    def _add_up_replicas(self, workspace: int) -> None:
        """Allocate the temporary of a sum over replicas, with operands in `workspace` bytes."""
        # A rank receives its part from each other replica.
        nbytes = workspace // (self._plan.step_plan.position.num_replicas - 1)
        most = SUM_CHUNK * self._plan.dtypes.gradient.itemsize
        self._recorder.allocate_temporary(min(nbytes, most))

    def _free_grads(self, *layouts: FlatLayout) -> None:
        for param in (param for layout in layouts for param in layout.params):
            key = self._recorder.gradient(param.name)
            if key is not None and param.name not in self._freed_grads:
                self._freed_grads.add(param.name)
                self._recorder.free(key)


class FsdpctlSteps:
    """The steps of one rank. Gathers of updated parameters end in the next step."""

    def __init__(self, plan: TrainingPlan, recorder: StepRecorder) -> None:
        self._plan, self._step, self._position = plan, plan.step_plan, plan.step_plan.position
        self._recorder = recorder
        self._events = planned_step(plan.step_plan, plan.reduces_gradients)
        self._update = planned_update(plan.step_plan)
        self._buffers = _EngineBuffers(plan, recorder)
        # By unit: gathers of its parameters, and gathers of updated parameters after a step (SYNC).
        self._gathers: dict[str, int] = {}
        self._syncs: dict[str, int] = {}
        # By unit: reductions in flight with their bytes, and reductions over replicas.
        self._reductions: dict[str, deque[tuple[int | None, int]]] = defaultdict(deque)
        self._replica_reductions: dict[str, deque[int]] = defaultdict(deque)
        uses_all_reduce = plan.step_plan.uses_all_reduce
        self._kind = CollectiveKind.ALL_REDUCE if uses_all_reduce else CollectiveKind.REDUCE_SCATTER
        self._last_reduction: dict[str, int | None] = {}  # COMBINE continues it
        # The first step allocates the states, unless the host has them.
        self._has_states = plan.step_plan.steps_on_host
        self._host_gradients: dict[str, list[int]] = {}  # keys by unit, read by the host's step
        self._host = fsdpctl_update.HostSchedule(plan, recorder)

    def setup(self, *, draws: bool) -> None:
        _allocate_model(self._step, self._recorder, draws=draws)

    def step(self) -> None:
        recorder, root = self._recorder, self._step.order.root
        recorder.compute(PassPart.BEFORE)
        passes_left = len(self._plan.reduces_gradients)
        for event in self._events:
            if event.buffer is BufferKind.OFFLOADING:  # never allocated, only freed
                recorder.free(*self._host_gradients.pop(event.unit, ()))
            elif event.buffer is not None:
                self._buffers.change(event)
            elif event.kind is EventKind.LEAVE and event.unit == root:  # the pass has ended
                self._host.wait_for_copy()
                recorder.compute(PassPart.END)
                passes_left -= 1
                if passes_left:
                    recorder.compute(PassPart.BEFORE)
            else:
                self._do(event)
        self._optimize()

    def _do(self, event: Event) -> None:
        recorder, unit = self._recorder, event.unit
        match event.kind:
            case EventKind.FORWARD:
                self._forward(unit)
            case EventKind.LEAVE:
                recorder.compute(PassPart.BETWEEN, unit)
                if unit == self._step.order.forward[-1]:
                    recorder.compute(PassPart.LOSS)
            case EventKind.BACKWARD:
                recorder.compute(PassPart.BACKWARD, unit)
            case EventKind.SYNC:
                self._host.wait(unit)
                self._sync(event)
            case EventKind.GATHER:
                self._gather(unit, event.nbytes)
            case EventKind.READY:
                recorder.wait(self._gathers.pop(unit, None))
            case EventKind.HOLD:
                self._buffers.free_gradients(unit)
            case EventKind.REDUCE:
                if event.is_last:
                    self._buffers.free_gradients(unit)
                self._reduce(unit, event.nbytes)
            case EventKind.REDUCED:
                key, nbytes = self._reductions[unit].popleft()
                recorder.wait(key)
                self._add_up(unit, nbytes)
                self._last_reduction[unit] = key
                self._offload_gradients(unit, is_last=event.is_last and not self._step.combines)
            case EventKind.COMBINE:
                self._combine(unit, event.nbytes)
            case EventKind.COMBINED:
                recorder.wait(self._replica_reductions[unit].popleft())
                self._offload_gradients(unit, is_last=event.is_last)

    def _offload_gradients(self, unit: str, *, is_last: bool) -> None:
        """Send the gradients of a unit to the host once its last piece is reduced."""
        self._buffers.offload_gradients(unit)
        if is_last:
            self._host.offload_gradients(unit)

    def _forward(self, unit: str) -> None:
        recorder, order = self._recorder, self._step.order
        self._host.wait(unit)
        recorder.wait(self._syncs.pop(unit, None))
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
        recorder.wait(self._syncs.pop(unit, None))
        from_host = sum(
            placement.param_span.numel * placement.dtypes.compute.itemsize
            for placement in map(self._step.placement, self._step.layouts[unit])
            if placement.is_gathered_from_host
        )
        if not self._step.steps_on_host:  # otherwise the host casts, too
            # Cast this rank's shard: read master weights, write in the compute dtype.
            traffic = 1 + dtypes.master.itemsize / dtypes.compute.itemsize
            shard_bytes = nbytes / self._position.num_shards - from_host
            recorder.copy(traffic * shard_bytes, f"cast {unit}")
        copies: tuple[int, ...] = ()
        if from_host:
            copies = (recorder.start_host(HostQueue.UP, from_host, f"parameters of {unit}"),)
        kind, group = CollectiveKind.GATHER, RankGroup.SHARD
        self._gathers[unit] = recorder.start_collective(
            kind, nbytes, group, f"gather {unit}", queue=GATHERS, after=copies
        )

    def _reduce(self, unit: str, nbytes: int) -> None:
        recorder, key = self._recorder, None
        recorder.copy(2 * nbytes, f"collect gradients of {unit}")
        if self._position.transport is Transport.SHARED:
            other_bytes = nbytes - nbytes / self._position.num_shards
            recorder.copy(2 * other_bytes, f"copy gradients of {unit}")
        else:
            key = recorder.start_collective(
                self._kind, nbytes, RankGroup.SHARD, f"reduce {unit}", queue=REDUCTIONS
            )
        self._reductions[unit].append((key, nbytes))
        self._last_reduction[unit] = key  # a chained COMBINE comes before REDUCED

    def _add_up(self, unit: str, nbytes: int) -> None:
        """Add the gradients of all ranks, or scale the sum if the collective adds."""
        ranks, scatters = self._position.num_shards, self._kind is CollectiveKind.REDUCE_SCATTER
        adds = scatters and self._position.transport is not Transport.NCCL
        traversals = ranks + 1 if adds else 2
        summed = nbytes / ranks if scatters else nbytes
        if ranks > 1:
            self._recorder.copy(traversals * summed, f"sum of {unit}")

    def _combine(self, unit: str, nbytes: int) -> None:
        strategy, group, queue = self._step.strategy, RankGroup.REPLICAS, REPLICA_SUMS
        scatters, label = strategy.shards_over_replicas, f"sum over replicas of {unit}"
        kind = CollectiveKind.REDUCE_SCATTER if scatters else CollectiveKind.ALL_REDUCE
        if self._position.num_replicas == 1:  # each rank keeps the full sum: gather its shards
            kind, group, queue = CollectiveKind.GATHER, RankGroup.SHARD, GATHERS
            label = f"gather the sum of {unit}"
        before = self._last_reduction[unit]
        after = (before,) if strategy.replicates and before is not None else ()
        key = self._recorder.start_collective(kind, nbytes, group, label, queue=queue, after=after)
        self._replica_reductions[unit].append(key)

    def _optimize(self) -> None:
        plan, step, recorder = self._plan, self._step, self._recorder
        recorder.begin_phase("the optimizer's step")
        if not self._has_states:
            self._has_states = True
            fsdpctl_update.allocate_states(plan, recorder)
        muon_numel = fsdpctl_update.record_muon(plan, recorder)
        fsdpctl_update.allocate_tiles(plan, recorder)
        if step.fetches_gradients:
            self._host_gradients = self._buffers.take_gradients()
        self._buffers.end_step()
        if step.steps_on_host:
            self._host.step()
        else:
            owned = sum(step.master_span(layout).numel for layout in step.all_trained())
            numel, moments = owned - muon_numel, plan.states.moments
            tile_traffic = fsdpctl_update.tile_traffic(plan, numel)
            recorder.optimizer_step(numel, plan.dtypes.master.itemsize, moments, tile_traffic)
        for event in self._update:
            self._sync(event)
        recorder.end_step()

    def _sync(self, event: Event) -> None:
        if self._position.transport is Transport.SHARED:
            return  # the owner has written into memory that other ranks read
        over_replicas = self._step.strategy.shards_over_replicas
        group = RankGroup.REPLICAS if over_replicas else RankGroup.SHARD
        self._syncs[event.unit] = self._recorder.start_collective(
            CollectiveKind.GATHER, event.nbytes, group, f"sync {event.unit}", queue=GATHERS
        )


def _allocate_model(step: StepPlan, recorder: StepRecorder, *, draws: bool) -> None:
    recorder.begin_phase("building the model")
    drawn: dict[str, int] = {}  # keys of buffers of random values, by dtype
    buffers = {name: buffer for buffer in step.unshard_buffers for name in buffer.units}
    allocated: set[str] = set()  # the first unit of each buffer
    for unit, layouts in step.layouts.items():
        buffer = buffers[unit]
        is_new = buffer.units[0] not in allocated
        if is_new:
            allocated.add(buffer.units[0])
            nbytes = step.position.local_share(buffer.nbytes)
            key = recorder.allocate(Category.GATHERED_UNITS, unit, "unshard buffer", nbytes)
        for layout in layouts:
            placement, dtype = step.placement(layout), step.dtypes_of(layout).initial
            for description, nbytes in _on_device(placement, trainable=layout.trainable):
                recorder.allocate(Category.PARAMETERS, unit, description, nbytes)
            if draws and dtype not in drawn:
                of_dtype = (x for x in step.all_layouts() if step.dtypes_of(x).initial == dtype)
                largest = max(layout.numel for layout in of_dtype)
                category, nbytes = Category.PARAMETERS, largest * dtype.itemsize
                drawn[dtype] = recorder.allocate(category, "", "random values", nbytes)
        # Until the first gather, only initialization needs the buffer.
        if is_new and step.strategy.shards_params and not buffer.is_permanent:
            recorder.free(key)
    recorder.free(*drawn.values())
    if outbox := step.outbox_bytes:
        description = "gradients that other ranks read"
        recorder.allocate(Category.REDUCE_BUFFERS, step.order.root, description, outbox)


def _on_device(placement: ShardPlacement, *, trainable: bool) -> Iterator[tuple[str, int]]:
    """Yield the tensors of a flat buffer that stay on the device, with their bytes."""
    if placement.param_location is StorageLocation.DEVICE:
        nbytes = placement.param_span.numel * placement.dtypes.compute.itemsize
        yield "shards to be gathered", nbytes
    if placement.master_location is StorageLocation.DEVICE:
        nbytes = placement.master_span.numel * placement.dtypes.master.itemsize
        yield "master weights" if trainable else "frozen weights", nbytes
    # Even master weights that are a view of the parameters have separate remainders.
    if placement.master_location is not StorageLocation.HOST and placement.remainder_bytes:
        yield "remainders of master weights", placement.remainder_bytes
