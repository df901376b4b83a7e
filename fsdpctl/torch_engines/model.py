"""The model that training uses under one of PyTorch's engines."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdpctl.comm.collectives import Collectives
from fsdpctl.comm.flat_shard import FlatShard, as_integers, compare_replicas, persistent_buffers
from fsdpctl.comm.mesh import Mesh, collectives_for
from fsdpctl.comm.rank_status import RANK_STATUS
from fsdpctl.comm.waits import Seconds
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

    Each parameter's local part is a shard, a view of the engine's memory, so that optimizers and
    checkpoints work as with fsdpctl's engine.
    """

    def __init__(
        self,
        module: nn.Module,
        runner: Fsdp2Engine | DdpEngine,
        world: Collectives,
        roles: Mapping[str, Role],
    ) -> None:
        super().__init__()
        self.module = module
        self.mesh = Mesh(world, world, None)
        self._runner = runner
        self._shards = tuple(_flat_shard(local, roles[local.name]) for local in runner.locals)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._runner(*args, **kwargs)

    @property
    def collectives(self) -> Collectives:
        return self.mesh.world

    @property
    def take_waits(self) -> Callable[[], Seconds] | None:
        """A function that returns the exposed communication since its last call; None: unknown."""
        own = self._runner.take_waits
        if own is None:
            return None

        def take() -> Seconds:
            both = own(), self.mesh.take_waits()
            return lambda: sum(seconds() for seconds in both)

        return take

    def flat_shards(self) -> tuple[FlatShard, ...]:
        return self._shards

    def persistent_buffers(self) -> Mapping[str, Tensor]:
        return persistent_buffers(self.module)

    def no_sync(self) -> AbstractContextManager[None]:
        """Reduce no gradients in backwards inside; the next one outside reduces all."""
        return self._runner.no_sync()

    @torch.no_grad()
    def sync_gradients(self) -> None:
        """Give every shard the gradient that the engine has reduced."""
        for local, shard in zip(self._runner.locals, self._shards, strict=True):
            grad = local.param.grad
            shard.grad = None if grad is None else _local_tensor(grad).view(-1)

    def absent_everywhere(self) -> frozenset[str]:
        """Return the trainable parameters without a gradient, which are the same on all ranks."""
        trained = (each for each in self._runner.locals if each.param.requires_grad)
        return frozenset(each.name for each in trained if each.param.grad is None)

    host = None  # the optimizer steps on the device

    def drop_gradients(self) -> None:
        for local, shard in zip(self._runner.locals, self._shards, strict=True):
            local.param.grad = shard.grad = None

    def broadcast_updated_params(self, *, trained_only: bool = False) -> None:
        """Let the next forward see what was written to the shards."""
        self._runner.reshard()

    @torch.no_grad()
    def check_replicas(self) -> None:
        """Compare replicas by checksum; EngineError names a parameter that differs. Collective."""
        if self._runner.num_replicas == 1:
            return
        sums = [as_integers(shard.master).sum(dtype=torch.int64) for shard in self._shards]
        names = [local.name for local in self._runner.locals]
        found = torch.stack(sums).tolist()
        checksums = {name: (value,) for name, value in zip(names, found, strict=True)}
        compare_replicas(self.collectives, self._runner.shard_rank, checksums)

    def name_ranges(self, *, is_on: bool) -> None:
        """Do nothing: these engines always name their ranges in a profile."""


def build_torch_engine(
    module: nn.Module, setup: TorchEngineSettings, device: torch.device, draw: InitParam | None
) -> TorchEngineModel:
    """Let one of PyTorch's engines train `module`; without `draw`, parameters are 0. Collective."""
    world = collectives_for(device)
    roles = parameter_roles(module)  # before `fully_shard` replaces the classes of modules
    values = ParamInitializer(module, device, setup.master_dtype, draw)
    for name in setup.blocks:
        _report_progress(name, module.get_submodule(name))
    kind = Fsdp2Engine if setup.engine == FSDP2 else DdpEngine
    return TorchEngineModel(module, kind(module, setup, world, values), world, roles)


def _report_progress(name: str, block: nn.Module) -> None:

    def backward(gradient: Tensor) -> None:
        RANK_STATUS.at(f"backward {name}")

    def forward(module: nn.Module, args: Any, output: Any) -> None:
        RANK_STATUS.at(f"forward {name}")
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(backward)

    block.register_forward_hook(forward)


def _local_tensor(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _flat_shard(local: LocalParam, role: Role) -> FlatShard:
    own = _local_tensor(local.param.detach())
    dtype = dtype_name(own.dtype)
    trains = local.param.requires_grad
    spec = ParamSpec(local.name, local.shape, dtype, trains, known_role=role)
    layout = FlatLayout((ParamSpan(spec, Span(0, spec.numel)),), spec.numel, (local.held,))
    spans = {"span": local.held, "owned_span": local.owned, "saved_span": local.written}
    return FlatShard(local.name, layout, own.view(-1), **spans, num_owners=local.num_owners)
