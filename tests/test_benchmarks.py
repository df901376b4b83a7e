"""The benchmarks run and describe themselves; their measurements are not tested."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from benchmarks import gpu_session
from benchmarks.registered import RECIPES, SEARCHED
from benchmarks.report import PAIRS
from docs import measured
from tests import emulated
from tests.commands.run import environment

ROOT = Path(__file__).parent.parent


def run(module: str, out: Path, *args: str) -> dict[str, object]:
    command = [sys.executable, "-m", f"benchmarks.{module}", "--out", str(out), *args]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment()
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, object] = json.loads(out.read_text())
    assert report["benchmark"] == module
    return report


@pytest.mark.slow
@pytest.mark.parametrize(("module", "args"), [
    ("step_time", ["--sizes", "8M", "--dtypes", "fp32", "--starts", "1", "--rounds", "1"]),
    ("host_time", ["--rounds", "1"]), ("startup", ["--rounds", "1"]),
    ("planning", ["--rounds", "1"]), ("growth", ["--steps", "200"]),
    ("estimates", ["--count", "1"]), ("decoders", ["--only", "llama"]),
    ("little_memory", ["--seeds", "1", "--steps", "30"]),
    ("update_time", ["--rounds", "1", "--width", "64"]),
    ("waiting", ["--rounds", "1", "--steps", "6"]), ("corpus", ["--mib", "1", "17"]),
    ("base_reads", []),
])  # fmt: skip
def test_a_benchmark_writes_what_it_measured(tmp_path: Path, module: str, args: list[str]) -> None:
    report = run(module, tmp_path / "report.json", *args)
    assert report["results"]
    assert {"torch", "machine"} <= set(report)


@pytest.mark.slow
@pytest.mark.skipif(emulated.missing() is not None, reason=str(emulated.missing()))
def test_all_parts_that_a_gpu_runs_run_in_small_on_an_emulated_device(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_session", "--small", "--out", str(tmp_path)]
    environ = {**environment(), **emulated.environment()}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((tmp_path / "gpu-session.json").read_text())["results"]
    assert len(parts) == 11
    assert {each["code"] for each in parts} == {0}, parts
    for name in ("fake8", "memory", "nccl1", "largest", "attention", "host-time", "compiled"):
        assert json.loads((tmp_path / f"gpu-{name}.json").read_text())["results"]


def test_a_part_that_fails_ends_a_session_with_its_name(tmp_path: Path, monkeypatch: Any) -> None:
    def answer(part: gpu_session.Part) -> dict[str, object]:
        return {"part": part.name, "code": int(part.name.startswith("compiled"))}

    monkeypatch.setattr(gpu_session, "missing", list)
    monkeypatch.setattr(gpu_session, "answer", answer)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    monkeypatch.setattr(sys, "argv", ["gpu_session", "--half", "2", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="failed: compiled, fused, collected"):
        gpu_session.main()


@pytest.mark.parametrize(("name", "groups"), [("step-time-cpu", 2), ("step-time-cpu-ddp", 1)])
def test_engines_that_are_compared_compute_the_same(name: str, groups: int) -> None:
    results = json.loads((measured.RESULTS / f"{name}.json").read_text())["results"]
    for each in results:
        losses = {name: engine["last_loss"] for name, engine in each["engines"].items()}
        pairs = [(ours, theirs) for ours, theirs in PAIRS.items() if ours in losses]
        assert len(pairs) == 2 * groups
        for ours, theirs in pairs:
            # Autocast, which DDP uses, rounds at other operations.
            if theirs.startswith("fsdp2") or each["dtype"] == "fp32":
                assert losses[ours] == pytest.approx(losses[theirs], rel=1e-5)


def _text_of(page: str) -> str:
    return " ".join((Path(measured.__file__).parent / f"{page}.md").read_text().split())


def test_a_rank_grows_from_step_200_to_5000_by_at_most_what_the_pages_say() -> None:
    first, *later = json.loads((measured.RESULTS / "growth.json").read_text())["results"]
    assert (first["step"], later[-1]["step"]) == (200, 5000)
    assert max(each["over_first"] for each in later) <= 1.02
    for page in ("long-runs", "method/evidence"):
        assert "grows by at most 2% in 5,000 steps" in _text_of(page)


def test_registered_predictions_are_of_thirty_public_recipes_with_a_commit_and_a_day() -> None:
    report = json.loads((measured.RESULTS / "registered.json").read_text())
    assert [each["settings"] for each in report["results"]] == [each.settings for each in RECIPES]
    assert len(RECIPES) == len({each.settings for each in RECIPES}) == 30
    assert (len(report["commit"]), report["searched"]) == (10, SEARCHED)
    assert all(row["low"] <= row["seconds"] <= row["high"] for row in report["results"])


def test_no_engine_of_pytorch_holds_less() -> None:
    for each in json.loads((measured.RESULTS / "peak-memory-cpu.json").read_text())["results"]:
        for ours, theirs in PAIRS.items():
            assert each[f"{ours}_over_{theirs}"] <= 1


def test_compressed_states_learn_as_much_as_float32_within_the_spread_of_the_seeds() -> None:
    report = json.loads((measured.RESULTS / "little-memory.json").read_text())
    assert report["steps"] >= 1000
    base, *compressed, lossy = report["results"]
    for kind in ("train_losses", "validation_losses"):
        expected = base[kind]
        assert len(expected) >= 5
        for each in compressed:
            assert abs(mean(each[kind]) - mean(expected)) <= stdev(expected), each["name"]
    # Lost quality would show in training; validation depends more on the seed.
    base_losses, lost = base["train_losses"], lossy["train_losses"]
    assert mean(lost) - mean(base_losses) > stdev(base_losses)


def test_int8_moments_take_six_bytes_and_nf4_weights_little_time() -> None:
    report = json.loads((measured.RESULTS / "update-time.json").read_text())
    result = {each["name"]: each for each in (*report["results"], *report["adapters"])}
    assert result["int8 moments"]["bytes_per_parameter"] <= 6.1
    assert result["NF4 weights"]["over_float32"] <= 1.08
