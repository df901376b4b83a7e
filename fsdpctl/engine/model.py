"""A sharded module, and everything that can be asked of it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

from torch import Tensor, nn

from fsdpctl.comm.base import Collectives
from fsdpctl.comm.mesh import Mesh
from fsdpctl.engine import access
from fsdpctl.engine.ledger import Ledger
from fsdpctl.engine.parameters import refuse_call
from fsdpctl.engine.presence import Presence
from fsdpctl.engine.replicas import check_replicas
from fsdpctl.engine.runtime import Runtime
from fsdpctl.engine.state import full_state
from fsdpctl.engine.unit import bytes_beside_slots
from fsdpctl.errors import EngineError
from fsdpctl.plan.order import UnitOrder
from fsdpctl.plan.schedule import Event
from fsdpctl.plan.strategy import Strategy
from fsdpctl.shards import FlatShard, persistent_buffers, trainable_shards

# What torch says of a write to a tensor in which one number stands for all elements.
_WRITTEN_AT_REST = "more than one element of the written-to tensor"


class ShardedModel(nn.Module):
    """A module whose parameters are sharded as its strategy says.

    Call it like the module. The module's Parameter objects stay what they were, with name, shape
    and dtype; where the strategy shards parameters they read NaN outside forward and backward.
    """

    def __init__(self, module: nn.Module, runtime: Runtime, strategy: Strategy) -> None:
        super().__init__()
        self.module = module
        self.strategy = strategy  # as asked for; one rank alone runs as no_shard
        self._own_runtime = runtime
        self._has_ended = False
        self._presence = Presence(runtime)
        self.take_waits = runtime.mesh.take_waits  # how long computation has waited since the last
        self._shards = tuple(b.shard for unit in runtime.units.values() for b in unit.buffers)
        access.guard_module(module, runtime)
        if runtime.strategy.shards_params:
            access.watch_first_forward(module, runtime)

    def __getattr__(self, name: str) -> Any:
        """What the module has beside torch's own: `config`, `generate` and the like."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "module" not in self._modules:
                raise
            return getattr(self.module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own result.

        Raises:
            EngineError: the module uses a unit's parameters without calling its module, or writes
                to parameters.
        """
        try:
            return self.module(*args, **kwargs)
        except RuntimeError as error:
            if _WRITTEN_AT_REST in str(error):
                raise EngineError(
                    "the module writes to its own parameters in forward, which are not here then: "
                    "do that before shard_model, or within model.full_parameters(writeback=True)"
                ) from error
            raise

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's parameters under its own names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> None:
        """What DistributedDataParallel asks a module for first."""
        raise EngineError(
            "DistributedDataParallel around a sharded model: it synchronises gradients itself; "
            "strategy no_shard is what DistributedDataParallel does"
        )

    @property
    def _runtime(self) -> Runtime:
        if self._has_ended:
            raise EngineError("the sharded model has ended with unwrap(); its module goes on")
        return self._own_runtime

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
        return self._shards

    def persistent_buffers(self) -> Mapping[str, Tensor]:
        """The module's buffers that its state dict contains, by name."""
        return persistent_buffers(self.module)

    def absent_everywhere(self) -> frozenset[str]:
        """Names of the trainable parameters that had a gradient on no rank. Collective.

        Raises:
            EngineError: the ranks did not gather the same units in the same order.
        """
        return self._presence.absent_everywhere()

    def check_replicas(self) -> None:
        """Compare what several ranks hold alike, bit for bit by a checksum. Collective.

        Raises:
            EngineError: a parameter differs; the message names it and the rank. Or the ranks did
                not gather the same units in the same order in the last step.
        """
        self._presence.settle()
        self._runtime.renewal.finish()
        check_replicas(self._runtime)

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
            EngineError: there was no backward since gradients were dropped, or it did not end.
        """
        self._runtime.sync_gradients()

    def drop_gradients(self) -> None:
        """Forget all gradients, reduced or not."""
        self._runtime.drop_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; none is set to zero, whatever `set_to_none` says."""
        self.drop_gradients()

    def prefetch_forward_params(self) -> None:
        """Start to gather what the next forward uses first.

        Raises:
            EngineError: the strategy has nothing to gather, or this was called already.
        """
        self._runtime.prefetch_forward()

    @property
    def overlap_param_gather(self) -> bool:
        """Whether the steps of optimizers return before other ranks' updates are here.

        Matters where a step renews parameters: shard_optimizer, hybrid_shard_optimizer. Each unit
        then waits for its own in the next forward, beside which the others arrive; until then
        parameters must not be read. Off at first.
        """
        return self._runtime.renewal.overlaps

    @overlap_param_gather.setter
    def overlap_param_gather(self, overlaps: bool) -> None:
        self._runtime.renewal.overlaps = overlaps
        self._runtime.renewal.finish()

    @property
    def can_prefetch(self) -> bool:
        """Whether there is anything for `prefetch_forward_params` to gather ahead of its use."""
        runtime = self._runtime
        return runtime.strategy.shards_params and runtime.prefetch.forward > 0

    @property
    def has_pending_prefetch(self) -> bool:
        """Whether `prefetch_forward_params` was called and no forward has come since."""
        return self._runtime.has_pending_prefetch

    def broadcast_updated_params(self, *, trained_only: bool = False) -> None:
        """Let the next forward see what was written to the masters, here and by other ranks.

        Collective. The steps of optimizers call it, `trained_only`: frozen ones have not changed.
        """
        self._runtime.masters_changed(trained_only=trained_only)

    def rest(self) -> None:
        """Let go of all that was gathered ahead, so that masters may be written to. Collective.

        Raises:
            EngineError: the ranks did not gather the same units in the same order.
        """
        self._presence.settle()
        self._runtime.renewal.finish()
        self._runtime.gatherer.rest()
        self._runtime.has_pending_prefetch = False

    def update_shards(self, flat: Tensor) -> None:
        """Overwrite this rank's masters with `flat`, 1-D, in the order of `flat_shards`."""
        access.update_shards(self._runtime, flat)

    def flat_parameters(self) -> list[nn.Parameter]:
        """This rank's trainable shards, for any elementwise optimizer and for torch.nn.utils."""
        return [shard.param for shard in trainable_shards(self)]

    def full_parameters(self, *, writeback: bool = False) -> AbstractContextManager[None]:
        """A block in which the parameters are whole master weights. Collective.

        With `writeback`, what rank 0 changes in them goes into all ranks' shards.
        """
        return access.full_parameters(self._runtime, writeback=writeback)

    def unwrap(self) -> nn.Module:
        """The module back, with whole parameters; this model must not be used any more."""
        module = access.unwrap(self.module, self._runtime)
        self._has_ended = True
        return module

    def shard_memory_bytes(self) -> int:
        """Bytes of this rank's master weights, padding included."""
        return sum(shard.master.nbytes for shard in self.flat_shards())

    def replicated_memory_bytes(self) -> int:
        """Bytes that all master weights take where they are not sharded, padding included."""
        return sum(s.layout.numel * s.master.itemsize for s in self.flat_shards())

    def peak_memory_bytes(self) -> int:
        """The most bytes so far of masters, gradients, gathered units and reduce buffers."""
        return self.ledger.peak_nbytes + bytes_beside_slots(list(self._runtime.units.values()))

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Take whole tensors under the module's names; each rank keeps its parts. Always strict."""
        access.load_full_state(self.module, self._runtime, state_dict)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Refused: what is trained decides how the model is cut."""
        raise refuse_call("requires_grad_")

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        raise refuse_call("moving or casting the model")

    def __deepcopy__(self, memo: object) -> Self:
        raise refuse_call("a copy of the model")

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        raise refuse_call("pickling the model")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Whole master weights and buffers on the CPU, under the module's names. Collective."""
        return full_state(self.module, self.flat_shards(), self.mesh)

    @contextmanager
    def recorded_events(self) -> Iterator[list[Event]]:
        """What happens in the block, as a growing list: collectives, and buffers come and gone."""
        trace: list[Event] = []
        self._runtime.ledger.trace = trace
        try:
            yield trace
        finally:
            self._runtime.ledger.trace = None

    def name_ranges(self, *, is_on: bool) -> None:
        """Have units and collectives named in profiles, or not."""
        self._runtime.ledger.ranges.is_on = is_on

    def watch(self, callback: Callable[[], None]) -> None:
        """Have `callback()` run after each recorded event."""
        self._runtime.ledger.on_event = callback

    @property
    def unit_order(self) -> UnitOrder:
        """The units in the order of their forward."""
        return self._runtime.order

    @property
    def ledger(self) -> Ledger:
        """The bytes of the engine's buffers, now and at most; masters are not among them."""
        return self._runtime.ledger

    def unit_nbytes(self) -> dict[str, int]:
        """Bytes of each unit's parameters when they are whole, padding included."""
        return {name: unit.nbytes for name, unit in self._runtime.units.items()}

    def gathered_nbytes(self) -> int:
        """Bytes that the slots of gathered parameters take now."""
        slots = {id(unit.slot): unit.slot for unit in self._runtime.units.values()}
        return sum(slot.allocated_nbytes for slot in slots.values())
