"""Devices, priced by their data sheets."""

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
    """NCCL's rings and trees over links from a data sheet.

    Times are latency + bytes / bandwidth, with NCCL's own latencies for its simple protocol
    (NVIDIA/nccl, src/graph/tuning.cc). Rings go through all ranks of a node before they leave it,
    on as many channels as there are network cards, so each card carries the share of its rank.
    """

    intra_bandwidth: float  # bytes/s that a rank sends and receives within its node
    inter_bandwidth: float  # the same between nodes, over its network card
    nvlink_efficiency: float = 0.8  # share of `intra` that collectives reach during computation
    # Share of the computing speed lost during a collective: 18.9% on average in arXiv 2507.03114.
    slowdown_intra: float = 0.19
    slowdown_inter: float = 0.10

    def transfer(self, kind: CollectiveKind, nbytes: float, group: GroupShape) -> Transfer:
        """Price a ring; for an all-reduce a tree, if its latency is shorter."""
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
        declines = max(0.0, math.log2(group.nodes / 4)) * _RING_DECLINE
        return min(intra if group.ranks_per_node > 1 else inter, inter) * max(0.4, 1.0 - declines)


_PCIE_EFFICIENCY = 0.8  # share of a link's rate that is left for data
_NETWORK_CARD_EFFICIENCY = 0.92
_RING_DECLINE = 0.055  # share of the bandwidth lost each time the nodes double beyond four
_BASE_LATENCY, _INTRA_HOP, _INTER_HOP = 8.4e-6, 3.4e-6, 14e-6  # seconds


class HostQueue(StrEnum):
    """The kinds of work of a rank's host, each one at a time."""

    DOWN = "copies to the host"
    STEPS = "steps on the host"
    UP = "copies to the device"


@dataclass(frozen=True, slots=True)
class HostDataSheet:
    """A node's memory, which its ranks use at the same time, and a link to each device."""

    memory_bandwidth: float  # bytes/s of the node
    pcie_bandwidth: float  # bytes/s of a device in each direction
    ranks: int  # of the node
    slowdown: float = 0.0  # share of its computing speed that a rank loses while its host steps

    def transfer(self, queue: HostQueue, nbytes: float) -> Transfer:
        """Price a step that reads and writes `nbytes` in total, or a copy of as many."""
        seconds = nbytes * self.ranks / (self.memory_bandwidth * _HOST_MEMORY_EFFICIENCY)
        if queue is HostQueue.STEPS:
            return Transfer(queue, 0.0, seconds, 0.0, self.slowdown, self.slowdown)
        seconds = max(seconds, nbytes / (self.pcie_bandwidth * _PCIE_EFFICIENCY))
        return Transfer(queue, _COPY_LATENCY, seconds, nbytes)


