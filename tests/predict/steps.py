"""What a published step is."""

from typing import NamedTuple


class Step(NamedTuple):
    """A published step."""

    name: str
    words: str
    tokens_per_second: float  # of each GPU
    source: str
    differs: str = ""  # how its program differs from what its words say
    used: float | None = None  # GiB of the device, with what is outside of torch's allocator
    allocated: float | None = None  # GiB of torch's allocator


def batch(micro: int, ranks: int, passes: int = 1) -> str:
    """Return the settings of a batch."""
    return f"train.micro_batch_size={micro} train.global_batch_size={micro * ranks * passes}"
