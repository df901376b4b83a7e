"""The settings, local parameters and initialization that both of PyTorch's engines share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdpctl.plan.layout import Span
from fsdpctl.plan.step_plan import Prefetch


@dataclass(frozen=True, slots=True)
class TorchEngineSettings:
    """The settings of one of PyTorch's engines."""

    engine: str  # FSDP2 or DDP of plan/strategy.py
    blocks: tuple[str, ...]  # names of the modules that are units
    ranks_per_replica: int
    reshard_after_forward: bool  # whether blocks are freed after their forward
    prefetch: Prefetch
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    master_dtype: torch.dtype
    compiles: bool  # whether blocks are compiled

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """`param_dtype`, or None if parameters are stored in it."""
        return None if self.param_dtype == self.master_dtype else self.param_dtype


@dataclass(frozen=True, slots=True)
class LocalParam:
    """The elements of one parameter that a rank stores, counts in norms and saves."""

    name: str
    shape: tuple[int, ...]  # unsharded
    param: nn.Parameter  # the parameter that the engine reads, and whose gradient it sets
    span: Span  # elements in this rank's memory; with DDP, all
    owned_span: Span  # elements that this rank counts in norms; with FSDP2, `span`
    saved_span: Span  # elements that this rank saves, a share of `span`
    num_owners: int  # ranks that have the same `owned_span`


InitParam = Callable[[str, Tensor], None]  # initializes an unsharded parameter, given its name


class ParamInitializer:
    """Allocates and initializes the parameters of a module; tied parameters stay tied."""

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        init_param: InitParam | None,
    ) -> None:
        """Move the buffers of `module`, whose parameters may be on the meta device, to `device`.

        Parameters get `dtype`. `init_param` initializes them with the same values on every rank.
        Without `init_param`, they are zero.
        """
        self.device = device
        self._dtype, self._init_param = dtype, init_param
        self._names = {param: name for name, param in module.named_parameters()}
        self._owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for owner in module.modules():
            for key, param in owner._parameters.items():
                if param is not None:
                    self._owners.setdefault(param, []).append((owner, key))
            for key, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[key] = buffer.to(device)

    @torch.no_grad()
    def initialize(self, module: nn.Module) -> None:
        """Replace parameters and their ties, once, before an engine takes `module`."""
        for param in list(module.parameters()):
            if param not in self._owners:
                continue
            tensor = torch.zeros(param.shape, dtype=self._dtype, device=self.device)
            if self._init_param is not None:
                self._init_param(self._names[param], tensor)
            replacement = nn.Parameter(tensor, requires_grad=param.requires_grad)
            for owner, key in self._owners.pop(param):
                owner._parameters[key] = replacement
