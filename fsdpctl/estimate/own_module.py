"""`fsdpctl.estimate_memory`: a module of your own, estimated before there is a device for it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fsdpctl.config.sizes import parse_bytes
from fsdpctl.engine.build import Division, divide_module
from fsdpctl.engine.describe import dtype_name
from fsdpctl.engine.precision import Precision
from fsdpctl.engine.shard import Sharding
from fsdpctl.errors import UsageError, nearest
from fsdpctl.estimate.engines import fullest_rank, steps_of
from fsdpctl.estimate.run_plan import REPEATING
from fsdpctl.estimate.traced import TracedModule
from fsdpctl.plan.engines import ENGINES
from fsdpctl.plan.sizes import Itemsizes, RankPlace
from fsdpctl.plan.strategy import Strategy, effective_strategy, get_strategy, ranks_per_copy
from fsdpctl.plan.transport import Transport
from fsdpctl.plan.units import UnitSpec, lay_out
from fsdpctl.predict.engine_bytes import TrainingPlan
from fsdpctl.predict.memory_recorder import MemoryRecorder
from fsdpctl.predict.step_estimate import ALLOCATORS, StepEstimate, estimate_steps

_CHOICES = {
    "device": ("cuda", "cpu"),
    "engine": ENGINES,
    "allocator": ALLOCATORS,
    "activation_checkpointing": ("none", "selective", "full"),
    "reduce": ("every", "last"),
}


@dataclass(frozen=True, slots=True)
class Assumed:
    """How a module is trained that `estimate_memory` looks at."""

    device: str = "cuda"  # or cpu
    engine: str = "fsdpctl"  # or fsdp2, ddp
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
    step: StepEstimate

    @property
    def peak_allocated(self) -> int:
        """In tensors."""
        return self.step.allocated

    @property
    def peak_reserved(self) -> int:
        """By the caching allocator; on the CPU the same."""
        return self.step.peak_reserved

    @property
    def breakdown(self) -> dict[str, int]:
        """Of what is allocated, by category."""
        return self.step.breakdown

    @property
    def when(self) -> str:
        """In words, when that is."""
        return str(self.step.peak.when)

    def verdict(self, available: int | str) -> str:
        """`fits`, `thrashes` or `too_large` where the allocator may have `available` bytes.

        A size may be typed, as "76GiB". What a process takes outside the allocator (a CUDA context,
        NCCL) must be left out of it.
        """
        if isinstance(available, str):
            available = parse_bytes(available, "available")
        return self.step.verdict(available)

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "num_parameters": self.num_params,
            "rank": self.rank,
            **self.step.to_dict(),
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
    _check(assumed, world_size)
    given = Sharding(sharding) if isinstance(sharding, str) else sharding

    def make() -> nn.Module:
        with torch.device("meta"):
            return module_fn()

    module = make()
    classes = None if isinstance(given.units, str) else [each.__name__ for each in given.units]
    units = divide_module(module, classes)
    sizes = _item_sizes(module, given.precision, assumed.engine)
    dtype = given.precision.param_dtype
    num_params = sum(param.numel() for param in module.parameters())
    observed = TracedModule(
        module,
        make,
        units,
        checkpointing=assumed.activation_checkpointing,
        dtype=dtype,
        device=assumed.device,
    )
    program = observed.program(_Run(input_fn, loss_fn, dtype))
    recorder = MemoryRecorder(program, units[-1].name, last_is_head=units[-1].kind == "head")
    strategy, plan, place = _plan(units, given, sizes, world_size, assumed)
    place = replace(place, rank=fullest_rank(assumed.engine, plan, place))
    fused = assumed.fused_optimizer
    steps = steps_of(assumed.engine, strategy, units, plan, place, recorder, fused=fused)
    step = estimate_steps(
        recorder, steps, device=assumed.device, allocator=assumed.allocator, draws=False
    )
    return MemoryEstimate(num_params, place.rank, step)


def _check(assumed: Assumed, world_size: int) -> None:
    counts = {"world_size": world_size, "num_micro_batches": assumed.num_micro_batches}
    for name, count in counts.items():
        if type(count) is not int or count < 1:
            raise UsageError(f"{name}={count}: allowed is a whole number from 1")
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
        try:
            self._run(module)
        except RuntimeError as error:  # torch's, NotImplementedError too
            why = [*str(error).strip().splitlines(), repr(error)][0]
            raise UsageError(f"the module cannot be run without memory: {why}") from error

    def _run(self, module: nn.Module) -> None:
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


def _item_sizes(module: nn.Module, precision: Precision, engine: str) -> Itemsizes:
    """PyTorch's engines keep parameters in the dtype that the module has."""
    dtypes = {param.dtype for param in module.parameters() if param.is_floating_point()}
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(dtype_name, dtypes)))
        raise UsageError(f"estimate_memory: parameters of one dtype are estimated, not of {names}")
    (dtype,) = dtypes or {torch.float32}
    master = precision.dtype_of_master(dtype) if engine == "fsdpctl" else dtype
    return Itemsizes(
        precision.compute_dtype(dtype).itemsize,
        precision.dtype_of_reduction(master).itemsize,
        master.itemsize,
        None if precision.wire_dtype is None else precision.wire_dtype.itemsize,
    )


def _plan(
    units: tuple[UnitSpec, ...],
    given: Sharding,
    sizes: Itemsizes,
    world_size: int,
    assumed: Assumed,
) -> tuple[Strategy, TrainingPlan, RankPlace]:
    """The strategy that is asked for, and the plan of what runs."""
    strategy = given.strategy if isinstance(given.strategy, Strategy) else None
    strategy = strategy or get_strategy(str(given.strategy))
    size = ranks_per_copy(strategy, world_size, given.dp_shard_size)
    row, parts = effective_strategy(strategy, size, world_size)
    owner_map = given.owner_map if row.has_owner_map else "even"
    shares = row.shares(world_size // parts)
    division = Division(units, lay_out(units, parts, owner_map, shares=shares))
    shown = min(assumed.num_micro_batches, REPEATING)
    reduces = (*[assumed.reduce == "every"] * (shown - 1), True)
    plan = TrainingPlan(division.order, division.layouts, row, sizes, given.prefetch, reduces)
    transport = Transport.NCCL if assumed.device == "cuda" else Transport.GLOO
    return strategy, plan, RankPlace(0, parts, world_size // parts, transport)
