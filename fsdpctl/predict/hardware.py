"""The times of operators, collectives and copies, from data sheets of the hardware."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from fsdpctl.plan.attention_kernels import FLASH
from fsdpctl.predict.model_pass import Work, WorkKind
from fsdpctl.predict.simulator import Transfer

NODE_LINKS, NETWORK_LINKS = "links within a node", "links between nodes"


class CollectiveKind(StrEnum):
    """The collective operations of a training step."""

    GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"


@dataclass(frozen=True, slots=True)
class GroupShape:
    """A process group, with the same number of ranks on each of its nodes."""

    ranks: int
    nodes: int

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nodes


@dataclass(frozen=True, slots=True)
class RingNetwork:
    """The rings and trees of NCCL over links from a data sheet.

    Times are latency + bytes / bandwidth, with NCCL's latencies for its simple protocol
    (NVIDIA/nccl, src/graph/tuning.cc). A ring visits all ranks of a node before it continues on the
    next node. There is a ring per network card, so each card carries the share of its rank.
    """

    intra_bandwidth: float  # bytes/s that a rank sends and receives within its node
    inter_bandwidth: float  # bytes/s between nodes, over the network card of a rank
    nvlink_efficiency: float = 0.8  # share of `intra_bandwidth` that collectives reach
    # Share of the computing speed lost during a collective: 18.9% on average in arXiv 2507.03114.
    slowdown_intra: float = 0.19
    slowdown_inter: float = 0.10  # assumed

    def transfer(self, kind: CollectiveKind, nbytes: float, group: GroupShape) -> Transfer:
        """Return the transfer over rings; an all-reduce has a tree's latency if that is less."""
        ranks, nodes = group.ranks, group.nodes
        if ranks == 1:
            return Transfer(NODE_LINKS, latency=0.0, seconds=0.0)
        bandwidth = self._bandwidth(group)
        hops = (ranks - nodes) * _INTRA_HOP + (nodes - 1) * _INTER_HOP
        rounds = 2 if kind is CollectiveKind.ALL_REDUCE else 1
        if rounds == 2:
            tree = (group.ranks_per_node - 1) * _INTRA_HOP + math.log2(nodes) * _INTER_HOP
            hops = 2 * min(hops, tree)
        sent = rounds * nbytes * (ranks - 1) / ranks
        link = NODE_LINKS if nodes == 1 else NETWORK_LINKS
        slowdown = self.slowdown_inter if group.ranks_per_node == 1 else self.slowdown_intra
        # Over the network, a rank's card sends its part of the bytes that leave the node.
        sent_over_link = sent if nodes == 1 else sent * (nodes - 1) / nodes / group.ranks_per_node
        return Transfer(link, _BASE_LATENCY + hops, sent / bandwidth, sent_over_link, slowdown)

    def _bandwidth(self, group: GroupShape) -> float:
        """Return the bytes/s of a ring, which more nodes slow down (NVIDIA/nccl#1229)."""
        intra = self.intra_bandwidth * self.nvlink_efficiency
        if group.nodes == 1:
            return intra
        inter = self.inter_bandwidth * _NETWORK_CARD_EFFICIENCY * group.ranks_per_node
        share = max(_MIN_RING_SHARE, 1.0 - max(0.0, math.log2(group.nodes / 4)) * _RING_DECLINE)
        return min(intra if group.ranks_per_node > 1 else inter, inter) * share


_PCIE_EFFICIENCY = 0.8  # share of the link's rate that is left for data
_NETWORK_CARD_EFFICIENCY = 0.92
_RING_DECLINE = 0.055  # share of the bandwidth lost each time the nodes double beyond four
_MIN_RING_SHARE = 0.4  # share of the bandwidth that is left on any number of nodes
_BASE_LATENCY, _INTRA_HOP, _INTER_HOP = 8.4e-6, 3.4e-6, 14e-6  # seconds


class HostQueue(StrEnum):
    """The queues of a rank's host; each queue runs one copy or step at a time."""

    DOWN = "copies to the host"
    STEPS = "steps on the host"
    UP = "copies to the device"


