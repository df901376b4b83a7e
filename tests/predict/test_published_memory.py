"""Published measurements of memory, compared with estimates.

From torchtitan's repository: benchmarks/llama3_h100_202412_torchtitan.md, table 1 (8 B: reserved),
and pull request 165 (7 B: allocated and reserved, as shares of 95.0396 GiB).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpctl.config.schema import ActivationCheckpointingConfig
from fsdpctl.estimate.traced_model import MetaModule, PassTracer
from fsdpctl.models.module_spec import module_units
from fsdpctl.plan.precision import Precision
from fsdpctl.plan.step_plan import MeshPosition, StepPlan, Transport
from fsdpctl.plan.strategy import get_strategy
from fsdpctl.plan.units import lay_out
from fsdpctl.predict.allocator import CachingAllocator
from fsdpctl.predict.memory_recorder import MemoryRecorder
from fsdpctl.predict.peak import AllocationTrace, replay
from fsdpctl.predict.torch_steps import Fsdp2Steps
from fsdpctl.predict.training_plan import TrainingPlan
from tests.predict.torchtitan_model import LLAMA_7B, LLAMA_8B, Shape, Titan

GIB = 1 << 30


def estimated(
    shape: Shape, length: int, checkpointing: str, run: Callable[[nn.Module], object]
) -> CachingAllocator:
    """Replay steps on eight ranks, in bfloat16 with float32 reduction, and AdamW by tensor."""
    with torch.device("meta"):
        model = Titan(shape, length)
    units = module_units(model, None)
    traced = PassTracer(MetaModule(model, units), dtype=torch.bfloat16, device="cuda")
    model_pass = traced.model_pass(run, ActivationCheckpointingConfig(checkpointing))
    recorder = MemoryRecorder(model_pass, units[-1].name, last_is_head=True)
    strategy, position = get_strategy("full_shard"), MeshPosition(0, 8, 1, Transport.NCCL)
    model_layout = lay_out(units, strategy, 8, 8, "even")
    precision = Precision("bfloat16", None, "float32")
    plan = TrainingPlan(StepPlan(model_layout, position, precision), (True,))
    steps = Fsdp2Steps(units, strategy, plan, recorder, fused=False)
    allocator = CachingAllocator(streams=recorder.streams)
    replay(AllocationTrace(recorder, steps, draws=False, cuda=True), allocator)
    return allocator


@dataclass(frozen=True)
class Published:
    """A run of torchtitan on eight H100, and its memory in GiB."""

    name: str
    shape: Shape
    samples: int
    length: int
    checkpointing: str
    keeps_logits: bool  # in float32, until the next forward has returned
    measured: Mapping[str, float]

    def estimate(self) -> CachingAllocator:
        outliving: list[Tensor] = []

        def run(model: nn.Module) -> None:
            shape = (self.samples, self.length)
            logits = model(torch.empty(shape, dtype=torch.int64))
            if self.keeps_logits:
                logits = logits.float()
                outliving[:] = [logits]
            targets = torch.empty(shape, dtype=torch.int64)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))
            del logits
            loss.backward()

        return estimated(self.shape, self.length, self.checkpointing, run)


PUBLISHED = [
    Published(
        "Llama 3.1 8B, 2 x 8192 tokens, selective checkpointing", LLAMA_8B, samples=2, length=8192,
        checkpointing="selective", keeps_logits=False, measured={"reserved": 82.4},
    ),
    Published("Llama 2 7B, 8 x 2048 tokens, full checkpointing", LLAMA_7B, samples=8, length=2048,
     checkpointing="full", keeps_logits=True, measured={"allocated": 22.73, "reserved": 31.02}),
]  # fmt: skip


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda each: each.name)
def test_a_published_run_is_estimated(published):
    result = published.estimate()
    measured = published.measured
    assert result.peak_reserved / GIB == pytest.approx(measured["reserved"], rel=0.05)
    if "allocated" in measured:
        assert result.peak_allocated / GIB == pytest.approx(measured["allocated"], rel=0.03)
