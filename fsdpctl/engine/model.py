"""`shard_model`: any nn.Module, sharded."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdpctl.comm.base import Collectives
from fsdpctl.comm.mesh import Mesh, make_mesh
from fsdpctl.comm.process_group import collectives_for
from fsdpctl.engine.build import Division, Source, build_runtime, divide_module
from fsdpctl.engine.precision import Precision
from fsdpctl.engine.runtime import Runtime
from fsdpctl.engine.state import full_state, persistent_buffers
from fsdpctl.errors import EngineError, UsageError
from fsdpctl.plan.owners import OwnerMap
from fsdpctl.plan.schedule import Event, Prefetch, UnitOrder
from fsdpctl.plan.strategy import (
    Strategy,
    effective_strategy,
    get_strategy,
    ranks_per_copy,
)
from fsdpctl.plan.units import lay_out
from fsdpctl.shards import FlatShard, trainable_shards


class ShardedModel(nn.Module):
    """A module whose parameters are sharded as its strategy says.

    Call it like the module. The module's Parameter objects stay what they were, with name, shape
    and dtype; where the strategy shards parameters they read NaN outside forward and backward.
    """

    def __init__(self, module: nn.Module, runtime: Runtime, strategy: Strategy) -> None:
        super().__init__()
        self.module = module
        self.strategy = strategy  # as asked for; one rank alone runs as no_shard
        self._runtime = runtime
        self._all_present: Tensor | None = None
        self._presence: tuple[int, Tensor | None] = (-1, None)  # after how many backwards

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own result."""
        return self.module(*args, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's parameters under its own names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    @property
    def mesh(self) -> Mesh:
        """The ranks that share a copy of the model with this one, and those of other copies."""
        return self._runtime.mesh

    @property
    def collectives(self) -> Collectives:
        """All ranks of the model."""
        return self._runtime.mesh.world

    def flat_shards(self) -> tuple[FlatShard, ...]:
        """This rank's shards, root first, in the same order on every rank."""
        units = self._runtime.units.values()
        return tuple(buffer.shard for unit in units for buffer in unit.buffers)

    def persistent_buffers(self) -> Mapping[str, Tensor]:
        """The module's buffers that its state dict contains, by name."""
        return persistent_buffers(self.module)

    def presence(self) -> Tensor:
        """For each trainable parameter, 1 if it had a gradient here since they were dropped."""
        runtime = self._runtime
        buffers = [b for unit in runtime.units.values() for b in unit.trainable_buffers]
        if runtime.has_all_gradients:  # the usual case, for which nothing is copied to a device
            if self._all_present is None:
                count = sum(len(buffer.params) for buffer in buffers)
                self._all_present = torch.ones(count, dtype=torch.float64, device=runtime.device)
            return self._all_present
        present = [
            float(index in buffer.present)
            for buffer in buffers
            for index in range(len(buffer.params))
        ]
        return torch.tensor(present, dtype=torch.float64, device=runtime.device)

    def share_presence(self, counts: Tensor) -> None:
        """Take note of the sum of all ranks' `presence()`."""
        self._presence = self._runtime.num_backwards, counts

    def absent_everywhere(self) -> frozenset[str]:
        """Names of the trainable parameters that had a gradient on no rank. Collective.

        A rank that had all of them knows the answer and does not wait for it.
        """
        own = self.presence()
        at, counts = self._presence
        if at != self._runtime.num_backwards or counts is None:
            counts = self.mesh.world.all_reduce(own.clone())
            self.share_presence(counts)
        if self._runtime.has_all_gradients:
            return frozenset()
        names = [param.name for s in trainable_shards(self) for param in s.layout.params]
        return frozenset(n for n, count in zip(names, counts.tolist(), strict=True) if not count)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside keeps whole gradients here; the next one outside reduces them too."""
        before, self._runtime.reduces = self._runtime.reduces, False
        try:
            yield
        finally:
            self._runtime.reduces = before

    def sync_gradients(self) -> None:
        """Reduce what `no_sync` held back; does nothing when every gradient is reduced.

        Raises:
            EngineError: there was no backward since gradients were dropped.
        """
        runtime = self._runtime
        buffers = [b for unit in runtime.units.values() for b in unit.trainable_buffers]
        if any(buffer.held_gradients is not None for buffer in buffers):
            runtime.reducer.advance()
            runtime.reducer.finish()
        if all(buffer.shard.grad is None for buffer in buffers):
            raise EngineError("sync_gradients: there are no gradients; call backward first")

    def drop_gradients(self) -> None:
        """Forget all gradients, reduced or not."""
        for unit in self._runtime.units.values():
            for buffer in unit.buffers:
                buffer.drop_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; they are always freed."""
        self.drop_gradients()

    def publish_updates(self) -> None:
        """Let the next forward see what was written to the masters."""
        self._runtime.masters_changed()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Whole master weights and buffers on the CPU, under the module's names. Collective."""
        return full_state(self.module, self.flat_shards(), self.mesh.shard)

    @contextmanager
    def recorded_events(self) -> Iterator[list[Event]]:
        """The gathers, releases and reductions that happen in the block, as a growing list."""
        trace: list[Event] = []
        self._runtime.trace = trace
        try:
            yield trace
        finally:
            self._runtime.trace = None

    def watch(self, callback: Callable[[], None]) -> None:
        """Have `callback()` run after each recorded event."""
        self._runtime.on_event = callback

    @property
    def unit_order(self) -> UnitOrder:
        """The units in the order of their forward."""
        return self._runtime.order

    def unit_nbytes(self) -> dict[str, int]:
        """Bytes of each unit's parameters when they are whole, padding included."""
        return {
            name: sum(buffer.layout.numel * buffer.whole.itemsize for buffer in unit.buffers)
            for name, unit in self._runtime.units.items()
        }

    def gathered_nbytes(self) -> int:
        """Bytes that the slots of gathered parameters take now."""
        slots = {id(unit.slot): unit.slot for unit in self._runtime.units.values()}
        return sum(slot.allocated_nbytes for slot in slots.values())


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a model is sharded; see `shard_model`."""

    strategy: str | Strategy = "full_shard"
    units: str | Sequence[type[nn.Module]] = "auto"
    dp_shard_size: int | None = None
    owner_map: str | OwnerMap = "even"
    prefetch: Prefetch = Prefetch()
    precision: Precision = Precision()


def shard_model(
    module: nn.Module,
    strategy: str | Strategy = "full_shard",
    *,
    units: str | Sequence[type[nn.Module]] = "auto",
    dp_shard_size: int | None = None,
    owner_map: str | OwnerMap = "even",
    prefetch: Prefetch = Prefetch(),
    precision: Precision = Precision(),
) -> ShardedModel:
    """Shard `module` over the ranks of the process group. Collective; rank 0's weights win.

    Args:
        module: any module with values, on the device where it shall run.
        strategy: a name of the strategy table, or one of its rows.
        units: "auto", or the module classes whose instances are gathered and freed as one.
        dp_shard_size: hybrid strategies: how many ranks share one copy; by default all.
        owner_map: shard_optimizer: who keeps the states of what; a name, or a map of your own.
        prefetch: how many units are gathered ahead; one in each direction by default.
        precision: dtypes of compute, reduction and masters; the module's own by default.

    Raises:
        UsageError: a name is unknown, or sizes do not fit the number of ranks.
        EngineError: the ranks' modules differ.
    """
    first = next((param.device for param in module.parameters()), torch.device("cpu"))
    sharding = Sharding(strategy, units, dp_shard_size, owner_map, prefetch, precision)
    return shard_from(Source(first), module, sharding)


def shard_from(source: Source, module: nn.Module, sharding: Sharding) -> ShardedModel:
    """`shard_model` with values and device from `source`; `module` may lie on the meta device."""
    strategy, owner_map = sharding.strategy, sharding.owner_map
    row = get_strategy(strategy) if isinstance(strategy, str) else strategy
    world = collectives_for(source.device)
    copy_size = ranks_per_copy(row, world.size, sharding.dp_shard_size)
    if owner_map != "even" and not row.has_owner_map:
        raise UsageError(f"owner_map: only shard_optimizer has one, and {row.name} is another")
    effective = effective_strategy(row, copy_size)
    mesh = make_mesh(world, source.device, copy_size if copy_size > 1 else world.size)
    units = sharding.units
    specs = divide_module(
        module, None if isinstance(units, str) else [each.__name__ for each in units]
    )
    layouts = lay_out(specs, mesh.shard.size, owner_map if effective is row else "even")
    runtime = build_runtime(
        module,
        Division(specs, layouts),
        mesh,
        source,
        strategy=effective,
        prefetch=sharding.prefetch,
        precision=sharding.precision,
    )
    return ShardedModel(module, runtime, row)
