"""When gloo's all-reduces begin."""

from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from fsdpctl.comm.base import Handle
from fsdpctl.comm.gloo import GlooCollectives
from fsdpctl.plan.transport import ALL_REDUCED_TOGETHER
from tests.distributed import distributed


class Begun:
    """The sizes of the all-reduces that have begun since the last look, in order."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._all_reduce = dist.all_reduce

    def all_reduce(self, values: Tensor, **how: object) -> object:
        """As torch's."""
        self._sizes.append(values.numel())
        return self._all_reduce(values, **how)  # type: ignore[arg-type]  # whatever it was given

    def look(self) -> list[int]:
        """And forget them."""
        sizes, self._sizes = self._sizes, []
        return sizes


@distributed(world_size=2)
def test_sums_are_right_and_in_order_whenever_they_begin(rank: int, world_size: int) -> None:
    collectives, begun = GlooCollectives(), Begun()

    def start(numel: int, *, at_once: bool = False) -> Handle:
        return collectives.start_all_reduce(torch.full((numel,), rank + 1.0), at_once=at_once)

    with mock.patch.object(dist, "all_reduce", begun.all_reduce):
        kept = [start(3), start(5)]
        assert begun.look() == []
        sums = [kept[1].wait(), kept[0].wait()]
        assert begun.look() == [3, 5]
        started = [start(2), start(4, at_once=True)]
        assert begun.look() == [2, 4]
        started += [start(7), start(ALL_REDUCED_TOGETHER // 4)]
        assert begun.look() == [7, ALL_REDUCED_TOGETHER // 4]
        sums += [handle.wait() for handle in started]
    assert [len(each) for each in sums] == [5, 3, 2, 4, 7, ALL_REDUCED_TOGETHER // 4]
    assert all(bool((each == 3).all()) for each in sums)
