"""The recipe that an estimate writes, and its dry run on a machine without the GPUs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands.run import TINY, invoke, make_text

JOBS = {
    "selected": (["cluster=16xh100", "strategy=auto"], "16, on each of 2 nodes 8 on cuda"),
    "does not fit": (["cluster=4xrtx4090", "cluster.memory=2.0"], "4 on cuda"),
    "by tokens": (["cluster=8xH200", "train.global_batch_tokens=5000"], "8 on cuda"),
    "of a size": (["cluster.memory=3", "cluster.price=2"], "1 on cuda"),
    "fitted": (
        ["cluster=2xa100_40", "cluster.memory=2.2", "data.val_fraction=0", "--fit", "seq_len"],
        "2 on cuda",
    ),
    "of CPUs": (["launch.nproc_per_node=2"], "2 on cpu"),
}


@pytest.fixture
def args(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = [arg for arg in TINY if not arg.startswith("train.global_batch_size")]
    return [*settings, f"data.path={make_text(tmp_path)}", "train.steps=10"]


@pytest.mark.parametrize("job", JOBS)
def test_a_printed_recipe_is_what_was_sized_and_a_dry_run_checks_it_for_its_ranks(args, job):
    more, ranks = JOBS[job]
    code, out = invoke("estimate-memory", *args, *more, "--print-config")
    assert code == 0, out
    recipe = out[out.index("model: ") : out.rindex("verdict ")]
    Path("sized.yaml").write_text(recipe)
    sized = _estimated(*args, *more)
    sized = sized.get("fit", {}).get("estimate", sized)
    again = _estimated("sized.yaml")
    assert "selected" not in again  # the recipe has all selected values
    same = ("strategy", "world_size", "seq_len", "micro_batch_size", "num_micro_batches",
            "peak_reserved_bytes", "memory_bytes")  # fmt: skip
    assert {name: again[name] for name in same} == {name: sized[name] for name in same}
    code, out = invoke("train", "--dry-run", "sized.yaml", "train.require_fit=false")
    assert (code, "it would run" in out) == (0, True), out
    assert f"ranks   {ranks}" in out
    assert ("checked for cluster=" in out) == (job != "of CPUs")


def test_a_dry_run_of_a_job_refuses_what_its_ranks_cannot_run(args):
    Path("job.yaml").write_text("cluster: 16xh100\nlaunch.device: cuda\n")
    for wrong in ("strategy.dp_shard_size=3", "train.global_batch_size=8"):
        code, out = invoke("train", "--dry-run", "job.yaml", *args, wrong, "strategy=hybrid_shard")
        assert (code, out.startswith(f"{wrong}: ")) == (2, True), out
    _, out = invoke("train", "--dry-run", "job.yaml", *args, "launch.device=cpu")
    assert "on cpu" in out
    code, out = invoke("train", "job.yaml", *args)
    assert (code, out.startswith("launch.device=cuda: torch finds no CUDA device")) == (2, True)


def test_a_recipe_of_several_estimates_is_refused(args):
    for more in (["--all-strategies"], ["--json"], ["--from", "no.yaml"]):
        code, out = invoke("estimate-memory", *args, *more, "--print-config")
        assert (code, out.startswith("--print-config: conflicts with --from")) == (2, True)


def _estimated(*args: str) -> dict[str, Any]:
    code, out = invoke("estimate-memory", *args, "--json")
    assert code == 0, out
    content: dict[str, Any] = json.loads(out[out.index("{") :])
    return content
