"""The sections `engine`, `launch` and `cluster`: how and where a run is computed."""

import os
from dataclasses import dataclass

from fsdpctl.config.keys import key
from fsdpctl.plan.attention import ARCHITECTURES

_MOST_RANKS, _MOST_NODES = 1 << 10, 1 << 17  # of a node; ten times the largest clusters


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine that shards: fsdpctl's, or for comparison one of PyTorch's."""

    name: str = "fsdpctl"


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """How the ranks of a run are started."""

    name: str = "local"
    nproc_per_node: int | None = key(
        None,
        "ranks per node; auto: one per CUDA device, else 2",
        minimum=1,
        maximum=_MOST_RANKS,
        auto=True,
    )
    nnodes: int = key(1, "number of nodes", minimum=1, maximum=_MOST_NODES)
    node_rank: int | None = key(
        None, "number of this node, starting at 0", minimum=0, maximum=_MOST_NODES - 1
    )
    rdzv_endpoint: str | None = key(None, "HOST:PORT of node 0, for the rendezvous of launchers")
    interface: str | None = key(
        None, "network interface; auto: the one that reaches rdzv_endpoint", auto=True
    )
    device: str | None = key(None, "device of the ranks", choices=("cpu", "cuda"), auto=True)
    allocator: str = key(
        "expandable", "CUDA: kind of memory segments", choices=("expandable", "native")
    )
    timeout: float = key(
        600.0, "seconds after which a stuck collective ends the run", minimum=1, maximum=1e6
    )
    hang_timeout: float | None = key(
        None,
        "seconds after which a rank that hangs is reported; auto: half of launch.timeout",
        minimum=1,
        maximum=1e6,
        auto=True,
    )
    max_restarts: int = key(0, "number of restarts after failures", minimum=0, maximum=1_000_000)
    nproc_min: int | None = key(
        None,
        "fewest ranks per node after a restart; auto: as many as before",
        minimum=1,
        maximum=_MOST_RANKS,
        auto=True,
    )
    nnodes_min: int | None = key(
        None,
        "fewest nodes after a restart; auto: as many as before",
        minimum=1,
        maximum=_MOST_NODES,
        auto=True,
    )
    time_limit: float | None = key(
        None,
        "seconds from the start of the launch within which the run saves a checkpoint and stops",
        minimum=1,
        maximum=1e9,
        optional=True,
    )

    @property
    def allocator_environment(self) -> dict[str, str]:
        """The environment variables of a CUDA rank, to be set before torch is imported."""
        if "PYTORCH_CUDA_ALLOC_CONF" in os.environ:  # torch's older name
            return {}
        return {"PYTORCH_ALLOC_CONF": f"expandable_segments:{self.allocator == 'expandable'}"}


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The hardware of estimates and predictions; no run is started on it."""

    name: str = "here"
    memory: float | None = key(
        None,
        "memory that a rank may use, as reported by torch; auto: that of this machine",
        unit="GiB",
        minimum=0.001,
        maximum=1e6,
        auto=True,
    )
    ranks_per_node: int | None = key(
        None,
        "ranks per node in estimates, for launch.nproc_per_node=auto",
        minimum=1,
        maximum=_MOST_RANKS,
        auto=True,
    )
    flops: float | None = key(
        None, "peak dense TFLOP/s in bf16", minimum=1e-3, maximum=1e6, is_later=True, optional=True
    )
    flops_fp32: float | None = key(
        None, "peak dense TFLOP/s in fp32", minimum=1e-3, maximum=1e6, is_later=True, optional=True
    )
    memory_bandwidth: float | None = key(
        None, "memory bandwidth in GB/s", minimum=1e-3, maximum=1e6, is_later=True, optional=True
    )
    intra_bandwidth: float | None = key(
        None,
        "bandwidth of a rank's link within its node in GB/s, per direction",
        optional=True,
        minimum=1e-4,
        maximum=1e6,
        is_later=True,
    )
    inter_bandwidth: float | None = key(
        None,
        "bandwidth of a rank's share of its node's network links in GB/s, per direction",
        optional=True,
        minimum=1e-4,
        maximum=1e6,
        is_later=True,
    )
    architecture: str | None = key(
        None,
        "GPU generation, which determines the attention kernels",
        choices=ARCHITECTURES,
        auto=True,
        is_later=True,
    )
    matmul_efficiency: float = key(
        0.73,
        "share of cluster.flops in large matrix products",
        minimum=0.01,
        maximum=1,
        is_later=True,
    )
    attention_efficiency: float | None = key(
        None,
        "share of cluster.flops in attention to long sequences; auto: by kernel and architecture",
        minimum=0.01,
        maximum=1,
        auto=True,
        is_later=True,
    )
    step_efficiency: float = key(
        0.863,
        "speed of operators in a step, relative to alone",
        minimum=0.01,
        maximum=1,
        is_later=True,
    )
    profile: str | None = key(
        None, "file written by profile-device, in place of the other keys of cluster", is_later=True
    )
