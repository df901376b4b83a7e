"""What is trained, which decides how a model is cut."""

from collections.abc import Iterable

from torch import nn

from fsdpctl.engine.describe import all_named_parameters
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
        self._places: list[tuple[str, dict[str, nn.Parameter | None], str, nn.Parameter]] = []
        self._modules: list[tuple[str, nn.Module]] = []
        self._trained = [(unit, param) for unit, spec, param in found if spec.trainable]

    def hold_to(self, module: nn.Module, *, gathers: bool) -> None:
        """Remember where the parameters are in `module`."""
        self._places = [
            (name, owner._parameters, key, param)
            for name, owner, key, param in all_named_parameters(module)
        ]
        self._modules = [(n, each) for n, each in module.named_modules() if gathers]

    def refuse_changes(self) -> None:
        """Raise EngineError where a parameter is another now, or `requires_grad` is."""
        for name, params, key, param in self._places:
            if params.get(key) is not param:
                raise EngineError(
                    f"{name} is another parameter than when the model was sharded: write to it "
                    "within model.full_parameters(writeback=True), or unwrap() the model"
                )
        for name, module in self._modules:
            if module._compiled_call_impl is not None:
                raise EngineError(
                    f"{name or 'the module'} was compiled together with what gathers its "
                    "parameters: instead of module.compile() compile its forward, "
                    "module.forward = torch.compile(module.forward)"
                )
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
