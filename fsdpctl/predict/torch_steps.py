"""The training steps of PyTorch's engines: `fully_shard` and DistributedDataParallel."""

from collections.abc import Sequence
from functools import partial

from fsdpctl.plan.layout import ParamSpec
from fsdpctl.plan.step_plan import Transport
from fsdpctl.plan.strategy import Strategy
from fsdpctl.plan.units import UnitSpec
from fsdpctl.predict.hardware import CollectiveKind
from fsdpctl.predict.model_pass import PassPart
from fsdpctl.predict.step_recorder import GATHERS, REPLICA_SUMS, Category, RankGroup, StepRecorder
from fsdpctl.predict.training_plan import TorchOptimizer, TrainingPlan

_GATHER_STREAM, _REDUCE_STREAM, _ALL_REDUCE_STREAM = 1, 2, 3
_QUEUE = "collectives"  # FSDP2 runs the collectives of a shard group one after another


class Fsdp2Steps:
    """The steps of one rank after `fully_shard` was called on each block, then on the root.

    The description follows torch/distributed/fsdp: each parameter is sharded along its first
    dimension. A unit is all-gathered into one buffer on a side stream, and copied from the buffer
    into one tensor per parameter. The buffer is freed before the next unit is copied. In backward,
    the previous unit is prefetched. Gradients are copied into one buffer, which is freed after the
    next unit's backward. Sharded gradients are views of the buffer that a collective reduces into.

    The host runs ahead of the device: it requests memory for the next forward gather after it has
    issued the kernels of the current block, but the transfer overlaps with these kernels. So
    `_start_gather` and `_allocate_gather` are separate.
    """

    def __init__(
        self,
        units: Sequence[UnitSpec],
        strategy: Strategy,
        plan: TrainingPlan,
        recorder: StepRecorder,
        *,
        fused: bool,
        regathers: bool = False,
    ) -> None:
        """Describe the steps with the requested `strategy`; `plan` has the effective strategy.

        `regathers`: recomputation runs as a separate forward, after which a unit is freed, and
        backward gathers the unit again, as with reentrant checkpoints.
        """
        self._plan, self._recorder = plan, recorder
        self._optimizer = TorchOptimizer(plan, recorder, fused=fused)
        position, prefetch = plan.step_plan.position, plan.step_plan.prefetch
        self._num_shards = position.num_shards if plan.step_plan.strategy.shards_params else 1
        self._reshards = strategy.reshard_after_forward  # except for the last block and the root
        self._regathers = regathers and self._reshards and self._num_shards > 1
        self._replicates = position.num_replicas > 1  # gradients are all-reduced over replicas
        # Numbers of blocks. By default (1), FSDP2 prefetches one block in backward. In forward, its
        # all-gather stream starts the next transfer early, but allocates only explicit prefetches.
        self._backward_prefetch = max(1, prefetch.backward)
        self._forward_prefetch = prefetch.forward if prefetch.forward > 1 else 0
        self._early_gathers = max(self._forward_prefetch, int(position.transport is Transport.NCCL))
        # Parameters by unit. The root has all parameters outside the blocks.
        self._root = units[0].name
        blocks = {unit.name: unit.params for unit in units if unit.kind == "block"}
        others = tuple(p for unit in units if unit.name not in blocks for p in unit.params)
        self._params = {self._root: others, **blocks}
        self._blocks = list(blocks)
        self._units = [unit.name for unit in units[1:]]
        # Keys by unit.
        self._gather_handles: dict[str, int] = {}  # gathers in flight
        self._gather_buffers: dict[str, int | None] = {}  # None: one rank needs no buffer
        self._unsharded: dict[str, list[int]] = {}
        self._grads: dict[str, int] = {}  # reduced gradients
        self._held_grads: dict[str, list[int]] = {}  # unreduced gradients
        self._copied_buffer: int | None = None  # the buffer of the last gather in forward
        self._reduce_buffer: int | None = None
        self._all_reduce_buffers: list[int] = []  # freed after the backward
        self._reduce_handles: list[int] = []  # reductions in flight

    def setup(self, *, draws: bool) -> None:
        """Allocate the parameters; `draws` has no effect, as drawing is not modeled."""
        self._recorder.begin_phase("building the model")
        for unit, params in self._params.items():
            for nbytes in self._shard_nbytes(params):
                self._recorder.allocate(Category.PARAMETERS, unit, "parameters", nbytes)

    def step(self) -> None:
        for reduces in self._plan.reduces_gradients:
            self._recorder.compute(PassPart.BEFORE)
            self._forward()
            self._backward(reduces=reduces)
            self._recorder.compute(PassPart.END)
        self._optimize()

    def _param_shard_numel(self, param: ParamSpec) -> int:
        """Return the elements of a parameter in a rank's shard, with padded rows."""
        if not param.shape:
            return 1
        rows = -(-param.shape[0] // self._num_shards)
        return rows * param.numel // max(1, param.shape[0])

    def _shard_numel(self, params: Sequence[ParamSpec]) -> int:
        return sum(map(self._param_shard_numel, params))

    def _shard_nbytes(self, params: Sequence[ParamSpec]) -> list[int]:
        itemsize = self._plan.dtypes.master.itemsize
        return [self._param_shard_numel(param) * itemsize for param in params]

    def _start_gather(self, unit: str) -> None:
        if unit not in self._gather_handles and unit not in self._unsharded:
            self._gather_handles[unit] = self._all_gather(unit)

    def _all_gather(self, unit: str) -> int:
        recorder, dtypes = self._recorder, self._plan.dtypes
        shard_numel = self._shard_numel(self._params[unit])
        recorder.copy(shard_numel * (dtypes.compute.itemsize + dtypes.master.itemsize), "copy in")
        nbytes = shard_numel * self._num_shards * dtypes.compute.itemsize
        return recorder.start_collective(
            CollectiveKind.GATHER, nbytes, RankGroup.SHARD, f"gather {unit}", queue=_QUEUE
        )

    def _allocate_gather(self, unit: str) -> None:
        if unit in self._gather_buffers or unit in self._unsharded:
            return
        recorder, dtypes = self._recorder, self._plan.dtypes
        if self._num_shards == 1:
            self._gather_buffers[unit] = None
            return
        recorder.begin_phase("gathering", unit)
        shard_nbytes = self._shard_numel(self._params[unit]) * dtypes.compute.itemsize
        category, cast = Category.GATHERED_UNITS, None
        allocate = partial(recorder.allocate, category, unit, "gathered parameters")
        if dtypes.compute.itemsize != dtypes.master.itemsize:
            cast = allocate(shard_nbytes, stream=_GATHER_STREAM)
        nbytes = shard_nbytes * self._num_shards
        self._gather_buffers[unit] = allocate(nbytes, stream=_GATHER_STREAM)
        recorder.free(cast)

    def _copy_out(self, unit: str, *, forward: bool) -> None:
        """Gather a unit unless it is gathered, and copy its parameters out of the buffer."""
        if unit in self._unsharded:
            return
        recorder, params = self._recorder, self._params[unit]
        self._start_gather(unit)
        self._allocate_gather(unit)
        self._free_copied()
        recorder.wait(self._gather_handles.pop(unit))
        num_shards, itemsize = self._num_shards, self._plan.dtypes.compute.itemsize
        sizes = [self._param_shard_numel(param) * num_shards * itemsize for param in params]
        self._unsharded[unit] = [
            recorder.allocate(Category.GATHERED_UNITS, unit, "parameters", size) for size in sizes
        ]
        if num_shards > 1:
            recorder.copy(2 * sum(sizes), f"copy out {unit}")
        buffer = self._gather_buffers.pop(unit)
        if forward:
            self._copied_buffer = buffer
        else:
            recorder.free(buffer)

    def _free_copied(self) -> None:
        self._recorder.free(self._copied_buffer)
        self._copied_buffer = None

    def _reshard(self, unit: str) -> None:
        self._recorder.free(*self._unsharded.pop(unit, ()))

    def _forward(self) -> None:
        recorder = self._recorder
        self._copy_out(self._root, forward=True)
        recorder.compute(PassPart.START)
        for name in self._units:
            is_block = name in self._params
            if is_block:
                self._copy_out(name, forward=True)
                next_blocks = self._blocks[self._blocks.index(name) + 1 :]
                for prefetched in next_blocks[: self._early_gathers]:
                    self._start_gather(prefetched)
                for prefetched in next_blocks[: self._forward_prefetch]:
                    self._allocate_gather(prefetched)
            recorder.compute(PassPart.FORWARD, name)
            if is_block and self._reshards and name != self._blocks[-1]:
                self._reshard(name)
            recorder.compute(PassPart.BETWEEN, name)
        self._free_copied()
        recorder.compute(PassPart.LOSS)

    def _backward(self, *, reduces: bool) -> None:
        recorder, running = self._recorder, ""
        for name in reversed(self._units):
            if running:
                self._post_backward(running, reduces=reduces)
            running = name if name in self._params else ""
            if running:
                self._copy_out(name, forward=False)
                index = self._blocks.index(name)
                is_last = index == len(self._blocks) - 1
                # Only the time: the gather for the recomputation has freed as much memory before.
                regather = self._all_gather(name) if self._regathers and not is_last else None
                start = max(0, index - self._backward_prefetch)
                for prefetched in self._blocks[start:index][::-1]:
                    self._start_gather(prefetched)
                    self._allocate_gather(prefetched)
            recorder.compute(PassPart.BACKWARD, name)
            if running:
                recorder.wait(regather)
        for name in filter(None, (running, self._root)):
            self._post_backward(name, reduces=reduces)
        for handle in self._reduce_handles:
            recorder.wait(handle)
        recorder.free(self._reduce_buffer, *self._all_reduce_buffers)
        self._reduce_buffer = None
        self._reduce_handles.clear()
        self._all_reduce_buffers.clear()

    def _with_gradients(self, unit: str) -> list[ParamSpec]:
        return [param for param in self._params[unit] if self._recorder.has_gradient(param)]

    def _post_backward(self, unit: str, *, reduces: bool) -> None:
        """Free the unsharded parameters of a unit after its backward; hold or reduce gradients."""
        recorder, dtypes = self._recorder, self._plan.dtypes
        self._reshard(unit)
        params = self._with_gradients(unit)
        if not params:
            return
        recorder.begin_phase("reducing", unit)
        shard_numel = self._shard_numel(params)
        nbytes = shard_numel * self._num_shards * dtypes.reduce.itemsize
        keys = [recorder.gradient(param.name) for param in params]
        if not reduces or unit in self._held_grads:
            self._hold(unit, params, keys)
            if not reduces:
                recorder.copy(2 * nbytes, f"keep gradients of {unit}")
                return
            keys = [*self._held_grads.pop(unit)]
        recorder.free(self._reduce_buffer)
        category = Category.REDUCE_BUFFERS
        self._reduce_buffer = recorder.allocate(category, unit, "all gradients", nbytes)
        recorder.free(*keys)
        self._reduce(unit, nbytes)
        # FSDP2 keeps the input of an all-reduce until the end of backward.
        release = self._all_reduce_buffers.append if self._replicates else recorder.free
        allocate = partial(recorder.allocate, Category.GRADIENTS, unit, "reduced gradients")
        grads = allocate(shard_numel * dtypes.reduce.itemsize, stream=_REDUCE_STREAM)
        if dtypes.reduce.itemsize != dtypes.master.itemsize:
            stream = _ALL_REDUCE_STREAM if self._replicates else _REDUCE_STREAM
            master_grads = allocate(shard_numel * dtypes.master.itemsize, stream=stream)
            release(grads)
            grads = master_grads
        if unit in self._grads:
            release(grads)
        else:
            self._grads[unit] = grads

    def _reduce(self, unit: str, nbytes: int) -> None:
        recorder, num_shards = self._recorder, self._num_shards
        if num_shards > 1:
            recorder.copy(2 * nbytes, f"copy gradients of {unit}")
        kind, group = CollectiveKind.REDUCE_SCATTER, RankGroup.SHARD
        key = recorder.start_collective(kind, nbytes, group, f"reduce {unit}", queue=_QUEUE)
        if self._replicates:
            kind, group, label = CollectiveKind.ALL_REDUCE, RankGroup.REPLICAS, f"all-reduce {unit}"
            key = recorder.start_collective(
                kind, nbytes / num_shards, group, label, queue=REPLICA_SUMS, after=(key,)
            )
        self._reduce_handles.append(key)

    def _hold(self, unit: str, params: Sequence[ParamSpec], keys: Sequence[int | None]) -> None:
        """Hold unsharded gradients in the dtype of the reduction."""
        recorder, dtypes = self._recorder, self._plan.dtypes
        if unit in self._held_grads:  # the sum is in place
            recorder.free(*keys)
        elif dtypes.compute.itemsize == dtypes.reduce.itemsize:
            self._held_grads[unit] = [key for key in keys if key is not None]
            for gradient in self._held_grads[unit]:
                recorder.keep_gradient(gradient)
        else:
            grad_keys = self._held_grads[unit] = []
            for param, key in zip(params, keys, strict=True):
                category, nbytes = Category.GRADIENTS, param.numel * dtypes.reduce.itemsize
                grad_keys.append(recorder.allocate(category, unit, "held gradients", nbytes))
                recorder.free(key)

    def _optimize(self) -> None:
        trained = {unit: self._shard_nbytes(self._with_gradients(unit)) for unit in self._params}
        self._optimizer.step([(unit, n) for unit, sizes in trained.items() for n in sizes])
        self._recorder.free(*self._grads.values())
        self._grads.clear()


_BUCKET_BYTES = 25 << 20  # the default `bucket_cap_mb` of DistributedDataParallel


class DdpSteps:
    """The steps of one rank of DistributedDataParallel, with gradients as views of buckets.

    Every rank keeps all parameters, gradients and states. Buckets as large as all parameters stay
    allocated. If the computation has a narrower dtype than the parameters, each unit's parameters
    are cast in forward, and the copies are freed after the unit's backward, as with autocast.
    """

    def __init__(
        self, units: Sequence[UnitSpec], plan: TrainingPlan, recorder: StepRecorder, *, fused: bool
    ) -> None:
        self._plan, self._recorder = plan, recorder
        self._optimizer = TorchOptimizer(plan, recorder, fused=fused)
        self._cast_keys: dict[str, list[int]] = {}
        self._bucket_nbytes = 0  # in the current bucket
        self._bucket_handles: list[int] = []  # reductions in flight
        self._params = {unit.name: unit.params for unit in units}

    def setup(self, *, draws: bool) -> None:
        """Allocate parameters and buckets; `draws` has no effect, as drawing is not modeled."""
        recorder, itemsize = self._recorder, self._plan.dtypes.master.itemsize
        recorder.begin_phase("building the model")
        for unit, params in self._params.items():
            for param in params:
                recorder.allocate(Category.PARAMETERS, unit, "parameters", param.numel * itemsize)
        for unit in self._params:
            recorder.allocate(Category.GRADIENTS, unit, "buckets", sum(self._trained_nbytes(unit)))

    def step(self) -> None:
        recorder, (root, *units) = self._recorder, self._params
        for reduces in self._plan.reduces_gradients:
            recorder.compute(PassPart.BEFORE)
            self._cast(root)
            recorder.compute(PassPart.START)
            for name in units:
                self._cast(name)
                recorder.compute(PassPart.FORWARD, name)
                recorder.compute(PassPart.BETWEEN, name)
            recorder.compute(PassPart.LOSS)
            for name in (*reversed(units), root):
                if name != root:
                    recorder.compute(PassPart.BACKWARD, name)
                self._fill_buckets(name, reduces=reduces)
            self._reduce_bucket(self._bucket_nbytes, reduces=reduces)
            for key in self._bucket_handles:
                recorder.wait(key)
            self._bucket_handles.clear()
            recorder.compute(PassPart.END)
        sizes = [(name, n) for name in self._params for n in self._trained_nbytes(name)]
        self._optimizer.step(sizes)

    def _trained_nbytes(self, unit: str) -> list[int]:
        """Return the bytes of each trained parameter of a unit."""
        itemsize = self._plan.dtypes.master.itemsize
        return [param.numel * itemsize for param in self._params[unit] if param.trainable]

    def _cast(self, unit: str) -> None:
        dtypes, sizes = self._plan.dtypes, [param.numel for param in self._params[unit]]
        compute, master = dtypes.compute.itemsize, dtypes.master.itemsize
        if compute == master:
            return
        allocate = partial(self._recorder.allocate, Category.GATHERED_UNITS, unit)
        self._cast_keys[unit] = [allocate("cast parameters", numel * compute) for numel in sizes]
        self._recorder.copy(sum(sizes) * (compute + master), f"cast {unit}")

    def _fill_buckets(self, unit: str, *, reduces: bool) -> None:
        recorder = self._recorder
        recorder.free(*(recorder.gradient(param.name) for param in self._params[unit]))
        recorder.free(*self._cast_keys.pop(unit, ()))
        nbytes = sum(self._trained_nbytes(unit))
        recorder.copy(2 * nbytes, f"copy gradients of {unit}")
        self._bucket_nbytes += nbytes
        while self._bucket_nbytes >= _BUCKET_BYTES:
            self._reduce_bucket(_BUCKET_BYTES, reduces=reduces)

    def _reduce_bucket(self, nbytes: int, *, reduces: bool) -> None:
        self._bucket_nbytes -= nbytes
        if reduces and nbytes:
            # DDP has no shards: the group SHARD has all ranks. Its collectives run one by one.
            args = CollectiveKind.ALL_REDUCE, nbytes, RankGroup.SHARD, "reduce a bucket"
            self._bucket_handles.append(self._recorder.start_collective(*args, queue=GATHERS))
