"""Records a training step as operations on an allocator, with the purpose of each."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from fsdpctl.plan.layout import ParamSpec
from fsdpctl.predict.compute import Operation, Part, PassPosition, Program
from fsdpctl.predict.recorder import Category, Recorder


@dataclass(frozen=True, slots=True)
class Item:
    """The purpose of an allocation."""

    category: Category
    unit: str  # "": none
    what: str


@dataclass(frozen=True, slots=True)
class When:
    """A moment of a step."""

    doing: str
    unit: str

    def __str__(self) -> str:
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


class MemoryRecorder(Recorder):
    """The allocations and frees of one rank; the loss is computed after the unit `last`."""

    def __init__(self, program: Program, last: str, *, last_is_head: bool) -> None:
        self.program, self._last, self._last_is_head = program, last, last_is_head
        self.operations: list[Operation] = []
        self.moments: list[tuple[int, When]] = []  # where each begins
        self._items: list[Item] = []  # of the keys that are not the program's
        self.streams: dict[int, int] = {}  # of the keys that are not on stream 0
        self._empty: set[int] = set()  # keys of allocations without bytes
        # What outlives its pass, by the program's key: its current and its previous key.
        self._held: dict[int, int] = {}
        self._old: dict[int, int | None] = {}
        self._busy: set[int] = set()  # the program's keys of gradients that are held
        self._instead: dict[int, int] = {}  # for these, the key in this pass
        self._gradients = {key: name for name, key in program.gradients.items()}

    def begin(self) -> None:
        self.operations = []
        self.moments = []

    def at(self, doing: str, unit: str = "") -> None:
        self.moments.append((len(self.operations), When(doing, unit)))

    def allocate(
        self, category: Category, unit: str, what: str, nbytes: int, *, stream: int = 0
    ) -> int:
        key = self.program.num_keys + len(self._items)
        self._items.append(Item(category, unit, what))
        if stream:
            self.streams[key] = stream
        if nbytes:
            self.operations.append((key, nbytes))
        else:
            self._empty.add(key)
        return key

    def free(self, *keys: int | None) -> None:
        for key in (each for each in keys if each is not None):
            self._busy.discard(key)
            if key not in self._empty:
                self.operations.append((key, 0))

    def become(self, key: int, category: Category, what: str) -> None:
        if key >= self.program.num_keys:
            unit = self._items[key - self.program.num_keys].unit
            self._items[key - self.program.num_keys] = Item(category, unit, what)

    def pass_through(self, nbytes: int) -> None:
        if nbytes:
            self.operations.append((-1, -nbytes))

    def compute(self, part: Part, unit: str = "") -> None:
        operations = self.program.parts.get(PassPosition(part, unit))
        if part is Part.BEFORE:
            self._instead.clear()
        if operations:
            self.at(_DOING[part], unit)
            special = self.program.held_over | self._busy
            if special and any(key in special for key, _ in operations):
                self.operations += self._with_new_keys(operations)
            else:
                self.operations += operations

    def has_gradient(self, param: ParamSpec) -> bool:
        return param.name in self.program.gradients

    def gradient(self, param: str) -> int | None:
        key = self.program.gradients.get(param)
        return None if key is None else self._instead.get(key, key)

    def keep(self, key: int) -> None:
        self._busy.add(key)

    def _with_new_keys(self, operations: Sequence[Operation]) -> Iterator[Operation]:
        """Give what is made while that of the pass before still exists a key of its own."""
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
        if key >= self.program.num_keys:
            return self._items[key - self.program.num_keys]
        tensor = self.program.tensors[key]
        place = tensor.place
        if key in self._gradients:
            return Item(Category.GRADIENTS, place.unit, f"gradient of {self._gradients[key]}")
        is_loss = place.part is Part.LOSS or (
            place.unit == self._last and (self._last_is_head or place.part is Part.AROUND)
        )
        category = Category.LOGITS_AND_LOSS if is_loss else Category.ACTIVATIONS
        return Item(category, place.unit, tensor.what)


@contextmanager
def without_gc() -> Iterator[None]:
    """Disable the garbage collector, which takes a tenth of a second for all of torch's objects.

    Tensors that are observed inside are freed with their last reference, and not at another time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
