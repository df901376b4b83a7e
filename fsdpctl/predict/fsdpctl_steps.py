"""The training step of fsdpctl's engine: the plan's events, and the computation between them."""

from collections import defaultdict, deque

from fsdpctl.plan.layout import ParamSpec, optimizer_runs
from fsdpctl.plan.reductions import Transport
from fsdpctl.plan.schedule import Buffer, Event, EventKind
from fsdpctl.plan.sizes import RankPlace
from fsdpctl.plan.states import tile_bytes
from fsdpctl.predict.compute import Part
from fsdpctl.predict.fsdpctl_buffers import EngineBuffers
from fsdpctl.predict.hardware import CollectiveKind, HostQueue
from fsdpctl.predict.host_steps import HostSchedule
from fsdpctl.predict.muon_steps import matrix_elements, update_matrices
from fsdpctl.predict.planned_events import (
    outbox_bytes,
    plan_slots,
    planned_step,
    planned_update,
)
from fsdpctl.predict.recorder import COPIES, GATHERS, REDUCTIONS, Category, RankGroup, Recorder
from fsdpctl.predict.training_plan import (
    TrainingPlan,
    at_rest,
    held_masters,
    trained_layouts,
)

K = EventKind
C = CollectiveKind
_WITHOUT = -1  # the group of parameters that get no gradient