@dataclass(frozen=True, slots=True)
class HostDataSheet:
    """A node's host memory, which its ranks use at the same time, and a link to each device."""

    memory_bandwidth: float  # bytes/s of the node
    pcie_bandwidth: float  # bytes/s of a device in each direction
    ranks: int  # on the node
    slowdown: float = 0.0  # share of the computing speed that a rank loses while its host steps

    def transfer(self, queue: HostQueue, nbytes: float) -> Transfer:
        """Return the transfer of a step that reads and writes `nbytes` in total, or of a copy."""
        seconds = nbytes * self.ranks / (self.memory_bandwidth * _HOST_MEMORY_EFFICIENCY)
        if queue is HostQueue.STEPS:
            lost = self.slowdown
            return Transfer(queue, 0.0, seconds, compute_slowdown=lost, comm_slowdown=lost)
        seconds = max(seconds, nbytes / (self.pcie_bandwidth * _PCIE_EFFICIENCY))
        return Transfer(queue, _COPY_LATENCY, seconds, nbytes)


SHARED_CORES = 0.5  # share of a CPU rank's cores that the thread of the optimizer step takes
_HOST_MEMORY_EFFICIENCY = 0.8  # share of the rate of host memory that AdamW reaches
_COPY_LATENCY = 10e-6  # seconds


@dataclass(frozen=True, slots=True)
class DeviceDataSheet:
    """A GPU by its data sheet, with the efficiencies that kernels reach.

    Rates are for dense operations. Sources of the efficiencies are in docs/method/time-model.md.
    """

    peak_rates: Mapping[int, float]  # FLOP/s, by bytes of an element
    bandwidth: float  # bytes/s of its memory
    matmul_efficiency: float  # share of the peak that large products reach before `step_efficiency`
    attention_efficiency: Mapping[str, float]  # the same for long sequences, by kernel
    step_efficiency: float  # speed of an operator within a step, relative to a single operator
    grouped_efficiency: float = 1.0  # speed of grouped products with many rows, relative to others
    # Share of bandwidth that reads and writes by index reach, even if compiled; None: as others.
    index_efficiency: float | None = None
    is_compiled: bool = False  # whether a compiler fuses elementwise operators
    fused_dequantization: bool = False  # whether one kernel dequantizes a weight
    step_overhead: float = 0.0  # seconds per step
    long_sequence_gain: float = 0.0  # gain of attention from 65,536 to 1,048,576 tokens, relative
    unit_seconds: float = 0.0  # host time for the engine's part of a unit's forward or backward

    def seconds(self, work: Work) -> float:
        """Return the time by the roofline model, plus the launch of the kernel."""
        if work.kind is WorkKind.MEMORY:
            return self._memory_seconds(work)
        rate = self.peak_rates[work.itemsize] * self._efficiency(work)
        bandwidth = self.bandwidth * _bandwidth_efficiency(work.nbytes)
        bandwidth *= self._group_efficiency(work)  # few rows per group waste bandwidth, too
        seconds = max(work.flops / rate, work.nbytes / bandwidth)
        return seconds / self.step_efficiency + _KERNEL_LAUNCH

    def _memory_seconds(self, work: Work) -> float:
        serialized = 0.0 if self.is_compiled else _ADDED_ROW * max(0, work.dims[-1] - _FREE_ROWS)
        if self.index_efficiency is not None and work.name.rstrip("_") in _INDEXING:
            bandwidth = self.bandwidth * self.index_efficiency
            return work.nbytes / bandwidth / self.step_efficiency + _KERNEL_LAUNCH + serialized
        share = _FUSED_SHARE if self.is_compiled else 1.0
        if self.is_compiled or self.fused_dequantization:
            share = _FUSED_DEQUANTIZATION_SHARE.get(work.name, share)
        return self.copy_seconds(work.nbytes * share) + _KERNEL_LAUNCH * share + serialized

    @property
    def host_seconds(self) -> float:
        """The host's seconds per operator: Python, dispatcher, autograd and driver."""
        return _HOST_SECONDS_PER_OPERATOR * (_FUSED_SHARE if self.is_compiled else 1.0)

    def copy_seconds(self, nbytes: float) -> float:
        """Return the time to read and write `nbytes` in total."""
        return nbytes / (self.bandwidth * _bandwidth_efficiency(nbytes)) / self.step_efficiency

    def optimizer_seconds(self, nbytes: float, moments: int) -> float:
        """Return the time to read weights, gradients and moments, and write all but gradients."""
        return self.copy_seconds((3 + 2 * moments) * nbytes)

    def tiles_seconds(self, numel: float, stored: float) -> float:
        """Return the time of a step in tiles; a fused kernel moves the `stored` bytes."""
        return self.copy_seconds(stored if self.is_compiled else _DEVICE_TILE_BYTES * numel)

    def _kernel_efficiency(self, work: Work) -> float:
        """Return the efficiency of the kernel that torch runs; in float32, that of FLASH."""
        kernel = next((name for name in self.attention_efficiency if name in work.name), FLASH)
        return self.attention_efficiency[kernel if work.itemsize == 2 else FLASH]

    def _group_efficiency(self, work: Work) -> float:
        """Return the efficiency of grouped products: few rows per group fill tiles only in part."""
        if not work.name.startswith(GROUPED):
            return 1.0
        efficiency = self.grouped_efficiency * work.dims[1] / (work.dims[1] + _HALF_ROWS)
        return efficiency if work.name == GROUPED else _INDEXED_SHARE * efficiency

    def _efficiency(self, work: Work) -> float:
        if work.kind in (WorkKind.ATTENTION, WorkKind.ATTENTION_BACKWARD):
            *_, length, head_dim = work.dims
            # Narrower heads keep fewer tensor cores busy, by the fourth root of their dimension.
            by_dim = math.sqrt(math.sqrt(min(1.0, head_dim / 128)))
            doublings = math.log2(length / _LONG_TOKENS)
            gain = 1.0 + self.long_sequence_gain * min(1.0, max(0.0, doublings / _DOUBLINGS))
            return self._kernel_efficiency(work) * gain * length / (length + _HALF_LENGTH) * by_dim
        _, rows, columns, inner = work.dims
        matmul = self.matmul_efficiency * self._group_efficiency(work)
        return matmul * inner / (inner + _HALF_SUMS) * _alignment_efficiency(rows, columns, inner)


