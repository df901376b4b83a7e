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
    slowdown_inter: float = 0.10

    def transfer(self, kind: CollectiveKind, nbytes: float, group: GroupShape) -> Transfer:
        """Return the transfer of a ring; of a tree if it has less latency in an all-reduce."""
        ranks, nodes = group.ranks, group.nodes
        if ranks == 1:
            return Transfer(NODE_LINKS, 0.0, 0.0)
        bandwidth = self._bandwidth(group)
        latency = _BASE_LATENCY + (ranks - nodes) * _INTRA_HOP + (nodes - 1) * _INTER_HOP
        rounds = 2 if kind is CollectiveKind.ALL_REDUCE else 1
        if rounds == 2:
            tree = (group.ranks_per_node - 1) * _INTRA_HOP + math.log2(nodes) * _INTER_HOP
            latency = _BASE_LATENCY + 2 * min(latency - _BASE_LATENCY, tree)
        sent = rounds * nbytes * (ranks - 1) / ranks
        link = NODE_LINKS if nodes == 1 else NETWORK_LINKS
        slowdown = self.slowdown_inter if group.ranks_per_node == 1 else self.slowdown_intra
        sent_over_link = sent if nodes == 1 else sent * (nodes - 1) / nodes / group.ranks_per_node
        return Transfer(link, latency, sent / bandwidth, sent_over_link, slowdown)

    def _bandwidth(self, group: GroupShape) -> float:
        """Return the bytes/s of a ring, which more nodes slow down (NVIDIA/nccl#1229)."""
        intra = self.intra_bandwidth * self.nvlink_efficiency
        if group.nodes == 1:
            return intra
        inter = self.inter_bandwidth * _NETWORK_CARD_EFFICIENCY * group.ranks_per_node
        loss = max(0.0, math.log2(group.nodes / 4)) * _RING_DECLINE
        return min(intra if group.ranks_per_node > 1 else inter, inter) * max(0.4, 1.0 - loss)


_PCIE_EFFICIENCY = 0.8  # share of the link's rate that is left for data
_NETWORK_CARD_EFFICIENCY = 0.92
_RING_DECLINE = 0.055  # share of the bandwidth lost each time the nodes double beyond four
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
            return Transfer(queue, 0.0, seconds, 0.0, self.slowdown, self.slowdown)
        seconds = max(seconds, nbytes / (self.pcie_bandwidth * _PCIE_EFFICIENCY))
        return Transfer(queue, _COPY_LATENCY, seconds, nbytes)


SHARED_CORES = 0.5  # share of a CPU rank's cores that the thread of the optimizer step takes
_HOST_MEMORY_EFFICIENCY = 0.8  # share of the rate of host memory that AdamW reaches
_COPY_LATENCY = 10e-6  # seconds


_ATTENTION_KINDS = (WorkKind.ATTENTION, WorkKind.ATTENTION_BACKWARD)


