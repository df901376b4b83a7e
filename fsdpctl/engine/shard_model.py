"""`shard_model`, which shards any nn.Module after a check that all ranks have the same module."""

import hashlib
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import NoReturn, TypeVar

import torch
from torch import Tensor, nn

from fsdpctl.comm.collectives import Collectives
from fsdpctl.comm.mesh import Mesh, collectives_for, make_mesh, shared_memory_collectives
from fsdpctl.engine.build import Sharding, WeightInit, build_runtime
from fsdpctl.engine.hooks import is_sharded
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.errors import EngineError, ModuleError, UsageError
from fsdpctl.models.module_spec import module_units
from fsdpctl.plan.owner_map import OwnerMap
from fsdpctl.plan.precision import Precision
from fsdpctl.plan.step_plan import Prefetch, StepPlan
from fsdpctl.plan.strategy import Offload, Strategy, get_strategy, ranks_per_replica
from fsdpctl.plan.units import ModelLayout, UnitSpec, lay_out

T = TypeVar("T")


def check_module(module: nn.Module, *, needs_values: bool) -> None:
    """Check that a module can be sharded; UsageError or ModuleError says why not."""
    if not isinstance(module, nn.Module):
        got = type(module).__name__
        if isinstance(module, type):
            got = f"the class {module.__name__}; pass an object of it, {module.__name__}(…)"
        raise UsageError(f"module: expected a torch.nn.Module, got {got}")
    for name, param in module.named_parameters():
        is_bytes = param.dtype == torch.uint8 and not param.requires_grad
        if not (param.dtype.is_floating_point or is_bytes):
            problem = "expected a real floating-point dtype, or frozen uint8"
            raise ModuleError(f"parameter {name} is {param.dtype}; {problem}")
        if param.is_meta and needs_values:
            raise ModuleError(f"parameter {name} is on the meta device, without values")
    for name, each in module.named_modules():
        if getattr(each, "sparse", False) is True:
            raise ModuleError(f"{name}: sparse gradients are not supported; use sparse=False")
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise ModuleError(f"buffer {name} is on the meta device, without values")


def shard_model(
    module: nn.Module,
    strategy: str | Strategy | Sharding = "full_shard",
    *,
    units: str | Sequence[type[nn.Module]] = "auto",
    dp_shard_size: int | None = None,
    owner_map: str | OwnerMap = "even",
    prefetch: Prefetch = Prefetch(),
    precision: Precision = Precision(),
) -> ShardedModel:
    """Shard `module`, with rank 0's weights, over the ranks of the process group. Collective.

    Args:
        module: Any module with values, on the device where it runs.
        strategy: A strategy or its name, or a `Sharding` instead of all arguments.
        units: "auto", or the module classes whose instances are gathered and freed as one unit.
        dp_shard_size: For hybrid strategies, the number of ranks of one replica; by default all
            ranks.
        owner_map: For shard_optimizer, the owners of the optimizer states; a name or a map.
        prefetch: The number of units that are gathered ahead; one in forward and backward by
            default.
        precision: The dtypes of compute, reduction and masters; the module's own by default.

    Raises:
        UsageError: If a name is unknown, or sizes do not fit the number of ranks.
        EngineError: If the ranks' modules differ.
    """
    # `shard_from` checks the type of `module`, so that the error reaches all ranks.
    params = module.parameters() if isinstance(module, nn.Module) else ()
    first = next((param.device for param in params), torch.device("cpu"))
    if isinstance(strategy, Sharding):
        sharding = strategy
    else:
        sharding = Sharding(strategy, units, dp_shard_size, owner_map, prefetch, precision)
    model = shard_from(WeightInit(first), module, sharding)
    if model.mesh.world.not_shared_reason and model.mesh.world.rank == 0:
        reason = model.mesh.world.not_shared_reason
        warnings.warn(f"ranks do not share memory: {reason}", stacklevel=2)
    return model


