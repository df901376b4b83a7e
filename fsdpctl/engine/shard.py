"""`shard_model`, which shards any nn.Module."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdpctl.comm.collectives import collectives_for
from fsdpctl.comm.mesh import make_mesh
from fsdpctl.engine.agreement import agreed
from fsdpctl.engine.build import Division, Source, build_runtime, check_values, divide_module
from fsdpctl.engine.guards import is_sharded
from fsdpctl.engine.model import ShardedModel
from fsdpctl.engine.precision import Precision
from fsdpctl.errors import UsageError
from fsdpctl.plan.owners import OwnerMap
from fsdpctl.plan.schedule import Prefetch
from fsdpctl.plan.strategy import Strategy, effective_strategy, get_strategy, ranks_per_copy
from fsdpctl.plan.units import lay_out


@dataclass(frozen=True, slots=True)
class Sharding:
    """The arguments of `shard_model`."""

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
        module: Any module with values, on the device where it runs.
        strategy: A name of the strategy table, or one of its rows.
        units: "auto", or the module classes whose instances are gathered and released as one.
        dp_shard_size: For hybrid strategies, the number of ranks that share one replica; by default
            all.
        owner_map: For shard_optimizer, the owners of the optimizer states; a name or a map.
        prefetch: The number of units that are gathered ahead; one in each direction by default.
        precision: The dtypes of compute, reduction and masters; the module's own by default.

    Raises:
        UsageError: If a name is unknown, or sizes do not fit the number of ranks.
        EngineError: If the ranks' modules differ.
    """
    first = next((param.device for param in module.parameters()), torch.device("cpu"))
    sharding = Sharding(strategy, units, dp_shard_size, owner_map, prefetch, precision)
    return shard_from(Source(first), module, sharding)


def shard_from(source: Source, module: nn.Module, sharding: Sharding) -> ShardedModel:
    """Shard `module`, which may be on the meta device, with values and device from `source`."""
    world = collectives_for(source.device)
    cut = agreed(world, lambda: _cut(source, module, sharding, world.size), _described)
    mesh = make_mesh(world, source.device, cut.ranks_per_part)
    runtime = build_runtime(
        module,
        cut.division,
        mesh,
        source,
        strategy=cut.effective,
        prefetch=sharding.prefetch,
        precision=sharding.precision,
    )
    return ShardedModel(module, runtime, cut.row)


@dataclass(frozen=True, slots=True)
class _Cut:
    """The settings that all ranks must agree on."""

    sharding: Sharding
    row: Strategy
    effective: Strategy
    ranks_per_part: int
    division: Division
    buffers: tuple[tuple[str, Tensor], ...]


def _cut(source: Source, module: nn.Module, sharding: Sharding, num_ranks: int) -> _Cut:
    if is_sharded(module):
        raise UsageError("shard_model: the module is sharded already; call model.unwrap() first")
    strategy, owner_map, units = sharding.strategy, sharding.owner_map, sharding.units
    row = get_strategy(strategy) if isinstance(strategy, str) else strategy
    copy_size = ranks_per_copy(row, num_ranks, sharding.dp_shard_size)
    if owner_map != "even" and not row.has_owner_map:
        raise UsageError(f"owner_map: only valid with shard_optimizer, not with {row.name}")
    check_values(module, source)
    effective, ranks_per_part = effective_strategy(row, copy_size, num_ranks)
    classes = None if isinstance(units, str) else [each.__name__ for each in units]
    specs = divide_module(module, classes)
    owner_map = owner_map if effective.has_owner_map else "even"
    shares = effective.shares(num_ranks // ranks_per_part)
    layouts = lay_out(specs, ranks_per_part, owner_map, shares=shares)
    division, buffers = Division(specs, layouts), tuple(module.named_buffers())
    return _Cut(sharding, row, effective, ranks_per_part, division, buffers)


def _described(cut: _Cut) -> Iterator[str]:
    sharding = cut.sharding
    yield f"strategy {cut.row.name}, with {cut.ranks_per_part} ranks per replica"
    yield f"owner map {sharding.owner_map}"
    yield str(sharding.prefetch)
    yield str(sharding.precision)
    for unit in cut.division.units:
        yield f"unit {unit.name}"
        for param in unit.params:
            frozen = "" if param.trainable else ", frozen"
            yield f"parameter {param.name} {list(param.shape)} {param.dtype}{frozen}"
    for name, buffer in cut.buffers:
        yield f"buffer {name} {list(buffer.shape)} {buffer.dtype}"
