"""The panel of a run that ran out of memory."""

import pytest

from fsdpctl.commands.outcome import _show_failure
from fsdpctl.config.compose import compose_config
from fsdpctl.config.model_path import RUN_CONFIG
from fsdpctl.config.serialize import config_to_yaml
from fsdpctl.launch.outcome import Failure, Outcome
from fsdpctl.resolve.machine import placed_here

WORDS = ["model.vocab_size=256", "cluster.memory=0.75", "train.seq_len=2048"]


@pytest.mark.parametrize(("exit_code", "message"), [
    (1, "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …"),
    pytest.param(-9, "", marks=pytest.mark.slow),
])  # fmt: skip
def test_the_panel_says_what_was_needed_and_what_would_fit(tmp_path, capsys, exit_code, message):
    config = placed_here(compose_config(WORDS).config)
    (tmp_path / RUN_CONFIG).write_text(config_to_yaml(config))
    failure = Failure(1, "here", exit_code, message, 0)
    _show_failure(failure, tmp_path, Outcome((failure,), None))
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "estimated" in said
    assert "768.0 MiB available per rank" in said
    assert "peak " in said
    assert "to fit" in said
    assert "activation_checkpointing=" in said or "train.micro_batch_size=" in said
    fits = placed_here(compose_config([WORDS[0], "train.seq_len=16"]).config)
    (tmp_path / RUN_CONFIG).write_text(config_to_yaml(fits))
    killed = Failure(1, "here", -9, "", 0)
    _show_failure(killed, tmp_path, Outcome((killed,), None))
    assert "to fit" not in capsys.readouterr().err  # it was killed for another reason
