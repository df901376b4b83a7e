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
_HEAVIEST_FIRST = ", ".join(LEVELS[:0:-1])  # without none
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
    for (level, _), (later, _) in pairwise(counts):
        if LEVELS.index(level) <= LEVELS.index(later):
            problem = f"{later} after {level}; expected the order {_HEAVIEST_FIRST}"
            raise UsageError(f"{BLOCKS}={text}: {problem}")
    return ",".join(f"{mode}:{count}" for mode, count in counts)


def parse_counts(text: str) -> list[tuple[str, int]]:
    """Return the numbers of blocks by mode, in the order of forward."""
    counts = []
    for item in text.strip("[] ").split(","):
        level, _, number = item.strip().partition(":")
        if level not in LEVELS[1:] or not (number.isascii() and number.isdecimal() and int(number)):
            hint = "" if level in LEVELS else did_you_mean(level, LEVELS[1:])
            problem = "expected numbers of blocks such as full:20,selective:8, with"
            raise UsageError(f"{BLOCKS}={text}: {problem} {_HEAVIEST_FIRST}{hint}")
        counts.append((level, int(number)))
    return counts


def block_checkpointing(
    mode: str, blocks: str | None, num_blocks: int, *, offload: bool
) -> tuple[BlockCheckpointing, ...]:
    """Return the checkpointing of each block in the order of forward.

    `blocks` defines the first blocks. All other blocks have `mode`, and offload their inputs
    if `offload` is set. UsageError if the model has fewer blocks.
    """
    counts = parse_counts(blocks) if blocks else []
    first = [level for level, count in counts for _ in range(count)]
    if len(first) > num_blocks:
        raise UsageError(f"{BLOCKS}={blocks}: {len(first)} blocks, but the model has {num_blocks}")
    others = BlockCheckpointing(mode, offloads_input=offload)
    offloading = BlockCheckpointing("full", offloads_input=True)
    set_blocks = [offloading if x == OFFLOAD else BlockCheckpointing(x) for x in first]
    return (*set_blocks, *[others] * (num_blocks - len(first)))


def one_of_each(blocks: str | None, num_blocks: int) -> str | None:
    """Return `blocks` with one block per mode; at least one block of the model stays without."""
    levels = [level for level, _ in parse_counts(blocks)] if blocks else []
    return ",".join(f"{level}:1" for level in levels[: num_blocks - 1]) or None


class Recomputation(NamedTuple):
    """A value of `activation_checkpointing` and its `blocks`."""

    name: str
    blocks: str | None = None

    @property
    def text(self) -> str:
        """The two settings, without the first key."""
        return self.name if self.blocks is None else f"{self.name} {BLOCKS}={self.blocks}"


def recomputation_steps(num_blocks: int, levels: Sequence[str]) -> tuple[Recomputation, ...]:
    """Return the settings from the first to the last of `levels`, block by block.

    Each step saves memory and takes time: one more of the `num_blocks` blocks, in the order of
    forward, is in the next level.
    """
    steps = [Recomputation(levels[0])]
    for level, heavier in pairwise(levels):
        steps += [Recomputation(level, f"{heavier}:{count}") for count in range(1, num_blocks)]
        # The input of the last block stays on the device, because backward needs it at once.
        if heavier != OFFLOAD:
            steps.append(Recomputation(heavier))
    return tuple(steps)
