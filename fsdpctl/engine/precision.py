"""The dtypes of computation, gradient reduction and master weights."""

from dataclasses import dataclass, field

import torch

from fsdpctl.engine.describe import dtype_name
from fsdpctl.errors import EngineError
from fsdpctl.plan.precision import Dtypes


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a model; None keeps each parameter's dtype.

    Masters and reductions default to fp32 (fp64 for fp64).

    Raises:
        EngineError: If gradients would be added in float16.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | None = None
    # Whether bf16 masters have 8 more bits each. Their gradients have the dtype of the reduction.
    has_remainders: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.reduce_dtype == torch.float16:
            raise EngineError(
                "reduce_dtype float16: sums over ranks overflow at 65504; use bfloat16 or float32"
            )
        if self.has_remainders and not self.param_dtype == self.master_dtype == torch.bfloat16:
            raise EngineError(
                "has_remainders: expected param_dtype and master_dtype bfloat16, got "
                f"{self.param_dtype} and {self.master_dtype}"
            )

    @property
    def names(self) -> Dtypes:
        """The dtypes by name."""
        param, reduce, master = (
            None if dtype is None else dtype_name(dtype)
            for dtype in (self.param_dtype, self.reduce_dtype, self.master_dtype)
        )
        return Dtypes(param, reduce, master, self.has_remainders)