SHARED_CORES = 0.5  # of a CPU rank's cores: what the thread that steps takes
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
    matmul_efficiency: float  # share of FLOP/s that large products reach within a step
    attention_efficiency: Mapping[
        str, float
    ]  # the same for attention over long sequences, by kernel
    step_efficiency: float  # share of its speed alone that an operator reaches within a step
    grouped_efficiency: float = (
        1.0  # share of other products' speed that grouped ones of many rows reach
    )
    index_efficiency: float | None = (
        None  # share of the bandwidth of reads and writes by index, never fused
    )
    is_compiled: bool = False  # whether a compiler fuses operators that read and write
    fused_dequantization: bool = False  # whether one kernel dequantizes a weight
    step_overhead: float = 0.0
    long_sequence_gain: float = (
        0.0  # relative, of attention from a length of 65,536 to one of 1,048,576
    )
    unit_seconds: float = 0.0  # of the host, for the engine's part of a unit's forward or backward

    def seconds(self, work: Work) -> float:
        """Apply the roofline model: the longer of computation and memory, and the launch."""
        if work.kind is WorkKind.MEMORY:
            return self._memory_seconds(work)
        rate = self.flops[work.itemsize] * self._share(work)
        moved = work.nbytes / (self.bandwidth * _bandwidth_share(work.nbytes) * self._grouped(work))
        return max(work.flops / rate, moved) / self.step_efficiency + _KERNEL_LAUNCH

    def _memory_seconds(self, work: Work) -> float:
        in_turn = 0.0 if self.is_compiled else _SERIALIZED_ROW * max(0, work.dims[-1] - _FREE_ROWS)
        if self.index_efficiency is not None and work.name.rstrip("_") in _INDEXING:
            seconds = (
                work.nbytes / (self.bandwidth * self.index_efficiency) / self.step_efficiency
                + _KERNEL_LAUNCH
            )
            return seconds + in_turn
        share = _FUSED_SHARE if self.is_compiled else 1.0
        if self.is_compiled or self.fused_dequantization:
            share = _FUSED_DEQUANTIZATION_SHARE.get(work.name, share)
        return self.copy_seconds(work.nbytes * share) + _KERNEL_LAUNCH * share + in_turn

    @property
    def host_seconds(self) -> float:
        """The time in Python, dispatcher, autograd and driver; a compiler fuses operators."""
        return _HOST_SECONDS_PER_OPERATOR * (_FUSED_SHARE if self.is_compiled else 1.0)

    def copy_seconds(self, nbytes: float) -> float:
        """Apply the share of the bandwidth that `nbytes` reach."""
        return nbytes / (self.bandwidth * _bandwidth_share(nbytes)) / self.step_efficiency

    def optimizer_seconds(self, nbytes: float, moments: int) -> float:
        """Price one kernel: it reads all, and writes all except the gradient."""
        return self.copy_seconds((3 + 2 * moments) * nbytes)

    def tiles_seconds(self, numel: float, stored: float) -> float:
        """Price a step of `numel` weights in tiles; a fused kernel moves what is `stored`."""
        return self.copy_seconds(stored if self.is_compiled else _TILE_STEP_BYTES * numel)

    def _attention(self, work: Work) -> float:
        """Return the efficiency of the kernel that torch runs; float32 has a peak of its own."""
        kernel = next((name for name in self.attention_efficiency if name in work.name), FLASH)
        return self.attention_efficiency[kernel if work.itemsize == _TWO_BYTES else FLASH]

    def _grouped(self, work: Work) -> float:
        """Return the share that groups of rows reach: fewer rows fill their tiles less."""
        if not work.name.startswith(GROUPED):
            return 1.0
        share = self.grouped_efficiency * work.dims[1] / (work.dims[1] + _HALF_ROWS)
        return share if work.name == GROUPED else _GATHERING_SHARE * share

    def _share(self, work: Work) -> float:
        if work.kind in _ATTENTION_KINDS:
            _, _, length, width = work.dims
            # Narrower heads keep fewer units busy, by the fourth root of their width.
            by_width = math.sqrt(math.sqrt(min(1.0, width / 128)))
            long = 1.0 + self.long_sequence_gain * min(
                1.0, max(0.0, math.log2(length / _LONG_TOKENS) / _DOUBLINGS)
            )
            return self._attention(work) * long * length / (length + _HALF_LENGTH) * by_width
        _, rows, columns, length = work.dims
        matmul = self.matmul_efficiency * self._grouped(work)
        return (
            matmul * length / (length + _HALF_REDUCTION) * _alignment_share(rows, columns, length)
        )


GROUPED = "_grouped_mm"
GATHERING = f"{GROUPED}, gathering"  # by a kernel that reads its rows by index, such as Liger's
_GATHERING_SHARE = (
    0.55  # share of torch's grouped products that such a kernel reaches, by steps of TRL
)
_INDEXING = (
    "index", "index_put", "index_add", "index_select", "scatter", "scatter_add", "gather",
)  # fmt: skip
_TWO_BYTES = 2
# Seconds for each row that index_put adds to the same row, such as gradients of an expert's bias: a
# warp adds them one after another. By published steps of gpt-oss, whose filler text sends tokens to
# the same experts: 1.6e-6 each, for eight times the mean. A compiler adds with atomics instead.
_SERIALIZED_ROW, _FREE_ROWS = 13e-6, 64
# Bytes per weight of AdamW in tiles with 8-bit moments, by the operators in optim/tiles.py, of
# which each reads and writes float32. Fused, 16: gradient 4, weight 2 * 4, moments 2 * 2.
_TILE_STEP_BYTES = 310
UNPACKING = "unpack "  # and a packing: the operators that dequantize weights
# Bytes per weight in bf16 of a fused kernel, which reads a weight's bits and writes it, by those of
# the operators that a trace counts.
_FUSED_DEQUANTIZATION_SHARE = {"unpack nf4": 2.5 / 27.0, "unpack int8": 3.0 / 21.1}
_FUSED_SHARE = 0.4  # share of the bytes of single operators that remains after fusion
_HOST_SECONDS_PER_OPERATOR = 9e-6  # seconds
_KERNEL_LAUNCH = 2e-6  # seconds: the shortest kernel
_LONG_TOKENS, _DOUBLINGS = 1 << 16, 4
_HALF_LENGTH = 560  # sequence length at which attention reaches half of its speed
_HALF_ROWS = 600  # rows of each group at which a grouped product reaches half of its speed
_HALF_REDUCTION = 130  # length of the sums at which a matrix product reaches half of its speed


def _bandwidth_share(nbytes: float) -> float:
    """Return the share of the memory bandwidth that a kernel of `nbytes` reaches."""
    if nbytes >= 64e6:
        return 0.85
    return 0.70 if nbytes >= 8e6 else 0.5


def _alignment_share(*sizes: int) -> float:
    """Return the efficiency of a matrix whose sizes may not divide into tiles."""
    if any(size % 8 for size in sizes if size > 1):
        return 0.65
    return 0.95 if any(size % 64 for size in sizes if size > 64) else 1.0
