"""Whether copies of the same values are the same."""

import torch

from fsdpctl.comm.copies import as_integers, compare_copies
from fsdpctl.engine.runtime import Runtime


@torch.no_grad()
def check_replicas(runtime: Runtime) -> None:
    """Compare by a checksum what several ranks hold alike. Collective.

    Raises:
        EngineError: a parameter differs; the message names it and the rank.
    """
    mesh = runtime.mesh
    if runtime.strategy.shards_params and mesh.replicas is None:
        return
    place = mesh.shard.rank if runtime.strategy.shards_params else 0
    compare_copies(mesh.world, place, _checksums(runtime))


def _checksums(runtime: Runtime) -> dict[str, tuple[int, ...]]:
    """Of each parameter, as far as ranks hold it alike: the sums of its bits as integers."""
    names, sums = [], []
    for buffer in (buffer for unit in runtime.units.values() for buffer in unit.buffers):
        shard = buffer.shard
        alike = []
        if buffer.resting is not None:
            alike.append((buffer.resting.span, buffer.resting.values))
        has_copies = runtime.strategy.shards_params and shard.layout.shares == 1
        if shard.is_replicated or has_copies:
            alike.append((shard.held, shard.master))
        for held, values in alike:
            bits = as_integers(values)
            for piece in buffer.layout.pieces(held):
                inside = piece.in_flat.shift(-held.start)
                names.append(piece.param.name)
                sums.append(bits[inside.start : inside.stop].sum(dtype=torch.int64))
    found: dict[str, tuple[int, ...]] = {}
    for name, checksum in zip(names, torch.stack(sums).tolist() if sums else (), strict=True):
        found[name] = (*found.get(name, ()), checksum)
    return found
