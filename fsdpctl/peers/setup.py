"""What a peer is told of how to train, and what it gives back."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from fsdpctl.comm.waits import Seconds
from fsdpctl.plan.layout import Span
from fsdpctl.plan.schedule import Prefetch


@dataclass(frozen=True, slots=True)
class PeerSetup:
    """How one of PyTorch's engines shall train a module."""

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
    """What a rank has of one parameter."""

    name: str
    shape: tuple[int, ...]  # of all of it
    param: nn.Parameter  # that the engine updates from and leaves gradients at
    held: Span  # the elements that this rank has
    owned: Span  # those whose share in norms is this rank's to count
    written: Span  # those that this rank saves
    num_owners: int  # ranks with the same `owned`


class Runner(Protocol):
    """A module that one of PyTorch's engines has taken over."""

    @property
    def locals(self) -> Sequence[Local]:
        """What this rank has of each parameter."""
        ...

    @property
    def place(self) -> int:
        """Which part of a copy this rank has."""
        ...

    @property
    def num_copies(self) -> int:
        """How many ranks have the same part."""
        ...

    @property
    def take_waits(self) -> Callable[[], Seconds] | None:
        """How long computation has waited for ranks since the last time; None: not known."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own result."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward inside reduces nothing."""
        ...

    def reshard(self) -> None:
        """Let go of whole parameters, where between steps there are none."""
        ...
