"""The engine on CUDA devices: the CPU's losses, no race, and no step that has the host wait."""

import pytest

from fsdpctl.plan.strategy import STRATEGIES
from tests.distributed import distributed
from tests.emulated.cases import Case, every_case
from tests.matrix import fast


@pytest.mark.parametrize(
    ("case", "world_size"),
    [(Case("full_shard", precision="bf16 wire"), 2), (Case("hybrid_shard", window="last"), 4)],
    ids=["full_shard", "hybrid_shard"],
)
@pytest.mark.parametrize("seed", fast(0, slow=[1, 2]))
@distributed(timeout=120, on_devices=True)
def test_strategies_give_the_losses_of_cpu_ranks(
    rank: int, world_size: int, case: Case, seed: int
) -> None:
    case.check(rank, world_size)


def orders() -> list[tuple[str, int, int]]:
    """Each strategy on 1, 2 and 4 ranks, and on as many as it needs in twenty orders of kernels."""
    found = [(name, ranks, 0) for name in STRATEGIES for ranks in (1, 2, 4)]
    for name, row in STRATEGIES.items():
        found += [(name, 4 if row.replicates else 2, seed) for seed in range(1, 20)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "world_size", "seed"), orders())
@distributed(timeout=600, on_devices=True)
def test_everything_gives_the_losses_of_cpu_ranks_in_any_order_of_kernels(
    rank: int, world_size: int, strategy: str, seed: int
) -> None:
    for case in every_case():
        if case.strategy == strategy:
            case.check(rank, world_size)
