"""The second collective of a reduction, which adds sums over replicas or gathers their parts."""

from torch import Tensor

from fsdpctl.comm.base import Gathering, Handle
from fsdpctl.comm.collectives import Mesh
from fsdpctl.engine.buffer import UnitBuffer
from fsdpctl.engine.ledger import Ledger
from fsdpctl.plan.layout import EvenParts
from fsdpctl.plan.schedule import Buffer


def start_combining(
    mesh: Mesh, ledger: Ledger, buffer: UnitBuffer, key: tuple[str, int], total: Tensor
) -> Handle:
    """Start the second collective; its result is `total`, or this replica's share of it."""
    if buffer.shard.is_replicated:
        return mesh.shard.all_gather([Gathering(total, buffer.layout.parts)])
    replicas = mesh.replicas
    assert replicas is not None
    if buffer.layout.shares == 1:
        return replicas.start_all_reduce(total)
    numel = total.numel() // replicas.size
    reduction = replicas.reduce_scatter(total, EvenParts(numel, replicas.size))
    if reduction.workspace_nbytes:
        ledger.allocate(Buffer.COMBINING, *key, reduction.workspace_nbytes)
    own = total.narrow(0, replicas.rank * numel, numel)

    def finish() -> Tensor:
        reduction.finish(own, 1.0, own.dtype)
        ledger.free(Buffer.COMBINING, *key)
        return own

    return Handle(finish)
