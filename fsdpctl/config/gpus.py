"""The GPUs whose names, peaks and clusters are known."""

from typing import NamedTuple


class Gpu(NamedTuple):
    """A GPU, by the beginning or a part of the name that torch has for it."""

    name: str
    peak: float  # dense FLOP/s in bf16, by its data sheet
    cluster: str | None = None  # with its specs, if there is one


# The first name that a device's name contains counts.
GPUS = (
    Gpu("A100-SXM4-40GB", 312e12, "a100_40"),
    Gpu("A100", 312e12, "a100_80"),
    Gpu("H100 PCIE", 756e12, "h100"),
    Gpu("H100 NVL", 835e12, "h100"),
    Gpu("H100", 989e12, "h100"),
    Gpu("H200", 989e12, "h200"),
    Gpu("GB200", 2500e12),
    Gpu("B200", 2250e12, "b200"),
    Gpu("L40S", 362e12, "l40s"),
    Gpu("RTX 4090", 165e12, "rtx4090"),
    Gpu("RTX 5090", 209.5e12, "rtx5090"),
    Gpu("MI300X", 1307e12),
)


def known_gpu(device_name: str) -> Gpu | None:
    """Return the GPU that torch calls `device_name`; None if it is unknown."""
    return next((gpu for gpu in GPUS if gpu.name in device_name.upper()), None)
