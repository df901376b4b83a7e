"""Ranks that share memory."""

from dataclasses import dataclass
from itertools import product

import pytest
from torch import Tensor, nn

from fsdpctl.engine.build import Sharding
from fsdpctl.engine.shard import shard_model
from tests.distributed import distributed
from tests.engine import test_parity as parity
from tests.engine.odd import KINDS
from tests.matrix import fast


@dataclass(frozen=True)
class Case(parity.Case):
    """A case of every strategy, over shared memory."""

    @property
    def exact(self) -> bool:
        return self.window != "every"

    def trained(self, rank: int) -> dict[str, Tensor]:
        kind, (strategy, owner_map) = KINDS[self.kind], self.sharding
        net: nn.Module = kind.make().to(self.dtype)
        model = shard_model(net, Sharding(strategy, owner_map=owner_map, share_memory=True))
        assert model.mesh.shard.shares_memory
        parity.train(model, rank, self.batches, kind, self.window)
        state: dict[str, Tensor] = model.state_dict()
        return state


@pytest.mark.parametrize("world_size", fast(2, 3, slow=[4, 8]))
@distributed(timeout=300)
def test_equals_one_process_bit_for_bit(rank: int, world_size: int) -> None:
    every = product(KINDS, parity.WINDOWS)
    shardings = parity.SHARDINGS
    parity.check(
        rank,
        [
            Case(shardings[number % len(shardings)], *each, world_size)
            for number, each in enumerate(every)
        ],
    )
