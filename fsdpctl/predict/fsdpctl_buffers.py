"""The buffers of fsdpctl's engine on one rank."""

from collections.abc import Iterable, Sequence

from fsdpctl.plan.layout import EvenParts, FlatLayout, ParamSpec, Span
from fsdpctl.plan.reductions import ADDED_AT_A_TIME, Transport, sends_in_place
from fsdpctl.plan.schedule import Buffer, Event, EventKind
from fsdpctl.plan.sizes import Offload, RankPlace, sent_itemsize
from fsdpctl.predict.engine_bytes import pieces_before_the_last
from fsdpctl.predict.recorder import CATEGORY_OF, Category, Recorder
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

    The plan has the bytes. What it doesn't know is which of autograd's gradients serve as buffers,
    when the others are freed, and what a rank needs for a moment while it adds.
    """

    def __init__(
        self, plan: TrainingPlan, place: RankPlace, recorder: Recorder, events: Sequence[Event]
    ) -> None:
        self._plan = plan
        self._place = place
        self._recorder = recorder
        self._following = _following(events)
        self._live: dict[tuple[Buffer, str], list[list[int]]] = {}
        # Reductions of a piece that another piece of the same unit follows.
        self._unfinished = set(map(id, pieces_before_the_last(events, plan.order.root)))
        self._in_pieces: set[str] = set()  # units of which some pieces were collected
        self._on_host: set[str] = set()  # units whose gradients went there
        self._leaving: dict[str, int] = {}  # bytes of new gradients, by unit
        self._became = False  # whether the last sum is a gradient now
        self._taken: set[str] = set()  # parameters whose gradients the engine took in this pass
        sizes = plan.sizes
        self._transfers = place.transfers(plan.strategy)
        self._in_place = self._transfers.becomes_gradient(same_dtype=sizes.reduce == sizes.grad)

    def begin_pass(self) -> None:
        """Expect new gradients from autograd."""
        self._taken.clear()

    def change(self, event: Event) -> None:
        """Allocate or free the buffer of an event."""
        following = self._following.get(id(event))
        if event.kind is K.ALLOCATE:
            self._allocate(event, following)
        else:
            self._free(event, following)

    def has_more(self, event: Event) -> bool:
        """Return whether another piece of the same unit follows a reduction."""
        return id(event) in self._unfinished

    def drop_gradients(self, event: Event) -> None:
        """Free autograd's gradients of a unit, unless pieces of it follow."""
        if not self.has_more(event):
            self._in_pieces.discard(event.unit)
            for layout in self._plan.layouts[event.unit]:
                self._drop(layout.params)

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
        for (buffer, unit), lists in self._live.items():
            if buffer is Buffer.GRADS:
                taken[unit] = [key for keys in lists for key in keys]
                lists.clear()
        return taken

    def end_step(self) -> None:
        """Free the gradients."""
        self._on_host.clear()
        for (buffer, _), lists in self._live.items():
            if buffer in (Buffer.GRADS, Buffer.WHOLE_GRADS):
                for key in (key for keys in lists for key in keys):
                    self._recorder.free(key)
                lists.clear()

    def _allocate(self, event: Event, following: Event | None) -> None:
        buffer, unit, recorder = event.buffer, event.unit, self._recorder
        assert buffer is not None
        keys = self._live.setdefault((buffer, unit), [])
        if buffer is Buffer.GRADS and self._plan.offload is Offload.ALL:
            self._leaving[unit] = event.nbytes
        if buffer is Buffer.GRADS and self._became:
            self._became = False
            return
        if buffer is Buffer.SUM and self._in_place:
            self._add_up(unit, len(keys) - 1)  # it is what was collected in
            return
        index = 0 if buffer is Buffer.PARAMS else len(keys) % len(self._trained(unit))
        recorder.at(_DOING[buffer], unit)
        if buffer is Buffer.WORKSPACE and unit not in self._in_pieces:
            self._drop(self._trained(unit)[index].params)  # held gradients include them
        if buffer is Buffer.WHOLE_GRADS:
            assert following is not None
            if self.has_more(following):
                self._in_pieces.add(unit)
            keys.append(self._collect(unit, index, event.nbytes, following.kind is K.REDUCE))
            return
        keys.append([recorder.allocate(CATEGORY_OF[buffer], unit, buffer.value, event.nbytes)])
        if buffer is Buffer.SUM:
            self._add_up(unit, index)

    def _add_up(self, unit: str, index: int) -> None:
        """Allocate what a rank that adds gradients itself takes: one chunk at a time."""
        place, sizes = self._place, self._plan.sizes
        if place.size == 1 or self._transfers.adds_whole or place.transport is Transport.NCCL:
            return  # one kernel adds what NCCL has sent
        layout = self._trained(unit)[index]
        own = layout.parts[place.rank]
        stretches = [Span(0, layout.numel)]
        if self._transfers.sends_in_place(layout.parts):
            stretches = [each.span for each in layout.placements]
        parts = [both.numel for span in stretches if (both := span.intersect(own))]
        longest = min(max(parts, default=0), ADDED_AT_A_TIME)
        self._recorder.pass_through(longest * max(sizes.reduce, sizes.grad))

    def _add_up_replicas(self, workspace: int) -> None:
        """Allocate the same for the sums over replicas, which are in a workspace."""
        replicas, itemsize = self._place.num_replicas, self._plan.sizes.grad
        if sends_in_place(self._place.transport, EvenParts(1, replicas)):
            own = workspace // (replicas - 1)
            self._recorder.pass_through(min(own, ADDED_AT_A_TIME * itemsize))

    def _trained(self, unit: str) -> list[FlatLayout]:
        return [each for each in self._plan.layouts[unit] if each.trainable]

    def _free(self, event: Event, following: Event | None) -> None:
        buffer, unit = event.buffer, event.unit
        assert buffer is not None
        keys = self._live[buffer, unit].pop(0)
        into = None
        after = (following.buffer, following.nbytes) if following is not None else None
        if buffer is Buffer.COMBINING:
            self._add_up_replicas(event.nbytes)
        if buffer is Buffer.WHOLE_GRADS and self._in_place:
            into = Buffer.SUM
        elif buffer is Buffer.SUM and after == (Buffer.GRADS, event.nbytes):
            self._became, into = True, Buffer.GRADS
        if into is not None:
            self._live.setdefault((into, unit), []).append(keys)
        for key in keys:
            if into is None:
                self._recorder.free(key)
            elif into is Buffer.GRADS:
                self._recorder.become(key, Category.GRADIENTS, "reduced gradients")

    def _collect(self, unit: str, index: int, nbytes: int, reduces: bool) -> list[int]:
        """Collect the gradients of a flat buffer, or send them from where they are."""
        layout = self._trained(unit)[index]
        if unit in self._in_pieces:
            return [self._flat(unit, nbytes)]
        if reduces and self._transfers.sends_in_place(layout.parts):
            keys = self._send_in_place(unit, layout)
        elif self._is_collected_already(layout):
            keys = [self._take(layout.params[0])]
        else:
            keys = [self._flat(unit, nbytes)]
        self._drop(layout.params)
        return keys

    def _flat(self, unit: str, nbytes: int) -> int:
        """Allocate the buffer that all gradients are copied to."""
        return self._recorder.allocate(Category.REDUCE_BUFFERS, unit, "all gradients", nbytes)

    def _is_collected_already(self, layout: FlatLayout) -> bool:
        """Return whether a gradient is the flat buffer: a single one, neither cast nor scaled."""
        scales, sizes = self._transfers.adds_whole, self._plan.sizes
        is_there = self._recorder.gradient(layout.params[0].name) is not None
        is_alone = len(layout.params) == 1 and not layout.padding
        return is_there and is_alone and not scales and sizes.param == sizes.reduce

    def _send_in_place(self, unit: str, layout: FlatLayout) -> list[int]:
        sizes = self._plan.sizes
        itemsize = sent_itemsize(self._transfers, sizes)
        keys = []
        for param in layout.params:
            is_there = self._recorder.gradient(param.name) is not None
            if itemsize == sizes.param and is_there:
                keys.append(self._take(param))
            else:
                what, nbytes = "gradients to send", param.numel * itemsize
                keys.append(self._recorder.allocate(Category.REDUCE_BUFFERS, unit, what, nbytes))
            self._drop([param])
        return keys

    def _drop(self, params: Iterable[ParamSpec]) -> None:
        """Free autograd's gradients of parameters, except those that were taken."""
        for param in params:
            key = self._recorder.gradient(param.name)
            if key is not None and param.name not in self._taken:
                self._taken.add(param.name)
                self._recorder.free(key)

    def _take(self, param: ParamSpec) -> int:
        """Use a gradient itself as a buffer."""
        key = self._recorder.gradient(param.name)
        assert key is not None
        self._taken.add(param.name)
        self._recorder.keep(key)
        return key


def _following(events: Sequence[Event]) -> dict[int, Event]:
    """Map each event to the next, and a collection of gradients to what they are collected for."""
    purpose: Event | None = None
    after: Event | None = None
    found: dict[int, Event] = {}
    for event in reversed(events):
        if event.kind in (K.HOLD, K.REDUCE):
            purpose = event
        collects = event.kind is K.ALLOCATE and event.buffer is Buffer.WHOLE_GRADS
        following = purpose if collects else after
        if following is not None:
            found[id(event)] = following
        after = event
    return found
