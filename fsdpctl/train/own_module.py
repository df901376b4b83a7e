"""`fsdpctl.estimate_memory`: a module of your own, weighed before there is a device for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdpctl.config.sizes import parse_bytes
from fsdpctl.engine.build import Division, divide_module
from fsdpctl.engine.describe import dtype_name
from fsdpctl.engine.precision import Precision
from fsdpctl.engine.shard import Sharding
from fsdpctl.errors import UsageError, nearest
from fsdpctl.memory.compute import Program, Row
from fsdpctl.memory.estimate import TrainingPlan, estimate
from fsdpctl.memory.fsdp2_steps import FullyShard, FullyShardSteps
from fsdpctl.memory.own_steps import OwnSteps
from fsdpctl.memory.script import Writer
from fsdpctl.memory.shorten import shorten
from fsdpctl.memory.simulate import Steps
from fsdpctl.memory.trace import trace
from fsdpctl.memory.weighed import ALLOCATORS, Weighed, weigh_steps
from fsdpctl.plan.replay import Itemsizes, RankPlace
from fsdpctl.plan.strategy import Strategy, effective_strategy, get_strategy, ranks_per_copy
from fsdpctl.plan.transport import Transport
from fsdpctl.plan.units import UnitSpec, lay_out
from fsdpctl.train.blocks import checkpoint_block
from fsdpctl.train.footprint import REPEATING

_CHOICES = {
    "device": ("cuda", "cpu"),
    "engine": ("fsdpctl", "fsdp2"),
    "allocator": ALLOCATORS,
    "activation_checkpointing": ("none", "selective", "full"),
    "reduce": ("every", "last"),
}


@dataclass(frozen=True, slots=True)
class Assumed:
    """How a module is trained that `estimate_memory` weighs."""

    device: str = "cuda"  # or cpu
    engine: str = "fsdpctl"  # or fsdp2
    allocator: str = "expandable"  # or native: of CUDA's memory
    activation_checkpointing: str = "none"  # or selective, full: done to each block
    num_micro_batches: int = 1  # of a step
    reduce: str = "every"  # or last: in which micro-batches gradients are reduced
    fused_optimizer: bool = True  # fsdp2: AdamW in one kernel


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """What the fullest rank holds at most, in bytes."""

    num_params: int
    rank: int
    weighed: Weighed

    @property
    def peak_allocated(self) -> int:
        """In tensors."""
        return self.weighed.allocated

    @property
    def peak_reserved(self) -> int:
        """By the caching allocator; on the CPU the same."""
        return self.weighed.peak_reserved

    @property
    def breakdown(self) -> dict[str, int]:
        """Of what is allocated, by category."""
        return self.weighed.breakdown

    @property
    def when(self) -> str:
        """In words, when that is."""
        return str(self.weighed.peak.when)

    def verdict(self, available: int | str) -> str:
        """`fits`, `thrashes` or `too_large` where the allocator may have `available` bytes.

        A size may be typed, as "76GiB". What a process takes outside the allocator (a CUDA context,
        NCCL) must be left out of it.
        """
        if isinstance(available, str):
            available = parse_bytes(available, "available")
        return self.weighed.verdict(available)

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "num_parameters": self.num_params,
            "rank": self.rank,
            **self.weighed.to_dict(),
        }


def estimate_memory(
    module_fn: Callable[[], nn.Module],
    input_fn: Callable[[], Any],
    *,
    world_size: int,
    loss_fn: Callable[[Any], Tensor] | None = None,
    sharding: str | Sharding = "full_shard",
    assumed: Assumed = Assumed(),
) -> MemoryEstimate:
    """What each rank will hold when a module is trained with `ShardedAdamW`.

    Neither a device nor a process group is needed, and no memory for the module.

    Args:
        module_fn: makes the module; tensors made in it have no memory.
        input_fn: makes what the module is called with in a micro-batch of one rank: a tensor, a
            tuple of arguments, or a dict of named ones.
        world_size: the number of ranks.
        loss_fn: from what the module returns to the loss; by default that itself, or its `loss`.
        sharding: a strategy's name, or everything that `shard_model` takes, as a `Sharding`.
        assumed: device, engine, micro-batches, activation checkpointing.

    Raises:
        UsageError: a name is unknown, or sizes do not fit the number of ranks.
    """
    _check(assumed)
    given = Sharding(sharding) if isinstance(sharding, str) else sharding
    with torch.device("meta"):
        module = module_fn()
    classes = None if isinstance(given.units, str) else [each.__name__ for each in given.units]
    units = divide_module(module, classes)
    num_params = sum(param.numel() for param in module.parameters())
    sizes = _item_sizes(module, given.precision)
    dtype = given.precision.param_dtype
    program = _observe(module_fn, units, _Run(input_fn, loss_fn, dtype), dtype, assumed)
    writer = Writer(program, units[-1].name, last_is_head=units[-1].kind == "head")
    steps, rank = _steps(writer, units, given, sizes, world_size, assumed)
    weighed = weigh_steps(
        writer, steps, device=assumed.device, allocator=assumed.allocator, draws=False
    )
    return MemoryEstimate(num_params, rank, weighed)


def _check(assumed: Assumed) -> None:
    for name, choices in _CHOICES.items():
        value = getattr(assumed, name)
        if value not in choices:
            known = ", ".join(choices)
            raise UsageError(f"{name}={value}: allowed is {known}{nearest(str(value), choices)}")


@dataclass(frozen=True, slots=True)
class _Run:
    """A forward and its backward."""

    input_fn: Callable[[], Any]
    loss_fn: Callable[[Any], Tensor] | None
    dtype: torch.dtype | None  # of floating inputs

    def __call__(self, module: nn.Module) -> None:
        given = _cast(self.input_fn(), self.dtype)
        if isinstance(given, dict):
            output = module(**given)
        else:
            output = module(*(given if isinstance(given, tuple) else (given,)))
        if self.loss_fn is not None:
            output = self.loss_fn(output)
        loss = getattr(output, "loss", output)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UsageError("estimate_memory: the module returns no loss; give loss_fn=")
        del output
        loss.backward()


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Floating inputs in the dtype that is computed in, as the engine hands them on."""
    if isinstance(value, Tensor):
        return value.to(dtype) if dtype is not None and value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: _cast(each, dtype) for name, each in value.items()}
    return tuple(_cast(each, dtype) for each in value) if isinstance(value, tuple) else value