def shard_from(
    source: WeightInit, module: nn.Module, sharding: Sharding, mesh: Mesh | None = None
) -> ShardedModel:
    """Shard `module`, which may be on the meta device, with values and device from `source`.

    `mesh`, of a model with the same sharding, reuses the process groups of that model. Collective.
    """
    offloaded = sharding.offloaded
    params_on_host = Offload.PARAMS in offloaded
    shares_memory = sharding.share_memory and source.device.type == "cpu" and not params_on_host
    make = shared_memory_collectives if shares_memory else partial(collectives_for, source.device)
    world = mesh.world if mesh is not None else make()

    def make_layout() -> tuple[Strategy, ModelLayout]:
        check_module(module, needs_values=source.initialize is None and not source.is_zero)
        if is_sharded(module):
            problem = "the module is sharded already; call model.unwrap() first"
            raise UsageError(f"shard_model: {problem}")
        strategy = get_requested_strategy(sharding)
        replica_size = ranks_per_replica(strategy, world.size, sharding.dp_shard_size)
        units = units_of(module, sharding)
        options = {"shares_memory": world.shares_memory, "offloads_params": params_on_host}
        sizes = world.size, replica_size
        return strategy, lay_out(units, strategy, *sizes, sharding.owner_map, **options)

    def describe(model_layout: tuple[Strategy, ModelLayout]) -> Iterator[str]:
        return _describe(*model_layout, sharding, dict(module.named_buffers()))

    strategy, layout = agree_on(world, make_layout, describe)
    mesh = mesh or make_mesh(world, source.device, layout.ranks_per_replica)
    plan = StepPlan(layout, mesh.position, sharding.precision, sharding.prefetch, offloaded)
    return ShardedModel(module, build_runtime(module, plan, mesh, source), strategy)


def get_requested_strategy(sharding: Sharding) -> Strategy:
    """Return the requested strategy.

    UsageError if its name is unknown, or the strategy does not support the owner map.
    """
    strategy = sharding.strategy
    if not isinstance(strategy, Strategy):
        # torch's ShardingStrategy has a name.
        strategy = get_strategy(str(getattr(strategy, "name", strategy)))
    # With shared memory, the strategy that takes effect may have an owner map.
    if sharding.owner_map != "even" and not (strategy.has_owner_map or sharding.share_memory):
        raise UsageError(f"owner_map: only valid with shard_optimizer, not with {strategy.name}")
    return strategy


def units_of(module: nn.Module, sharding: Sharding) -> tuple[UnitSpec, ...]:
    """Return the units of a module; UsageError if `sharding` has something other than classes."""
    units = sharding.units
    if units == "auto":
        return module_units(module, classes=None)
    classes = [*units] if isinstance(units, Collection) else []
    if not classes or not all(isinstance(each, type) for each in classes):
        raise UsageError(f'units: expected "auto" or a list of module classes, got {units!r:.60}')
    return module_units(module, [each.__name__ for each in classes])


def _describe(
    strategy: Strategy, layout: ModelLayout, sharding: Sharding, buffers: dict[str, Tensor]
) -> Iterator[str]:
    yield f"strategy {strategy.name}, with {layout.ranks_per_replica} ranks per replica"
    yield f"owner map {sharding.owner_map}"
    yield str(sharding.prefetch)
    yield str(sharding.precision)
    yield f"offload {sharding.offloaded}"
    for unit in layout.units:
        yield f"unit {unit.name}"
        for param in unit.params:
            frozen = "" if param.trainable else ", frozen"
            yield f"parameter {param.name} {list(param.shape)} {param.dtype}{frozen}"
    for name, buffer in buffers.items():
        yield f"buffer {name} {list(buffer.shape)} {buffer.dtype}"


def agree_on(
    collectives: Collectives, make: Callable[[], T], describe: Callable[[T], Iterable[str]]
) -> T:
    """Return the result of `make()`, after a check that it is the same on all ranks. Collective.

    `describe` returns the lines that must be equal. An exception of `make()` is raised again. If
    `make()` failed on another rank or returned a different result there, raises EngineError.
    """
    result: T | None = None
    lines: tuple[str, ...] = ()
    error: Exception | None = None
    try:
        result = make()
        lines = tuple(describe(result))
    except Exception as caught:  # other ranks must receive any failure, or they would hang
        error = caught
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    answers = collectives.all_gather_values([digest] if error is None else [digest, str(error)])
    if error is not None:
        raise error
    for rank, (_, *messages) in enumerate(answers):
        if messages:
            raise EngineError(f"rank {rank}: {messages[0]}")
    if len({digest for digest, *_ in answers}) > 1:  # only then exchange the long descriptions
        _report_difference(lines, collectives)
    assert result is not None
    return result


def _report_difference(lines: Sequence[str], collectives: Collectives) -> NoReturn:
    answers = collectives.all_gather_values(list(lines))
    other = next(rank for rank, other_lines in enumerate(answers) if other_lines != answers[0])
    first, second = next(
        (line, other_lines)
        for line, other_lines in zip_longest(answers[0], answers[other], fillvalue="nothing more")
        if line != other_lines
    )
    problem = f"rank 0 has {first}, rank {other} has {second}"
    raise ModuleError(f"the ranks were given different models or settings: {problem}")
