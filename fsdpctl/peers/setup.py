"""The settings of PyTorch's engines, and a rank's part of a parameter under them."""

from dataclasses import dataclass

import torch
from torch import nn

from fsdpctl.plan.layout import Span
from fsdpctl.plan.schedule import Prefetch


@dataclass(frozen=True, slots=True)
class PeerSetup:
    """The settings of one of PyTorch's engines."""

    engine: str  # of plan/engines.py
    blocks: tuple[str, ...]  # the modules that are gathered, freed and reduced as one
    ranks_per_copy: int
    reshards: bool  # whether blocks are freed after their forward
    prefetch: Prefetch
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    master_dtype: torch.dtype
    compiles: bool  # whether blocks are compiled


@dataclass(frozen=True, slots=True)
class Local:
    """A rank's part of one parameter."""

    name: str
    shape: tuple[int, ...]  # unsharded
    param: nn.Parameter  # that the engine reads, and whose gradient it sets
    held: Span  # the elements that this rank has
    owned: Span  # those that this rank counts in norms
    written: Span  # those that this rank saves
    num_owners: int  # ranks with the same `owned`
