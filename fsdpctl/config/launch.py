"""The sections `engine` and `launch`: the engine that shards, and the start of its ranks."""

import os
from dataclasses import dataclass, replace

from fsdpctl.config.keys import auto_key, key, optional_key
from fsdpctl.io.resources import threads_per_rank

# Ranks per node, and nodes; ten times those of the largest clusters.
MAX_RANKS, _MAX_NODES = 1 << 10, 1 << 17


@dataclass(frozen=True, slots=True)
class EmulatedProgram:
    """A training program that an estimate predicts, by its differences from fsdpctl."""

    fused_optimizer: bool = True  # AdamW in one kernel; False: with a copy of the second moments
    keeps_logits: bool = False  # float32 logits stay until the next pass has computed its logits
    transformers_norms: bool = False  # norms of transformers save more tensors than torch's
    fused_experts: bool = False  # experts in one kernel, as in Liger
    # Reentrant checkpoints gather units once more in backward, after recomputation.
    reentrant_checkpoints: bool = False
    fused_dequantization: bool = False  # one kernel dequantizes a weight, as in bitsandbytes
    seconds_per_tensor: float = 0.0  # host time per DTensor: norm, clipping and optimizer step


NO_EMULATION = "fsdpctl"
# The time per tensor follows from published step times of TRL.
_HF_TRAINER = EmulatedProgram(
    transformers_norms=True, fused_dequantization=True, seconds_per_tensor=0.3e-3
)
PROGRAMS = {
    NO_EMULATION: EmulatedProgram(), "torchtitan": EmulatedProgram(keeps_logits=True),
    "transformers": _HF_TRAINER,
    "transformers_foreach": replace(_HF_TRAINER, fused_optimizer=False),
    "liger": replace(_HF_TRAINER, transformers_norms=False, fused_experts=True),
    "reentrant": EmulatedProgram(reentrant_checkpoints=True),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine that shards: fsdpctl, or one of PyTorch's own for comparison."""

    name: str = "fsdpctl"
    program: str = key(
        NO_EMULATION,
        "estimates only: program that is estimated; torchtitan: keeps logits in float32 during the "
        "next pass; transformers: norms and trainer of transformers, with _foreach torch's default "
        "AdamW; liger: with Liger's kernels; reentrant: fsdp2 gathers again after recomputation",
        choices=tuple(PROGRAMS),
    )

    @property
    def emulated(self) -> EmulatedProgram:
        return PROGRAMS[self.program]


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """The start of the workers."""

    name: str = "local"
    nproc_per_node: int | None = auto_key(
        "ranks per node; auto: one per CUDA device, else 2 (1 core: 1)", within=(1, MAX_RANKS)
    )
    nnodes: int = key(1, "nodes", within=(1, _MAX_NODES))
    node_rank: int | None = key(None, "number of this node, from 0", within=(0, _MAX_NODES - 1))
    rdzv_endpoint: str | None = key(None, "HOST:PORT of node 0, which all launchers connect to")
    interface: str | None = auto_key(
        "network interface between nodes; auto: the interface that reaches launch.rdzv_endpoint"
    )
    device: str | None = auto_key("device of the ranks", choices=("cpu", "cuda"))
    share_memory: bool | None = auto_key(
        "CPU: ranks of a machine share memory; every strategy runs as shard_optimizer; "
        "auto: if possible"
    )
    allocator: str = key("expandable", "CUDA: memory allocator", choices=("expandable", "native"))
    timeout: float = key(600.0, "seconds until a stuck collective stops the run", within=(1, 1e6))
    hang_timeout: float | None = auto_key(
        "seconds until a rank without progress is reported; auto: half of launch.timeout",
        within=(1, 1e6),
    )
    max_restarts: int = key(0, "number of restarts after failures", within=(0, 1_000_000))
    nproc_min: int | None = auto_key(
        "fewest ranks per node after a restart; auto: no fewer than before", within=(1, MAX_RANKS)
    )
    nnodes_min: int | None = auto_key(
        "fewest nodes after a restart; auto: no fewer than before", within=(1, _MAX_NODES)
    )
    time_limit: float | None = optional_key(
        "seconds from launch to the last save; training stops early enough to save", within=(1, 1e9)
    )

    @property
    def used_hang_timeout(self) -> float:
        """Seconds without progress after which a rank counts as hung."""
        return self.hang_timeout or self.timeout / 2

    def rank_environment(self, ranks: int) -> dict[str, str]:
        """Return the environment variables that a rank needs before torch is imported.

        `ranks` are those of the host. With `launch.device=auto`, both devices' variables are set.
        """
        values = {"OMP_NUM_THREADS": str(threads_per_rank(ranks))}
        if self.device != "cuda":  # each step allocates large tensors again: use pages of 2 MiB
            values["THP_MEM_ALLOC_ENABLE"] = "1"
        # The variable has an older name, which a user may have set.
        if self.device != "cpu" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
            values["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{self.allocator == 'expandable'}"
        return values
