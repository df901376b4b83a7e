"""The dtypes of flat buffers, by name."""

import re
from dataclasses import dataclass, field
from functools import cache

from fsdpctl.errors import EngineError, UsageError, did_you_mean

_KNOWN = ("float32", "bfloat16", "float16", "float64")
TF32 = "tf32"  # float32 whose matrix products round their operands to 10 mantissa bits
SPLIT = "bfloat16+int8"  # master weights of 24 bits: a bf16 value, and a remainder of 8 bits


class Dtype(str):
    """The name of a dtype, with its size."""

    __slots__ = ()

    @property
    def itemsize(self) -> int:
        return int(re.findall(r"\d+", self)[0]) // 8


@dataclass(frozen=True, slots=True)
class BufferDtypes:
    """The dtypes of a flat buffer."""

    compute: Dtype  # dtype of gathered parameters
    master: Dtype  # dtype of weights that the optimizer updates; equals `compute` if frozen
    reduce: Dtype  # dtype of gradients while they are summed over ranks
    gradient: Dtype  # dtype of reduced gradients
    has_remainders: bool  # masters are SPLIT

    @property
    def initial(self) -> Dtype:
        """The dtype of initial values, which has all bits of master weights."""
        return Dtype("float32") if self.has_remainders else self.master


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a model, as torch dtypes or their names; names are stored.

    A `param_dtype` of None keeps each parameter's dtype. The others default to float32, or float64
    for float64 parameters.

    Raises:
        UsageError: If a dtype is unknown.
        EngineError: If gradients were added in float16, or masters with remainders are not bf16.
    """

    param_dtype: object = None
    reduce_dtype: object = None
    master_dtype: object = None
    # Whether masters are SPLIT. Gradients then keep the dtype of the reduction.
    has_remainders: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "master_dtype"):
            if (value := getattr(self, name)) is not None:
                dtype = str(value).removeprefix("torch.")
                if dtype not in _KNOWN:
                    hint = did_you_mean(dtype, _KNOWN)
                    raise UsageError(f"{name}={dtype}: expected one of {', '.join(_KNOWN)}{hint}")
                object.__setattr__(self, name, dtype)
        if self.reduce_dtype == "float16":
            problem = "sums over ranks overflow at 65504; use bfloat16 or float32"
            raise EngineError(f"reduce_dtype float16: {problem}")
        if self.has_remainders and not self.param_dtype == self.master_dtype == "bfloat16":
            expected = "expected param_dtype and master_dtype bfloat16"
            got = f"{self.param_dtype} and {self.master_dtype}"
            raise EngineError(f"has_remainders: {expected}, got {got}")

    def buffer_dtypes(self, dtype: str, *, trainable: bool = True) -> BufferDtypes:
        """Return the dtypes of a flat buffer whose parameters had `dtype` before sharding."""
        return _dtypes_of(self, dtype, trainable)


@cache
def _dtypes_of(precision: Precision, dtype: str, trainable: bool) -> BufferDtypes:
    # Bytes are quantization codes that a module decodes: a cast would change them.
    compute = Dtype(dtype if dtype == "uint8" else precision.param_dtype or dtype)
    master = Dtype(precision.master_dtype or _at_least_float32(dtype)) if trainable else compute
    reduce = Dtype(precision.reduce_dtype or _at_least_float32(master))
    has_remainder = precision.has_remainders and trainable
    return BufferDtypes(compute, master, reduce, reduce if has_remainder else master, has_remainder)


def _at_least_float32(dtype: str) -> str:
    return dtype if dtype == "float64" else "float32"
