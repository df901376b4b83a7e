"""A run on a mixture: its metrics, exact resuming and evaluation."""

import json

import pytest

from tests.commands.run import TINY, figures, fsdpctl, make_text
from tests.training.ranks import lines


@pytest.mark.slow
def test_a_mixture_is_reported_by_source_and_resumes_to_the_bit(tmp_path):
    (tmp_path / "other.txt").write_text(make_text(tmp_path).read_text()[::-1][:1200])
    path = "data.path=words.txt:0.75,less=other.txt:0.25"
    settings = [*TINY[:-2], "data=text", "checkpoint.every=10", "data.val_fraction=0.2", path]

    def train(run_dir, steps, ranks):
        done = fsdpctl(
            "train", *settings, f"train.run_dir={run_dir}", f"train.steps={steps}",
            f"launch.nproc_per_node={ranks}", "lr_scheduler=constant", cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    out = train("whole", 40, 1)
    assert "words (75.0%), less (25.0%)" in out
    assert "less: epoch 2 begins" in out
    train("parts", 20, 1)
    train("parts", 40, 1)
    of_parts, of_whole = (
        [each for each in figures(tmp_path / run) if each[0] != 20 or each[1]]
        for run in ("parts", "whole")
    )  # except for the validation over all data at the end of the first part
    assert of_parts == of_whole
    train("two", 40, 2)
    pairs = zip(figures(tmp_path / "two"), figures(tmp_path / "whole"), strict=True)
    assert all(a[1] == pytest.approx(b[1], rel=1e-5) for a, b in pairs if a[1] is not None)
    steps = {line["step"]: line for line in lines(tmp_path / "whole") if "loss" in line}
    assert steps[40]["tokens/words"] + steps[40]["tokens/less"] == 40 * 8 * 16
    assert steps[40]["epochs/less"] > 1
    last = next(line for line in lines(tmp_path / "whole")[::-1] if "val_loss" in line)
    result = fsdpctl("evaluate", "whole", "--json", cwd=tmp_path)
    by_source = json.loads(result.stdout)["loss_by_source"]
    assert by_source["less"] == pytest.approx(last["val_loss/less"], rel=1e-5)
    assert set(by_source) == {"words", "less"}
    other = [
        "train", *settings[:-1], path.replace("0.75", "0.6"), "train.steps=44",
        "launch.nproc_per_node=1", "lr_scheduler=constant",
    ]  # fmt: skip
    refused = fsdpctl(*other, "train.run_dir=whole", cwd=tmp_path)
    assert refused.returncode == 2
    assert "pass --resume whole to start a new run from its state" in refused.stderr
    new = fsdpctl(*other, "train.run_dir=new", "--resume", "whole", cwd=tmp_path)
    assert new.returncode == 0, new.stderr
    assert ("changed data.path was" in new.stdout, figures(tmp_path / "new")[0][0]) == (True, 41)
