"""Each planted fault is detected, in any order of kernels."""

import re

import pytest

from fsdpctl.plan.strategy import STRATEGIES
from tests.distributed import distributed
from tests.emulated.cases import Case
from tests.emulated.faults import FAULTS


def ranks_for(case: Case) -> int:
    return 4 if STRATEGIES[case.strategy].replicates else 2


@distributed(timeout=30, on_devices=True)
def planted(rank: int, world_size: int, name: str, seed: int) -> None:
    case, plant = FAULTS[name]
    plant()
    case.check(rank, world_size)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, seed: int) -> None:
    with pytest.raises((AssertionError, TimeoutError)) as error:
        planted(world_size=ranks_for(FAULTS[name][0]), name=name, seed=seed)
    if name.startswith("no wait"):  # detected by the clocks, not by a wrong value
        assert re.search(r"race: .* on stream|freed too early", str(error.value))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "world_size"), {case: ranks_for(case) for case, _ in FAULTS.values()}.items(), ids=str
)
@distributed(timeout=60, on_devices=True)
def test_without_a_fault_nothing_is_detected(rank: int, world_size: int, case: Case) -> None:
    case.check(rank, world_size)
