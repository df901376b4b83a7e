"""Activation checkpointing by block: which blocks are recomputed in backward, and how.

The first blocks in forward are recomputed most: backward frees the activations of the last blocks
before it recomputes the first blocks.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from fsdpctl.errors import UsageError, did_you_mean

MODES = ("none", "selective", "full")  # ordered from the least to the most recomputation
OFFLOAD = "offload"  # `full`, with the inputs of the blocks in host memory
LEVELS = (*MODES, OFFLOAD)
BLOCKS = "activation_checkpointing.blocks"


class BlockCheckpointing(NamedTuple):
    """The activation checkpointing of one block."""

    mode: str  # one of `MODES`
    offloads_input: bool = False  # the block's input is copied to the host


def normalize_blocks(text: str) -> str:
    """Return numbers of blocks by mode in their normal spelling, such as `full:20,selective:8`.

    UsageError if a mode or a number is not allowed, or a mode follows a mode that recomputes less.
    """
    counts = parse_counts(text)
    for (mode, _), (later, _) in pairwise(counts):
        if LEVELS.index(mode) <= LEVELS.index(later):
            order = ", ".join(LEVELS[:0:-1])
            raise UsageError(f"{BLOCKS}={text}: {later} after {mode}; expected the order {order}")
    return ",".join(f"{mode}:{count}" for mode, count in counts)


def parse_counts(text: str) -> list[tuple[str, int]]:
    """Return the numbers of blocks by mode, in the order of forward."""
    counts = []
    for item in text.strip("[] ").split(","):
        mode, _, number = item.strip().partition(":")
        if mode not in LEVELS[1:] or not (number.isascii() and number.isdecimal() and int(number)):
            raise UsageError(
                f"{BLOCKS}={text}: expected numbers of blocks such as full:20,selective:8, with "
                f"{', '.join(LEVELS[:0:-1])}"
                f"{'' if mode in LEVELS else did_you_mean(mode, LEVELS[1:])}"
            )
        counts.append((mode, int(number)))
    return counts


def block_checkpointing(
    name: str, blocks: str | None, num_blocks: int, *, offload: bool
) -> tuple[BlockCheckpointing, ...]:
    """Return the checkpointing of each block in the order of forward.

    `blocks` defines the first blocks. All other blocks have the mode `name`, and offload their
    inputs if `offload` is set.
    UsageError if the model has fewer blocks.
    """
    first = [mode for mode, count in parse_counts(blocks) for _ in range(count)] if blocks else []
    if len(first) > num_blocks:
        raise UsageError(f"{BLOCKS}={blocks}: {len(first)} blocks, but the model has {num_blocks}")
    others = BlockCheckpointing(name, offloads_input=offload)
    offloading = BlockCheckpointing("full", offloads_input=True)
    set_blocks = [offloading if x == OFFLOAD else BlockCheckpointing(x) for x in first]
    return (*set_blocks, *[others] * (num_blocks - len(first)))


def one_of_each(blocks: str | None, num_blocks: int) -> str | None:
    """Return `blocks` with one block per mode, as far as the model has a further block."""
    modes = [mode for mode, _ in parse_counts(blocks)] if blocks else []
    return ",".join(f"{mode}:1" for mode in modes[: num_blocks - 1]) or None


class Recomputation(NamedTuple):
    """A value of `activation_checkpointing` and its `blocks`."""

    name: str
    blocks: str | None = None

    @property
    def text(self) -> str:
        """The two settings, without the first key."""
        return self.name if self.blocks is None else f"{self.name} {BLOCKS}={self.blocks}"


def recomputation_steps(num_blocks: int, modes: Sequence[str]) -> tuple[Recomputation, ...]:
    """Return the settings from the first to the last of `modes`, block by block.

    Each step saves memory and takes time: one more block is in the next mode. The blocks of a model
    with `num_blocks` change their mode in the order of forward.
    """
    steps = [Recomputation(modes[0])]
    for name, heavier in pairwise(modes):
        # The input of the last block stays on the device, because backward needs it at once.
        most = num_blocks - 1
        steps += [Recomputation(name, f"{heavier}:{count}") for count in range(1, most + 1)]
        if heavier != OFFLOAD:
            steps.append(Recomputation(heavier))
    return tuple(steps)
