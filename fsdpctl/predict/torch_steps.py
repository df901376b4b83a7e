"""The training steps of PyTorch's engines: `fully_shard` and DistributedDataParallel."""

from collections.abc import Sequence

from fsdpctl.plan.layout import ParamSpec
from fsdpctl.plan.step_plan import Transport
from fsdpctl.plan.strategy import Strategy
from fsdpctl.plan.units import UnitSpec
from fsdpctl.predict.hardware import CollectiveKind
from fsdpctl.predict.model_pass import PassPart
from fsdpctl.predict.step_recorder import GATHERS, REPLICA_SUMS, Category, RankGroup, StepRecorder
from fsdpctl.predict.training_plan import TorchOptimizer, TrainingPlan

_GATHERS, _REDUCES, _ALL_REDUCES = 1, 2, 3  # streams
_QUEUE = "collectives"  # FSDP2 runs those of a shard group one after another


class Fsdp2Steps:
    """The steps of one rank after `fully_shard` was called on each block, then on the root.

    The description follows torch/distributed/fsdp: each parameter is sharded along its first
    dimension. A unit is all-gathered into one buffer on a side stream, and copied from the buffer
    into one tensor per parameter. The buffer is freed when the next unit has been copied. In
    backward, the previous unit is gathered ahead. Gradients are copied into one buffer, which is
    freed after the next unit's backward. They are reduced into another buffer, of which sharded
    gradients are views.

    The host requests memory for the next forward gather only after it has issued the kernels of
    the current block, but the transfer overlaps with these kernels. So `_start_gather` and
    `_allocate_gather` are separate.
    """

    def __init__(
        self,
        units: Sequence[UnitSpec],
        strategy: Strategy,
        plan: TrainingPlan,
        recorder: StepRecorder,
        *,
        fused: bool = True,
        regathers: bool = False,
    ) -> None:
        """Describe the steps with the requested `strategy`; the strategy of `plan` may differ.

        `regathers`: recomputation runs as a separate forward, after which a unit is freed, and
        backward gathers the unit again, as with reentrant checkpoints.
        """
        self._plan, self._recorder = plan, recorder
        self._optimizer = TorchOptimizer(plan, recorder, fused=fused)
        position, prefetch = plan.step.position, plan.step.prefetch
        self._num_shards = position.size if plan.step.strategy.shards_params else 1
        self._reshards = strategy.reshard_after_forward  # except for the last block and the root
        self._regathers = regathers and self._reshards and self._num_shards > 1
        self._replicates = (
            position.num_replicas > 1
        )  # if so, gradients are all-reduced over replicas
        self._backward_prefetch = max(1, prefetch.backward)  # blocks gathered ahead in backward
        # Blocks gathered ahead in forward by request, and blocks whose transfer starts ahead.
        self._forward_prefetch = prefetch.forward if prefetch.forward > 1 else 0
        self._started_gathers = max(
            self._forward_prefetch, int(position.transport is Transport.NCCL)
        )
        # The parameters of the root, which is everything outside the blocks, and of each block.
        self._root = units[0].name
        blocks = {unit.name: unit.params for unit in units if unit.kind == "block"}
        rest = tuple(p for unit in units if unit.name not in blocks for p in unit.params)
        self._groups = {self._root: rest, **blocks}
        self._blocks = list(blocks)
        self._units = [unit.name for unit in units[1:]]
        self._gathers: dict[str, int] = {}  # by unit, until they are waited for
        self._gathered: dict[
            str, int | None
        ] = {}  # by unit: the buffer of a gather; None: no buffer
        self._unsharded: dict[str, list[int]] = {}
        self._copied: int | None = None  # the buffer of the last gather in forward
        self._reducing: int | None = None
        self._all_reduced: list[int] = []  # freed after the backward
        self._reductions: list[int] = []  # of this pass
        self._grads: dict[str, int] = {}  # reduced
        self._held: dict[str, list[int]] = {}  # not reduced yet

    def setup(self, *, draws: bool) -> None:
        self._recorder.begin_phase("building the model")
        for unit, params in self._groups.items():
            for nbytes in self._shards(params):
                self._recorder.allocate(Category.PARAMETERS, unit, "parameters", nbytes)

    def step(self) -> None:
        for reduces in self._plan.reduces_gradients:
            self._recorder.compute(PassPart.BEFORE)
            self._forward()
            self._backward(reduces=reduces)
            self._recorder.compute(PassPart.END)
        self._optimize()

    def _numel(self, param: ParamSpec) -> int:
        """Return the elements of a rank's shard, with padded rows."""
        if not param.shape:
            return 1
        rows = -(-param.shape[0] // self._num_shards)
        return rows * param.numel // max(1, param.shape[0])

    def _shard_numel(self, params: Sequence[ParamSpec]) -> int:
        return sum(map(self._numel, params))

    def _shards(self, params: Sequence[ParamSpec]) -> list[int]:
        return [self._numel(param) * self._plan.dtypes.master.itemsize for param in params]

    def _start_gather(self, unit: str) -> None:
        if unit not in self._gathers and unit not in self._unsharded:
            self._gathers[unit] = self._gather(unit)

    def _gather(self, unit: str) -> int:
        recorder, dtypes = self._recorder, self._plan.dtypes
        part = self._shard_numel(self._groups[unit])
        recorder.copy(part * (dtypes.compute.itemsize + dtypes.master.itemsize), "copy in")
        nbytes = part * self._num_shards * dtypes.compute.itemsize
        return recorder.start_collective(
            CollectiveKind.GATHER, nbytes, RankGroup.SHARD, f"gather {unit}", queue=_QUEUE
        )

    def _allocate_gather(self, unit: str) -> None:
        if unit in self._gathered or unit in self._unsharded:
            return
        recorder, dtypes = self._recorder, self._plan.dtypes
        if self._num_shards == 1:
            self._gathered[unit] = None
            return
        recorder.begin_phase("gathering", unit)
        part = self._shard_numel(self._groups[unit]) * dtypes.compute.itemsize
        cast = None
        if dtypes.compute.itemsize != dtypes.master.itemsize:
            cast = self._buffer(Category.GATHERED_UNITS, unit, part, _GATHERS)
        nbytes = part * self._num_shards
        self._gathered[unit] = self._buffer(Category.GATHERED_UNITS, unit, nbytes, _GATHERS)
        recorder.free(cast)

    def _buffer(self, category: Category, unit: str, nbytes: int, stream: int = 0) -> int:
        what = "gathered parameters" if stream == _GATHERS else "all gradients"
        return self._recorder.allocate(category, unit, what, nbytes, stream=stream)

    def _copy_out(self, unit: str, *, forward: bool) -> None:
        """Gather a unit unless it is gathered, and copy its parameters out of the buffer."""
        if unit in self._unsharded:
            return
        recorder, params = self._recorder, self._groups[unit]
        self._start_gather(unit)
        self._allocate_gather(unit)
        self._free_copied()
        recorder.wait(self._gathers.pop(unit))
        parts, itemsize = self._num_shards, self._plan.dtypes.compute.itemsize
        sizes = [self._numel(param) * parts * itemsize for param in params]
        self._unsharded[unit] = [
            recorder.allocate(Category.GATHERED_UNITS, unit, "parameters", size) for size in sizes
        ]
        if parts > 1:
            recorder.copy(2 * sum(sizes), f"copy out {unit}")
        buffer = self._gathered.pop(unit)
        if forward:
            self._copied = buffer
        else:
            recorder.free(buffer)

    def _free_copied(self) -> None:
        self._recorder.free(self._copied)
        self._copied = None

    def _reshard(self, unit: str) -> None:
        self._recorder.free(*self._unsharded.pop(unit, ()))

    def _forward(self) -> None:
        recorder = self._recorder
        self._copy_out(self._root, forward=True)
        recorder.compute(PassPart.START)
        for name in self._units:
            is_block = name in self._groups
            if is_block:
                self._copy_out(name, forward=True)
                following = self._blocks[self._blocks.index(name) + 1 :]
                for ahead in following[: self._started_gathers]:
                    self._start_gather(ahead)
                for ahead in following[: self._forward_prefetch]:
                    self._allocate_gather(ahead)
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
                self._after(running, reduces=reduces)
            running = name if name in self._groups else ""
            if running:
                self._copy_out(name, forward=False)
                index = self._blocks.index(name)
                is_last = index == len(self._blocks) - 1
                again = self._gather(name) if self._regathers and not is_last else None
                for ahead in self._blocks[max(0, index - self._backward_prefetch) : index][::-1]:
                    self._start_gather(ahead)
                    self._allocate_gather(ahead)
            recorder.compute(PassPart.BACKWARD, name)
            if running:
                recorder.wait(again)
        for name in filter(None, (running, self._root)):
            self._after(name, reduces=reduces)
        for key in self._reductions:
            recorder.wait(key)
        recorder.free(self._reducing, *self._all_reduced)
        self._reducing = None
        self._reductions.clear()
        self._all_reduced.clear()

    def _with_gradients(self, unit: str) -> list[ParamSpec]:
        return [param for param in self._groups[unit] if self._recorder.has_gradient(param)]

    def _after(self, unit: str, *, reduces: bool) -> None:
        """Free the unsharded parameters of a unit after its backward; hold or reduce gradients."""
        recorder, dtypes = self._recorder, self._plan.dtypes
        self._reshard(unit)
        params = self._with_gradients(unit)
        if not params:
            return
        recorder.begin_phase("reducing", unit)
        part = self._shard_numel(params)
        nbytes = part * self._num_shards * dtypes.reduce.itemsize
        keys = [recorder.gradient(param.name) for param in params]
        if not reduces or unit in self._held:
            self._hold(unit, params, keys)
            if not reduces:
                recorder.copy(2 * nbytes, f"keep gradients of {unit}")
                return
            keys = [*self._held.pop(unit)]
        recorder.free(self._reducing)
        self._reducing = self._buffer(Category.REDUCE_BUFFERS, unit, nbytes)
        recorder.free(*keys)
        self._reduce(unit, nbytes)
        # FSDP2 keeps the input of an all-reduce until the end of backward.
        release = self._all_reduced.append if self._replicates else recorder.free
        grads = self._buffer(Category.GRADIENTS, unit, part * dtypes.reduce.itemsize, _REDUCES)
        if dtypes.reduce.itemsize != dtypes.master.itemsize:
            stream = _ALL_REDUCES if self._replicates else _REDUCES
            wide = self._buffer(Category.GRADIENTS, unit, part * dtypes.master.itemsize, stream)
            release(grads)
            grads = wide
        if unit in self._grads:
            release(grads)
        else:
            self._grads[unit] = grads

    def _reduce(self, unit: str, nbytes: int) -> None:
        recorder, parts = self._recorder, self._num_shards
        shard, replicas = RankGroup.SHARD, RankGroup.REPLICAS
        if parts > 1:
            recorder.copy(2 * nbytes, f"copy gradients of {unit}")
        key = recorder.start_collective(
            CollectiveKind.REDUCE_SCATTER, nbytes, shard, f"reduce {unit}", queue=_QUEUE
        )
        if self._replicates:
            label, shard_bytes = f"sum over replicas of {unit}", nbytes / parts
            key = recorder.start_collective(
                CollectiveKind.ALL_REDUCE,
                shard_bytes,
                replicas,
                label,
                queue=REPLICA_SUMS,
                after=(key,),
            )
        self._reductions.append(key)

    def _hold(self, unit: str, params: Sequence[ParamSpec], keys: Sequence[int | None]) -> None:
        """Hold unsharded gradients in the dtype of the reduction."""
        recorder, dtypes = self._recorder, self._plan.dtypes
        if unit in self._held:
            recorder.free(*keys)
        elif dtypes.compute.itemsize == dtypes.reduce.itemsize:
            self._held[unit] = [key for key in keys if key is not None]
            for gradient in self._held[unit]:
                recorder.keep_gradient(gradient)
        else:
            held = self._held[unit] = []
            for param, key in zip(params, keys, strict=True):
                category, nbytes = Category.GRADIENTS, param.numel * dtypes.reduce.itemsize
                held.append(recorder.allocate(category, unit, "held gradients", nbytes))
                recorder.free(key)

    def _optimize(self) -> None:
        trained = {unit: self._shards(self._with_gradients(unit)) for unit in self._groups}
        shards = [(unit, nbytes) for unit, parts in trained.items() for nbytes in parts]
        self._optimizer.step(shards)
        self._recorder.free(*self._grads.values())
        self._grads.clear()


_BUCKET_BYTES = 25 << 20  # bytes


class DdpSteps:
    """The steps of one rank of DistributedDataParallel, with gradients as views of buckets.

    Every rank keeps all parameters, gradients and states. Buckets as large as all parameters stay
    allocated. If the computation has a narrower dtype than the parameters, each unit's parameters
    are cast in forward, and the copies are freed after the unit's backward, as with autocast.
    """

    def __init__(
        self,
        units: Sequence[UnitSpec],
        plan: TrainingPlan,
        recorder: StepRecorder,
        *,
        fused: bool = True,
    ) -> None:
        self._plan, self._recorder = plan, recorder
        self._optimizer = TorchOptimizer(plan, recorder, fused=fused)
        self._cast_keys: dict[str, list[int]] = {}
        self._filled = 0  # bytes in the current bucket
        self._sent: list[int] = []
        self._params = {unit.name: unit.params for unit in units}

    def setup(self, *, draws: bool) -> None:
        recorder, itemsize = self._recorder, self._plan.dtypes.master.itemsize
        recorder.begin_phase("building the model")
        for unit, params in self._params.items():
            for param in params:
                recorder.allocate(Category.PARAMETERS, unit, "parameters", param.numel * itemsize)
        for unit in self._params:
            recorder.allocate(Category.GRADIENTS, unit, "buckets", sum(self._trained(unit)))

    def step(self) -> None:
        recorder = self._recorder
        root, *units = self._params
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
                self._collect(name, reduces=reduces)
            self._send(self._filled, reduces=reduces)
            for key in self._sent:
                recorder.wait(key)
            self._sent.clear()
            recorder.compute(PassPart.END)
        self._optimizer.step([(name, n) for name in self._params for n in self._trained(name)])

    def _trained(self, unit: str) -> list[int]:
        """Return the bytes of each trained parameter of a unit."""
        itemsize = self._plan.dtypes.master.itemsize
        return [param.numel * itemsize for param in self._params[unit] if param.trainable]

    def _cast(self, unit: str) -> None:
        dtypes, sizes = self._plan.dtypes, [param.numel for param in self._params[unit]]
        compute, master = dtypes.compute.itemsize, dtypes.master.itemsize
        if compute == master:
            return
        category = Category.GATHERED_UNITS
        self._cast_keys[unit] = [
            self._recorder.allocate(category, unit, "cast parameters", numel * compute)
            for numel in sizes
        ]
        self._recorder.copy(sum(sizes) * (compute + master), f"cast {unit}")

    def _collect(self, unit: str, *, reduces: bool) -> None:
        recorder = self._recorder
        recorder.free(*(recorder.gradient(param.name) for param in self._params[unit]))
        recorder.free(*self._cast_keys.pop(unit, ()))
        nbytes = sum(self._trained(unit))
        recorder.copy(2 * nbytes, f"copy gradients of {unit}")
        self._filled += nbytes
        while self._filled >= _BUCKET_BYTES:
            self._send(_BUCKET_BYTES, reduces=reduces)

    def _send(self, nbytes: int, *, reduces: bool) -> None:
        self._filled -= nbytes
        if reduces and nbytes:
            kind, group = CollectiveKind.ALL_REDUCE, RankGroup.SHARD
            key = self._recorder.start_collective(
                kind, nbytes, group, "reduce a bucket", queue=GATHERS
            )
            self._sent.append(key)
