"""`fsdpctl.estimate_memory`: the memory of a user's module, without a device."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fsdpctl.config.keys import parse_bytes
from fsdpctl.config.launch import NO_EMULATION, PROGRAMS
from fsdpctl.config.schema import ActivationCheckpointingConfig
from fsdpctl.engine.build import Sharding
from fsdpctl.engine.shard_model import get_requested_strategy, units_of
from fsdpctl.errors import UsageError, did_you_mean
from fsdpctl.estimate.planned_steps import (
    MOST_PLANNED_PASSES,
    engine_steps,
    first_position,
    plan_of_fullest_rank,
    reducing_passes,
)
from fsdpctl.estimate.traced_model import MetaModule, PassTracer
from fsdpctl.models.module_spec import dtype_name, torch_dtype
from fsdpctl.plan.precision import Precision
from fsdpctl.plan.recomputation import MODES
from fsdpctl.plan.step_plan import StepPlan
from fsdpctl.plan.strategy import ENGINES, FSDPCTL, Offload, ranks_per_replica
from fsdpctl.plan.units import UnitSpec, lay_out
from fsdpctl.predict.memory_recorder import MemoryRecorder
from fsdpctl.predict.peak import ALLOCATORS, StepEstimate, estimate_steps
from fsdpctl.predict.training_plan import TrainingPlan

_ALLOWED = {
    "device": ("cuda", "cpu"),
    "engine": ENGINES,
    "allocator": ALLOCATORS,
    "activation_checkpointing": MODES,
    "reduce": ("every", "last"),
    "program": tuple(PROGRAMS),
}


@dataclass(frozen=True, slots=True)
class Assumed:
    """The assumed training settings of `estimate_memory`."""

    device: str = "cuda"  # or cpu
    engine: str = "fsdpctl"  # or fsdp2, ddp
    allocator: str = "expandable"  # or native: the segments of CUDA's caching allocator
    activation_checkpointing: str = "none"  # how blocks are recomputed; or selective, full
    num_micro_batches: int = 1  # per step
    reduce: str = "every"  # or last: the micro-batches in which gradients are reduced
    program: str = NO_EMULATION  # transformers_foreach: torch's default AdamW, with fsdp2 and ddp


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The peak memory of the fullest rank, in bytes."""

    num_params: int
    rank: int
    step: StepEstimate
    host_states: int  # bytes of states in host memory, which `Sharding.offload` moves there

    @property
    def peak_allocated(self) -> int:
        """The bytes of all tensors at the peak."""
        return self.step.allocated

    @property
    def peak_reserved(self) -> int:
        """The bytes that the caching allocator reserves; on the CPU, the bytes of all tensors."""
        return self.step.peak_reserved

    @property
    def breakdown(self) -> dict[str, int]:
        """The bytes at the peak by category; their sum is `peak_allocated`."""
        return self.step.breakdown

    def verdict(self, available: int | str) -> str:
        """Return `fits`, `thrashes` or `too_large` for an allocator with `available` bytes.

        A size may be text, such as "76GiB". Subtract the CUDA context and NCCL's memory first.
        """
        if isinstance(available, str):
            available = parse_bytes(available, "available")
        return self.step.verdict(available)

    def to_dict(self) -> dict[str, Any]:
        counts = {"num_parameters": self.num_params, "rank": self.rank}
        return {**counts, "host_states_bytes": self.host_states, **self.step.to_dict()}


def estimate_memory(
    module_fn: Callable[[], nn.Module],
    input_fn: Callable[[], Any],
    *,
    world_size: int,
    loss_fn: Callable[[Any], Tensor] | None = None,
    sharding: str | Sharding = "full_shard",
    assumed: Assumed = Assumed(),
) -> MemoryEstimate:
    """Estimate the memory of the fullest rank of a training with `ShardedAdamW`.

    This requires neither a device nor a process group, nor memory for the module.

    Args:
        module_fn: makes the module; its tensors are on the meta device.
        input_fn: makes the arguments of the module for a micro-batch of one rank: a tensor, a
            tuple, or a dict of keyword arguments.
        world_size: the number of ranks.
        loss_fn: computes the loss from the module's result; by default, the loss is the result or
            its attribute `loss`.
        sharding: a strategy's name, or all arguments of `shard_model` as a `Sharding`.
        assumed: device, engine, micro-batches, activation checkpointing.

    Raises:
        UsageError: If a name is unknown, or sizes do not match the number of ranks.
    """
    _check(assumed, world_size)
    sharding = Sharding(sharding) if isinstance(sharding, str) else sharding
    with torch.device("meta"):
        module = module_fn()
    units = units_of(module, sharding)
    param_dtype = sharding.precision.param_dtype
    dtype = None if param_dtype is None else torch_dtype(str(param_dtype))
    precision = _precision(module, sharding.precision, assumed.engine)
    sharding = replace(sharding, precision=precision)
    num_params = sum(param.numel() for param in module.parameters())
    tracer = PassTracer(MetaModule(module, units), dtype=dtype, device=assumed.device)
    checkpointing = ActivationCheckpointingConfig(assumed.activation_checkpointing)
    model_pass = tracer.model_pass(_ForwardBackward(input_fn, loss_fn, dtype), checkpointing)
    recorder = MemoryRecorder(model_pass, units[-1].name, last_is_head=units[-1].kind == "head")
    strategy = get_requested_strategy(sharding)
    plan = plan_of_fullest_rank(
        assumed.engine, _training_plan(units, sharding, world_size, assumed)
    )
    fused = PROGRAMS[assumed.program].fused_optimizer
    steps = engine_steps(assumed.engine, strategy, units, plan, recorder, fused=fused)
    device, allocator = assumed.device, assumed.allocator
    step = estimate_steps(recorder, steps, device=device, allocator=allocator, draws=False)
    return MemoryEstimate(num_params, plan.step_plan.position.rank, step, plan.host_model_bytes)


