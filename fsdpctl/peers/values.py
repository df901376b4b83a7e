"""Initializes the parameters of a meta module, one part at a time."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Draw = Callable[[str, Tensor], None]  # fills an unsharded parameter, by its name


class Values:
    """Allocates and initializes the parameters of a module; tied parameters stay tied."""

    def __init__(
        self, module: nn.Module, device: torch.device, dtype: torch.dtype, draw: Draw | None
    ) -> None:
        """Move the buffers of `module` to `device`.

        Args:
            module: its parameters may be on the meta device.
            device: of the computation.
            dtype: of the parameters and of their initialization.
            draw: initializes them, equally on every rank; None: zeros, to be overwritten.
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
        """Initialize the parameters of `part` that are not initialized yet."""
        for param in list(part.parameters()):
            if param not in self._homes:
                continue
            whole = torch.zeros(param.shape, dtype=self._dtype, device=self.device)
            if self._draw is not None:
                self._draw(self._names[param], whole)
            made = nn.Parameter(whole, requires_grad=param.requires_grad)
            for home, key in self._homes.pop(param):
                home._parameters[key] = made
