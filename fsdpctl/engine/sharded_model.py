"""The sharded module with its public methods."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from fsdpctl.comm.collectives import Collectives
from fsdpctl.comm.flat_shard import FlatShard, persistent_buffers, scale_gradients, trainable_shards
from fsdpctl.comm.mesh import Mesh
from fsdpctl.engine import full_state
from fsdpctl.engine.buffer_accounting import BufferAccounting
from fsdpctl.engine.hooks import guard_module, watch_first_forward
from fsdpctl.engine.offload import HostStates
from fsdpctl.engine.parameters import impossible_after_sharding
from fsdpctl.engine.rank_checks import StepCheck, check_replicas
from fsdpctl.engine.runtime import Runtime
from fsdpctl.engine.unit import bytes_outside_unshard_buffers
from fsdpctl.errors import EngineError, ModuleError, did_you_mean
from fsdpctl.models.module_spec import torch_dtype
from fsdpctl.plan.strategy import Strategy

# Sharded parameters are one expanded value. A part of torch's message for a write to them.
_WRITE_TO_EXPANDED = "more than one element of the written-to tensor"


class ShardedModel(nn.Module):
    """A module whose parameters are sharded by a strategy.

    Call it like the module. The module's Parameter objects keep their identity, name, shape and
    dtype. If the strategy shards parameters, they read NaN outside forward and backward.
    """

    def __init__(self, module: nn.Module, runtime: Runtime, strategy: Strategy) -> None:
        super().__init__()
        self.module = module
        self.strategy = strategy  # the requested strategy; a single rank runs no_shard
        self._own_runtime = runtime
        self._has_ended = False
        self._step_check = StepCheck(runtime)
        self.take_waits = runtime.mesh.take_waits  # takes the seconds of exposed communication
        self._shards = tuple(buffer.shard for buffer in runtime.buffers)
        guard_module(module, runtime)
        if runtime.strategy.shards_params:
            watch_first_forward(module, runtime)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module, such as `config` or `generate`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "module" not in self._modules:
                raise
            return getattr(self.module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's result.

        ModuleError if it writes to parameters, or uses those of a unit without calling the unit.
        """
        try:
            return self.module(*args, **kwargs)
        except RuntimeError as error:
            if _WRITE_TO_EXPANDED in str(error):
                raise ModuleError(
                    "the module writes to its own parameters in forward while they are sharded; "
                    "do that before shard_model, or within model.full_parameters(writeback=True)"
                ) from error
            raise

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> None:
        """Raise an error: DistributedDataParallel reads this attribute first."""
        raise EngineError(
            "DistributedDataParallel: not supported around a sharded model, which synchronizes "
            "gradients itself; strategy no_shard does what DistributedDataParallel does"
        )

    @property
    def _runtime(self) -> Runtime:
        if self._has_ended:
            raise EngineError("unwrap() has ended the sharded model; use its module")
        return self._own_runtime

    @property
    def mesh(self) -> Mesh:
        """The groups of ranks: the ranks of this replica, and the ranks with the same shard."""
        return self._runtime.mesh

    @property
    def collectives(self) -> Collectives:
        return self._runtime.mesh.world

    def flat_shards(self) -> tuple[FlatShard, ...]:
        """Return this rank's shards, root first, in the same order on every rank."""
        return self._shards

    def persistent_buffers(self) -> Mapping[str, Tensor]:
        """Return the module's buffers that its state dict contains, by name."""
        return persistent_buffers(self.module)

    def params_without_grad(self) -> frozenset[str]:
        """Return the names of trainable parameters that had a gradient on no rank. Collective.

        ModuleError if the ranks did not gather the same units in the same order.
        """
        return self._step_check.params_without_grad()

    def check_replicas(self) -> None:
        """Compare checksums of the values that several ranks store. Collective.

        EngineError names a parameter that differs, and the rank. Also an EngineError if the ranks
        did not gather the same units in the same order in the last step.
        """
        self._step_check.finish_check()
        self._runtime.param_sync.finish()
        check_replicas(self._runtime)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate unsharded gradients in a `with` block; the next backward reduces them too."""
        before, self._runtime.reduces = self._runtime.reduces, False
        try:
            yield
        finally:
            self._runtime.reduces = before

    def sync_gradients(self) -> None:
        """Reduce the gradients that `no_sync` held, if any.

        EngineError if no shard has a gradient then, or the backward failed.
        """
        self._runtime.sync_gradients()

    def drop_gradients(self) -> None:
        self._runtime.drop_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.drop_gradients()

    def prefetch_forward_params(self) -> None:
        """Start to gather the first units of the next forward.

        EngineError if the strategy has nothing to gather, or this was called already.
        """
        self._runtime.prefetch_forward()

    @property
    def overlap_param_gather(self) -> bool:
        """Whether optimizer steps return before other ranks' updates arrive; off by default.

        All-gathers of units always overlap. This affects only strategies whose step sends new
        parameters: shard_optimizer and hybrid_shard_optimizer. In the next forward, each unit waits
        for its own update. Do not read parameters before that forward: they may be half updated.
        """
        return self._runtime.param_sync.overlaps_forward

    @overlap_param_gather.setter
    def overlap_param_gather(self, overlaps: bool) -> None:
        self._runtime.param_sync.overlaps_forward = overlaps
        self._runtime.param_sync.finish()

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype of gathered floating-point parameters; None: each keeps its dtype."""
        name = self._runtime.plan.precision.param_dtype
        return None if name is None else torch_dtype(str(name))

    @property
    def can_prefetch(self) -> bool:
        """Whether `prefetch_forward_params` has anything to gather."""
        runtime = self._runtime
        # With states on the host, the first units wait for the host's step: nothing would overlap.
        gathers = runtime.strategy.shards_params and runtime.host is None
        return gathers and runtime.schedule.prefetch.forward > 0

    @property
    def has_pending_prefetch(self) -> bool:
        """Whether `prefetch_forward_params` was called since the last forward."""
        return self._runtime.schedule.is_prefetched

    @property
    def host(self) -> HostStates | None:
        """The master weights and gradients in host memory; None if they are on the device."""
        return self._runtime.host

    def host_memory_bytes(self) -> int:
        """Return the bytes of parameters, master weights and buffers in host memory."""
        states, params = self._runtime.host, self._runtime.host_params
        return (states.nbytes if states else 0) + (params.nbytes if params else 0)

    def broadcast_updated_params(self, *, trained_only: bool = False) -> None:
        """Make writes to the masters on any rank visible to the next forward. Collective.

        Optimizers call it with `trained_only`: masters of frozen parameters are unchanged.
        """
        self._runtime.sync_params(trained_only=trained_only)

    def update_shards(self, flat: Tensor) -> None:
        """Overwrite this rank's masters by a 1-D tensor, ordered as `flat_shards`. Collective."""
        full_state.update_shards(self._runtime, flat)

    def flat_parameters(self) -> list[nn.Parameter]:
        """Return this rank's trainable shards, for elementwise optimizers and torch.nn.utils.

        EngineError if the shards are in host memory, or masters have 24 bits, which only
        fsdpctl's optimizers step.
        """
        shards = list(trainable_shards(self))
        if self._runtime.host is not None:
            raise EngineError("flat_parameters: not supported with offload; use ShardedAdamW")
        if any(shard.remainder is not None for shard in shards):
            raise EngineError(
                "flat_parameters: not supported with 24-bit masters; use ShardedAdamW"
            )
        return [shard.param for shard in shards]

    def full_parameters(self, *, writeback: bool = False) -> AbstractContextManager[None]:
        """Give the parameters the full master weights in a `with` block. Collective.

        With `writeback`, rank 0's changes are written to the shards of all ranks.
        """
        return full_state.full_parameters(self._runtime, writeback=writeback)

    def unwrap(self) -> nn.Module:
        """Return the module with full parameters, and end this model. Collective."""
        module = full_state.unwrap(self.module, self._runtime)
        self._has_ended = True
        return module

    def shard_memory_bytes(self) -> int:
        """Return the bytes of this rank's master weights, with padding."""
        return sum(s.span.numel * s.itemsize for s in self.flat_shards())

    def replicated_memory_bytes(self) -> int:
        """Return the bytes of all master weights without sharding, with padding."""
        return sum(s.layout.numel * s.itemsize for s in self.flat_shards())

    def peak_memory_bytes(self) -> int:
        """Return the peak bytes of masters, gradients, gathered units and reduce buffers."""
        units = list(self._runtime.units.values())
        return self.accounting.peak_nbytes + bytes_outside_unshard_buffers(units)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load full tensors under the module's names into the shards; always strict. Collective."""
        full_state.load_full_state(self.module, self._runtime, state_dict)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Raise an error: trainable and frozen parameters are sharded separately."""
        raise impossible_after_sharding("requires_grad_")

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        raise impossible_after_sharding("moving or casting the model")

    def __deepcopy__(self, memo: object) -> Self:
        raise impossible_after_sharding("copying the model")

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        raise impossible_after_sharding("pickling the model")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return full masters and buffers on the CPU, by the module's names. Collective."""
        return full_state.full_state(self.module, self.flat_shards(), self.mesh)

    def name_ranges(self, *, is_on: bool) -> None:
        """Turn named ranges of units and collectives in profiles on or off."""
        self._runtime.accounting.ranges.is_on = is_on

    @property
    def accounting(self) -> BufferAccounting:
        """The bytes of the engine's buffers, without masters, now and at the peak."""
        return self._runtime.accounting


