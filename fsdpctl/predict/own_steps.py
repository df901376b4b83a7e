"""The steps of our engine: the plan's events and the computation between them."""

from collections.abc import Iterable

from fsdpctl.plan.layout import EvenParts, FlatLayout, Span
from fsdpctl.plan.schedule import Buffer, Event, EventKind
from fsdpctl.plan.sizes import RankPlace, wire_itemsize
from fsdpctl.plan.transport import (
    ADDED_AT_A_TIME,
    Transport,
    adds_whole,
    exchanges,
    gradient_stretches,
    sends_in_place,
)
from fsdpctl.predict import engine_bytes
from fsdpctl.predict.compute import Part, Place
from fsdpctl.predict.engine_bytes import TrainingPlan, planned_step
from fsdpctl.predict.own_states import write_model, write_states
from fsdpctl.predict.script import CATEGORY_OF, Category, Writer

K = EventKind
_PARTS = {K.FORWARD: Part.FORWARD, K.LEAVE: Part.AROUND, K.BACKWARD: Part.BACKWARD}
_DOING = {  # at an allocation
    Buffer.PARAMS: "gathering",
    Buffer.WHOLE_GRADS: "collecting the gradients of",
    Buffer.WORKSPACE: "reducing",
    Buffer.SUM: "reducing",
    Buffer.COMBINING: "reducing",
    Buffer.GRADS: "reducing",
}


