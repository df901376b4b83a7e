"""Bytes that a rank sends in a step: in closed form, and by the interface's own counter."""

import json
import subprocess
from pathlib import Path

import pytest

from fsdpctl.config.compose import compose_config
from fsdpctl.estimate.planned_steps import SentBytes, sent_per_step
from fsdpctl.models.build_model import build_model
from fsdpctl.models.module_spec import module_units
from fsdpctl.resolve.launchers import ESTIMATE_ROLE
from fsdpctl.resolve.prepare import prepare
from fsdpctl.resolve.run_plan import make_run_plan
from tests.commands.run import TINY, command, environment, make_text

FP32 = 4


def sent(*args: str, micro_batches: int = 1) -> tuple[SentBytes, int]:
    """Return the traffic, and the number of parameters."""
    fixed = ["launch.device=cpu", "launch.share_memory=false", "model.vocab_size=256"]
    config = make_run_plan(prepare(compose_config([*fixed, *args]), ESTIMATE_ROLE).config).config
    module = build_model(config.model)
    num_params = sum(param.numel() for param in module.parameters())
    return sent_per_step(config, module_units(module, None), micro_batches), num_params


@pytest.mark.parametrize("engine", ["fsdpctl", "ddp"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_unsharded_gradients_are_all_reduced(engine, ranks):
    args = [f"engine={engine}", "strategy=no_shard", f"launch.nproc_per_node={ranks}"]
    num_bytes, num_params = sent(*args)
    assert num_bytes.total == pytest.approx(2 * (ranks - 1) / ranks * num_params * FP32, rel=0.01)


@pytest.mark.parametrize(
    "args", [["strategy=full_shard"], ["strategy=hybrid_shard", "strategy.dp_shard_size=2"]]
)
def test_fully_shard_sends_the_same_except_for_units_gathered_once(args):
    ours, num_params = sent(*args, "launch.nproc_per_node=4")
    theirs, _ = sent(*args, "launch.nproc_per_node=4", "engine=fsdp2")
    assert theirs.inter_replica == pytest.approx(ours.inter_replica, rel=0.01)
    assert ours.intra_replica <= theirs.intra_replica * 1.01
    assert theirs.intra_replica <= 3 * num_params * FP32
    assert ours.intra_replica > 2 / 3 * theirs.intra_replica


def test_replicas_exchange_their_parts():
    args = ["strategy=hybrid_shard", "strategy.dp_shard_size=2", "launch.nproc_per_node=8"]
    num_bytes, num_params = sent(*args)
    assert num_bytes.inter_replica == pytest.approx(2 * 3 / 4 * num_params * FP32 / 2, rel=0.01)


@pytest.mark.parametrize("engine", ["fsdpctl", "fsdp2"])
def test_only_passes_that_reduce_send_gradients(engine):
    args = [f"engine={engine}", "launch.nproc_per_node=2"]
    once, num_params = sent(*args)
    every, _ = sent(*args, "accumulation=every", micro_batches=5)
    last, _ = sent(*args, "accumulation=last", micro_batches=5)
    assert every.total == pytest.approx(5 * once.total, rel=0.15)  # first units: gathered once
    assert every.total - last.total == pytest.approx(4 * num_params * FP32 / 2, rel=0.01)


@pytest.mark.parametrize("engine", ["fsdpctl", "fsdp2"])
def test_one_rank_sends_nothing(engine):
    assert sent(f"engine={engine}", "launch.nproc_per_node=1")[0].total == 0


def counted(folder: Path, steps: int, *args: str) -> tuple[int, int]:
    """Return the bytes over a loopback interface, and the planned bytes of a rank's step."""
    out = folder / f"{args[0]}-{steps}"
    line = subprocess.list2cmdline(command("compare", *args, "--steps", str(steps)))
    counter = "awk '/lo:/ {print $10}' /proc/net/dev"
    script = f"ip link set lo up; {counter}; {line} --json --out {out} >{out}.json"
    result = subprocess.run(
        ["unshare", "--net", "sh", "-c", f"{script} && {counter}"],
        cwd=folder, capture_output=True, text=True, timeout=200, env=environment(),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    before, after = map(int, result.stdout.split())
    (row,) = json.loads(Path(f"{out}.json").read_text())
    return after - before, row["sent_bytes_per_step"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("full_shard", 2), ("no_shard", 3), ("shard_optimizer", 2), ("hybrid_shard", 4)],
)
def test_planned_bytes_are_sent_over_the_interface(tmp_path, strategy, ranks):
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        pytest.skip("takes a network namespace")
    sizes = ["model.hidden_size=256", "model.intermediate_size=512", "train.global_batch_size=12"]
    names = [arg.partition("=")[0] for arg in sizes]
    args = [f"strategy={strategy}", *(arg for arg in TINY if arg.partition("=")[0] not in names)]
    args += ["launch.share_memory=false", *sizes, f"data.path={make_text(tmp_path)}"]
    args += [f"launch.nproc_per_node={ranks}"]
    args += ["strategy.dp_shard_size=2"] * (strategy == "hybrid_shard")
    (few, planned), (many, _) = (counted(tmp_path, steps, *args) for steps in (5, 25))
    assert (many - few) / 20 / ranks == pytest.approx(planned, rel=0.03)
