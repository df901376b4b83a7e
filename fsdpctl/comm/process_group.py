"""The process groups of gloo and NCCL, and collectives that are the same over both."""

from collections.abc import Callable, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from fsdpctl.comm.collectives import Collectives
from fsdpctl.comm.waits import HostWaits, Waits

T = TypeVar("T")
Groups = Sequence[Sequence[int]]  # the ranks of each group; together, all ranks


def _renamed(name: str, old_name: str) -> Callable[..., dist.Work]:
    """Return a function that torch 2.13 renamed; its old name warns since then."""
    return getattr(dist, name, None) or getattr(dist, old_name)  # type: ignore[no-any-return]


all_gather_single = _renamed("all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = _renamed("reduce_scatter_single", "reduce_scatter_tensor")

_GroupKey = tuple[tuple[tuple[int, ...], ...], str, str]  # ranks of all groups, device, purpose
# By default group. Weak keys free the groups when the default group is destroyed.
_GROUPS = WeakKeyDictionary[dist.ProcessGroup, dict[_GroupKey, dist.ProcessGroup]]()


class ProcessGroupCollectives(Collectives):
    """The common part of the collectives over gloo and NCCL.

    The group of all ranks is the default process group. If gathers and reductions overlap,
    reductions have a separate group: collectives of one group run one after the other. Each group
    costs sockets and threads, or GPU memory. Broadcasts and barriers are not in a training step,
    so `waits` does not measure them.
    """

    _device_type = "cpu"

    def __init__(self, groups: Groups | None = None, purpose: str = "gather") -> None:
        """Join this rank's group; None: all ranks. Groups with another `purpose` may overlap it."""
        self._groups = groups or [range(dist.get_world_size())]
        self.group = (
            dist.distributed_c10d._get_default_group()
            if groups is None
            else _get_group(groups, self._device_type, purpose)
        )
        self.reduce_group = self.group
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self.waits: Waits = HostWaits()

    def use_separate_reduce_group(self) -> None:
        self.reduce_group = _get_group(self._groups, self._device_type, "reduce")

    def all_reduce(self, values: Tensor) -> Tensor:
        self.waits.measure(lambda: dist.all_reduce(values, group=self.group))
        return values

    def all_to_all(self, values: Tensor) -> Tensor:
        received = torch.empty_like(values)
        self.waits.measure(lambda: dist.all_to_all_single(received, values, group=self.group))
        return received

    def broadcast(self, values: Tensor, source: int = 0) -> Tensor:
        dist.broadcast(values, group=self.group, group_src=source)
        return values

    def all_gather_values(self, value: T) -> list[T]:
        return all_gather_values(value, self.group)

    def barrier(self) -> None:
        dist.barrier(group=self.group)


def all_gather_values(value: T, group: dist.ProcessGroup) -> list[T]:
    """Return the values of all ranks in rank order; unlike in torch, nothing is unpickled.

    All values must have one type, else msgspec raises: plain values, or dataclasses of plain
    values. Containers within them, such as tuples, arrive as lists.
    """
    device = dist.distributed_c10d._get_object_coll_device(group)
    encoded = bytearray(msgspec.msgpack.encode(value))
    payload = torch.frombuffer(encoded, dtype=torch.uint8).to(device)
    size = torch.tensor([len(payload)], device=device)
    sizes = [int(each) for each in _all_gather(size, group)]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: len(payload)] = payload
    padded_payloads = zip(_all_gather(padded, group), sizes, strict=True)
    payloads = (each[:n].cpu().numpy().tobytes() for each, n in padded_payloads)
    return [msgspec.msgpack.decode(each, type=type(value)) for each in payloads]


def _all_gather(values: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    gathered = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(gathered, values, group=group)
    return gathered


def _get_group(groups: Groups, device_type: str, purpose: str) -> dist.ProcessGroup:
    """Return this rank's process group of `groups`; create it if necessary. Collective.

    Each rank creates only its own group, but all ranks at once: NCCL splits the default group's
    communicator. All ranks must create groups in the same order, or they would wait for one
    another. All models share the groups: threads, sockets and NCCL memory exist as long as the
    default group, whose timeout they have.
    """
    default = dist.distributed_c10d._get_default_group()
    groups_by_key = _GROUPS.setdefault(default, {})
    key = (tuple(map(tuple, groups)), device_type, purpose)
    if key not in groups_by_key:
        options = default._get_backend(torch.device(device_type)).options
        timeout = None if options is None else options._timeout  # None: torch's fake backend
        rank = dist.get_rank()
        ranks = next(list(each) for each in groups if rank in each)
        group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        groups_by_key[key] = group
    return groups_by_key[key]
