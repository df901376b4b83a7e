"""The memory of the fullest rank of a run, and whether it fits."""

from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

from fsdpctl.config.schema import Resolved
from fsdpctl.io.packages import package_folder
from fsdpctl.io.texts import format_bytes
from fsdpctl.io.untrusted import read_json
from fsdpctl.plan.batch_plan import BatchPlan
from fsdpctl.predict.peak import StepEstimate
from fsdpctl.resolve.run_plan import RunPlan

_GIB = 1 << 30
MEMORY_ACCURACY = "memory_accuracy.json"  # written by `benchmarks/estimates.py`
_MIN_RESERVE = 0.05  # share of the memory of a GPU
# With fewer published measurements of a kind of run, the errors of all kinds count.
_MIN_MEASUREMENTS = 5
_LONG_TOKENS = 1 << 16  # per sample
_SMALL_PARAMS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A number of bytes that is only known approximately."""

    low: int
    high: int


# Assumed bytes of a process that uses the device, and of each communicator.
_CONTEXT_BYTES = {
    "cuda": ByteRange(int(0.4 * _GIB), int(0.7 * _GIB)),
    "cpu": ByteRange(int(0.25 * _GIB), int(0.5 * _GIB)),
}
_COMMUNICATOR_BYTES = ByteRange(int(0.05 * _GIB), int(0.6 * _GIB))
_WORKER_BYTES = {"cuda": 3 * _GIB, "cpu": _GIB // 2}  # host memory of a worker without its model


@cache
def memory_errors() -> dict[str, list[float]]:
    """Return the relative errors of the memory estimates of published runs, by kind of run."""
    return read_json(package_folder("conf") / MEMORY_ACCURACY, dict[str, list[float]])


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """The estimated memory of the rank that needs most."""

    plan: RunPlan
    num_params: int
    num_trained: int
    num_active: int  # parameters that a token uses
    frozen_bytes: int  # all frozen parameters
    saved_states_bytes: int  # the moments in a checkpoint
    rank: int
    step: StepEstimate
    host_model_bytes: int = 0  # states, parameters, inputs of blocks and buffers in host memory
    assumed_packages: tuple[str, ...] = ()  # the estimate assumes their kernels
    shared_bytes: int = 0  # memory that the ranks of a machine share; each rank counts its share

    @property
    def config(self) -> Resolved:
        return self.plan.config

    @property
    def batches(self) -> BatchPlan:
        return self.plan.batches

    @property
    def allocated(self) -> int:
        return self.step.allocated

    @property
    def peak_reserved(self) -> int:
        return self.step.peak_reserved

    @property
    def memory_bytes(self) -> int:
        """The memory of the device, from cluster.memory."""
        assert self.config.cluster.memory is not None
        return int(self.config.cluster.memory * _GIB)

    @property
    def outside_allocator(self) -> ByteRange:
        """The bytes outside the allocator: the device's context, and communicators."""
        config, count = self.config, 0
        context, each = _CONTEXT_BYTES[str(config.launch.device)], _COMMUNICATOR_BYTES
        if config.launch.device == "cuda" and config.num_ranks > 1:
            # Two communicators, or four with shards and replicas (docs/memory-model.md).
            count = 2 if config.strategy.dp_shard_size in (None, 1, config.num_ranks) else 4
        return ByteRange(context.low + count * each.low, context.high + count * each.high)

    @property
    def available(self) -> int:
        """The bytes that are left for the allocator if memory outside it is at its maximum."""
        return self.memory_bytes - self.outside_allocator.high

    @property
    def margin(self) -> int:
        """The bytes to spare on the device, or per rank on the host if less; negative: missing."""
        on_device = self.available - self.peak_reserved
        if self.host_limit is None:
            return on_device
        return min(on_device, (self.host_limit - self.node_host_bytes) // self._ranks_per_node)

    @property
    def kind(self) -> str:
        """The kind of the run: estimates of runs of one kind have similar errors."""
        config, model = self.config, self.config.model
        if config.strategy.offloaded or config.activation_checkpointing.offloads_inputs:
            return "offloaded"
        if self.num_active < self.num_params:
            return "experts"
        if model.lora.rank is not None:
            return "LoRA" if model.base_dtype in (None, "float32") else "QLoRA"
        if config.train.seq_len >= _LONG_TOKENS or config.train.context_parallel > 1:
            return "long"
        return "small" if self.num_params < _SMALL_PARAMS else "dense"

    @property
    def reserve_share(self) -> float:
        """The share of `available` that a selection leaves, for errors of the estimate.

        It is the largest underestimate for published runs of this kind.
        """
        if self.config.launch.device == "cpu":
            return 0
        published = memory_errors()
        of_kind = published.get(self.kind, [])
        errors = of_kind if len(of_kind) >= _MIN_MEASUREMENTS else chain(*published.values())
        return max(_MIN_RESERVE, -min(errors))

    @property
    def reserve(self) -> int:
        """The bytes of `reserve_share`."""
        return int(self.reserve_share * self.available)

    @property
    def leaves_reserve(self) -> bool:
        """Whether the run fits and leaves `reserve` bytes."""
        return self.fits and self.peak_reserved <= self.available - self.reserve

    @property
    def verdict(self) -> str:
        """`fits`, `thrashes` or `too_large`, as `StepEstimate.verdict`; counts host memory, too."""
        return "too_large" if self.lacks_host_memory else self.step.verdict(self.available)

    @property
    def fits(self) -> bool:
        """Whether the memory of devices and hosts suffices, without emptying a cache."""
        return self.verdict == "fits"

    @property
    def shortages(self) -> list[str]:
        """A clause for each kind of memory that does not suffice; empty if the run fits."""
        return [
            f"{kind}: about {needed} needed per {owner}, {limit} available{key}"
            for kind, needed, limit, owner, key in self._shortages
        ]

    @property
    def excess(self) -> str:
        """The needed and the available bytes of the memory that does not suffice."""
        kind, needed, limit, *_ = self._shortages[0]
        return f"{needed} of {limit}{f' {kind}' if kind != 'memory' else ''}"

    @property
    def _shortages(self) -> list[tuple[str, str, str, str, str]]:
        """Kind, needed bytes, limit, owner and key of each memory that does not suffice."""
        rows = []
        if self.step.verdict(self.available) != "fits":
            needed = format_bytes(self.peak_reserved + self.outside_allocator.high)
            rows.append(("memory", needed, format_bytes(self.memory_bytes), "rank", ""))
        if self.host_limit is not None and self.lacks_host_memory:
            needed, limit = format_bytes(self.node_host_bytes), format_bytes(self.host_limit)
            rows.append(("host memory", needed, limit, "node", " (cluster.host_memory)"))
        return rows

    @property
    def checkpoint_bytes(self) -> int:
        """The bytes of a checkpoint: master weights and moments, without the manifest.

        Frozen parameters of a pretrained model are not saved.
        """
        dtypes = self.config.precision.planned.buffer_dtypes("float32")
        saved = 0 if self.config.model.is_pretrained else self.frozen_bytes
        master = dtypes.master.itemsize + dtypes.has_remainders  # a remainder has 1 byte
        return self.num_trained * master + self.saved_states_bytes + saved

    @property
    def host_bytes(self) -> int:
        """The approximate host memory of a worker, with the copy of an asynchronous checkpoint."""
        saves_async = self.config.checkpoint.mode == "async"
        copied = self.checkpoint_bytes // self.config.num_ranks if saves_async else 0
        return _WORKER_BYTES[str(self.config.launch.device)] + self.host_model_bytes + copied

    @property
    def _ranks_per_node(self) -> int:
        return self.config.launch.nproc_per_node or 1

    @property
    def node_host_bytes(self) -> int:
        """The approximate host memory of a node's workers; with device=cpu, it includes tensors."""
        tensors = self.peak_reserved if self.config.launch.device == "cpu" else 0
        return self._ranks_per_node * (self.host_bytes + tensors)

    @property
    def host_limit(self) -> int | None:
        """The bytes of a node's host memory, if they are known and could be exceeded.

        CPU ranks need more than `memory_bytes` only for states in host memory.
        """
        limit = self.config.cluster.host_memory
        if limit is None or (self.config.launch.device == "cpu" and not self.host_model_bytes):
            return None
        return int(limit * _GIB)

    @property
    def lacks_host_memory(self) -> bool:
        """Whether the workers of a node may need more host memory than the node has."""
        return self.host_limit is not None and self.node_host_bytes > self.host_limit

    def to_dict(self) -> dict[str, Any]:
        config, outside, batches = self.config, self.outside_allocator, self.batches
        return {
            "strategy": config.strategy.name, "engine": config.engine.name,
            "model": config.model.title,
            **({} if config.model.base_dtype is None else {"base_dtype": config.model.base_dtype}),
            "num_parameters": self.num_params, "num_trained_parameters": self.num_trained,
            "num_active_parameters": self.num_active,
            "world_size": config.num_ranks, "rank": self.rank,
            "micro_batch_size": batches.micro_batch_size,
            "num_micro_batches": batches.num_micro_batches,
            "seq_len": config.train.seq_len, "tokens_per_step": self.tokens_per_step,
            "verdict": self.verdict, "margin_bytes": self.margin, "reserve_bytes": self.reserve,
            "memory_bytes": self.memory_bytes, "outside_bytes": [outside.low, outside.high],
            "host_bytes": self.host_bytes, "node_host_bytes": self.node_host_bytes,
            **({} if self.host_limit is None else {"node_host_memory_bytes": self.host_limit}),
            **({"host_states_bytes": self.host_model_bytes} if self.host_model_bytes else {}),
            **({"shared_bytes": self.shared_bytes} if self.shared_bytes else {}),
            "checkpoint_bytes": self.checkpoint_bytes,
            **({"assumed_packages": [*self.assumed_packages]} if self.assumed_packages else {}),
            **self.step.to_dict(),
        }  # fmt: skip

    @property
    def tokens_per_step(self) -> int:
        return self.batches.global_batch_size * self.config.train.seq_len
