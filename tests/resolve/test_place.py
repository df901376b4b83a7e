"""What is chosen for a machine by itself."""

import pytest
import torch

from fsdpctl.config.compose import compose_config
from fsdpctl.resolve.place import place


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
    assert memory("launch.device=cuda", "cluster.memory=5") == (5, 12)
    assert memory("launch.device=cuda", "cluster.memory=5", "cluster.host_memory=7") == (5, 7)
    assert memory("cluster=h100")[1] == 2048
    assert memory("cluster=l40s")[1] is None