def _check(assumed: Assumed, world_size: int) -> None:
    counts = {"world_size": world_size, "num_micro_batches": assumed.num_micro_batches}
    for name, count in counts.items():
        if type(count) is not int or count < 1:
            raise UsageError(f"{name}={count}: expected a whole number of at least 1")
    for name, choices in _ALLOWED.items():
        value = getattr(assumed, name)
        if value not in choices:
            names = ", ".join(choices)
            raise UsageError(f"{name}={value}: expected {names}{did_you_mean(str(value), choices)}")


@dataclass(frozen=True, slots=True)
class _ForwardBackward:
    """A forward of the module and its backward."""

    input_fn: Callable[[], Any]
    loss_fn: Callable[[Any], Tensor] | None
    dtype: torch.dtype | None  # to which floating-point inputs are cast; None: unchanged

    def __call__(self, module: nn.Module) -> None:
        try:
            self._run(module)
        except RuntimeError as error:  # NotImplementedError of torch is a RuntimeError
            reason = [*str(error).strip().splitlines(), repr(error)][0]  # repr without a message
            problem = f"the module cannot run on the meta device: {reason}"
            raise UsageError(f"estimate_memory: {problem}") from error

    def _run(self, module: nn.Module) -> None:
        inputs = _cast(self.input_fn(), self.dtype)
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        output = module(**inputs) if isinstance(inputs, dict) else module(*args)
        if self.loss_fn is not None:
            output = self.loss_fn(output)
        loss = getattr(output, "loss", output)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UsageError("estimate_memory: the module does not return a loss; pass loss_fn=")
        del output  # otherwise the logits outlive backward
        loss.backward()


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Cast floating-point inputs to the compute dtype, as the engine does."""
    if isinstance(value, Tensor):
        return value.to(dtype) if dtype is not None and value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: _cast(each, dtype) for name, each in value.items()}
    return tuple(_cast(each, dtype) for each in value) if isinstance(value, tuple) else value


def _precision(module: nn.Module, precision: Precision, engine: str) -> Precision:
    """Return the precision; PyTorch's engines update parameters in the module's own dtype."""
    dtypes = {dtype_name(param.dtype) for param in module.parameters() if param.is_floating_point()}
    if len(dtypes) > 1:
        names = ", ".join(sorted(dtypes))
        raise UsageError(f"estimate_memory: expected parameters of one dtype, got {names}")
    if engine == FSDPCTL:
        return precision
    return replace(precision, master_dtype=dtypes.pop() if dtypes else "float32")


def _training_plan(
    units: tuple[UnitSpec, ...], sharding: Sharding, world_size: int, assumed: Assumed
) -> TrainingPlan:
    strategy, on_host = get_requested_strategy(sharding), sharding.offloaded
    size = ranks_per_replica(strategy, world_size, sharding.dp_shard_size)
    offloads = Offload.PARAMS in on_host
    shares = sharding.share_memory and world_size > 1 and assumed.device == "cpu" and not offloads
    options = {"shares_memory": shares, "offloads_params": offloads}
    model_layout = lay_out(units, strategy, world_size, size, sharding.owner_map, **options)
    position = first_position(model_layout, world_size, assumed.device, shares_memory=shares)
    passes = min(assumed.num_micro_batches, MOST_PLANNED_PASSES)
    reduces = reducing_passes(passes, every=assumed.reduce == "every")
    if on_host and assumed.engine != FSDPCTL:
        problem = f"requires engine={FSDPCTL}, got engine={assumed.engine}"
        raise UsageError(f"strategy.offload={on_host}: {problem}")
    step_plan = StepPlan(model_layout, position, sharding.precision, sharding.prefetch, on_host)
    step_plan.check_offload()
    return TrainingPlan(step_plan, reduces)
