"""What collectives over gloo and over NCCL have in common: the process groups."""

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fsdpctl.comm.exchange import T, exchange
from fsdpctl.comm.waits import HostWaits, Waits
from fsdpctl.plan.layout import Span

_Collective = Callable[..., dist.Work]


def _renamed(name: str, before: str) -> _Collective:
    """A function that torch 2.13 renamed; the old name warns there."""
    found: _Collective = getattr(dist, name, None) or getattr(dist, before)
    return found


all_gather_single = _renamed("all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = _renamed("reduce_scatter_single", "reduce_scatter_tensor")

_GroupKey = tuple[tuple[tuple[int, ...], ...], str, str]
_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dict[_GroupKey, dist.ProcessGroup]] = (
    WeakKeyDictionary()
)


class ProcessGroupCollectives:
    """What gloo and NCCL do alike.

    All ranks talk in the default process group. Where gathers and reductions run beside each other,
    reductions have a group of their own; each group costs sockets and threads, or memory of a GPU.
    """

    _device_type = "cpu"

    def __init__(self, groups: Sequence[Sequence[int]] | None = None) -> None:
        """Join the ranks of one of `groups`, which together are all ranks; None: all ranks."""
        self._groups = groups or [range(dist.get_world_size())]
        self.gather_group = (
            dist.distributed_c10d._get_default_group()
            if groups is None
            else _own_group(groups, self._device_type, "gather")
        )
        self.reduce_group = self.gather_group
        self.rank = dist.get_rank(self.gather_group)
        self.size = dist.get_world_size(self.gather_group)
        self.waits: Waits = HostWaits()

    def separate_reductions(self) -> None:
        """By a process group of their own."""
        self.reduce_group = _own_group(self._groups, self._device_type, "reduce")

    def all_reduce(self, values: Tensor) -> Tensor:
        """By the backend's all-reduce, at once."""
        self.waits.around(lambda: dist.all_reduce(values, group=self.gather_group))
        return values

    def broadcast(self, values: Tensor, source: int = 0) -> Tensor:
        """By the backend's broadcast, at once."""
        dist.broadcast(values, group=self.gather_group, group_src=source)
        return values

    def gather_objects(self, value: T) -> list[T]:
        """By the backend's all-gather of bytes."""
        return exchange(value, self.gather_group)

    def barrier(self) -> None:
        """By the backend's barrier."""
        dist.barrier(group=self.gather_group)

    def start_broadcasts(self, whole: Tensor, parts: Sequence[Span]) -> list[dist.Work]:
        """One from each rank, of its part of `whole`."""
        return [
            dist.broadcast(
                whole[part.start : part.stop],
                group=self.gather_group,
                group_src=owner,
                async_op=True,
            )
            for owner, part in enumerate(parts)
            if part.numel
        ]


def _own_group(
    groups: Sequence[Sequence[int]], device_type: str, purpose: str
) -> dist.ProcessGroup:
    """The process group of this rank; every rank makes its own, at the same time.

    That is one call however many groups there are; NCCL splits the default group's communicator,
    which all ranks do together. All models share them: a group has threads, sockets and with NCCL
    memory that live as long as the default group. It times out as that does.
    """
    default = dist.distributed_c10d._get_default_group()
    made = _GROUPS.setdefault(default, {})
    key = (tuple(map(tuple, groups)), device_type, purpose)
    if key not in made:
        options = default._get_backend(torch.device(device_type)).options
        timeout = None if options is None else options._timeout  # torch's fake backend has none
        rank = dist.get_rank()
        ranks = next(list(each) for each in groups if rank in each)
        own = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
        assert isinstance(own, dist.ProcessGroup)
        made[key] = own
    return made[key]
