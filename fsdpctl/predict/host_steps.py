"""The optimizer's step in host memory, as a rank's engine schedules it."""

from fsdpctl.plan.offload import Offload
from fsdpctl.plan.sizes import RankPlace
from fsdpctl.predict.hardware import HostQueue
from fsdpctl.predict.recorder import Recorder
from fsdpctl.predict.training_plan import TrainingPlan, held_masters

# Bytes per element that are moved in the time of a step in tiles, by benchmarks/update_time.py: six
# times those of a step in float32.
_IN_TILES = 6 * 32


class HostSchedule:
    """The gradients that leave a rank, the steps of its host, and the results that come back.

    Each unit is stepped once its gradient has arrived, in the order of the next forward. A unit
    waits for its own result only.
    """

    def __init__(self, plan: TrainingPlan, place: RankPlace, recorder: Recorder) -> None:
        self._plan = plan
        self._recorder = recorder
        owned = {
            unit: sum(
                held_masters(plan, place, each).numel
                for each in plan.layouts[unit]
                if plan.is_on_host(each)
            )
            for unit in (plan.order.root, *plan.order.forward)
        }
        self._owned = {unit: numel for unit, numel in owned.items() if numel}
        self._left: dict[str, int] = {}  # copies of gradients to the host
        self._leaving: int | None = None  # the last of them, whose gradient is not freed yet
        self._results: dict[str, int] = {}  # copies to the device, or steps if none are needed

    def leave(self, unit: str) -> None:
        """Send a unit's complete gradients to the host, added to those that it has."""
        if Offload.GRADIENTS not in self._plan.offload or unit not in self._owned:
            return
        self.finish()
        recorder, nbytes = self._recorder, self._owned[unit] * self._plan.sizes.grad
        if unit in self._left:
            after = (self._left[unit],)
            label = f"earlier gradients of {unit}"
            recorder.wait(recorder.on_host(HostQueue.UP, nbytes, label, after=after))
            recorder.copy(3 * nbytes, f"sum of {unit}")
        recorder.copy(nbytes, f"norm of {unit}")
        self._leaving = recorder.on_host(HostQueue.DOWN, nbytes, f"gradients of {unit}")
        self._left[unit] = self._leaving

    def finish(self) -> None:
        """Wait until the gradients that were sent last can be freed."""
        self._recorder.wait(self._leaving)
        self._leaving = None

    def step(self) -> None:
        """Let the host step all units. Two buffers for each direction limit how far it is ahead."""
        recorder, sizes = self._recorder, self._plan.sizes
        fetches = self._plan.fetches_gradients
        recorder.norm(sum(self._owned.values()) * sizes.grad if fetches else 0)
        steps: list[int] = []
        results: list[int] = []
        for unit, numel in self._owned.items():
            if fetches:
                label, nbytes = f"gradients of {unit}", numel * sizes.grad
                down = recorder.on_host(HostQueue.DOWN, nbytes, label, after=tuple(steps[-2:-1]))
            else:
                down = self._left.pop(unit)
            after, nbytes = (*results[-2:-1], down), numel * _step_traffic(self._plan)
            steps.append(recorder.on_host(HostQueue.STEPS, nbytes, f"step {unit}", after=after))
            if Offload.PARAMS not in self._plan.offload:
                label, nbytes = f"parameters of {unit}", numel * sizes.param
                results.append(recorder.on_host(HostQueue.UP, nbytes, label, after=(steps[-1],)))
            self._results[unit] = (results or steps)[-1]

    def wait(self, unit: str) -> None:
        """Wait for a unit's new parameters."""
        self._recorder.wait(self._results.pop(unit, None), "optimizer")


def _step_traffic(plan: TrainingPlan) -> int:
    """Return the bytes that a step reads and writes in host memory, per element.

    AdamW reads and writes master weight, moments and gradient, which it scales in place, and writes
    the parameter in the compute dtype. In tiles, it computes as long as it takes to move more.
    Meanwhile the device reads the result unless it rests on the host, and writes gradients unless
    they have left before.
    """
    sizes = plan.sizes
    stepped = 2 * (sizes.grad + (1 + plan.states.moments) * sizes.master)
    if plan.states.dtype is not None:
        stepped = _IN_TILES
    cast = sizes.param if sizes.param != sizes.master else 0
    fetched = sizes.grad if plan.fetches_gradients else 0
    read = 0 if Offload.PARAMS in plan.offload else sizes.param
    return stepped + cast + read + fetched
