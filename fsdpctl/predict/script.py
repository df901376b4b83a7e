"""A step written down as operations on an allocator, with what each of them is for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from fsdpctl.plan.schedule import Buffer
from fsdpctl.predict.compute import Operation, Part, Place, Program


class Category(StrEnum):
    """What memory is for."""

    PARAMETERS = "parameters"  # at rest: master weights, and what is gathered in another dtype
    GRADIENTS = "gradients"  # reduced, or as autograd made them
    OPTIMIZER_STATES = "optimizer_states"
    GATHERED_UNITS = "gathered_units"  # parameters that compute
    REDUCE_BUFFERS = "reduce_buffers"
    ACTIVATIONS = "activations"
    LOGITS_AND_LOSS = "logits_and_loss"
    WORKSPACES = "workspaces"  # of kernels


CATEGORY_OF = {
    Buffer.PARAMS: Category.GATHERED_UNITS,
    Buffer.WHOLE_GRADS: Category.REDUCE_BUFFERS,
    Buffer.WORKSPACE: Category.REDUCE_BUFFERS,
    Buffer.SUM: Category.REDUCE_BUFFERS,
    Buffer.COMBINING: Category.REDUCE_BUFFERS,
    Buffer.GRADS: Category.GRADIENTS,
}


@dataclass(frozen=True, slots=True)
class Item:
    """Something that takes memory."""

    category: Category
    unit: str  # "" where it belongs to none
    what: str


@dataclass(frozen=True, slots=True)
class When:
    """Where in a step something happens."""

    doing: str
    unit: str

    def __str__(self) -> str:
        """In words."""
        return f"{self.doing} {self.unit}".strip()


_DOING = {
    Part.BEFORE: "loading a batch",
    Part.START: "before the first unit",
    Part.FORWARD: "forward of",
    Part.AROUND: "after the forward of",
    Part.LOSS: "computing the loss",
    Part.BACKWARD: "backward of",
    Part.END: "after backward",
}


class Writer:
    """Writes operations down; parts of the computation as they are, the engine's one by one."""

    def __init__(self, program: Program, last: str, *, last_is_head: bool) -> None:
        """`last`: the unit after which the loss is computed; it may make the logits itself."""
        self.program = program
        self._last = last
        self._last_is_head = last_is_head
        self.operations: list[Operation] = []
        self.moments: list[tuple[int, When]] = []  # where each begins
        self._items: list[Item] = []  # of the keys that are not the program's
        self.streams: dict[int, int] = {}  # of the keys that are not of the first
        self._empty: set[int] = set()  # keys that take nothing
        # What outlives its pass, by the program's key: its own, and that of its forerunner.
        self._held: dict[int, int] = {}
        self._old: dict[int, int | None] = {}
        self._busy: set[int] = set()  # the program's keys of gradients that are held
        self._instead: dict[int, int] = {}  # for these, the key in this pass
        self._gradients = {key: name for name, key in program.gradients.items()}

    def begin(self) -> None:
        """Start a new list of operations."""
        self.operations = []
        self.moments = []

    def at(self, doing: str, unit: str = "") -> None:
        """What comes now happens at this moment."""
        self.moments.append((len(self.operations), When(doing, unit)))

    def allocate(
        self, category: Category, unit: str, what: str, nbytes: int, *, stream: int = 0
    ) -> int:
        """Take memory on a stream; returns the key to free it."""
        key = self.program.num_keys + len(self._items)
        self._items.append(Item(category, unit, what))
        if stream:
            self.streams[key] = stream
        if nbytes:
            self.operations.append((key, nbytes))
        else:
            self._empty.add(key)
        return key

    def free(self, key: int) -> None:
        """Give memory back."""
        self._busy.discard(key)
        if key not in self._empty:
            self.operations.append((key, 0))

    def become(self, key: int, category: Category, what: str) -> None:
        """The same memory is for something else from now on."""
        if key >= self.program.num_keys:
            unit = self._items[key - self.program.num_keys].unit
            self._items[key - self.program.num_keys] = Item(category, unit, what)

    def pass_through(self, nbytes: int) -> None:
        """Take memory for a moment."""
        if nbytes:
            self.operations.append((-1, -nbytes))

    def play(self, place: Place) -> None:
        """Compute a part of a pass."""
        operations = self.program.parts.get(place)
        if place.part is Part.BEFORE:
            self._instead.clear()
        if not operations:
            return
        self.at(_DOING[place.part], place.unit)
        special = self.program.held_over | self._busy
        if special and any(key in special for key, _ in operations):
            self.operations += self._with_new_keys(operations)
        else:
            self.operations += operations

    def gradient(self, param: str) -> int | None:
        """The key of a parameter's gradient in this pass, if it has one."""
        key = self.program.gradients.get(param)
        return None if key is None else self._instead.get(key, key)

    def keep(self, key: int) -> None:
        """What has this key lives on when the pass is over."""
        self._busy.add(key)

    def _with_new_keys(self, operations: Sequence[Operation]) -> Iterator[Operation]:
        """What is made while its like from the pass before is there has a key of its own."""
        for key, nbytes in operations:
            outlives = key in self.program.held_over
            if nbytes > 0 and (outlives or key in self._busy):
                new = self.program.num_keys + len(self._items)
                self._items.append(self.item(key))
                if outlives:
                    self._old[key] = self._held.pop(key, None)
                    self._held[key] = new
                else:
                    self._instead[key] = new
                yield (new, nbytes)
            elif nbytes == 0 and outlives:
                old = self._old.pop(key) if key in self._old else self._held.pop(key, None)
                if old is not None:
                    yield (old, 0)
            else:
                yield (self._instead.get(key, key), nbytes)

    def item(self, key: int) -> Item:
        """What a key stands for."""
        if key >= self.program.num_keys:
            return self._items[key - self.program.num_keys]
        tensor = self.program.tensor(key)
        place = tensor.place
        if key in self._gradients:
            return Item(Category.GRADIENTS, place.unit, f"gradient of {self._gradients[key]}")
        is_loss = place.part is Part.LOSS or (
            place.unit == self._last and (self._last_is_head or place.part is Part.AROUND)
        )
        category = Category.LOGITS_AND_LOSS if is_loss else Category.ACTIVATIONS
        return Item(category, place.unit, tensor.what)
