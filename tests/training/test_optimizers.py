"""The optimizers: every name has a row, a class and an option, and no other name trains."""

from dataclasses import replace

import pytest
from torch import nn

from fsdpctl.config.compose import compose_config
from fsdpctl.config.schema import KEYS
from fsdpctl.errors import UsageError
from fsdpctl.estimate.planned_steps import optimizer_states
from fsdpctl.io.packages import package_folder
from fsdpctl.plan.optimizers import OPTIMIZERS
from fsdpctl.resolve.launchers import ESTIMATE_ROLE
from fsdpctl.resolve.prepare import prepare
from fsdpctl.resolve.run_plan import stored_config
from fsdpctl.training.assemble import OPTIMIZER_CLASSES, make_optimizer


def test_every_optimizer_has_a_row_a_class_and_an_option():
    options = {each.stem for each in (package_folder("conf") / "optimizer").glob("*.yaml")}
    assert set(OPTIMIZERS) == set(OPTIMIZER_CLASSES) == options
    assert {f"optimizer.{key}" for row in OPTIMIZERS.values() for key in row.keys} <= set(KEYS)


def test_an_unknown_optimizer_neither_trains_nor_is_estimated():
    composed = compose_config([])
    config = stored_config(composed.config)
    config = replace(config, optimizer=replace(config.optimizer, name="lion"))
    match = "^optimizer=lion: not supported; expected adamw, sgd, muon$"
    with pytest.raises(UsageError, match=match):
        prepare(replace(composed, config=config), ESTIMATE_ROLE)
    with pytest.raises(UsageError, match=match):
        optimizer_states(config)
    with pytest.raises(UsageError, match=match):
        make_optimizer(config, nn.Linear(1, 1))  # type: ignore[arg-type]  # is not looked at


@pytest.mark.parametrize(("name", "momentum", "states"), [
    ("adamw", 0.9, (2, 4)), ("sgd", 0.9, (1, 0)), ("sgd", 0.0, (0, 0)), ("muon", 0.0, (2, 4)),
])  # fmt: skip
def test_states_are_those_of_the_row(name, momentum, states):
    config = stored_config(prepare(compose_config([]), ESTIMATE_ROLE).config)
    optimizer = replace(config.optimizer, name=name, momentum=momentum)
    result = optimizer_states(replace(config, optimizer=optimizer))
    assert (result.moments, result.counter) == states