class OwnSteps:
    """Writes the operations of one rank under our engine."""

    def __init__(self, plan: TrainingPlan, place: RankPlace, writer: Writer) -> None:
        self._plan = plan
        self._place = place
        self._writer = writer
        self._events = planned_step(plan, place)
        self._live: dict[tuple[Buffer, str], list[list[int]]] = {}
        self._goes_on = set(
            map(id, engine_bytes.pieces_before_the_last(self._events, plan.order.root))
        )
        self._in_pieces: set[str] = set()  # units of which some of these were collected
        self._became = False  # whether the last sum is a gradient now
        self._taken: set[str] = set()  # parameters whose gradients the engine took in this pass
        self._has_states = False
        self._kept: dict[tuple[str, int], int] = {}  # memory that gradients come back to
        sizes = plan.sizes
        keeps = place.size == 1 or not plan.strategy.shards_grads
        self._in_place = keeps and sizes.reduce == sizes.master

    def setup(self, *, draws: bool) -> None:
        """Build the model; `draws`: its values are made here, a unit at a time."""
        write_model(self._plan, self._place, self._writer, draws=draws)

    def step(self) -> None:
        """All passes, the reductions, and the optimizer's step."""
        writer, order = self._writer, self._plan.order
        passes = len(self._plan.reduces)
        writer.begin()
        writer.play(Place(Part.BEFORE))
        for event, following in self._annotated():
            if event.unit == order.root and event.kind is K.FORWARD:
                self._taken.clear()
                writer.play(Place(Part.START))
                if not order.forward:
                    writer.play(Place(Part.LOSS))
            elif event.unit == order.root and event.kind is K.LEAVE:
                writer.play(Place(Part.END))
                passes -= 1
                if passes:
                    writer.play(Place(Part.BEFORE))
            elif event.kind in _PARTS:
                writer.play(Place(_PARTS[event.kind], event.unit))
                if event.kind is K.LEAVE and event.unit == order.forward[-1]:
                    writer.play(Place(Part.LOSS))
            elif event.kind is K.ALLOCATE:
                self._allocate(event, following)
            elif event.kind is K.FREE:
                self._free(event, following)
            elif event.kind in (K.HOLD, K.REDUCE) and id(event) not in self._goes_on:
                self._in_pieces.discard(event.unit)
                self._let_go(
                    param.name for each in self._plan.layouts[event.unit] for param in each.params
                )
        self._optimizer()

    def _annotated(self) -> Iterable[tuple[Event, Event | None]]:
        """Each event with the one after it; a collection with what the gradients are for."""
        purpose: Event | None = None
        annotated: list[tuple[Event, Event | None]] = []
        after: Event | None = None
        for event in reversed(self._events):
            if event.kind in (K.HOLD, K.REDUCE):
                purpose = event
            collects = event.kind is K.ALLOCATE and event.buffer is Buffer.WHOLE_GRADS
            annotated.append((event, purpose if collects else after))
            after = event
        return reversed(annotated)

    def _allocate(self, event: Event, following: Event | None) -> None:
        buffer, unit = event.buffer, event.unit
        assert buffer is not None
        keys = self._live.setdefault((buffer, unit), [])
        if buffer is Buffer.GRADS and self._became:
            self._became = False
            return
        if buffer is Buffer.SUM and self._in_place:
            self._add_up(unit, len(keys) - 1, event.nbytes)  # it is what was collected in
            return
        index = 0 if buffer is Buffer.PARAMS else len(keys) % len(self._trained(unit))
        self._writer.at(_DOING[buffer], unit)
        if buffer is Buffer.WORKSPACE and unit not in self._in_pieces:
            # What was held before has taken them in.
            self._let_go(param.name for param in self._trained(unit)[index].params)
        if buffer is Buffer.WHOLE_GRADS:
            assert following is not None
            if id(following) in self._goes_on:
                self._in_pieces.add(unit)
            keys.append(self._collect(unit, index, event.nbytes, following.kind is K.REDUCE))
            return
        keys.append([self._writer.allocate(CATEGORY_OF[buffer], unit, buffer.value, event.nbytes)])
        if buffer is Buffer.SUM:
            self._add_up(unit, index, event.nbytes)

    def _add_up(self, unit: str, index: int, nbytes: int) -> None:
        """What a rank takes that adds gradients itself: a chunk at a time."""
        place, strategy, sizes = self._place, self._plan.strategy, self._plan.sizes
        adds = not strategy.shards_grads and adds_whole(place.transport, place.size)
        if place.size == 1 or adds:
            return
        layout = self._trained(unit)[index]
        own = layout.parts[place.rank]
        if place.transport is Transport.NCCL:
            wire = wire_itemsize(layout, strategy, sizes, place.transport)
            exchanged = exchanges(place.transport, wire, sizes.reduce)
            if strategy.shards_grads and exchanged and sizes.master != sizes.reduce:
                self._writer.pass_through(nbytes // sizes.master * sizes.reduce)
            return
        stretches = [Span(0, layout.numel)]
        if strategy.shards_grads and sends_in_place(place.transport, layout.parts):
            stretches = [span for span, _ in gradient_stretches(layout)]
        parts = [both.numel for span in stretches if (both := span.intersect(own))]
        longest = min(max(parts, default=0), ADDED_AT_A_TIME)
        self._writer.pass_through(longest * max(sizes.reduce, sizes.master))

    def _add_up_copies(self, workspace: int) -> None:
        """The same over copies, whose sums lie in a workspace of so many bytes."""
        copies, master = self._place.num_replicas, self._plan.sizes.master
        if sends_in_place(self._place.transport, EvenParts(1, copies)):
            own = workspace // (copies - 1)
            self._writer.pass_through(min(own, ADDED_AT_A_TIME * master))

    def _trained(self, unit: str) -> list[FlatLayout]:
        return [each for each in self._plan.layouts[unit] if each.trainable]

    def _free(self, event: Event, following: Event | None) -> None:
        buffer, unit = event.buffer, event.unit
        assert buffer is not None
        keys = self._live[buffer, unit].pop(0)
        into = None
        if buffer is Buffer.COMBINING:
            self._add_up_copies(event.nbytes)
        if buffer is Buffer.WHOLE_GRADS and self._in_place:
            into = Buffer.SUM
        elif buffer is Buffer.SUM and _becomes(event, following):
            self._became, into = True, Buffer.GRADS
        if into is not None:
            self._live.setdefault((into, unit), []).append(keys)
            if into is Buffer.GRADS:
                for key in keys:
                    self._writer.become(key, Category.GRADIENTS, "reduced gradients")
            return
        for key in keys:
            self._writer.free(key)

    def _collect(self, unit: str, index: int, nbytes: int, reduces: bool) -> list[int]:
        """Bring the gradients of a flat buffer together, or send them from where they are."""
        layout = self._trained(unit)[index]
        names = [param.name for param in layout.params]
        if unit in self._in_pieces:
            return [self._flat(unit, index, nbytes)]
        splits = self._plan.strategy.shards_grads
        splits &= sends_in_place(self._place.transport, layout.parts)
        if reduces and splits:
            keys = self._send_from_place(unit, layout)
        elif self._is_collected_already(layout):
            keys = [self._take(names[0])]
        else:
            keys = [self._flat(unit, index, nbytes)]
        self._let_go(names)
        return keys

    def _flat(self, unit: str, index: int, nbytes: int) -> int:
        """The buffer that all gradients are copied to."""
        is_first = len(self._live.get((Buffer.GRADS, unit), ())) <= index
        keeps = self._in_place and self._place.transport is Transport.GLOO and is_first
        has_one_dtype = self._plan.sizes.param == self._plan.sizes.master
        keeps &= has_one_dtype or unit in self._plan.order.reduced_early
        if keeps and (unit, index) in self._kept:
            return self._kept[unit, index]
        what = "all gradients"
        key = self._writer.allocate(Category.REDUCE_BUFFERS, unit, what, nbytes)
        if keeps:
            self._kept[unit, index] = key
        return key

    def _is_collected_already(self, layout: FlatLayout) -> bool:
        """A single gradient that is neither cast nor scaled is the flat buffer."""
        place, strategy, sizes = self._place, self._plan.strategy, self._plan.sizes
        scales = not strategy.shards_grads and adds_whole(place.transport, place.size)
        scales &= place.size > 1
        is_there = self._writer.gradient(layout.params[0].name) is not None
        is_alone = len(layout.params) == 1 and not layout.padding
        return is_there and is_alone and not scales and sizes.param == sizes.reduce

    def _send_from_place(self, unit: str, layout: FlatLayout) -> list[int]:
        plan, sizes = self._plan, self._plan.sizes
        itemsize = wire_itemsize(layout, plan.strategy, sizes, self._place.transport)
        keys = []
        for span, indices in gradient_stretches(layout):
            name = layout.params[indices[0]].name
            is_there = self._writer.gradient(name) is not None
            if len(indices) == 1 and itemsize == sizes.param and is_there:
                keys.append(self._take(name))
            else:
                what, nbytes = "gradients to send", span.numel * itemsize
                keys.append(self._writer.allocate(Category.REDUCE_BUFFERS, unit, what, nbytes))
            self._let_go(layout.params[each].name for each in indices)
        return keys

    def _let_go(self, names: Iterable[str]) -> None:
        """What autograd made was taken from the parameters."""
        for name in names:
            key = self._writer.gradient(name)
            if key is not None and name not in self._taken:
                self._taken.add(name)
                self._writer.free(key)

    def _take(self, name: str) -> int:
        """The gradient itself serves as a buffer."""
        key = self._writer.gradient(name)
        assert key is not None
        self._taken.add(name)
        self._writer.keep(key)
        return key

    def _optimizer(self) -> None:
        self._writer.at("the optimizer's step")
        if not self._has_states:
            self._has_states = True
            write_states(self._plan, self._place, self._writer)
        kept = set(self._kept.values())
        for (buffer, _), lists in self._live.items():
            if buffer in (Buffer.GRADS, Buffer.WHOLE_GRADS):
                for key in (key for keys in lists for key in keys):
                    if key not in kept:
                        self._writer.free(key)
                lists.clear()


def _becomes(gone: Event, following: Event | None) -> bool:
    """Whether a sum that goes is the gradient that comes next."""
    if following is None or following.buffer is not Buffer.GRADS:
        return False
    return following.nbytes == gone.nbytes