def _item_sizes(module: nn.Module, precision: Precision) -> Itemsizes:
    dtypes = {param.dtype for param in module.parameters() if param.is_floating_point()}
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(dtype_name, dtypes)))
        raise UsageError(f"estimate_memory: parameters of one dtype are weighed, not of {names}")
    (dtype,) = dtypes or {torch.float32}
    master = precision.dtype_of_master(dtype)
    return Itemsizes(
        precision.compute_dtype(dtype).itemsize,
        precision.dtype_of_reduction(master).itemsize,
        master.itemsize,
    )


def _observe(
    make: Callable[[], nn.Module],
    units: Sequence[UnitSpec],
    run: Callable[[nn.Module], None],
    dtype: torch.dtype | None,
    assumed: Assumed,
) -> Program:
    """A pass, of a model with few blocks if they are alike."""
    names = [unit.name for unit in units[1:]]
    blocks = [unit.name for unit in units if unit.kind == "block"]
    for shortens in (True, False):
        with torch.device("meta"):
            module = make()
        rows: list[Row] = shorten(module, blocks) if shortens else []
        stood_for = {name for row in rows for name in row.whole}
        traced = [name for row in rows for name in row.traced]
        traced += [name for name in names if name not in stood_for]
        if assumed.activation_checkpointing != "none":
            for name in (each for each in traced if each not in names or each in blocks):
                checkpoint_block(module.get_submodule(name), assumed.activation_checkpointing)
        for param in module.parameters():
            param.data = param.data.to(dtype or param.dtype)
        passed = trace(module, traced, partial(run, module), assumed.device)
        if all(row.is_regular(passed) for row in rows):
            break
    return Program(passed, names, rows)


def _steps(
    writer: Writer,
    units: tuple[UnitSpec, ...],
    given: Sharding,
    sizes: Itemsizes,
    world_size: int,
    assumed: Assumed,
) -> tuple[Steps, int]:
    strategy = given.strategy if isinstance(given.strategy, Strategy) else None
    strategy = strategy or get_strategy(str(given.strategy))
    size = ranks_per_copy(strategy, world_size, given.dp_shard_size)
    shown = min(assumed.num_micro_batches, REPEATING)
    reduces = (*[assumed.reduce == "every"] * (shown - 1), True)
    if assumed.engine == "fsdp2":
        if not strategy.shards_params:
            raise UsageError(f"engine=fsdp2: not with strategy={strategy.name}")
        ahead = max(1, given.prefetch.backward)
        model = FullyShard(
            units,
            size,
            sizes,
            strategy.reshard_after_forward,
            ahead,
            reduces,
            assumed.fused_optimizer,
        )
        return FullyShardSteps(model, writer), 0
    row, parts = effective_strategy(strategy, size, world_size)
    owner_map = given.owner_map if row.has_owner_map else "even"
    division = Division(units, lay_out(units, parts, owner_map))
    plan = TrainingPlan(division.order, division.layouts, row, sizes, given.prefetch, reduces)
    transport = Transport.NCCL if assumed.device == "cuda" else Transport.GLOO
    place = RankPlace(0, parts, world_size // parts, transport)
    if not all(layout.is_even for of_unit in plan.layouts.values() for layout in of_unit):
        place = replace(place, rank=estimate(plan, place).rank)
    return OwnSteps(plan, place, writer), place.rank
