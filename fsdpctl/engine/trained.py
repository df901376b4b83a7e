"""What is trained, which decides how a model is cut."""

from collections.abc import Iterable

from fsdpctl.engine.parameters import arrived_gradient
from fsdpctl.engine.unit import ShardedUnit
from fsdpctl.errors import EngineError


class Trained:
    """The parameters as they were when the model was sharded."""

    def __init__(self, units: Iterable[ShardedUnit]) -> None:
        found = [
            (unit.name, spec, param)
            for unit in units
            for buffer in unit.buffers
            for spec, param in zip(buffer.layout.params, buffer.params, strict=True)
        ]
        self._params = [param for _, _, param in found]
        self._names = [spec.name for _, spec, _ in found]
        self._flags = [spec.trainable for _, spec, _ in found]
        self._trained = [(unit, param) for unit, spec, param in found if spec.trainable]

    def refuse_changes(self) -> None:
        """Raise EngineError where `requires_grad` is another now."""
        now = [param.requires_grad for param in self._params]
        if now != self._flags:
            place = next(i for i, flag in enumerate(self._flags) if flag is not now[i])
            raise EngineError(
                f"{self._names[place]}: requires_grad was {self._flags[place]} when the model was "
                f"sharded and is {now[place]}; what is trained decides how it is cut: unwrap() it, "
                "change that, and shard it again"
            )

    def refuse_strays(self) -> None:
        """Raise EngineError where a gradient has arrived that no reduction has taken."""
        for unit, param in self._trained:
            if arrived_gradient(param) is not None:
                raise EngineError(
                    f"gradients of {unit} were not reduced: its output reaches the loss where "
                    "hooks do not see it, or the loss uses its parameters before the forward"
                )
