"""The values of `auto` that depend on the machine."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from fsdpctl.comm.world import World
from fsdpctl.config.compose import compose_config
from fsdpctl.errors import UsageError
from fsdpctl.launch.run_summary import _dtypes
from fsdpctl.resolve.launchers import LaunchRole
from fsdpctl.resolve.machine import (
    assign_ranks,
    note_on_tf32,
    notes_on_cluster,
    without_other_cluster,
)
from fsdpctl.resolve.prepare import Prepared
from fsdpctl.resolve.run_plan import RunPlan
from fsdpctl.training.worker import _run


@pytest.mark.parametrize("native", [True, False])
def test_bf16_is_selected_only_if_the_card_supports_it(monkeypatch, native):
    """V100 and T4 emulate bf16, which torch counts as support by default."""

    def supported(including_emulation: bool = True) -> bool:
        return native or including_emulation

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr("fsdpctl.resolve.machine._memory_here", lambda device, ranks: 1e9)
    config = compose_config(["launch.device=cuda"]).config
    placed = assign_ranks(config, LaunchRole(config.launch))
    assert placed.precision.param_dtype == ("bfloat16" if native else "float32")


@pytest.mark.parametrize(("setting", "native", "parts"), [
    ("precision=fp32", True, ("precision=tf32 is faster", "in float32")),
    ("precision=tf32", True, ()), ("precision=bf16", True, ()), ("precision=fp32", False, ()),
    ("precision=tf32", False, ("precision=tf32: not supported by V100",)),
    ("precision=tf32 cpu", True, ("precision=tf32: not supported by a CPU of ",)),
    ("precision=fp32 cpu", True, ()),
])  # fmt: skip
def test_float32_names_tf32_and_a_card_without_it_is_named(setting, native, parts, monkeypatch):
    device = "cpu" if "cpu" in setting else "cuda"
    config = compose_config([setting.split()[0]]).config.changed({"launch.device": device})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "V100")
    note = note_on_tf32(config)
    assert bool(note) == bool(parts)
    assert all(text in note for text in parts)
    dtypes = _dtypes(cast("Prepared", SimpleNamespace(config=config)))
    is_tf32 = "precision=tf32" in setting and "cpu" not in setting
    assert dtypes.startswith("float32 with TF32 products") == is_tf32


@pytest.mark.parametrize("setting", ["precision=tf32", "precision=fp32"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_cuda_ranks_train_in_tf32_and_leave_the_process_as_it_was(device, setting, monkeypatch):
    products, seen = torch.backends.cuda.matmul, []
    plan = SimpleNamespace(config=compose_config([setting, f"launch.device={device}"]).config)

    def fails(*options: object, **more: object) -> None:
        seen.append(products.fp32_precision)
        raise UsageError("of the data")

    monkeypatch.setattr("fsdpctl.training.assemble.make_trainer", fails)
    before, kwargs = products.fp32_precision, SimpleNamespace(rank=0)
    with pytest.raises(UsageError):
        _run(cast("RunPlan", plan), cast("World", kwargs), 0.0, None, only_measures=True)
    is_tf32 = (device, setting) == ("cuda", "precision=tf32")
    assert seen == ["tf32" if is_tf32 else before]
    assert products.fp32_precision == before


def test_host_memory_is_that_of_this_machine_or_of_a_known_cluster(monkeypatch):
    monkeypatch.setattr("fsdpctl.resolve.machine.host_memory", lambda: 12 << 30)

    def memory(*settings: str) -> tuple[float | None, float | None]:
        cluster = assign_ranks(compose_config(list(settings)).config).cluster
        return cluster.memory, cluster.host_memory

    on_cpu = ["launch.device=cpu", "launch.nproc_per_node=3"]
    assert memory(*on_cpu) == (4, 12)
    assert memory(*on_cpu, "cluster.memory=5") == (5, 15)  # the ranks need not be on this machine
    if not torch.cuda.is_available():  # the host of another machine is unknown
        assert memory("launch.device=cuda", "cluster.memory=5") == (5, None)
        single = assign_ranks(compose_config(["cluster.memory=24GB"]).config)
        assert (single.launch.device, single.num_ranks) == ("cuda", 1)
        assert single.precision.param_dtype == "bfloat16"
    assert memory("launch.device=cuda", "cluster.memory=5", "cluster.host_memory=7") == (5, 7)
    assert (memory("cluster=h100")[1], memory("cluster=l40s")[1]) == (2048, None)


def test_a_run_is_on_this_machine_whatever_its_recipe_is_sized_for(tmp_path, monkeypatch):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("cluster: 64xh100\ncluster.host_memory: 9\ncluster.memory: 3\n")
    sized = compose_config(["cluster.memory=2GiB", "launch.device=cpu"], str(recipe))
    assert sized.config.launch.nnodes == 8
    local = without_other_cluster(without_other_cluster(sized))
    assert notes_on_cluster(local)[0].startswith("sized for 64xh100; this machine is a CPU of ")
    cluster, launch = local.config.cluster, local.config.launch
    assert (launch.nproc_per_node, launch.nnodes, cluster.name) == (None, 1, "local")
    assert (cluster.memory, cluster.host_memory, cluster.flops) == (2, None, None)
    for settings in (["cluster=4xh100"], ["cluster=h100", "launch.nnodes=2"]):
        with pytest.raises(UsageError, match=rf"{settings[0]}: this machine is .* estimate-memory"):
            without_other_cluster(compose_config([*settings, "launch.device=cpu"], str(recipe)))
    for settings in ([], ["cluster.memory=5"], ["cluster=local"], ["cluster=cpu"]):
        composed = compose_config([*settings, "launch.device=cpu"])
        assert without_other_cluster(composed) is composed
        assert notes_on_cluster(composed) == ()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "NVIDIA H100 80GB HBM3")
    composed = compose_config([], str(recipe))
    assert without_other_cluster(composed) is composed
    with pytest.raises(UsageError, match="cluster=a10: this machine is NVIDIA H100"):
        without_other_cluster(compose_config(["cluster=a10"]))
