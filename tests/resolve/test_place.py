"""What is chosen for a machine by itself."""

import pytest
import torch

from fsdpctl.config.compose import compose_config
from fsdpctl.errors import UsageError
from fsdpctl.resolve.place import notes_on_cluster, on_this_machine, place


@pytest.mark.parametrize("native", [True, False])
def test_bf16_is_selected_only_if_the_card_supports_it(monkeypatch, native):
    """V100 and T4 emulate it, which torch counts as support unless it is asked."""

    def supported(including_emulation: bool = True) -> bool:
        return native or including_emulation

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr("fsdpctl.resolve.place._memory_here", lambda device, ranks: 1e9)
    config = compose_config(["launch.device=cuda"]).config
    placed = place(config, (config.launch, None))
    assert placed.precision.param_dtype == ("bfloat16" if native else "float32")


def test_host_memory_is_that_of_this_machine_or_of_a_known_cluster(monkeypatch):
    monkeypatch.setattr("fsdpctl.resolve.place.host_memory", lambda: 12 << 30)

    def memory(*words: str) -> tuple[float | None, float | None]:
        cluster = place(compose_config(list(words)).config).cluster
        return cluster.memory, cluster.host_memory

    on_cpu = ["launch.device=cpu", "launch.nproc_per_node=3"]
    assert memory(*on_cpu) == (4, 12)
    assert memory(*on_cpu, "cluster.memory=5") == (5, 15)  # of ranks that need not be here
    if not torch.cuda.is_available():  # the host of another machine is unknown
        assert memory("launch.device=cuda", "cluster.memory=5") == (5, None)
        alone = place(compose_config(["cluster.memory=24GB"]).config)
        assert (alone.launch.device, alone.num_ranks) == ("cuda", 1)
        assert alone.precision.param_dtype == "bfloat16"
    assert memory("launch.device=cuda", "cluster.memory=5", "cluster.host_memory=7") == (5, 7)
    assert (memory("cluster=h100")[1], memory("cluster=l40s")[1]) == (2048, None)


def test_a_run_is_on_this_machine_whatever_its_recipe_is_sized_for(tmp_path, monkeypatch):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("cluster: 64xh100\ncluster.host_memory: 9\ncluster.memory: 3\n")
    sized = compose_config(["cluster.memory=2GiB", "launch.device=cpu"], str(recipe))
    assert sized.config.launch.nnodes == 8
    found = on_this_machine(on_this_machine(sized))
    assert notes_on_cluster(found)[0].startswith("sized for 64xh100; this machine is a CPU of ")
    cluster, launch = found.config.cluster, found.config.launch
    assert (launch.nproc_per_node, launch.nnodes, cluster.name) == (None, 1, "local")
    assert (cluster.memory, cluster.host_memory, cluster.flops) == (2, None, None)
    for words in (["cluster=4xh100"], ["cluster=h100", "launch.nnodes=2"]):
        with pytest.raises(UsageError, match=rf"{words[0]}: this machine is .* estimate-memory"):
            on_this_machine(compose_config([*words, "launch.device=cpu"], str(recipe)))
    for words in ([], ["cluster.memory=5"], ["cluster=local"], ["cluster=cpu"]):
        composed = compose_config([*words, "launch.device=cpu"])
        assert on_this_machine(composed) is composed
        assert notes_on_cluster(composed) == ()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "NVIDIA H100 80GB HBM3")
    composed = compose_config([], str(recipe))
    assert on_this_machine(composed) is composed
    with pytest.raises(UsageError, match="cluster=a10: this machine is NVIDIA H100"):
        on_this_machine(compose_config(["cluster=a10"]))
