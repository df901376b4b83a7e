"""Engine, launch, and the hardware that estimates assume."""

import os
from dataclasses import dataclass

from fsdpctl.config.keys import key
from fsdpctl.plan.attention_kernels import ARCHITECTURES

_MOST_RANKS, _MOST_NODES = 1 << 10, 1 << 17  # per node, and nodes; ten times the largest clusters


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    """The memory of another program that an estimate can be of, where it differs from fsdpctl's."""

    steps_at_once: bool = True  # AdamW in one kernel; else with a copy of the second moments
    keeps_logits: bool = False  # in float32, until the next pass has made its own
    plain_norms: bool = False  # of transformers' modules, which keep more tensors than torch's


OURS = "fsdpctl"
PROGRAMS = {
    OURS: ProgramFacts(),
    "torchtitan": ProgramFacts(keeps_logits=True),
    "transformers": ProgramFacts(plain_norms=True),
    "transformers_foreach": ProgramFacts(steps_at_once=False, plain_norms=True),
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine that shards: fsdpctl, or one of PyTorch's own for comparison."""

    name: str = "fsdpctl"
    program: str = key(
        OURS,
        "estimates only: program whose memory is estimated; torchtitan: keeps logits in float32 "
        "during the next pass; transformers: norms of its modules, with _foreach torch's default "
        "AdamW",
        choices=tuple(PROGRAMS),
    )

    @property
    def facts(self) -> ProgramFacts:
        return PROGRAMS[self.program]


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """The start of the workers."""

    name: str = "local"
    nproc_per_node: int | None = key(
        None,
        "ranks per node; auto: one per CUDA device, else 2",
        minimum=1,
        maximum=_MOST_RANKS,
        auto=True,
    )
    nnodes: int = key(1, "nodes", minimum=1, maximum=_MOST_NODES)
    node_rank: int | None = key(
        None, "number of this node, from 0", minimum=0, maximum=_MOST_NODES - 1
    )
    rdzv_endpoint: str | None = key(
        None, "HOST:PORT of node 0, where the launchers of all nodes connect"
    )
    interface: str | None = key(
        None, "network interface between nodes; auto: the one that reaches rdzv_endpoint", auto=True
    )
    device: str | None = key(None, "device of the ranks", choices=("cpu", "cuda"), auto=True)
    share_memory: bool | None = key(
        None,
        "CPU: the ranks of one machine share memory; every strategy then runs as shard_optimizer; "
        "auto: true where possible",
        auto=True,
    )
    allocator: str = key(
        "expandable", "CUDA: allocator of device memory", choices=("expandable", "native")
    )
    timeout: float = key(
        600.0, "seconds after which a stuck collective stops the run", minimum=1, maximum=1e6
    )
    hang_timeout: float | None = key(
        None,
        "seconds after which a rank without progress is reported; auto: half of launch.timeout",
        minimum=1,
        maximum=1e6,
        auto=True,
    )
    max_restarts: int = key(0, "number of restarts after failures", minimum=0, maximum=1_000_000)
    nproc_min: int | None = key(
        None,
        "fewest ranks per node after a restart; auto: no fewer than before",
        minimum=1,
        maximum=_MOST_RANKS,
        auto=True,
    )
    nnodes_min: int | None = key(
        None,
        "fewest nodes after a restart; auto: no fewer than before",
        minimum=1,
        maximum=_MOST_NODES,
        auto=True,
    )
    time_limit: float | None = key(
        None,
        "seconds from launch to the last save; training stops in time for it",
        minimum=1,
        maximum=1e9,
        optional=True,
    )

    @property
    def hang_limit(self) -> float:
        """Seconds without a heartbeat, longer than a short network failure."""
        return self.hang_timeout or self.timeout / 2

    def rank_environment(self, ranks: int) -> dict[str, str]:
        """Return variables that one of a host's `ranks` needs before torch is imported.

        Those of the allocator are for both devices if it is auto.
        """
        values = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
        if self.device != "cuda":  # each step maps large tensors again: in pages of 2 MiB
            values["THP_MEM_ALLOC_ENABLE"] = "1"
        has_older_name = "PYTORCH_CUDA_ALLOC_CONF" in os.environ
        if self.device != "cpu" and not has_older_name:
            values["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{self.allocator == 'expandable'}"
        return values


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The hardware that estimates and predictions assume."""

    name: str = "local"
    memory: float | None = key(
        None,
        "memory per rank, as torch reports that of a device",
        unit="GiB",
        minimum=0.001,
        maximum=1e6,
        auto=True,
    )
    host_memory: float | None = key(
        None,
        "host memory of a node; auto: of this machine or its control group",
        unit="GiB",
        minimum=0.001,
        maximum=1e6,
        auto=True,
    )
    ranks_per_node: int | None = key(
        None,
        "value of launch.nproc_per_node=auto in estimates",
        minimum=1,
        maximum=_MOST_RANKS,
        auto=True,
    )
    flops: float | None = key(
        None, "TFLOP/s of dense matrix products in bf16", minimum=1e-3, maximum=1e6, optional=True
    )
    flops_fp32: float | None = key(
        None, "TFLOP/s of dense matrix products in fp32", minimum=1e-3, maximum=1e6, optional=True
    )
    memory_bandwidth: float | None = key(
        None, "GB/s of device memory", minimum=1e-3, maximum=1e6, optional=True
    )
    intra_bandwidth: float | None = key(
        None, "GB/s per rank within a node, per direction", optional=True, minimum=1e-4, maximum=1e6
    )
    inter_bandwidth: float | None = key(
        None, "GB/s per rank between nodes, per direction", optional=True, minimum=1e-4, maximum=1e6
    )
    host_bandwidth: float = key(
        200.0, "GB/s of a node's host memory, which its ranks share", minimum=1e-3, maximum=1e6
    )
    pcie_bandwidth: float = key(
        31.5, "GB/s between a GPU and its host, per direction", minimum=1e-4, maximum=1e6
    )
    price: float | None = key(
        None,
        "estimates only: price of a GPU hour, in any currency",
        minimum=0,
        maximum=1e6,
        optional=True,
    )
    architecture: str | None = key(
        None,
        "GPU generation, which determines the supported attention kernels",
        choices=ARCHITECTURES,
        auto=True,
    )
    matmul_efficiency: float = key(
        0.73,
        "share of flops that large matrix products reach",
        minimum=0.01,
        maximum=1,
        instead="cluster.flops",
    )
    attention_efficiency: float | None = key(
        None,
        "share of flops that attention reaches; auto: by architecture and model.attention",
        minimum=0.01,
        maximum=1,
        auto=True,
    )
    step_efficiency: float = key(
        0.863,
        "speed of operators within a step, relative to each on its own",
        minimum=0.01,
        maximum=1,
        instead="cluster.flops",
    )
