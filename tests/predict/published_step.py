"""The type of a published step."""

from typing import NamedTuple


class Step(NamedTuple):
    """A published step."""

    name: str
    settings: str
    tokens_per_second: float  # per GPU
    source: str
    differs: str = ""  # how the measured program differs from the settings
    used: float | None = None  # GiB of the device, with memory outside of torch's allocator
    allocated: float | None = None  # GiB of torch's allocator


def batch(micro: int, ranks: int, passes: int = 1) -> str:
    """Return the settings of a batch."""
    return f"train.micro_batch_size={micro} train.global_batch_size={micro * ranks * passes}"
