"""Engine, launch, and the hardware that estimates assume."""

import os
from dataclasses import dataclass, replace

from fsdpctl.config.keys import auto_key, key, optional_key
from fsdpctl.io.resources import threads_per_rank
from fsdpctl.plan.attention_kernels import ARCHITECTURES

_MOST_RANKS, _MOST_NODES = 1 << 10, 1 << 17  # per node, and nodes; ten times the largest clusters


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    """The differences between fsdpctl and another program that an estimate can be of."""

    steps_at_once: bool = True  # AdamW in one kernel; else with a copy of the second moments
    keeps_logits: bool = False  # in float32, until the next pass has made its own
    plain_norms: bool = False  # of transformers' modules, which keep more tensors than torch's
    fused_experts: bool = False  # as Liger's
    regathers: bool = False  # in backward after recomputation, as reentrant checkpoints do
    unpacks_at_once: bool = False  # quantized weights, as bitsandbytes does
    # Of the host, for each DTensor's norm, clip and step, before the trainer reads the loss.
    seconds_per_tensor: float = 0.0


OURS = "fsdpctl"
# By published steps of TRL.
_TRAINER = ProgramFacts(plain_norms=True, unpacks_at_once=True, seconds_per_tensor=0.3e-3)
PROGRAMS = {
    OURS: ProgramFacts(),
    "torchtitan": ProgramFacts(keeps_logits=True),
    "transformers": _TRAINER,
    "transformers_foreach": replace(_TRAINER, steps_at_once=False),
    "liger": replace(_TRAINER, plain_norms=False, fused_experts=True),
    "reentrant": ProgramFacts(regathers=True),
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine that shards: fsdpctl, or one of PyTorch's own for comparison."""

    name: str = "fsdpctl"
    program: str = key(
        OURS,
        "estimates only: program that is estimated; torchtitan: keeps logits in float32 during the "
        "next pass; transformers: norms and trainer of transformers, with _foreach torch's default "
        "AdamW; liger: with Liger's kernels; reentrant: fsdp2 gathers again after recomputation",
        choices=tuple(PROGRAMS),
    )

    @property
    def facts(self) -> ProgramFacts:
        return PROGRAMS[self.program]


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """The start of the workers."""

    name: str = "local"
    nproc_per_node: int | None = auto_key(
        "ranks per node; auto: one per CUDA device, else 2 (1 core: 1)", within=(1, _MOST_RANKS)
    )
    nnodes: int = key(1, "nodes", within=(1, _MOST_NODES))
    node_rank: int | None = key(None, "number of this node, from 0", within=(0, _MOST_NODES - 1))
    rdzv_endpoint: str | None = key(
        None, "HOST:PORT of node 0, where the launchers of all nodes connect"
    )
    interface: str | None = auto_key(
        "network interface between nodes; auto: the one that reaches rdzv_endpoint"
    )
    device: str | None = auto_key("device of the ranks", choices=("cpu", "cuda"))
    share_memory: bool | None = auto_key(
        "CPU: the ranks of one machine share memory; every strategy then runs as shard_optimizer; "
        "auto: true where possible"
    )
    allocator: str = key(
        "expandable", "CUDA: allocator of device memory", choices=("expandable", "native")
    )
    timeout: float = key(
        600.0, "seconds after which a stuck collective stops the run", within=(1, 1e6)
    )
    hang_timeout: float | None = auto_key(
        "seconds after which a rank without progress is reported; auto: half of launch.timeout",
        within=(1, 1e6),
    )
    max_restarts: int = key(0, "number of restarts after failures", within=(0, 1_000_000))
    nproc_min: int | None = auto_key(
        "fewest ranks per node after a restart; auto: no fewer than before", within=(1, _MOST_RANKS)
    )
    nnodes_min: int | None = auto_key(
        "fewest nodes after a restart; auto: no fewer than before", within=(1, _MOST_NODES)
    )
    time_limit: float | None = optional_key(
        "seconds from launch to the last save; training stops in time for it", within=(1, 1e9)
    )

    @property
    def hang_limit(self) -> float:
        """Seconds without a heartbeat, longer than a short network failure."""
        return self.hang_timeout or self.timeout / 2

    def rank_environment(self, ranks: int) -> dict[str, str]:
        """Return variables that one of a host's `ranks` needs before torch is imported.

        Those of the allocator are for both devices if it is auto.
        """
        values = {"OMP_NUM_THREADS": str(threads_per_rank(ranks))}
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
    memory: float | None = auto_key(
        "memory per rank, as torch reports that of a device", unit="GiB", within=(0.001, 1e6)
    )
    host_memory: float | None = auto_key(
        "host memory of a node; auto: of this machine or its control group",
        unit="GiB",
        within=(0.001, 1e6),
    )
    ranks_per_node: int | None = auto_key(
        "value of launch.nproc_per_node=auto in estimates", within=(1, _MOST_RANKS)
    )
    flops: float | None = optional_key(
        "TFLOP/s of dense matrix products in bf16", within=(1e-3, 1e6)
    )
    flops_fp32: float | None = optional_key(
        "TFLOP/s of dense matrix products in fp32", within=(1e-3, 1e6)
    )
    memory_bandwidth: float | None = optional_key("GB/s of device memory", within=(1e-3, 1e6))
    intra_bandwidth: float | None = optional_key(
        "GB/s per rank within a node, per direction", within=(1e-4, 1e6)
    )
    inter_bandwidth: float | None = optional_key(
        "GB/s per rank between nodes, per direction", within=(1e-4, 1e6)
    )
    host_bandwidth: float = key(
        200.0, "GB/s of a node's host memory, which its ranks share", within=(1e-3, 1e6)
    )
    pcie_bandwidth: float = key(
        31.5, "GB/s between a GPU and its host, per direction", within=(1e-4, 1e6)
    )
    price: float | None = optional_key(
        "estimates only: price of a GPU hour; of a named cluster, one quoted on a day, in USD",
        within=(0, 1e6),
    )
    architecture: str | None = auto_key(
        "GPU generation, which determines the supported attention kernels", choices=ARCHITECTURES
    )
    matmul_efficiency: float = key(
        0.73,
        "share of flops that large matrix products reach",
        within=(0.01, 1),
        instead="cluster.flops",
    )
    attention_efficiency: float | None = auto_key(
        "share of flops that attention reaches; auto: by architecture and model.attention",
        within=(0.01, 1),
    )
    step_efficiency: float = key(
        0.863,
        "speed of operators within a step, relative to each on its own",
        within=(0.01, 1),
        instead="cluster.flops",
    )
