"""Lines that a start prints before it prepares anything."""

import pytest

from fsdpctl.config.compose import compose_config
from fsdpctl.launch.prepare_run import report_if_finished
from fsdpctl.resolve.run_plan import stored_config
from fsdpctl.run.directory import RunDirState, StartKind


@pytest.mark.parametrize(("length", "key"), [
    (("train.steps=12",), "train.steps"),
    (("train.epochs=1",), "train.epochs"),
    (("train.tokens=1e4",), "train.tokens"),
    (("train.steps=40",), "train.patience"),
])  # fmt: skip
def test_a_finished_run_names_the_key_that_makes_it_longer(length, key):
    config = stored_config(compose_config(length).config)
    messages: list[str] = []
    assert report_if_finished(RunDirState(config, StartKind.FINISHED, 12), messages.append)
    assert messages[1].startswith(f"set a larger {key} to continue")
