"""The optimizers: the keys and the states that each of them has, a row each."""

from dataclasses import dataclass

from fsdpctl.errors import UsageError
from fsdpctl.plan.muon import MUON

ADAMW = "adamw"
_BETAS = ("beta1", "beta2", "eps")


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """An optimizer. `train.optimizers` makes it."""

    name: str
    keys: tuple[str, ...]  # of `optimizer` that not all of them have
    moments: int  # as large as the weights
    counter: int  # bytes of a parameter's number of steps
    needs_momentum: bool = False  # without it, it has no moments
    has_usual_lr: bool = True
    steps_matrices: bool = False  # as a whole


_TABLE = (
    OptimizerRow(ADAMW, (*_BETAS, "state_dtype"), 2, 4),
    OptimizerRow("sgd", ("momentum",), 1, 0, needs_momentum=True, has_usual_lr=False),
    OptimizerRow(MUON, (*_BETAS, "momentum", "nesterov", "ns_steps"), 2, 4, steps_matrices=True),
)
OPTIMIZERS = {row.name: row for row in _TABLE}


def get_optimizer(name: str) -> OptimizerRow:
    """Return an optimizer by name."""
    if name not in OPTIMIZERS:
        raise UsageError(f"optimizer={name}: not supported; expected {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]
