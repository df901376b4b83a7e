"""Collectives priced by latency and bandwidth, over the links within a node and between nodes."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from fsdpctl.predict.tasks import Transfer

NODE, NET = "links within a node", "links between nodes"


class CollectiveKind(StrEnum):
    """What ranks do together."""

    GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that do something together, alike many on each of their nodes."""

    ranks: int
    nodes: int

    @property
    def ranks_per_node(self) -> int:
        """Of the group."""
        return self.ranks // self.nodes


class Network(Protocol):
    """What sends."""

    def transfer(self, kind: CollectiveKind, nbytes: float, group: Group) -> Transfer:
        """A collective over a buffer of so many bytes: what is gathered, or what is reduced."""
        ...


@dataclass(frozen=True, slots=True)
class RingNetwork:
    """NCCL's rings and trees over links that are described.

    Times are latency + bytes / bandwidth, with NCCL's own latencies for its simple protocol
    (NVIDIA/nccl, src/graph/tuning.cc). Rings go through all ranks of a node before they leave it,
    on as many channels as there are network cards, so each card carries the share of its rank.
    """

    intra: float  # bytes/s that a rank sends and receives within its node
    inter: float  # the same between nodes: its card's
    slows_intra: float = 0.19  # arithmetic beside a collective: arXiv 2507.03114, 18.9 % on average
    slows_inter: float = 0.10

    def transfer(self, kind: CollectiveKind, nbytes: float, group: Group) -> Transfer:
        """By a ring; an all-reduce by a tree where that has the shorter latency."""
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
        slows = self.slows_inter if group.ranks_per_node == 1 else self.slows_intra
        leaving = sent if nodes == 1 else sent * (nodes - 1) / nodes / group.ranks_per_node
        return Transfer(link, latency, sent / bandwidth, leaving, slows)

    def _bandwidth(self, group: Group) -> float:
        """Bytes/s of a ring, which more nodes make slower (NVIDIA/nccl#1229)."""
        intra = self.intra * _PROTOCOL
        if group.nodes == 1:
            return intra
        inter = self.inter * _CARD * group.ranks_per_node
        declines = max(0.0, math.log2(group.nodes / 4)) * _DECLINE
        return min(intra if group.ranks_per_node > 1 else inter, inter) * max(0.4, 1.0 - declines)


_PROTOCOL = 0.8  # of a link's rate is left for data
_CARD = 0.92
_DECLINE = 0.055  # of the bandwidth, each time that the nodes double beyond four
_BASE, _INTRA_HOP, _INTER_HOP = 8.4e-6, 3.4e-6, 14e-6  # seconds
