"""The dtypes of computation, gradient reduction and master weights."""

from dataclasses import dataclass, field

import torch

from fsdpctl.errors import EngineError


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

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a parameter of `dtype` is gathered and used.

        Bytes are codes that a module decodes.
        """
        return dtype if dtype == torch.uint8 else self.param_dtype or dtype

    def dtype_of_master(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that the optimizer updates."""
        return self.master_dtype or _at_least_float32(dtype)

    def dtype_of_reduction(self, master_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients are added over ranks."""
        return self.reduce_dtype or _at_least_float32(master_dtype)

    def dtype_of_gradient(self, master_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of a reduced gradient."""
        return self.dtype_of_reduction(master_dtype) if self.has_remainders else master_dtype


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32
