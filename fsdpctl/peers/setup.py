"""The settings of PyTorch's engines, and the interface of a module under them."""

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


class Runner(Protocol):
    """A module under one of PyTorch's engines."""

    @property
    def locals(self) -> Sequence[Local]:
        """This rank's part of each parameter."""
        ...

    @property
    def place(self) -> int:
        """The part of a replica that this rank has."""
        ...

    @property
    def num_copies(self) -> int:
        """The number of ranks that have the same part."""
        ...

    @property
    def take_waits(self) -> Callable[[], Seconds] | None:
        """A function that returns the exposed communication since its last call; None: unknown."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's own result."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Reduce no gradients in backwards inside."""
        ...

    def reshard(self) -> None:
        """Free unsharded parameters, if they are sharded between steps."""
        ...
