"""The buffers of fsdpctl's engine on one rank."""

from fsdpctl.plan.layout import FlatLayout
from fsdpctl.plan.offload import Offload
from fsdpctl.plan.reductions import ADDED_AT_A_TIME, Transport
from fsdpctl.plan.schedule import Buffer, Event, EventKind
from fsdpctl.plan.sizes import RankPlace
from fsdpctl.predict.recorder import CATEGORY_OF, Recorder
from fsdpctl.predict.training_plan import TrainingPlan

K = EventKind
_DOING = {  # at an allocation
    Buffer.PARAMS: "gathering",
    Buffer.WHOLE_GRADS: "collecting the gradients of",
    Buffer.WORKSPACE: "reducing",
    Buffer.SUM: "reducing",
    Buffer.COMBINING: "reducing",
    Buffer.GRADS: "reducing",
}


class EngineBuffers:
    """The buffers of a step, which the planned events allocate and free.

    The plan has the bytes. What it doesn't know is when autograd's gradients are freed, and what a
    rank needs for a moment while it adds.
    """

    def __init__(self, plan: TrainingPlan, place: RankPlace, recorder: Recorder) -> None:
        self._plan = plan
        self._place = place
        self._recorder = recorder
        self._keys: dict[tuple[Buffer, str, int], int] = {}
        self._on_host: set[str] = set()  # units whose gradients went there
        self._leaving: dict[str, int] = {}  # bytes of new gradients, by unit
        self._dropped: set[str] = set()  # parameters whose gradients were freed in this pass

    def begin_pass(self) -> None:
        """Expect new gradients from autograd."""
        self._dropped.clear()

    def change(self, event: Event) -> None:
        """Allocate or free the buffer of an event, or let it become another one."""
        assert event.buffer is not None
        own = event.buffer, event.unit, event.index
        if event.kind is K.ALLOCATE:
            self._allocate(event.buffer, event)
            return
        if event.buffer is Buffer.COMBINING:
            self._add_up_replicas(event.nbytes)
        key = self._keys.pop(own)
        if event.into is None:
            self._recorder.free(key)
        else:
            buffer, index = event.into
            self._keys[buffer, event.unit, index] = key
            self._recorder.become(key, CATEGORY_OF[buffer], buffer.value)

    def drop_gradients(self, unit: str) -> None:
        """Free autograd's gradients of a unit."""
        for layout in self._trained(unit):
            self._drop(layout)

    def leave(self, unit: str) -> None:
        """Let the reduced gradients of a unit leave, if they do; what the host has is added."""
        nbytes = self._leaving.pop(unit, None)
        if nbytes is not None:
            if unit in self._on_host:
                self._recorder.pass_through(nbytes)
            self._on_host.add(unit)

    def take_gradients(self) -> dict[str, list[int]]:
        """Return the keys of the reduced gradients by unit, which `end_step` then keeps."""
        taken: dict[str, list[int]] = {}
        for buffer, unit, index in [each for each in self._keys if each[0] is Buffer.GRADS]:
            taken.setdefault(unit, []).append(self._keys.pop((buffer, unit, index)))
        return taken

    def end_step(self) -> None:
        """Free the gradients."""
        self._on_host.clear()
        for each in [e for e in self._keys if e[0] in (Buffer.GRADS, Buffer.WHOLE_GRADS)]:
            self._recorder.free(self._keys.pop(each))

    def _allocate(self, buffer: Buffer, event: Event) -> None:
        unit, recorder = event.unit, self._recorder
        number, piece = event.index, 0
        if buffer is not Buffer.PARAMS:
            piece, number = divmod(event.index, len(self._trained(unit)))
        collected = event.is_last and not piece  # at once: autograd's gradients are not needed
        recorder.at(_DOING[buffer], unit)
        if buffer is Buffer.GRADS and Offload.GRADIENTS in self._plan.offload:
            self._leaving[unit] = event.nbytes
        if buffer is Buffer.WORKSPACE and collected:
            self._drop(self._trained(unit)[number])  # held gradients include them
        own = buffer, unit, event.index
        if own not in self._keys:  # it has not become this one
            self._keys[own] = recorder.allocate(
                CATEGORY_OF[buffer], unit, buffer.value, event.nbytes
            )
        if buffer is Buffer.WHOLE_GRADS and collected:
            self._drop(self._trained(unit)[number])
        if buffer is Buffer.SUM:
            self._add_up(self._trained(unit)[number])

    def _add_up(self, layout: FlatLayout) -> None:
        """Allocate what a rank that adds gradients itself takes: one chunk at a time."""
        place, sizes = self._place, self._plan.sizes
        if place.size > 1 and place.transport is not Transport.NCCL:  # one kernel adds its sums
            own = layout.parts[place.rank].numel
            self._recorder.pass_through(min(own, ADDED_AT_A_TIME) * max(sizes.reduce, sizes.grad))

    def _add_up_replicas(self, workspace: int) -> None:
        """Allocate the same for the sums over replicas, which are in a workspace."""
        replicas, itemsize = self._place.num_replicas, self._plan.sizes.grad
        own = workspace // (replicas - 1)
        self._recorder.pass_through(min(own, ADDED_AT_A_TIME * itemsize))

    def _trained(self, unit: str) -> list[FlatLayout]:
        return [each for each in self._plan.layouts[unit] if each.trainable]

    def _drop(self, layout: FlatLayout) -> None:
        """Free autograd's gradients of a flat buffer, unless they were freed."""
        for param in layout.params:
            key = self._recorder.gradient(param.name)
            if key is not None and param.name not in self._dropped:
                self._dropped.add(param.name)
                self._recorder.free(key)
