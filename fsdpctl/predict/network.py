"""Collectives priced by latency and bandwidth, on the links within a node and between nodes."""

import math
from dataclasses import dataclass
from enum import StrEnum

from fsdpctl.predict.simulator import Transfer

NODE, NET = "links within a node", "links between nodes"


class CollectiveKind(StrEnum):
    """The collective operations of a training step."""

    GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"


@dataclass(frozen=True, slots=True)
class Group:
    """A process group, with the same number of ranks on each of its nodes."""

    ranks: int
    nodes: int

    @property
    def ranks_per_node(self) -> int:
        """The ranks of the group on one node."""
        return self.ranks // self.nodes


@dataclass(frozen=True, slots=True)
class RingNetwork:
    """NCCL's rings and trees over links from a data sheet.

    Times are latency + bytes / bandwidth, with NCCL's own latencies for its simple protocol
    (NVIDIA/nccl, src/graph/tuning.cc). Rings go through all ranks of a node before they leave it,
    on as many channels as there are network cards, so each card carries the share of its rank.
    """

    intra: float  # bytes/s that a rank sends and receives within its node
    inter: float  # the same between nodes, over its network card
    # Share of the computing speed lost during a collective: 18.9% on average in arXiv 2507.03114.
    slowdown_intra: float = 0.19
    slowdown_inter: float = 0.10

    def transfer(self, kind: CollectiveKind, nbytes: float, group: Group) -> Transfer:
        """Price a ring; for an all-reduce a tree, if its latency is shorter."""
        ranks, nodes = group.ranks, group.nodes
        if ranks == 1:
            return Transfer(NODE, 0.0, 0.0)
        bandwidth = self._bandwidth(group)
        latency = _BASE + (ranks - nodes) * _INTRA_HOP + (nodes - 1) * _INTER_HOP
        rounds = 2 if kind is CollectiveKind.ALL_REDUCE else 1
        if rounds == 2:
            tree = (group.ranks_per_node - 1) * _INTRA_HOP + math.log2(nodes) * _INTER_HOP
            latency = _BASE + 2 * min(latency - _BASE, tree)
        sent = rounds * nbytes * (ranks - 1) / ranks
        link = NODE if nodes == 1 else NET
        slowdown = self.slowdown_inter if group.ranks_per_node == 1 else self.slowdown_intra
        leaving = sent if nodes == 1 else sent * (nodes - 1) / nodes / group.ranks_per_node
        return Transfer(link, latency, sent / bandwidth, leaving, slowdown)

    def _bandwidth(self, group: Group) -> float:
        """Return the bytes/s of a ring, which more nodes slow down (NVIDIA/nccl#1229)."""
        intra = self.intra * _PROTOCOL
        if group.nodes == 1:
            return intra
        inter = self.inter * _CARD * group.ranks_per_node
        declines = max(0.0, math.log2(group.nodes / 4)) * _DECLINE
        return min(intra if group.ranks_per_node > 1 else inter, inter) * max(0.4, 1.0 - declines)


_PROTOCOL = 0.8  # share of a link's rate that is left for data
_CARD = 0.92
_DECLINE = 0.055  # share of the bandwidth lost each time the nodes double beyond four
_BASE, _INTRA_HOP, _INTER_HOP = 8.4e-6, 3.4e-6, 14e-6  # seconds