@dataclass(frozen=True, slots=True)
class DeviceDataSheet:
    """A GPU by its data sheet, with the efficiencies that kernels reach.

    Rates are for dense operations. Sources of the efficiencies are in docs/method/time-model.md.
    """

    flops: Mapping[int, float]  # FLOP/s by bytes of an element
    bandwidth: float  # bytes/s of its memory
    matmul_efficiency: float  # share of the FLOP/s that large products reach within a step
    attention_efficiency: Mapping[str, float]  # the same for long sequences, by kernel
    step_efficiency: float  # speed of an operator within a step, relative to a single operator
    # Speed of grouped products with many rows per group, relative to single products.
    grouped_efficiency: float = 1.0
    # Share of the bandwidth that reads and writes by index reach; a compiler never fuses such
    # operators. None: they have the speed of other operators.
    index_efficiency: float | None = None
    is_compiled: bool = False  # whether a compiler fuses elementwise operators
    fused_dequantization: bool = False  # whether one kernel dequantizes a weight
    step_overhead: float = 0.0  # seconds per step
    # Relative gain of attention when the length grows from 65,536 to 1,048,576.
    long_sequence_gain: float = 0.0
    unit_seconds: float = 0.0  # host time for the engine's part of a unit's forward or backward

    def seconds(self, work: Work) -> float:
        """Return the time by the roofline model, plus the launch of the kernel."""
        if work.kind is WorkKind.MEMORY:
            return self._memory_seconds(work)
        rate = self.flops[work.itemsize] * self._share(work)
        bandwidth = self.bandwidth * _bandwidth_share(work.nbytes) * self._grouped(work)
        seconds = max(work.flops / rate, work.nbytes / bandwidth)
        return seconds / self.step_efficiency + _KERNEL_LAUNCH

    def _memory_seconds(self, work: Work) -> float:
        serialized = 0.0 if self.is_compiled else _ADDED_ROW * max(0, work.dims[-1] - _FREE_ROWS)
        if self.index_efficiency is not None and work.name.rstrip("_") in _INDEXING:
            seconds = (
                work.nbytes / (self.bandwidth * self.index_efficiency) / self.step_efficiency
                + _KERNEL_LAUNCH
            )
            return seconds + serialized
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
        return nbytes / (self.bandwidth * _bandwidth_share(nbytes)) / self.step_efficiency

    def optimizer_seconds(self, nbytes: float, moments: int) -> float:
        """Return the time of one kernel: it reads all tensors, and writes all but the gradient."""
        return self.copy_seconds((3 + 2 * moments) * nbytes)

    def tiles_seconds(self, numel: float, stored: float) -> float:
        """Return the time of a step in tiles; a fused kernel moves the `stored` bytes."""
        return self.copy_seconds(stored if self.is_compiled else _TILE_STEP_BYTES * numel)

    def _attention(self, work: Work) -> float:
        """Return the efficiency of the kernel that torch runs; float32 has another peak."""
        kernel = next((name for name in self.attention_efficiency if name in work.name), FLASH)
        return self.attention_efficiency[kernel if work.itemsize == _TWO_BYTES else FLASH]

    def _grouped(self, work: Work) -> float:
        """Return the efficiency of grouped products: few rows per group fill tiles only in part."""
        if not work.name.startswith(GROUPED):
            return 1.0
        share = self.grouped_efficiency * work.dims[1] / (work.dims[1] + _HALF_ROWS)
        return share if work.name == GROUPED else _GATHERING_SHARE * share

    def _share(self, work: Work) -> float:
        if work.kind in _ATTENTION_KINDS:
            _, _, length, head_dim = work.dims
            # Narrower heads keep fewer units busy, by the fourth root of their dimension.
            by_dim = math.sqrt(math.sqrt(min(1.0, head_dim / 128)))
            gain = 1.0 + self.long_sequence_gain * min(
                1.0, max(0.0, math.log2(length / _LONG_TOKENS) / _DOUBLINGS)
            )
            return self._attention(work) * gain * length / (length + _HALF_LENGTH) * by_dim
        _, rows, columns, length = work.dims
        matmul = self.matmul_efficiency * self._grouped(work)
        return matmul * length / (length + _HALF_SUMS) * _alignment(rows, columns, length)


GROUPED = "_grouped_mm"
INDEXED_GROUPED_MM = (
    f"{GROUPED}, gathering"  # a kernel that reads its rows by index, such as Liger's
)
# Speed of such a kernel relative to torch's grouped products, by published steps of TRL.
_GATHERING_SHARE = 0.55
_INDEXING = (
    "index", "index_put", "index_add", "index_select", "scatter", "scatter_add", "gather",
)  # fmt: skip
_TWO_BYTES = 2
# Seconds for each row that index_put adds to the same row, such as gradients of an expert's bias: a
# warp adds the rows one after another. By published steps of gpt-oss, whose filler text sends
# tokens to the same experts: 1.6e-6 each, for eight times the mean. A compiler adds with atomics.
_ADDED_ROW, _FREE_ROWS = 13e-6, 64
# Bytes per weight of AdamW in tiles with 8-bit moments, by the operators in optim/tiles.py, each of
# which reads and writes float32. A fused kernel moves 16 bytes: gradient 4, weight 2 * 4, moments
# 2 * 2.
_TILE_STEP_BYTES = 310
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


def _bandwidth_share(nbytes: float) -> float:
    """Return the share of the memory bandwidth that a kernel of `nbytes` reaches."""
    if nbytes >= 64e6:
        return 0.85
    return 0.70 if nbytes >= 8e6 else 0.5


def _alignment(*sizes: int) -> float:
    """Return the efficiency of a matrix product whose sizes may not be multiples of tiles."""
    if any(size % 8 for size in sizes if size > 1):
        return 0.65
    return 0.95 if any(size % 64 for size in sizes if size > 64) else 1.0
