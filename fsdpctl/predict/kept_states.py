"""The optimizer states of each tensor that an optimizer steps, in bytes."""

from dataclasses import dataclass

from fsdpctl.plan.layout import ParamSpec, Run, decay_group
from fsdpctl.plan.muon import Muon, is_muons
from fsdpctl.plan.optimizers import OPTIMIZERS
from fsdpctl.plan.states import is_compressible, moment_bytes, run_group


@dataclass(frozen=True, slots=True)
class KeptStates:
    """The optimizer states of each tensor."""

    moments: int  # as large as the tensor
    counter: int  # bytes of the step counter
    muon: Muon | None = None  # has one moment per matrix instead
    # Of the moments of large matrices, others have float32; None: that of the masters for all.
    dtype: str | None = None

    @property
    def _is_divided(self) -> bool:
        return self.dtype not in (None, "float32")

    def key(self, param: ParamSpec) -> int:
        """Return the key of a parameter by which runs are cut."""
        return run_group(param) if self._is_divided else decay_group(param)

    def is_alone(self, param: ParamSpec) -> bool:
        """Return whether a parameter is stepped as a matrix of its own."""
        return self.muon is not None and is_muons(param)

    def of_run(self, run: Run, master: int) -> list[int]:
        """Return the bytes of each state of a run whose weights have `master` bytes."""
        if run.alone is not None:
            return [run.span.numel * master]
        if self.dtype is None:
            return self.of(run.span.numel * master)
        dtype = self.dtype if not self._is_divided or run.group % 2 else "float32"
        counter = [self.counter] * bool(self.counter)
        return [*counter, *moment_bytes(run.span.numel, dtype) * self.moments]

    def saved(self, param: ParamSpec, master: int) -> int:
        """Return the bytes of a parameter's states in a checkpoint."""
        if self.dtype is None:
            return param.numel * master * (1 if self.is_alone(param) else self.moments)
        dtype = self.dtype if self._is_divided and is_compressible(param) else "float32"
        return sum(moment_bytes(param.numel, dtype)) * self.moments

    def of(self, nbytes: int) -> list[int]:
        """Return the bytes of each state of a tensor with `nbytes` of master weights."""
        return [*[self.counter] * bool(self.counter), *[nbytes] * self.moments]


ADAMW = KeptStates(OPTIMIZERS["adamw"].moments, OPTIMIZERS["adamw"].counter)
