"""Casts of stored values between floating-point dtypes, in numpy, which has no bfloat16.

Note: why not torch. Importing it takes seconds, and more memory than a whole consolidation.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpctl.errors import UsageError

EXPORT_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
FLOATS = ("F64", "F32", "BF16", "F16")
_DTYPES: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
_NAN = np.uint16(0x7FC0)


def cast(data: memoryview, source: str, target: str, name: str) -> memoryview:
    """Cast `data` from one dtype of safetensors to another; UsageError beyond float16's range."""
    if source == target:
        return data
    values = _widened(data) if source == "BF16" else np.frombuffer(data, _DTYPES[source])
    with np.errstate(over="ignore", invalid="ignore"):
        narrowed = values.astype(np.float32)  # torch, too, rounds float64 twice
        if target == "BF16":
            return _to_bfloat16(narrowed).view(np.uint8).data
        narrowed = narrowed.astype(_DTYPES[target])
    if target == "F16" and bool(np.any(np.isinf(narrowed) & np.isfinite(values))):
        raise UsageError(f"--dtype float16: {name} has values out of range; use bfloat16")
    narrow_bytes: NDArray[np.uint8] = narrowed.view(np.uint8)
    return narrow_bytes.data


def joined(upper: memoryview, lower: memoryview) -> memoryview:
    """Return float32 of bfloat16 and signed remainders of 8 bits; see `codes`."""
    bits = np.frombuffer(upper, np.int16).astype(np.int32) << 8
    result: NDArray[np.uint8] = ((bits + np.frombuffer(lower, np.int8)) << 8).view(np.uint8)
    return result.data


def _widened(data: memoryview) -> NDArray[np.float32]:
    """Convert bfloat16, which is the upper half of float32."""
    bits: NDArray[np.uint32] = np.frombuffer(data, np.uint16).astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32)


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = values.view(np.uint32)
    upper = bits >> np.uint32(16)
    rounded = (bits + (np.uint32(0x7FFF) + (upper & np.uint32(1)))) >> np.uint32(16)
    result: NDArray[np.uint16] = rounded.astype(np.uint16)
    is_nan = np.isnan(values)
    if is_nan.any():  # rounding could carry a NaN over into infinity
        result[is_nan] = _NAN
    return result