_REDUCE = ("every", "last")


class GradAccumulator:
    """An accumulator of gradients: their mean over a window of micro-batches, also a partial one.

    With `reduce="every"` each micro-batch is reduced into the shards. With `"last"` unsharded
    gradients are held until the window ends, and reduced once.
    """

    def __init__(
        self, model: ShardedModel, steps: int, reduce: Literal["every", "last"] = "every"
    ) -> None:
        """Accumulate over windows of `steps` micro-batches.

        EngineError if `steps` is below 1, or `reduce` is neither value.
        """
        if steps < 1:
            raise EngineError(f"GradAccumulator: steps={steps}: expected at least 1")
        if reduce not in _REDUCE:
            problem = f"reduce={reduce!r}{did_you_mean(reduce, _REDUCE)}: expected every, last"
            raise EngineError(f"GradAccumulator: {problem}")
        self.model, self.steps = model, steps
        self.ready = False  # whether the window is complete and its gradient is reduced
        self._reduce = reduce
        self._count = 0

    @contextmanager
    def micro_step(self) -> Iterator[None]:
        """Run one backward in a `with` block; the last ends the window, an exception drops it."""
        self.ready = False
        holds = self._reduce == "last" and self._count + 1 < self.steps
        try:
            with self.model.no_sync() if holds else nullcontext():
                yield
        except BaseException:
            self.reset()
            raise
        self._count += 1
        if self._count == self.steps:
            self.sync()

    def sync(self) -> None:
        """End the window, also a partial one. Does nothing between windows."""
        if self._count == 0:
            return
        self.model.sync_gradients()
        if self._count > 1:
            scale_gradients(trainable_shards(self.model), 1 / self._count)
        self._count = 0
        self.ready = True

    def reset(self) -> None:
        """Drop the window and its gradients."""
        self.model.drop_gradients()
        self._count = 0
        self.ready = False
