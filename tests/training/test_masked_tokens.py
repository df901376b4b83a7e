"""Training on token files with flags that mask tokens."""

import math
from pathlib import Path

import numpy as np
import pytest

from fsdpctl.errors import SelfCheckError
from fsdpctl.training.validation_loss import describe_validation, validation_loss
from tests.distributed import distributed
from tests.training.ranks import CPU, lines, new_trainer, run_args

COUNT = 64 * 12 * 4  # the samples of four steps


def settings(folder: Path, flags: np.ndarray, *more: str) -> list[str]:
    """Write tokens with flags, and return the settings of a run on two ranks."""
    np.random.default_rng(0).integers(0, 200, len(flags) + 1).astype("<u2").tofile(folder / "a.bin")
    np.append(True, flags).tofile(folder / "a.bin.loss")
    args = ["data=tokens", f"data.path={folder / 'a.bin'}", "data.format=uint16", "train.steps=4",
            "model.vocab_size=256", "train.seq_len=64", *more]  # fmt: skip
    return run_args(folder, 2, *args)


@distributed(timeout=150)
def train(rank: int, world_size: int, typed: list[str], folder: str) -> None:
    trainer = new_trainer([*typed, f"train.run_dir={folder}/run"])
    trainer.run()
    if (batches := trainer.parts.val_batches) is not None:
        model = trainer.parts.model
        result = validation_loss(
            model, batches, model.collectives, CPU, max_batches=0, chunk_tokens=0
        )
        assert result is not None
        assert math.isnan(result.mean)
        assert result.to_line() == {"val_loss": None}
        assert "nan" in describe_validation(result, trainer.parts.data)


@distributed(timeout=150)
def refused(rank: int, world_size: int, typed: list[str], folder: str) -> None:
    with pytest.raises(SelfCheckError, match="no token of the step is trained on"):
        new_trainer([*typed, f"train.run_dir={folder}/run"]).run()


def steps(folder: Path) -> list[dict[str, float]]:
    return [each for each in lines(folder / "run") if "grad_norm" in each]


def test_the_tokens_of_a_step_that_are_trained_on_are_counted(tmp_path):
    flags = np.arange(COUNT) % 4 == 0
    train(world_size=2, typed=settings(tmp_path, flags, "train.self_check=auto"), folder=tmp_path)
    assert [each["trained_tokens"] for each in steps(tmp_path)] == [64 * 12 / 4] * 4
    assert [each["tokens"] for each in steps(tmp_path)] == [64 * 12] * 4


@pytest.mark.slow
def test_steps_and_validations_without_a_trained_token_change_nothing(tmp_path):
    typed = settings(tmp_path, np.zeros(COUNT, bool), "data.val_fraction=0.3")
    train(world_size=2, typed=typed, folder=tmp_path)
    typed = [each.replace("self_check=off", "self_check=auto") for each in typed]
    (tmp_path / "checked").mkdir()
    refused(world_size=2, typed=typed, folder=tmp_path / "checked")
    assert {(x["trained_tokens"], x["loss"], x["grad_norm"]) for x in steps(tmp_path)} == {(0,) * 3}
