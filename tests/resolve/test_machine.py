"""What is chosen for a machine by itself."""

import pytest
import torch

from fsdpctl.config.compose import compose_config
from fsdpctl.resolve.machine import placed_here


@pytest.mark.parametrize("native", [True, False])
def test_bf16_is_selected_only_if_the_card_supports_it(monkeypatch, native):
    """V100 and T4 emulate it, which torch counts as support unless it is asked."""

    def supported(including_emulation: bool = True) -> bool:
        return native or including_emulation

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr("fsdpctl.resolve.machine._memory_here", lambda device, ranks: 1e9)
    placed = placed_here(compose_config(["launch.device=cuda"]).config)
    assert placed.precision.param_dtype == ("bfloat16" if native else "float32")
