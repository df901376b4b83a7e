"""What runs where: engine, launch, and the hardware that estimates assume."""

import os
from dataclasses import dataclass

from fsdpctl.config.keys import key
from fsdpctl.plan.attention import ARCHITECTURES

_MOST_RANKS, _MOST_NODES = 1 << 10, 1 << 17  # of a node; ten times the largest there are


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Who shards: fsdpctl, or for comparison one of PyTorch's own."""

    name: str = "fsdpctl"


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """How workers are started."""

    name: str = "local"
    nproc_per_node: int | None = key(
        None, "ranks; auto: one per CUDA device, else 2", minimum=1, maximum=_MOST_RANKS, auto=True
    )
    nnodes: int = key(1, "machines", minimum=1, maximum=_MOST_NODES)
    node_rank: int | None = key(
        None, "which of several machines this is", minimum=0, maximum=_MOST_NODES - 1
    )
    rdzv_endpoint: str | None = key(
        None, "HOST:PORT of machine 0, where the launchers of several meet"
    )
    interface: str | None = key(
        None, "by which machines talk; auto: what reaches rdzv_endpoint", auto=True
    )
    device: str | None = key(None, "where ranks compute", choices=("cpu", "cuda"), auto=True)
    allocator: str = key(
        "expandable", "CUDA: how its memory is kept", choices=("expandable", "native")
    )
    timeout: float = key(
        600.0, "seconds after which a stuck collective ends the run", minimum=1, maximum=1e6
    )
    hang_timeout: float | None = key(
        None,
        "seconds after which a rank that stands still is reported; auto: half of launch.timeout",
        minimum=1,
        maximum=1e6,
        auto=True,
    )
    max_restarts: int = key(
        0, "how often failed ranks are started again", minimum=0, maximum=1_000_000
    )
    nproc_min: int | None = key(
        None,
        "fewest ranks of a machine to go on with; auto: no fewer than before",
        minimum=1,
        maximum=_MOST_RANKS,
        auto=True,
    )
    nnodes_min: int | None = key(
        None,
        "fewest machines to go on with; auto: no fewer than before",
        minimum=1,
        maximum=_MOST_NODES,
        auto=True,
    )
    time_limit: float | None = key(
        None,
        "seconds from the start of the launch, in which the last step is done and saved",
        minimum=1,
        maximum=1e9,
        optional=True,
    )

    @property
    def allocator_environment(self) -> dict[str, str]:
        """What a rank on CUDA needs in its environment before torch is imported."""
        if "PYTORCH_CUDA_ALLOC_CONF" in os.environ:  # torch's older name for the same
            return {}
        return {"PYTORCH_ALLOC_CONF": f"expandable_segments:{self.allocator == 'expandable'}"}


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Hardware that estimates assume; nothing runs there."""

    name: str = "here"
    memory: float | None = key(
        None,
        "what a rank may use, as torch reports a device's",
        unit="GiB",
        minimum=0.001,
        maximum=1e6,
        auto=True,
    )
    ranks_per_node: int | None = key(
        None,
        "what launch.nproc_per_node=auto becomes in estimates",
        minimum=1,
        maximum=_MOST_RANKS,
        auto=True,
    )
    flops: float | None = key(
        None,
        "TFLOP/s of dense products in bf16",
        minimum=1e-3,
        maximum=1e6,
        is_later=True,
        optional=True,
    )
    flops_fp32: float | None = key(
        None, "the same in fp32", minimum=1e-3, maximum=1e6, is_later=True, optional=True
    )
    memory_bandwidth: float | None = key(
        None, "GB/s of a device's memory", minimum=1e-3, maximum=1e6, is_later=True, optional=True
    )
    intra_bandwidth: float | None = key(
        None,
        "GB/s of a rank's link within its node, each way",
        optional=True,
        minimum=1e-4,
        maximum=1e6,
        is_later=True,
    )
    inter_bandwidth: float | None = key(
        None,
        "GB/s of a rank's share of its node's network cards, each way",
        optional=True,
        minimum=1e-4,
        maximum=1e6,
        is_later=True,
    )
    architecture: str | None = key(
        None,
        "generation of the GPUs, by the attention kernels that run on them",
        choices=ARCHITECTURES,
        auto=True,
        is_later=True,
    )
    matmul_efficiency: float = key(
        0.73, "of flops: what large products reach", minimum=0.01, maximum=1, is_later=True
    )
    attention_efficiency: float | None = key(
        None,
        "of flops: what long attention reaches; auto: by cluster.architecture and model.attention",
        minimum=0.01,
        maximum=1,
        auto=True,
        is_later=True,
    )
    step_efficiency: float = key(
        0.863, "of each operator's own speed, within a step", minimum=0.01, maximum=1, is_later=True
    )
    profile: str | None = key(
        None, "FILE of profile-device, which says all of this by measurement", is_later=True
    )
