"""The steps of PyTorch's `fully_shard`, as its source has them (torch/distributed/fsdp).

Each parameter is cut along its first dimension. A unit is gathered into one buffer of a side stream
and copied from there into a tensor for each parameter; that buffer is given back when the next unit
has been copied. The unit before is gathered ahead in backward. Gradients are copied into one
buffer, which is given back when the next unit's backward is over, and reduced into another, which
the gradients are views of.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdpctl.plan.layout import ParamSpec
from fsdpctl.plan.sizes import Itemsizes
from fsdpctl.plan.units import UnitSpec
from fsdpctl.predict.compute import Part, Place
from fsdpctl.predict.engine_bytes import ADAMW, KeptStates
from fsdpctl.predict.script import Category, Writer

_GATHERS, _REDUCES, _ALL_REDUCES = 1, 2, 3  # streams


@dataclass(frozen=True, slots=True)
class FullyShard:
    """A model that `fully_shard` was called on: each block, then the whole."""

    units: tuple[UnitSpec, ...]  # ours, in the order of their forward after the root
    num_parts: int  # ranks that share a copy
    sizes: Itemsizes
    reshards: bool  # after forward; the last block, and what is in no block, never
    prefetch: int  # blocks gathered ahead in backward
    reduces: tuple[bool, ...]  # per pass
    ahead: int = 0  # blocks gathered ahead in forward, beyond its habit
    states: KeptStates = ADAMW
    replicates: bool = False  # what is reduced is then all-reduced over copies
    fused: bool = True  # AdamW in one kernel, or tensor by tensor with a temporary each

    def groups(self) -> dict[str, tuple[ParamSpec, ...]]:
        """The parameters of the root and of each block."""
        blocks = {unit.name: unit.params for unit in self.units if unit.kind == "block"}
        rest = [p for unit in self.units if unit.name not in blocks for p in unit.params]
        return {self.root: tuple(rest), **blocks}

    @property
    def root(self) -> str:
        """Our name for what is in no block."""
        return self.units[0].name


class FullyShardSteps:
    """Writes the operations of one rank."""

    def __init__(self, model: FullyShard, writer: Writer) -> None:
        self._model = model
        self._writer = writer
        self._groups = model.groups()
        self._blocks = [name for name in self._groups if name != model.root]
        self._places = [unit.name for unit in model.units[1:]]
        self._gathered: dict[str, int | None] = {}  # units in a gather's buffer, if there is one
        self._whole: dict[str, list[int]] = {}
        self._copied: int | None = None  # the buffer of the gather that was copied last
        self._reducing: int | None = None
        self._all_reduced: list[int] = []  # kept until the backward is over
        self._grads: dict[str, int] = {}  # reduced
        self._held: dict[str, list[int]] = {}  # not reduced yet
        self._has_states = False

    def setup(self, *, draws: bool) -> None:
        """Build the model."""
        self._writer.begin()
        self._writer.at("building the model")
        for unit, params in self._groups.items():
            for nbytes in self._shards(params):
                self._writer.allocate(Category.PARAMETERS, unit, "parameters", nbytes)

    def step(self) -> None:
        """All passes, the reductions, and the optimizer's step."""
        self._writer.begin()
        for reduces in self._model.reduces:
            self._writer.play(Place(Part.BEFORE))
            self._forward()
            self._backward(reduces=reduces)
            self._writer.play(Place(Part.END))
        self._optimizer()

    def _numel(self, param: ParamSpec) -> int:
        """Of a rank's part, rows padded."""
        if not param.shape:
            return 1
        rows = -(-param.shape[0] // self._model.num_parts)
        return rows * param.numel // max(1, param.shape[0])

    def _shards(self, params: Sequence[ParamSpec]) -> Iterator[int]:
        return (self._numel(param) * self._model.sizes.master for param in params)

    def _gather(self, unit: str) -> None:
        if unit in self._gathered or unit in self._whole:
            return
        writer, sizes = self._writer, self._model.sizes
        if self._model.num_parts == 1:
            self._gathered[unit] = None
            return
        writer.at("gathering", unit)
        part = sum(map(self._numel, self._groups[unit])) * sizes.param
        cast = None
        if sizes.param != sizes.master:
            cast = self._buffer(Category.GATHERED_UNITS, unit, part, _GATHERS)
        nbytes = part * self._model.num_parts
        self._gathered[unit] = self._buffer(Category.GATHERED_UNITS, unit, nbytes, _GATHERS)
        if cast is not None:
            writer.free(cast)

    def _buffer(self, category: Category, unit: str, nbytes: int, stream: int = 0) -> int:
        what = "gathered parameters" if stream == _GATHERS else "all gradients"
        return self._writer.allocate(category, unit, what, nbytes, stream=stream)

    def _copy_out(self, unit: str, *, forward: bool) -> None:
        if unit in self._whole:
            return
        self._gather(unit)
        self._let_go_of_copied()
        self._whole[unit] = [
            self._writer.allocate(
                Category.GATHERED_UNITS,
                unit,
                "parameters",
                self._numel(param) * self._model.num_parts * self._model.sizes.param,
            )
            for param in self._groups[unit]
        ]
        buffer = self._gathered.pop(unit)
        if forward:
            self._copied = buffer
        elif buffer is not None:
            self._writer.free(buffer)

    def _let_go_of_copied(self) -> None:
        if self._copied is not None:
            self._writer.free(self._copied)
            self._copied = None

    def _reshard(self, unit: str) -> None:
        for key in self._whole.pop(unit, []):
            self._writer.free(key)

    def _forward(self) -> None:
        model, writer = self._model, self._writer
        self._copy_out(model.root, forward=True)
        writer.play(Place(Part.START))
        for name in self._places:
            is_block = name in self._groups
            if is_block:
                self._copy_out(name, forward=True)
                place = self._blocks.index(name) + 1
                for ahead in self._blocks[place : place + model.ahead]:
                    self._gather(ahead)
            writer.play(Place(Part.FORWARD, name))
            if is_block and model.reshards and name != self._blocks[-1]:
                self._reshard(name)
            writer.play(Place(Part.AROUND, name))
        self._let_go_of_copied()
        writer.play(Place(Part.LOSS))

    def _backward(self, *, reduces: bool) -> None:
        running: str | None = None
        for name in reversed(self._places):
            if running is not None and name in self._groups:
                self._after(running, reduces=reduces)
            if name in self._groups:
                self._copy_out(name, forward=False)
                place = self._blocks.index(name)
                for ahead in self._blocks[max(0, place - self._model.prefetch) : place][::-1]:
                    self._gather(ahead)
            elif running is not None:
                self._after(running, reduces=reduces)
            running = name if name in self._groups else None
            self._writer.play(Place(Part.BACKWARD, name))
        if running is not None:
            self._after(running, reduces=reduces)
        self._after(self._model.root, reduces=reduces)
        if self._reducing is not None:
            self._writer.free(self._reducing)
            self._reducing = None
        for key in self._all_reduced:
            self._writer.free(key)
        self._all_reduced.clear()

    def _with_gradients(self, unit: str) -> list[ParamSpec]:
        gradients = self._writer.program.gradients
        return [param for param in self._groups[unit] if param.name in gradients]

    def _after(self, unit: str, *, reduces: bool) -> None:
        """A unit's backward is over."""
        writer, sizes = self._writer, self._model.sizes
        self._reshard(unit)
        params = self._with_gradients(unit)
        if not params:
            return
        keys = [key for param in params if (key := writer.gradient(param.name)) is not None]
        writer.at("reducing", unit)
        if not reduces or unit in self._held:
            self._hold(unit, params, keys)
            if not reduces:
                return
            keys = self._held.pop(unit)
        if self._reducing is not None:
            writer.free(self._reducing)
        part = sum(map(self._numel, params))
        self._reducing = self._buffer(
            Category.REDUCE_BUFFERS, unit, part * self._model.num_parts * sizes.reduce
        )
        for key in keys:
            writer.free(key)
        grads = self._buffer(Category.GRADIENTS, unit, part * sizes.reduce, _REDUCES)
        if sizes.reduce != sizes.master:
            stream = _ALL_REDUCES if self._model.replicates else _REDUCES
            wide = self._buffer(Category.GRADIENTS, unit, part * sizes.master, stream)
            self._let_go_of_sum(grads)
            grads = wide
        if unit in self._grads:
            self._let_go_of_sum(grads)
        else:
            self._grads[unit] = grads

    def _let_go_of_sum(self, key: int) -> None:
        """What was all-reduced is kept until the backward is over."""
        if self._model.replicates:
            self._all_reduced.append(key)
        else:
            self._writer.free(key)

    def _hold(self, unit: str, params: Sequence[ParamSpec], keys: list[int]) -> None:
        """Gradients stay whole, in the dtype of the reduction."""
        writer, sizes = self._writer, self._model.sizes
        if unit in self._held:
            for key in keys:
                writer.free(key)
        elif sizes.param == sizes.reduce:
            self._held[unit] = keys
            for key in keys:
                writer.keep(key)
        else:
            self._held[unit] = []
            for param, key in zip(params, keys, strict=True):
                nbytes = param.numel * sizes.reduce
                wide = writer.allocate(Category.GRADIENTS, unit, "held gradients", nbytes)
                self._held[unit].append(wide)
                writer.free(key)

    def _optimizer(self) -> None:
        writer = self._writer
        writer.at("the optimizer's step")
        if not self._has_states:
            self._has_states = True
            for unit in self._groups:
                for nbytes in self._shards(self._with_gradients(unit)):
                    for size in self._model.states.of(nbytes):
                        writer.allocate(Category.OPTIMIZER_STATES, unit, "optimizer states", size)
        if not self._model.fused:
            temporaries = [
                writer.allocate(Category.OPTIMIZER_STATES, unit, "roots of second moments", nbytes)
                for unit in self._groups
                for nbytes in self._shards(self._with_gradients(unit))
            ]
            for key in temporaries:
                writer.free(key)
        for key in self._grads.values():
            writer.free(key)
        self._grads.clear()