class FsdpctlSteps:
    """The steps of one rank; the optimizer's gathers are waited for in the next step."""

    def __init__(self, plan: TrainingPlan, place: RankPlace, recorder: Recorder) -> None:
        self._plan = plan
        self._place = place
        self._recorder = recorder
        self._events = planned_step(plan, place)
        self._update = planned_update(plan, place)
        self._buffers = EngineBuffers(plan, place, recorder)
        self._gathers: dict[str, int] = {}
        self._renewing: dict[str, int] = {}
        self._reducing: dict[str, deque[tuple[int | None, int]]] = defaultdict(deque)  # and bytes
        self._combining: dict[str, deque[int]] = defaultdict(deque)
        self._last_reduced: dict[str, int | None] = {}
        self._has_states = plan.steps_on_host  # they are on the host
        self._leaving: dict[str, list[int]] = {}  # gradients that the host steps with
        self._host = HostSchedule(plan, place, recorder)
        self._transfers = place.transfers(plan.strategy)

    def setup(self, *, draws: bool) -> None:
        """Build the model; `draws`: initialize its values on the device, one unit at a time."""
        _allocate_model(self._plan, self._place, self._recorder, draws=draws)

    def step(self) -> None:
        """Run all forward-backward passes, the reductions and the optimizer."""
        recorder, root = self._recorder, self._plan.order.root
        recorder.compute(Part.BEFORE)
        passes = len(self._plan.reduces)
        for event in self._events:
            if event.buffer is Buffer.LEAVING:
                for key in self._leaving.pop(event.unit, ()):
                    recorder.free(key)
            elif event.buffer is not None:
                self._buffers.change(event)
            elif event.kind is K.LEAVE and event.unit == root:
                self._host.finish()
                recorder.compute(Part.END)
                passes -= 1
                if passes:
                    recorder.compute(Part.BEFORE)
            else:
                self._do(event)
        self._optimize()

    def _do(self, event: Event) -> None:
        recorder, unit = self._recorder, event.unit
        match event.kind:
            case K.FORWARD:
                self._forward(unit)
            case K.LEAVE:
                recorder.compute(Part.AROUND, unit)
                if unit == self._plan.order.forward[-1]:
                    recorder.compute(Part.LOSS)
            case K.BACKWARD:
                recorder.compute(Part.BACKWARD, unit)
            case K.SYNC:
                self._host.wait(unit)
                self._renew(event)
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
                key, nbytes = self._reducing[unit].popleft()
                recorder.wait(key)
                self._add_up(unit, nbytes)
                self._last_reduced[unit] = key
                self._leave(unit, is_last=event.is_last and not self._transfers.combines)
            case K.COMBINE:
                self._combine(unit, event.nbytes)
            case K.COMBINED:
                recorder.wait(self._combining[unit].popleft())
                self._leave(unit, is_last=event.is_last)

    def _leave(self, unit: str, *, is_last: bool) -> None:
        """Let a unit's gradients leave for the host, unless more of them have to arrive."""
        self._buffers.leave(unit)
        if is_last:
            self._host.leave(unit)

    def _forward(self, unit: str) -> None:
        recorder, order = self._recorder, self._plan.order
        self._host.wait(unit)
        recorder.wait(self._renewing.pop(unit, None))
        if unit != order.root:
            recorder.compute(Part.FORWARD, unit)
            return
        self._buffers.begin_pass()
        recorder.compute(Part.START)
        if not order.forward:
            recorder.compute(Part.LOSS)

    def _gather(self, unit: str, nbytes: int) -> None:
        recorder, sizes = self._recorder, self._plan.sizes
        self._host.wait(unit)
        recorder.wait(self._renewing.pop(unit, None))
        from_host = self._from_host(unit)
        if not self._plan.steps_on_host:  # which casts, too
            widened = 1 + sizes.master / sizes.param  # the cast into this rank's part
            recorder.copy(widened * (nbytes / self._place.size - from_host), f"cast {unit}")
        arrives: tuple[int, ...] = ()
        if from_host:
            arrives = (recorder.on_host(HostQueue.UP, from_host, f"parameters of {unit}"),)
        self._gathers[unit] = recorder.start(
            C.GATHER, nbytes, RankGroup.SHARD, f"gather {unit}", queue=GATHERS, after=arrives
        )

    def _from_host(self, unit: str) -> int:
        """Return the bytes of a unit's part that come from host memory."""
        return sum(
            layout.parts[self._place.rank].numel * self._plan.sizes.gathered(layout)
            for layout in self._plan.layouts[unit]
            if self._plan.rests_on_host(layout)
        )

    def _reduce(self, unit: str, nbytes: int) -> None:
        recorder, transport = self._recorder, self._place.transport
        key = None
        recorder.copy(2 * nbytes, f"collect gradients of {unit}")
        if transport is Transport.SHARED:
            others = nbytes - nbytes / self._place.size
            recorder.copy(2 * others, f"copy gradients of {unit}")
        else:
            key = recorder.start(
                self._reduction(), nbytes, RankGroup.SHARD, f"reduce {unit}", queue=REDUCTIONS
            )
        self._reducing[unit].append((key, nbytes))
        self._last_reduced[unit] = key

    def _reduction(self) -> CollectiveKind:
        return C.ALL_REDUCE if self._transfers.adds_whole else C.REDUCE_SCATTER

    def _add_up(self, unit: str, nbytes: int) -> None:
        """Let the rank add the gradients of all ranks, or only scale the sum."""
        ranks, kind = self._place.size, self._reduction()
        adds = self._place.transport is not Transport.NCCL and kind is C.REDUCE_SCATTER
        passes = ranks + 1 if adds else 2
        own = nbytes if kind is C.ALL_REDUCE else nbytes / ranks
        if ranks > 1:
            self._recorder.copy(passes * own, f"sum of {unit}")

    def _combine(self, unit: str, nbytes: int) -> None:
        strategy = self._plan.strategy
        kind = C.REDUCE_SCATTER if strategy.shards_over_copies else C.ALL_REDUCE
        group, queue = RankGroup.REPLICAS, COPIES
        if self._place.num_replicas == 1:  # the parts of unsharded gradients are put together
            kind, group, queue = C.GATHER, RankGroup.SHARD, GATHERS
        before = self._last_reduced[unit]
        after = (before,) if strategy.replicates and before is not None else ()
        label = f"sum over replicas of {unit}"
        key = self._recorder.start(kind, nbytes, group, label, queue=queue, after=after)
        self._combining[unit].append(key)

    def _optimize(self) -> None:
        plan, recorder = self._plan, self._recorder
        recorder.at("the optimizer's step")
        if not self._has_states:
            self._has_states = True
            _allocate_states(plan, self._place, recorder)
        update_matrices(plan, self._place, recorder)
        self._step_in_tiles()
        if plan.fetches_gradients:
            self._leaving = self._buffers.take_gradients()
        self._buffers.end_step()
        if plan.steps_on_host:
            self._host.step()
        else:
            trained = trained_layouts(plan.layouts)
            owned = sum(held_masters(plan, self._place, layout).numel for layout in trained)
            owned -= matrix_elements(plan, self._place)
            recorder.optimize(owned, plan.sizes.master, plan.states.moments)
        for event in self._update:
            self._renew(event)
        recorder.end_step()

    def _step_in_tiles(self) -> None:
        plan, place = self._plan, self._place
        if plan.states.dtype is None or plan.steps_on_host:
            return
        runs = (
            run.span.numel
            for layout in trained_layouts(plan.layouts)
            for run in optimizer_runs(layout, held_masters(plan, place, layout), plan.states.key)
        )
        device = "cuda" if place.transport is Transport.NCCL else "cpu"
        self._recorder.pass_through(tile_bytes(max(runs, default=0), device, plan.states.dtype))

    def _renew(self, event: Event) -> None:
        """Start to send a unit's new parameters to other ranks."""
        if self._place.transport is Transport.SHARED:
            return  # ranks read what their owner has written
        over_copies = self._plan.strategy.shards_over_copies
        group, label = RankGroup.REPLICAS if over_copies else RankGroup.SHARD, f"renew {event.unit}"
        key = self._recorder.start(C.GATHER, event.nbytes, group, label, queue=GATHERS)
        self._renewing[event.unit] = key


