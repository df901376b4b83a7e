"""Collectives over gloo (CPU) and NCCL (CUDA) process groups.

Note: why gloo's own reductions are not used. gloo reduces by an all-reduce of everything, in ring
order. An all-to-all followed by additions in rank order moves half the bytes, and its result does
not depend on which rank owns what: every strategy gives the same bits.
"""

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fsdpctl.comm.base import Collectives, Handle, LocalCollectives
from fsdpctl.plan.layout import Span, are_even
from fsdpctl.plan.transport import MAX_DIRECT_RANKS, Transport, reduce_workspace

_Collective = Callable[..., dist.Work]


def _renamed(name: str, before: str) -> _Collective:
    """A function that torch 2.13 renamed; the old name warns there."""
    found: _Collective = getattr(dist, name, None) or getattr(dist, before)
    return found


_all_gather_single = _renamed("all_gather_single", "all_gather_into_tensor")
_reduce_scatter_single = _renamed("reduce_scatter_single", "reduce_scatter_tensor")

_BROADCAST_FROM_BYTES = 16 << 20  # from here one broadcast per part beats gloo's all-gather


_GroupKey = tuple[tuple[tuple[int, ...], ...], str, str]
_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dict[_GroupKey, dist.ProcessGroup]] = (
    WeakKeyDictionary()
)


class _ProcessGroupCollectives:
    """What gloo and NCCL do alike. Gathers and reductions have a process group each."""

    _device_type = "cpu"

    def __init__(self, groups: Sequence[Sequence[int]] | None = None) -> None:
        """Join the ranks of one of `groups`, which together are all ranks; None: all ranks."""
        groups = groups or [range(dist.get_world_size())]
        self._gather_group = _own_group(groups, self._device_type, "gather")
        self._reduce_group = _own_group(groups, self._device_type, "reduce")
        self.rank = dist.get_rank(self._gather_group)
        self.size = dist.get_world_size(self._gather_group)

    def all_reduce(self, values: Tensor) -> Tensor:
        """By the backend's all-reduce, at once."""
        dist.all_reduce(values, group=self._gather_group)
        return values

    def broadcast(self, values: Tensor, source: int = 0) -> Tensor:
        """By the backend's broadcast, at once."""
        dist.broadcast(values, group=self._gather_group, group_src=source)
        return values

    def gather_objects(self, value: object) -> list[object]:
        """By the backend's all-gather of pickled objects."""
        values: list[object] = [None] * self.size
        dist.all_gather_object(values, value, group=self._gather_group)
        return values

    def barrier(self) -> None:
        """By the backend's barrier."""
        dist.barrier(group=self._gather_group)

    def _start_broadcasts(self, whole: Tensor, parts: Sequence[Span]) -> list[dist.Work]:
        return [
            dist.broadcast(
                whole[part.start : part.stop],
                group=self._gather_group,
                group_src=owner,
                async_op=True,
            )
            for owner, part in enumerate(parts)
            if part.numel
        ]


def _own_group(
    groups: Sequence[Sequence[int]], device_type: str, purpose: str
) -> dist.ProcessGroup:
    """The process group of this rank; every rank takes part in making all of them.

    All models share them: a group has threads, sockets and with NCCL memory that live as long as
    the default group. It times out as that does.
    """
    default = dist.distributed_c10d._get_default_group()
    made = _GROUPS.setdefault(default, {})
    key = (tuple(map(tuple, groups)), device_type, purpose)
    if key not in made:
        options = default._get_backend(torch.device(device_type)).options
        own, _ = dist.new_subgroups_by_enumeration(
            [list(ranks) for ranks in groups], timeout=options._timeout
        )
        assert isinstance(own, dist.ProcessGroup)
        made[key] = own
    return made[key]


