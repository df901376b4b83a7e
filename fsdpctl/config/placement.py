"""What runs where: engine, launch, and the hardware that estimates assume."""

from dataclasses import dataclass

from fsdpctl.config.keys import key

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
    time_limit: float | None = key(
        None,
        "seconds from the start of the launch, in which the last step is done and saved",
        minimum=1,
        maximum=1e9,
        optional=True,
    )


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
