"""Learning rates step by step, beside the schedulers of transformers."""

from dataclasses import replace

import pytest
import torch
from transformers import get_scheduler

from fsdpctl.config.schema import LrSchedulerConfig
from fsdpctl.training.learning_rate import lr_factor, warmup_steps

THEIRS = LrSchedulerConfig(start_lr_ratio=0.0, min_lr_ratio=0.0, reaches_min=False)
LINEAR = replace(THEIRS, name="wsd", decay_ratio=1.0)
CASES: dict[str, tuple[LrSchedulerConfig, dict]] = {
    "linear": (LINEAR, {}), "cosine": (replace(THEIRS, name="cosine"), {}),
    "cosine_with_min_lr": (replace(THEIRS, min_lr_ratio=0.3), {"min_lr_rate": 0.3}),
    "constant": (replace(THEIRS, name="constant"), {}),
    "constant_with_warmup": (replace(THEIRS, name="constant"), {}),
    "warmup_stable_decay": (
        replace(THEIRS, name="wsd", decay_ratio=0.25, decay_type="cosine"), {"num_decay_steps": 10},
    ),
}  # fmt: skip


def rates_of_transformers(
    name: str, warmup: int, steps: int, more: dict, lr: float = 1.0
) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler = get_scheduler(name, optimizer, warmup, steps, scheduler_specific_kwargs=more)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("name", CASES)
def test_rates_are_those_of_transformers(name, warmup):
    config, more = CASES[name]
    warmup = 0 if name == "constant" else warmup
    ours = [lr_factor(replace(config, warmup_steps=warmup), step, 40) for step in range(40)]
    assert ours == pytest.approx(rates_of_transformers(name, warmup, 40, more), abs=1e-12)


@pytest.mark.parametrize("kind", ["linear", "cosine", "1-sqrt"])
@pytest.mark.parametrize("lowest", [0.0, 0.2])
def test_each_form_of_a_decay_is_that_of_transformers(kind, lowest):
    config = replace(THEIRS, name="wsd", decay_ratio=0.5, decay_type=kind, min_lr_ratio=lowest)
    ours = [lr_factor(replace(config, warmup_steps=0), step, 30) for step in range(30)]
    more = {"num_decay_steps": 15, "decay_type": kind, "min_lr_ratio": lowest}
    assert ours == pytest.approx(rates_of_transformers("warmup_stable_decay", 0, 30, more))


def test_a_warmup_is_a_share_rounded_up_or_at_most_a_number_of_steps():
    share = LrSchedulerConfig(warmup_ratio=0.03, warmup_steps=None)
    capped = replace(share, warmup_steps=100)
    assert [warmup_steps(share, steps) for steps in (1, 100, 101, 5000)] == [1, 3, 4, 150]
    assert [warmup_steps(capped, steps) for steps in (1, 100, 133, 5000)] == [0, 3, 3, 100]


def test_the_last_step_has_the_final_rate_unless_the_step_after_it_would():
    for name in ("cosine", "wsd"):
        config = LrSchedulerConfig(name=name, warmup_steps=3, min_lr_ratio=0.1)
        assert lr_factor(config, 19, 20) == pytest.approx(0.1)
        other = replace(config, reaches_min=False)
        assert lr_factor(other, 19, 20) > 0.1
        assert lr_factor(other, 20, 20) == pytest.approx(0.1)