class GlooCollectives(_ProcessGroupCollectives):
    """Collectives on the CPU, overlapped by gloo's own threads."""

    def all_gather(self, whole: Tensor, parts: Sequence[Span], shard: Tensor | None) -> Handle:
        """By gloo's all-gather, or one broadcast per part where that is faster."""
        own = parts[self.rank]
        if shard is not None:
            whole[own.start : own.stop].copy_(shard)
        small = whole.nbytes < _BROADCAST_FROM_BYTES or self.size > MAX_DIRECT_RANKS
        if small and are_even(parts):
            source = whole[own.start : own.stop]
            works = [_all_gather_single(whole, source, group=self._gather_group, async_op=True)]
        else:
            works = self._start_broadcasts(whole, parts)

        return _after_works(works, whole)

    def reduce_scatter(self, whole: Tensor, parts: Sequence[Span]) -> Handle:
        """By an all-to-all and additions in rank order; see the note above."""
        own = parts[self.rank]
        workspace = whole.new_empty(reduce_workspace(Transport.GLOO, parts, self.rank))
        if self.size > MAX_DIRECT_RANKS and are_even(parts):
            work = _reduce_scatter_single(workspace, whole, group=self._reduce_group, async_op=True)
            return _after_works([work], workspace, workspace.nbytes)
        work = dist.all_to_all_single(
            workspace,
            whole,
            output_split_sizes=[own.numel] * self.size,
            input_split_sizes=[part.numel for part in parts],
            group=self._reduce_group,
            async_op=True,
        )

        def finish() -> Tensor:
            nonlocal work
            work.wait()
            del work  # and with it `whole`
            total, *others = workspace.view(self.size, own.numel).unbind()
            for contribution in others:
                total += contribution
            return total

        return Handle(finish, workspace.nbytes)

    def start_all_reduce(self, values: Tensor) -> Handle:
        """By gloo's all-reduce."""
        work = dist.all_reduce(values, group=self._reduce_group, async_op=True)
        return _after_works([work], values)


class NcclCollectives(_ProcessGroupCollectives):
    """Collectives on CUDA, gathers and reductions on a stream each.

    Memory is allocated on the compute stream only and given back after the compute stream has
    waited for its last use, so no tensor needs `record_stream`. A shard that is copied from must
    outlive its all-gather.
    """

    _device_type = "cuda"

    def __init__(self, device: torch.device, groups: Sequence[Sequence[int]] | None = None) -> None:
        """Join one of `groups`; None: all ranks."""
        super().__init__(groups)
        self._gather_stream = torch.cuda.Stream(device, priority=-1)
        self._reduce_stream = torch.cuda.Stream(device, priority=-1)

    def all_gather(self, whole: Tensor, parts: Sequence[Span], shard: Tensor | None) -> Handle:
        """On the gather stream."""
        own = parts[self.rank]
        # Whoever used this memory before did so on the current stream; a prefetch is issued
        # before the running unit's work, so it overlaps with that.
        self._gather_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._gather_stream):
            source = whole[own.start : own.stop]
            if shard is not None:
                source.copy_(shard)
            if are_even(parts):
                _all_gather_single(whole, source, group=self._gather_group)
            else:
                for work in self._start_broadcasts(whole, parts):
                    work.wait()
            done = self._gather_stream.record_event()
        return _after_event(done, whole)

    def reduce_scatter(self, whole: Tensor, parts: Sequence[Span]) -> Handle:
        """On the reduce stream; the result is a part of `whole`."""
        own = parts[self.rank]
        part = whole[own.start : own.stop]
        self._reduce_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._reduce_stream):
            if are_even(parts):
                _reduce_scatter_single(part, whole, group=self._reduce_group)
            else:
                for owner, span in enumerate(parts):
                    if span.numel:
                        dist.reduce(
                            whole[span.start : span.stop],
                            group=self._reduce_group,
                            group_dst=owner,
                        )
            done = self._reduce_stream.record_event()
        return _after_event(done, part)

    def start_all_reduce(self, values: Tensor) -> Handle:
        """On the reduce stream."""
        self._reduce_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._reduce_stream):
            dist.all_reduce(values, group=self._reduce_group)
            done = self._reduce_stream.record_event()
        return _after_event(done, values)


def _after_works(works: list[dist.Work], result: Tensor, workspace_nbytes: int = 0) -> Handle:
    def finish() -> Tensor:
        while works:
            works.pop().wait()
        return result

    return Handle(finish, workspace_nbytes)


def _after_event(done: torch.cuda.Event, result: Tensor) -> Handle:
    def finish() -> Tensor:
        torch.cuda.current_stream().wait_event(done)
        return result

    return Handle(finish)


def collectives_for(
    device: torch.device, groups: Sequence[Sequence[int]] | None = None
) -> Collectives:
    """Collectives among the ranks of this rank's group, or of this process alone.

    Args:
        device: where the tensors lie.
        groups: a division of all ranks; None is one group of all.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return LocalCollectives()
    if groups is not None and len(groups[0]) == 1:
        return LocalCollectives()
    return NcclCollectives(device, groups) if device.type == "cuda" else GlooCollectives(groups)
