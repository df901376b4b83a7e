"""The optimizer states of a parameter: their dtype and their bytes."""

from fsdpctl.plan.layout import ALIGNMENT, ParamSpec, Span, decay_group
from fsdpctl.plan.sizes import DTYPE_BYTES

BLOCK = ALIGNMENT  # elements that share a scale: blocks never cross parameters or ranks
SMALLEST = 4096  # elements of a parameter whose states may be compressed
TILE = {"cpu": 1 << 17, "cuda": 1 << 22}  # elements that are stepped at a time
NUM_TILES = 4  # in float32: both moments, the gradient and then the weights, and one to work in
STATE_DTYPES = ("float32", "int8")
SPLIT = "bfloat16+int8"  # master weights of 24 bits: a bf16 half, and a remainder of 8 bits
_SCALE = 2  # bytes
_BLOCK_WORK = 10  # bytes: a new scale, the same in float32, and a factor


def is_compressible(param: ParamSpec) -> bool:
    """Return whether a state dtype other than float32 applies to a parameter.

    It depends on the whole parameter, not on a rank's part, so that every number of ranks agrees.
    """
    return param.numel >= SMALLEST and param.role != "vector"


def run_group(param: ParamSpec, group: int | None = None) -> int:
    """Return the key of a parameter by which runs are cut if states may be compressed."""
    return 2 * (decay_group(param) if group is None else group) + is_compressible(param)


def blocks_of(span: Span) -> Span:
    """Return the blocks with the elements `span`."""
    return Span(span.start // BLOCK, -(-span.stop // BLOCK))


def tile_bytes(largest: int, device: str, dtype: str | None) -> int:
    """Return the bytes in which runs of up to `largest` elements are stepped in tiles.

    `dtype` is that of the moments.
    """
    size = min(largest, TILE[device])
    # On a GPU, values that replace others unless a step is skipped; on CPUs, one in float64.
    whole = NUM_TILES + (2 if device == "cpu" else 1)
    blocks = size // BLOCK * _BLOCK_WORK if dtype == "int8" else 0
    return size * whole * DTYPE_BYTES["float32"] + blocks


def moment_bytes(numel: int, dtype: str) -> list[int]:
    """Return the bytes of each tensor of a moment with `numel` elements."""
    if dtype == "int8":
        return [numel, -(-numel // BLOCK) * _SCALE]
    return [numel * DTYPE_BYTES[dtype]]
