"""What a run says while it waits."""

import pytest

from fsdpctl.optim.record import StepFigures
from fsdpctl.train.clock import StepTimes
from fsdpctl.train.metrics import PeakMemory, StepMetrics
from fsdpctl.train.progress import RunProgress


def test_a_wait_for_a_checkpoint_is_told_every_ten_seconds_of_it(capsys):
    progress = RunProgress(10, 0, log_every=1, num_ranks=2, shows=True, log=None)
    for share, seconds in [(0.1, 0.5), (0.4, 9.9), (0.5, 10.1), (0.6, 19.0), (0.9, 20.2)]:
        progress.saving(share, seconds)
    progress.saving(0.1, 0.5)  # the next one
    progress.saving(0.2, 10.5)
    said = capsys.readouterr().out.splitlines()
    assert said == [f"waiting for the checkpoint, {share}% written" for share in (50, 90, 20)]


def step_metrics(memory: PeakMemory) -> StepMetrics:
    figures = StepFigures(
        loss=3.2149, grad_norm=0.8412, tokens=20_000, finite=True, stop_requested=False
    )
    times = StepTimes(total=1.0, compute=1.0, exposed_communication=0.0, data=0.0, optimizer=0.0)
    return StepMetrics(120, figures, 2.9e-4, times, memory)


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        (PeakMemory(None, 333 << 20), "333.0 MiB"),
        (PeakMemory(1, 459 << 30, 791 << 30, 0), "459.0/791.0 GiB (58%)"),
    ],
)
def test_a_line_has_what_other_trainers_print(capsys, memory, said):
    progress = RunProgress(1000, 0, log_every=10, num_ranks=2, shows=True, log=None)
    progress.step(step_metrics(memory), None)
    line = capsys.readouterr().out
    start = (
        "step 120/1000  loss 3.215  grad_norm 0.84  lr 0.00029  20,000 tok/s (10,000 per rank)  "
    )
    assert line.startswith(f"{start}{said}  ")
    assert "num_alloc_retries" in step_metrics(memory).to_line()
