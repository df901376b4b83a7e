"""The training step of PyTorch's DistributedDataParallel, with gradients as views of its buckets.

Every rank keeps everything. The buckets, as large as all parameters, stay allocated. If the
computation has a narrower dtype than the parameters, each unit's parameters are cast in forward and
kept until its backward, as autocast does for matrix products.
"""

from collections.abc import Sequence

from fsdpctl.plan.units import UnitSpec
from fsdpctl.predict.compute import Part
from fsdpctl.predict.hardware import CollectiveKind
from fsdpctl.predict.recorder import GATHERS, Category, RankGroup, Recorder
from fsdpctl.predict.training_plan import TorchOptimizer, TrainingPlan

_BUCKET = 25 << 20  # bytes


class DdpSteps:
    """The steps of one rank."""

    def __init__(
        self,
        units: Sequence[UnitSpec],
        plan: TrainingPlan,
        recorder: Recorder,
        *,
        fused: bool = True,
    ) -> None:
        self._plan, self._recorder = plan, recorder
        self._optimizer = TorchOptimizer(plan, recorder, fused=fused)
        self._cast_keys: dict[str, list[int]] = {}
        self._filled = 0  # bytes of the bucket that fills
        self._sent: list[int] = []
        self._params = {unit.name: unit.params for unit in units}

    def setup(self, *, draws: bool) -> None:
        recorder, itemsize = self._recorder, self._plan.dtypes.master.itemsize
        recorder.at("building the model")
        for unit, params in self._params.items():
            for param in params:
                recorder.allocate(Category.PARAMETERS, unit, "parameters", param.numel * itemsize)
        for unit in self._params:
            recorder.allocate(Category.GRADIENTS, unit, "buckets", sum(self._trained(unit)))

    def step(self) -> None:
        recorder = self._recorder
        root, *units = self._params
        for reduces in self._plan.reduces:
            recorder.compute(Part.BEFORE)
            self._cast(root)
            recorder.compute(Part.START)
            for name in units:
                self._cast(name)
                recorder.compute(Part.FORWARD, name)
                recorder.compute(Part.AROUND, name)
            recorder.compute(Part.LOSS)
            for name in (*reversed(units), root):
                if name != root:
                    recorder.compute(Part.BACKWARD, name)
                self._collect(name, reduces=reduces)
            self._send(self._filled, reduces=reduces)
            for key in self._sent:
                recorder.wait(key)
            self._sent.clear()
            recorder.compute(Part.END)
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
        of, what = Category.GATHERED_UNITS, "cast parameters"
        self._cast_keys[unit] = [
            self._recorder.allocate(of, unit, what, numel * compute) for numel in sizes
        ]
        self._recorder.copy(sum(sizes) * (compute + master), f"cast {unit}")

    def _collect(self, unit: str, *, reduces: bool) -> None:
        recorder = self._recorder
        recorder.free(*(recorder.gradient(param.name) for param in self._params[unit]))
        recorder.free(*self._cast_keys.pop(unit, ()))
        nbytes = sum(self._trained(unit))
        recorder.copy(2 * nbytes, f"copy gradients of {unit}")
        self._filled += nbytes
        while self._filled >= _BUCKET:
            self._send(_BUCKET, reduces=reduces)

    def _send(self, nbytes: int, *, reduces: bool) -> None:
        self._filled -= nbytes
        if reduces and nbytes:
            kind, group = CollectiveKind.ALL_REDUCE, RankGroup.SHARD
            key = self._recorder.start(kind, nbytes, group, "reduce a bucket", queue=GATHERS)
            self._sent.append(key)
