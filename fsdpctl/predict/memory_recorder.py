"""Records a training step as operations on an allocator, with their purposes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdpctl.plan.layout import ParamSpec
from fsdpctl.predict.model_pass import ModelPass, Operation, PassPart, PassPosition
from fsdpctl.predict.step_recorder import Category, StepRecorder


@dataclass(frozen=True, slots=True)
class Purpose:
    """The purpose of an allocation."""

    category: Category
    unit: str  # empty: no unit
    description: str


@dataclass(frozen=True, slots=True)
class StepPhase:
    """The activity of a rank in a phase of a step, and the unit."""

    activity: str
    unit: str

    def __str__(self) -> str:
        return f"{self.activity} {self.unit}".strip()


_ACTIVITIES = {
    PassPart.BEFORE: "loading a batch",
    PassPart.START: "before the first unit",
    PassPart.FORWARD: "forward of",
    PassPart.BETWEEN: "after the forward of",
    PassPart.LOSS: "computing the loss",
    PassPart.BACKWARD: "backward of",
    PassPart.END: "after backward",
}


class MemoryRecorder(StepRecorder):
    """A recorder of the allocations and frees of one rank; the loss follows `last_unit`."""

    def __init__(self, model_pass: ModelPass, last_unit: str, *, last_is_head: bool) -> None:
        self.model_pass, self._last_unit, self._last_is_head = model_pass, last_unit, last_is_head
        self.operations: list[Operation] = []  # key -1: a workspace, allocated and freed at once
        self.phases: list[tuple[int, StepPhase]] = []  # each with the index of its first operation
        # Keys below `model_pass.num_keys` are tensors of the pass. The engine's keys follow.
        self._purposes: list[Purpose] = []  # purposes of the engine's keys
        self.streams: dict[int, int] = {}  # streams by key; absent: stream 0
        self._empty: set[int] = set()  # keys of allocations without bytes
        # Tensors that are freed in the next pass get a new key in each pass. By their key in the
        # pass: the key of the newest allocation, and of the one before, which is not freed yet.
        self._current_keys: dict[int, int] = {}
        self._previous_keys: dict[int, int | None] = {}
        self._held_gradient_keys: set[int] = set()  # keys of gradients that outlive their pass
        self._gradient_keys: dict[int, int] = {}  # keys in this pass of gradients that outlive it
        self._gradients = {key: name for name, key in model_pass.gradients.items()}

    def begin(self) -> None:
        """Begin a new list of operations and phases."""
        self.operations, self.phases = [], []

    def begin_phase(self, activity: str, unit: str = "") -> None:
        self.phases.append((len(self.operations), StepPhase(activity, unit)))

    def allocate(
        self, category: Category, unit: str, description: str, nbytes: int, *, stream: int = 0
    ) -> int:
        key = self.model_pass.num_keys + len(self._purposes)
        self._purposes.append(Purpose(category, unit, description))
        if stream:
            self.streams[key] = stream
        if nbytes:
            self.operations.append((key, nbytes))
        else:
            self._empty.add(key)
        return key

    def free(self, *keys: int | None) -> None:
        for key in (each for each in keys if each is not None):
            self._held_gradient_keys.discard(key)
            if key not in self._empty:
                self.operations.append((key, 0))

    def recategorize(self, key: int, category: Category, description: str) -> None:
        index = key - self.model_pass.num_keys
        if index >= 0:  # tensors of the pass keep their purpose
            self._purposes[index] = Purpose(category, self._purposes[index].unit, description)

    def allocate_temporary(self, nbytes: int) -> None:
        if nbytes:
            self.operations.append((-1, -nbytes))

    def compute(self, part: PassPart, unit: str = "") -> None:
        operations = self.model_pass.operations.get(PassPosition(part, unit))
        if part is PassPart.BEFORE:
            self._gradient_keys.clear()
        if operations:
            self.begin_phase(_ACTIVITIES[part], unit)
            outliving = self.model_pass.outliving | self._held_gradient_keys
            if outliving and any(key in outliving for key, _ in operations):
                self.operations += self._with_new_keys(operations)
            else:
                self.operations += operations

    def has_gradient(self, param: ParamSpec) -> bool:
        return param.name in self.model_pass.gradients

    def gradient(self, param: str) -> int | None:
        key = self.model_pass.gradients.get(param)
        return None if key is None else self._gradient_keys.get(key, key)

    def keep_gradient(self, key: int) -> None:
        self._held_gradient_keys.add(key)

    def _with_new_keys(self, operations: Sequence[Operation]) -> Iterator[Operation]:
        """Give a tensor a new key while a tensor of the previous pass has its key."""
        for key, nbytes in operations:
            outlives = key in self.model_pass.outliving
            if nbytes > 0 and (outlives or key in self._held_gradient_keys):
                new = self.model_pass.num_keys + len(self._purposes)
                self._purposes.append(self.purpose(key))
                if outlives:
                    self._previous_keys[key] = self._current_keys.pop(key, None)
                    self._current_keys[key] = new
                else:
                    self._gradient_keys[key] = new
                yield (new, nbytes)
            elif nbytes == 0 and outlives:
                # If this pass has allocated the tensor again already, free the previous one.
                keys = self._previous_keys if key in self._previous_keys else self._current_keys
                if (old := keys.pop(key, None)) is not None:
                    yield (old, 0)
            else:
                yield (self._gradient_keys.get(key, key), nbytes)

    def purpose(self, key: int) -> Purpose:
        """Return the purpose of an allocation by its key."""
        if key >= self.model_pass.num_keys:
            return self._purposes[key - self.model_pass.num_keys]
        tensor = self.model_pass.tensors[key]
        position = tensor.position
        if key in self._gradients:
            return Purpose(Category.GRADIENTS, position.unit, f"gradient of {self._gradients[key]}")
        # Without a head unit, the root computes the logits after the last unit (BETWEEN).
        of_head = self._last_is_head or position.part is PassPart.BETWEEN
        is_loss = position.part is PassPart.LOSS or (position.unit == self._last_unit and of_head)
        category = Category.LOGITS_AND_LOSS if is_loss else Category.ACTIVATIONS
        return Purpose(category, position.unit, tensor.description)
