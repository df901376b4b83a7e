"""The model that training uses with one of PyTorch's engines."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdpctl.comm.collectives import Collectives
from fsdpctl.comm.flat_shard import FlatShard, compare_replicas, integer_view, persistent_buffers
from fsdpctl.comm.mesh import Mesh, collectives_for
from fsdpctl.comm.rank_status import STATUS_PAGE
from fsdpctl.comm.waits import GetWaitSeconds, TakeWaits
from fsdpctl.models.module_spec import dtype_name, parameter_roles
from fsdpctl.plan.layout import FlatLayout, ParamSpan, ParamSpec, Role, Span
from fsdpctl.plan.strategy import FSDP2
from fsdpctl.torch_engines.ddp import DdpEngine
from fsdpctl.torch_engines.fsdp2 import Fsdp2Engine
from fsdpctl.torch_engines.settings import (
    InitParam,
    LocalParam,
    ParamInitializer,
    TorchEngineSettings,
)


class TorchEngineModel(nn.Module):
    """A module that `fully_shard` or DistributedDataParallel trains.

    The shard of each parameter is a view of the engine's memory. So optimizers and checkpoints work
    as with fsdpctl's engine.
    """

    def __init__(
        self,
        module: nn.Module,
        engine: Fsdp2Engine | DdpEngine,
        world: Collectives,
        roles: Mapping[str, Role],
    ) -> None:
        super().__init__()
        self.module = module
        self.mesh = Mesh(world, world, None)
        self._engine = engine
        self._shards = tuple(_flat_shard(local, roles[local.name]) for local in engine.local_params)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine(*args, **kwargs)

    @property
    def collectives(self) -> Collectives:
        return self.mesh.world

    @property
    def take_waits(self) -> TakeWaits | None:
        """A function for the communication exposed since its last call; None: not observable."""
        take_engine_waits = self._engine.take_waits
        if take_engine_waits is None:
            return None

        def take() -> GetWaitSeconds:
            waits = take_engine_waits(), self.mesh.take_waits()
            return lambda: sum(seconds() for seconds in waits)

        return take

    def flat_shards(self) -> tuple[FlatShard, ...]:
        return self._shards

    def persistent_buffers(self) -> Mapping[str, Tensor]:
        return persistent_buffers(self.module)

    def no_sync(self) -> AbstractContextManager[None]:
        """Do not reduce gradients inside the block; the next backward outside it reduces them."""
        return self._engine.no_sync()

    @torch.no_grad()
    def sync_gradients(self) -> None:
        """Set the gradient of every shard to the gradient that the engine has reduced."""
        for local, shard in zip(self._engine.local_params, self._shards, strict=True):
            grad = local.param.grad
            shard.grad = None if grad is None else _local_tensor(grad).view(-1)

    def params_without_grad(self) -> frozenset[str]:
        """Return the names of trainable parameters without a gradient."""
        # The engines reduce a gradient on all ranks or on none: no communication is needed.
        trained = (local for local in self._engine.local_params if local.param.requires_grad)
        return frozenset(local.name for local in trained if local.param.grad is None)

    host = None  # the optimizer steps on the device

    def drop_gradients(self) -> None:
        for local, shard in zip(self._engine.local_params, self._shards, strict=True):
            local.param.grad = shard.grad = None

    def broadcast_updated_params(self, *, trained_only: bool = False) -> None:
        """Reshard: the next forward gathers the updated shards. `trained_only` has no effect."""
        self._engine.reshard()

    @torch.no_grad()
    def check_replicas(self) -> None:
        """Compare checksums of the replicas' parameters. Collective.

        EngineError, which names the first parameter that differs.
        """
        if self._engine.num_replicas == 1:
            return
        sums = [integer_view(shard.master).sum(dtype=torch.int64) for shard in self._shards]
        values = zip(self._shards, torch.stack(sums).tolist(), strict=True)
        checksums = {shard.unit: (value,) for shard, value in values}
        compare_replicas(self.collectives, self._engine.shard_rank, checksums)

    def name_ranges(self, *, is_on: bool) -> None:
        """Do nothing: PyTorch's engines always name their ranges in a profile."""


def build_torch_engine(
    module: nn.Module,
    settings: TorchEngineSettings,
    device: torch.device,
    init_param: InitParam | None,
) -> TorchEngineModel:
    """Wrap `module` in one of PyTorch's engines. Collective.

    `init_param` initializes parameters; without it, they are zero.
    """
    world = collectives_for(device)
    # `fully_shard` replaces the classes of modules, which roles depend on.
    roles = parameter_roles(module)
    # Also moves the buffers of `module` to `device`.
    initializer = ParamInitializer(module, device, settings.master_dtype, init_param)
    for name in settings.blocks:
        _report_progress(name, module.get_submodule(name))
    engine_type = Fsdp2Engine if settings.engine == FSDP2 else DdpEngine
    engine = engine_type(module, settings, world, initializer)
    return TorchEngineModel(module, engine, world, roles)


def _report_progress(name: str, block: nn.Module) -> None:
    """Record the running block in this rank's status; in backward, if it returns a tensor."""

    def backward(gradient: Tensor) -> None:
        STATUS_PAGE.at(f"backward {name}")

    def forward(module: nn.Module, args: Any, output: Any) -> None:
        STATUS_PAGE.at(f"forward {name}")
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(backward)

    block.register_forward_hook(forward)


def _local_tensor(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _flat_shard(local: LocalParam, role: Role) -> FlatShard:
    tensor = _local_tensor(local.param.detach())
    dtype = dtype_name(tensor.dtype)
    trains = local.param.requires_grad
    spec = ParamSpec(local.name, local.shape, dtype, trains, known_role=role)
    # Spans of other ranks are not used.
    layout = FlatLayout((ParamSpan(spec, Span(0, spec.numel)),), spec.numel, (local.span,))
    spans = {"span": local.span, "owned_span": local.owned_span, "saved_span": local.saved_span}
    return FlatShard(local.name, layout, tensor.view(-1), **spans, num_owners=local.num_owners)
