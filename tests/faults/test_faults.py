"""Some cases of the fault campaign; `python -m tests.faults.campaign` runs any number."""

from pathlib import Path

import pytest

from tests.faults.campaign import PATIENCE, Sums, final_sums, run_case
from tests.faults.cases import case_of
from tests.faults.running import Run, codes_of

pytestmark = pytest.mark.slow
_SEEDS = 12


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Sums:
    run = Run(tmp_path_factory.mktemp("undisturbed"))
    assert codes_of(run.start(), PATIENCE) == [0], run.out
    return final_sums(run.run_dir)


@pytest.mark.parametrize("seed", range(_SEEDS))
def test_a_disturbed_run_ends_rightly_and_goes_on(tmp_path: Path, undisturbed: Sums, seed: int):
    result = run_case(case_of(seed), tmp_path / "case", undisturbed)
    assert result["wrong"] == [], result
