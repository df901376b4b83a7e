"""The settings of PyTorch's engines, and a rank's part of a parameter under them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdpctl.plan.layout import Span
from fsdpctl.plan.step_plan import Prefetch


@dataclass(frozen=True, slots=True)
class TorchEngineSettings:
    """The settings of one of PyTorch's engines."""

    engine: str  # of plan/strategy.py
    blocks: tuple[str, ...]  # the modules that are gathered, freed and reduced as one
    ranks_per_replica: int
    reshard_after_forward: bool  # whether blocks are freed after their forward
    prefetch: Prefetch
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    master_dtype: torch.dtype
    compiles: bool  # whether blocks are compiled


@dataclass(frozen=True, slots=True)
class LocalParam:
    """A rank's part of one parameter."""

    name: str
    shape: tuple[int, ...]  # unsharded
    param: nn.Parameter  # that the engine reads, and whose gradient it sets
    held: Span  # the elements that this rank has
    owned: Span  # those that this rank counts in norms
    written: Span  # those that this rank saves
    num_owners: int  # ranks with the same `owned`


InitParam = Callable[[str, Tensor], None]  # fills an unsharded parameter, by its name


class ParamInitializer:
    """Allocates and initializes the parameters of a module; tied parameters stay tied."""

    def __init__(
        self, module: nn.Module, device: torch.device, dtype: torch.dtype, draw: InitParam | None
    ) -> None:
        """Move the buffers of `module`, whose parameters may be on the meta device, to `device`.

        Parameters get `dtype`. `draw` initializes them, equally on every rank; None: zeros.
        """
        self.device = device
        self._dtype, self._draw = dtype, draw
        self._names = {param: name for name, param in module.named_parameters()}
        self._homes: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for each in module.modules():
            for key, param in each._parameters.items():
                if param is not None:
                    self._homes.setdefault(param, []).append((each, key))
            for key, buffer in each._buffers.items():
                if buffer is not None:
                    each._buffers[key] = buffer.to(device)

    @torch.no_grad()
    def fill(self, part: nn.Module) -> None:
        for param in list(part.parameters()):
            if param not in self._homes:
                continue
            whole = torch.zeros(param.shape, dtype=self._dtype, device=self.device)
            if self._draw is not None:
                self._draw(self._names[param], whole)
            made = nn.Parameter(whole, requires_grad=param.requires_grad)
            for home, key in self._homes.pop(param):
                home._parameters[key] = made
