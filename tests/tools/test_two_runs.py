"""Two runs side by side."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fsdpctl.checkpoint.cast import numbers
from fsdpctl.checkpoint.consolidate import shard_weights
from fsdpctl.checkpoint.manifest import PARAMETER, Progress, TensorInfo
from fsdpctl.checkpoint.publish import About
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.io.run_files import METRICS
from fsdpctl.plan.layout import Span
from fsdpctl.tools import tensors as tensors_module
from fsdpctl.tools.tensors import CheckpointDifference, compare_checkpoints
from fsdpctl.tools.two_runs import TwoRuns, compare_runs
from tests.cli.run import invoke
from tests.hostile import RANK_FILE
from tests.run.runs import make_run, save, step_line, write_lines

NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "uint16": "BF16"}


class Arrays:
    """Tensors in memory, as a source of checkpoints; uint16 are the bits of bfloat16."""

    def __init__(self, **arrays: NDArray) -> None:
        self._arrays = {f"{PARAMETER}/{name}": each for name, each in arrays.items()}

    def names(self, kind: str) -> list[str]:
        start = f"{kind}/"
        return sorted(key.removeprefix(start) for key in self._arrays if key.startswith(start))

    def info(self, key: str) -> TensorInfo:
        array = self._arrays[key]
        return TensorInfo(list(array.shape), NAMES[array.dtype.name])

    def read(self, key: str, span: Span | None = None) -> Iterator[tuple[Span, memoryview]]:
        flat = self._arrays[key].reshape(-1)
        span = span or Span(0, flat.size)
        if span.numel:
            yield span, flat[span.start : span.stop].copy().view(np.uint8).data

    def save(self, folder: Path, num_files: int = 1, step: int = 7) -> CheckpointReader:
        shard_weights(self, folder, num_files=num_files, about=About(Progress(step), {}, {}))
        return CheckpointReader(folder)


def compared(a: CheckpointReader, b: CheckpointReader) -> CheckpointDifference:
    return compare_checkpoints(a, b)


def compare(a: Path, b: Path) -> TwoRuns:
    return compare_runs(a, b)


@pytest.fixture
def run(tmp_path):
    """Three steps, a validation and a checkpoint."""
    folder = make_run(tmp_path / "run", done=3)
    write_lines(folder, {"step": 3, "val_loss": 0.5}, {"step": 3, "warning": "a word"})
    save(folder, 3)
    return folder


@pytest.fixture
def twin(run):
    return Path(shutil.copytree(run, run.with_name("twin"), symlinks=True))


def test_a_run_is_equal_to_its_copy(run, twin):
    found = compare(run, twin)
    assert found.differences == []
    assert found.configuration == ()
    assert found.series["loss"].compared == 3
    assert found.series["val_loss"].compared == 1
    assert found.checkpoint is not None
    assert len(found.checkpoint.tensors) > 10
    assert found.checkpoint.different == ()


@pytest.mark.parametrize("files", [(1, 1), (1, 3), (4, 2)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_differences_are_computed_over_whole_tensors(tmp_path, monkeypatch, files, dtype):
    monkeypatch.setattr(tensors_module, "_WINDOW", 1000)
    draw = np.random.default_rng(0)
    a = draw.normal(size=(70, 61)).astype(dtype)
    b = a.copy()
    b[3:60, 5] += draw.normal(size=57).astype(dtype)
    b[69, 60] = 40.0
    same, extra = draw.normal(size=300).astype(dtype), np.ones(3, dtype)
    one = Arrays(w=a, same=same, one=extra).save(tmp_path / "a", files[0])
    two = Arrays(w=b, same=same, two=extra).save(tmp_path / "b", files[1])
    found = compared(one, two)
    assert found.step == 7
    assert (found.only_a, found.only_b) == (("model/one",), ("model/two",))
    (worst,) = found.different
    apart = a.astype(float) - b.astype(float)
    assert worst.key == "model/w"
    assert worst.max_abs == np.abs(apart).max()
    assert worst.num_different == np.count_nonzero(apart)
    norms = np.linalg.norm(a.astype(float)), np.linalg.norm(b.astype(float))
    assert worst.relative_norm == pytest.approx(np.linalg.norm(apart) / max(norms), rel=1e-12)


def test_the_worst_tensor_comes_first(tmp_path):
    base = np.ones(10, np.float32)
    one = Arrays(a=base, b=base, c=base, d=base).save(tmp_path / "a")
    two = Arrays(a=base * 1.01, b=base * 3, c=base, d=base * np.float32(np.nan)).save(
        tmp_path / "b"
    )
    found = compared(one, two)
    assert [each.key[-1] for each in found.different] == ["d", "b", "a"]
    assert found.different[0].max_abs is None


def test_non_finite_values_are_equal_to_themselves(tmp_path):
    odd = np.array([np.nan, np.inf, -np.inf, 0.0, 1.0], np.float32)
    one = Arrays(odd=odd, none=np.zeros(0, np.float32)).save(tmp_path / "a")
    two = Arrays(odd=odd, none=np.zeros(0, np.float32)).save(tmp_path / "b", 2)
    found = compared(one, two)
    assert found.different == ()
    other = Arrays(odd=-odd, none=np.zeros(0, np.float32)).save(tmp_path / "c")
    (worst,) = compared(one, other).different
    assert (worst.num_different, worst.max_abs, worst.relative_norm) == (3, None, None)


def test_different_shapes_and_dtypes_are_reported(tmp_path):
    values = np.arange(8, dtype=np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    one = Arrays(shape=values, dtype=values).save(tmp_path / "a")
    two = Arrays(shape=values.reshape(2, 4), dtype=bits).save(tmp_path / "b")
    about = {each.key: each.about for each in compared(one, two).different}
    assert about == {"model/shape": "shapes 8 and 2x4", "model/dtype": "dtypes F32 and BF16"}


def test_stored_numbers_are_read_as_floats():
    assert numbers(np.array([1, 2**40]).data, "I64").tolist() == [1.0, 2.0**40]
    bits = np.array([0x3F80, 0xC040], np.uint16)
    assert numbers(bits.view(np.uint8).data, "BF16").tolist() == [1.0, -3.0]
    assert numbers(np.array([True, False]).data, "BOOL").tolist() == [1.0, 0.0]


def test_the_first_and_the_largest_difference_of_losses_are_reported(run, twin):
    (twin / METRICS).unlink()
    changed = {2: 0.5001, 3: 9.0}
    lines = [step_line(n, **({"loss": changed[n]} if n in changed else {})) for n in (1, 2, 3)]
    write_lines(twin, *lines, {"step": 3, "val_loss": 0.5})
    found = compare(run, twin)
    loss = found.series["loss"]
    assert loss.first is not None
    assert loss.largest is not None
    assert (loss.first.step, loss.first.a, loss.first.b) == (2, 0.5, 0.5001)
    assert (loss.largest.step, loss.num_different) == (3, 2)
    assert found.series["grad_norm"].first is None
    assert found.differences == ["loss from step 2 on (0.5 and 0.5001)"]


def test_steps_in_one_run_only_are_a_difference(run, twin):
    write_lines(twin, step_line(4), step_line(5))
    found = compare(run, twin)
    assert (found.series["loss"].only_a, found.series["loss"].only_b) == (0, 2)
    assert found.differences == ["2 steps in one run only"]


def test_a_non_finite_loss_differs_from_a_finite_one_only(run, twin):
    for folder, loss in ((run, None), (twin, None)):
        write_lines(folder, step_line(4, loss=loss))
    assert compare(run, twin).differences == []
    write_lines(run, step_line(5, loss=None))
    write_lines(twin, step_line(5))
    (said,) = compare(run, twin).differences
    assert said == "loss from step 5 on (not finite and 0.2)"
    assert compare(run, twin).series["loss"].to_dict()["largest"]["difference"] is None


def test_the_last_values_of_a_repeated_step_count(run, twin):
    write_lines(twin, step_line(3, loss=7.0), step_line(3))
    assert compare(run, twin).differences == []


def test_the_newest_checkpoints_of_a_common_step_are_compared(run, twin):
    save(run, 5)
    save(twin, 6)
    checkpoint = compare(run, twin).checkpoint
    assert checkpoint is not None
    assert checkpoint.step == 1  # as made, of folder step-3
    shutil.rmtree(twin / "checkpoints" / "step-00000003")
    found = compare(run, twin)
    assert found.checkpoint is None
    assert found.differences == ["no common step with a complete checkpoint"]


def test_different_settings_are_reported_but_do_not_count(run, twin):
    (twin / "config.yaml").write_text("train.steps: 200\ntrain.seed: 1\ntrain.run_dir: x\n")
    found = compare(run, twin)
    told = {each.key: (each.a, each.b) for each in found.configuration}
    assert told == {"train.steps": ("100", "200"), "train.seed": (None, "1")}
    assert found.differences == []


def test_a_corrupted_checkpoint_is_named(run, twin):
    file = twin / "checkpoints" / "step-00000003" / RANK_FILE
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=str(file)):
        compare(run, twin)
    code, said = invoke("compare-runs", str(run), str(twin))
    assert code == 4
    assert str(file) in said
    assert "\n" not in said


def test_a_corrupted_line_is_named_and_an_incomplete_last_line_is_skipped(run, twin):
    with (twin / METRICS).open("a") as file:
        file.write('{"step": 4, "lo')
    assert compare(run, twin).differences == []
    with (twin / METRICS).open("a") as file:
        file.write("\n")
    with pytest.raises(UsageError, match=r"twin/metrics\.jsonl, line 6: corrupted"):
        compare(run, twin)


def test_a_directory_that_is_not_a_run_is_rejected(run, tmp_path):
    with pytest.raises(UsageError, match="not a run of fsdpctl"):
        compare(run, tmp_path)


def test_the_command_prints_a_table_and_sets_the_exit_code(run, twin):
    words = ["compare-runs", str(run), str(twin)]
    code, text = invoke(*words, "--assert-equal")
    assert code == 0
    for part in ("loss", "equal", "configurations are equal", "none differ"):
        assert part in text
    write_lines(twin, step_line(3, loss=2.0))
    code, text = invoke(*words)
    assert code == 0
    assert "step 3: 0.333333333 and 2" in text
    code, said = invoke(*words, "--assert-equal")
    assert code == 1
    assert "\n" not in said
    assert "loss from step 3 on" in said
    code, text = invoke(*words, "--json")
    found = json.loads(text)
    assert (code, found["equal"]) == (0, False)
    assert found["loss"]["first"] == {"step": 3, "a": 1 / 3, "b": 2.0}
    assert found["checkpoint"]["different"] == []
