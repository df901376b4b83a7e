"""The first values of a module without any, a part of it at a time."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Draw = Callable[[str, Tensor], None]  # fills a whole parameter, from its name


class Values:
    """Gives the parameters of a module memory and values; ties stay ties."""

    def __init__(
        self, module: nn.Module, device: torch.device, dtype: torch.dtype, draw: Draw | None
    ) -> None:
        """Of `module`, whose buffers move to `device` at once.

        Args:
            module: its parameters may lie on the meta device.
            device: where it shall run.
            dtype: of the parameters; their values are drawn in it.
            draw: what draws them, alike on every rank; None: zeros, to be read over.
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
        """Give the parameters of `part` their values, but for those that have them."""
        for param in list(part.parameters()):
            if param not in self._homes:
                continue
            whole = torch.zeros(param.shape, dtype=self._dtype, device=self.device)
            if self._draw is not None:
                self._draw(self._names[param], whole)
            made = nn.Parameter(whole, requires_grad=param.requires_grad)
            for home, key in self._homes.pop(param):
                home._parameters[key] = made