def _allocate_model(
    plan: TrainingPlan, place: RankPlace, recorder: Recorder, *, draws: bool
) -> None:
    """Build the model; `draws`: initialize its values on the device, one unit at a time."""
    recorder.at("building the model")
    scratch: dict[int, int] = {}  # by the bytes of an element
    slots = {name: slot for slot in plan_slots(plan) for name in slot.units}
    made: set[str] = set()
    keeps, sizes = not plan.strategy.shards_params, plan.sizes
    for unit, layouts in plan.layouts.items():
        slot = slots[unit]
        is_new = slot.units[0] not in made
        if is_new:
            made.add(slot.units[0])
            nbytes = place.share_of(slot.nbytes)
            key = recorder.allocate(Category.GATHERED_UNITS, unit, "slot", nbytes)
        for layout in layouts:
            kept = at_rest(plan, place, layout)
            masters = "master weights" if layout.trainable else "frozen weights"
            for nbytes, what in (
                (kept.part, "parts to be gathered"),
                (kept.masters, masters),
                (kept.remainder, "remainders of master weights"),
            ):
                recorder.allocate(Category.PARAMETERS, unit, what, nbytes)
            drawn = sizes.drawn(layout)
            if draws and drawn not in scratch:
                alike = (each for of in plan.layouts.values() for each in of)
                largest = max(each.numel for each in alike if sizes.drawn(each) == drawn)
                scratch[drawn] = recorder.allocate(
                    Category.PARAMETERS, "", "values being drawn", largest * drawn
                )
        if is_new and not keeps and not slot.resident:
            recorder.free(key)
    for key in scratch.values():
        recorder.free(key)
    if outbox := outbox_bytes(plan, place):
        what = "gradients that other ranks read"
        recorder.allocate(Category.REDUCE_BUFFERS, plan.order.root, what, outbox)


def _allocate_states(plan: TrainingPlan, place: RankPlace, recorder: Recorder) -> None:
    """Allocate the optimizer states of the parameters that have gradients, group by group."""

    def group_of(param: ParamSpec) -> int:
        return plan.states.key(param) if recorder.has_gradient(param) else _WITHOUT

    runs = [
        (run, unit)
        for unit, layouts in plan.layouts.items()
        for layout in layouts
        if layout.trainable
        for run in optimizer_runs(
            layout, held_masters(plan, place, layout), group_of, plan.states.is_alone
        )
        if run.group != _WITHOUT
    ]
    for run, unit in sorted(runs, key=lambda each: each[0].group):
        for size in plan.states.of_run(run, plan.sizes.master):
            recorder.allocate(Category.OPTIMIZER_STATES, unit, "optimizer states", size)
