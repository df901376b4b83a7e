"""The dtypes of flat buffers, by name."""

import re
from dataclasses import dataclass
from functools import cache

SPLIT = "bfloat16+int8"  # master weights of 24 bits: a bf16 half, and a remainder of 8 bits


class Dtype(str):
    """The name of a dtype."""

    __slots__ = ()

    @property
    def itemsize(self) -> int:
        return int(re.findall(r"\d+", self)[0]) // 8


@dataclass(frozen=True, slots=True)
class BufferDtypes:
    """The dtypes of a flat buffer."""

    compute: Dtype  # in which it is gathered and used
    master: Dtype  # what the optimizer updates; frozen parameters are kept in the compute dtype
    reduce: Dtype  # in which gradients are added over ranks
    gradient: Dtype  # of reduced ones
    has_remainder: bool  # masters have 8 more bits each

    @property
    def drawn(self) -> Dtype:
        """The dtype of initial values, which has all bits of master weights."""
        return Dtype("float32") if self.has_remainder else self.master


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The dtypes of a model by name; None keeps each parameter's."""

    param: str | None = None
    reduce: str | None = None  # None: float32, or float64 as the masters
    master: str | None = None  # None: float32, or float64 as the parameters
    has_remainders: bool = False  # 8 more bits of each bf16 master

    def of(self, dtype: str, *, trainable: bool = True) -> BufferDtypes:
        """Return the dtypes of a flat buffer whose parameters had `dtype`."""
        return _dtypes_of(self, dtype, trainable)


@cache
def _dtypes_of(given: Dtypes, dtype: str, trainable: bool) -> BufferDtypes:
    # Bytes are codes that a module decodes.
    compute = Dtype(dtype if dtype == "uint8" else given.param or dtype)
    master = Dtype(given.master or _at_least_float32(dtype)) if trainable else compute
    reduce = Dtype(given.reduce or _at_least_float32(master))
    has_remainder = given.has_remainders and trainable
    return BufferDtypes(compute, master, reduce, reduce if has_remainder else master, has_remainder)


def _at_least_float32(dtype: str) -> str:
    return dtype if dtype == "float64" else "float32"
