"""The engine on CUDA devices: the CPU's losses, no race, and no step that has the host wait."""

import pytest

from fsdpctl.plan.strategy import STRATEGIES
from tests.distributed import distributed
from tests.emulated.cases import Case, every_case
from tests.matrix import fast


@pytest.mark.parametrize("seed", fast(0, slow=[1, 2]))
@distributed(world_size=4, timeout=120, on_devices=True)
def test_strategies_give_the_losses_of_cpu_ranks(rank: int, world_size: int, seed: int) -> None:
    for case in (Case("full_shard", precision="bf16 wire"), Case("hybrid_shard", window="last")):
        case.check(rank, world_size)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "seed"), [(1, 0), (4, 0), *((2, n) for n in range(20))])
@pytest.mark.parametrize("strategy", list(STRATEGIES))
@distributed(timeout=600, on_devices=True)
def test_everything_gives_the_losses_of_cpu_ranks_in_any_order_of_kernels(
    rank: int, world_size: int, strategy: str, seed: int
) -> None:
    for case in every_case():
        if case.strategy == strategy:
            case.check(rank, world_size)
