"""The steps of PyTorch's DistributedDataParallel, with gradients as views of its buckets.

Every rank keeps everything. The buckets, as large as all parameters, stay for good. Where it
computes in a narrower dtype than it keeps, each unit's parameters are cast in forward and kept
until its backward, as autocast does with those of matrix products.
"""

from dataclasses import dataclass

from fsdpctl.plan.sizes import Itemsizes
from fsdpctl.plan.units import UnitSpec
from fsdpctl.predict.compute import Part, Place
from fsdpctl.predict.engine_bytes import ADAMW, KeptStates
from fsdpctl.predict.script import Category, Writer


@dataclass(frozen=True, slots=True)
class DataParallel:
    """A model that every rank has a copy of."""

    units: tuple[UnitSpec, ...]  # root first
    sizes: Itemsizes
    passes: int
    states: KeptStates = ADAMW


class DataParallelSteps:
    """Writes the operations of a rank."""

    def __init__(self, model: DataParallel, writer: Writer) -> None:
        self._model = model
        self._writer = writer
        self._cast: dict[str, list[int]] = {}
        self._has_states = False
        self._params = {unit.name: unit.params for unit in model.units}

    def setup(self, *, draws: bool) -> None:
        """Build the model, and the buckets."""
        writer, itemsize = self._writer, self._model.sizes.master
        writer.begin()
        writer.at("building the model")
        for unit, params in self._params.items():
            for param in params:
                writer.allocate(Category.PARAMETERS, unit, "parameters", param.numel * itemsize)
        for unit, params in self._params.items():
            nbytes = sum(param.numel for param in params if param.trainable) * itemsize
            writer.allocate(Category.GRADIENTS, unit, "buckets", nbytes)

    def step(self) -> None:
        """All passes, and the optimizer's step."""
        model, writer = self._model, self._writer
        root, *units = (unit.name for unit in model.units)
        writer.begin()
        for _ in range(model.passes):
            writer.play(Place(Part.BEFORE))
            self._narrow(root)
            writer.play(Place(Part.START))
            for name in units:
                self._narrow(name)
                writer.play(Place(Part.FORWARD, name))
                writer.play(Place(Part.AROUND, name))
            writer.play(Place(Part.LOSS))
            for name in reversed(units):
                writer.play(Place(Part.BACKWARD, name))
                self._collect(name)
            self._collect(root)
            writer.play(Place(Part.END))
        self._optimizer()

    def _narrow(self, unit: str) -> None:
        sizes = self._model.sizes
        if sizes.param == sizes.master:
            return
        self._cast[unit] = [
            self._writer.allocate(
                Category.GATHERED_UNITS, unit, "cast parameters", param.numel * sizes.param
            )
            for param in self._params[unit]
        ]

    def _collect(self, unit: str) -> None:
        """The gradients were copied into the buckets."""
        for param in self._params[unit]:
            key = self._writer.gradient(param.name)
            if key is not None:
                self._writer.free(key)
        for key in self._cast.pop(unit, []):
            self._writer.free(key)

    def _optimizer(self) -> None:
        self._writer.at("the optimizer's step")
        if self._has_states:
            return
        self._has_states = True
        for unit, params in self._params.items():
            trained = [param.numel for param in params if param.trainable]
            for nbytes in (numel * self._model.sizes.master for numel in trained):
                for size in self._model.states.of(nbytes):
                    self._writer.allocate(Category.OPTIMIZER_STATES, unit, "optimizer states", size)