GROUPED = "_grouped_mm"
INDEXED_GROUPED_MM = f"{GROUPED}, indexed"  # a kernel that reads rows by index, such as Liger's
# Speed of such a kernel relative to torch's grouped products, by published steps of TRL.
_INDEXED_SHARE = 0.55
_INDEXING = (
    "index", "index_put", "index_add", "index_select", "scatter", "scatter_add", "gather",
)  # fmt: skip
# Seconds for each row that index_put adds to the same row, such as gradients of an expert's bias: a
# warp adds the rows one after another. 8 * 1.6e-6: 1.6e-6 by published steps of gpt-oss, whose
# filler text sends eight times the mean to an expert. A compiler adds with atomics.
_ADDED_ROW, _FREE_ROWS = 13e-6, 64
# Bytes per weight of AdamW in tiles with 8-bit moments, by the operators in optim/tiles.py, each of
# which reads and writes float32. A fused kernel moves 16: gradient 4, weight 2 * 4, moments 2 * 2.
_DEVICE_TILE_BYTES = 310
UNPACKING = "unpack "  # the prefix of operators that dequantize weights; a packing follows
# Bytes per bf16 weight of a fused kernel, which reads packed bits and writes the weight, relative
# to the bytes of the operators that a trace counts.
_FUSED_DEQUANTIZATION_SHARE = {"unpack nf4": 2.5 / 27.0, "unpack int8": 3.0 / 21.1}
_FUSED_SHARE = 0.4  # bytes of fused operators relative to the bytes of single operators
_HOST_SECONDS_PER_OPERATOR = 9e-6
_KERNEL_LAUNCH = 2e-6  # seconds: the shortest kernel
_LONG_TOKENS, _DOUBLINGS = 1 << 16, 4
_HALF_LENGTH = 560  # sequence length at which attention reaches half of its speed
_HALF_ROWS = 600  # rows per group at which a grouped product reaches half of its speed
_HALF_SUMS = 130  # length of the sums at which a matrix product reaches half of its speed


def _bandwidth_efficiency(nbytes: float) -> float:
    """Return the share of the memory bandwidth that a kernel of `nbytes` reaches."""
    return 0.85 if nbytes >= 64e6 else 0.70 if nbytes >= 8e6 else 0.5


def _alignment_efficiency(*sizes: int) -> float:
    """Return the efficiency of a matrix product whose sizes may not be multiples of tiles."""
    if any(size % 8 for size in sizes if size > 1):
        return 0.65
    return 0.95 if any(size % 64 for size in sizes if size > 64) else 1.0
