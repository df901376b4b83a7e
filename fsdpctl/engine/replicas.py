"""Whether copies of the same values are the same."""

from collections import Counter

import torch

from fsdpctl.engine.runtime import Runtime
from fsdpctl.errors import EngineError

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    places = mesh.world.gather_objects(place)
    answers = mesh.world.gather_objects(_checksums(runtime))
    for part in range(mesh.shard.size):
        of_part = {
            rank: {name: tuple(sums) for name, sums in answers[rank].items()}
            for rank, place in enumerate(places)
            if place == part
        }
        for name in next(iter(of_part.values()), {}):
            found = {rank: checksums[name] for rank, checksums in of_part.items()}
            usual = Counter(found.values()).most_common(1)[0][0]
            odd = [str(rank) for rank, checksum in found.items() if checksum != usual]
            if odd:
                raise EngineError(
                    f"{name} on rank {', '.join(odd)} differs from its other copies: a replica has "
                    "gone astray, by a hardware fault or a write to parameters of one rank only"
                )


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
            bits = values.view(_INTEGERS[values.itemsize])
            for piece in buffer.layout.pieces(held):
                inside = piece.in_flat.shift(-held.start)
                names.append(piece.param.name)
                sums.append(bits[inside.start : inside.stop].sum(dtype=torch.int64))
    found: dict[str, tuple[int, ...]] = {}
    for name, checksum in zip(names, torch.stack(sums).tolist() if sums else (), strict=True):
        found[name] = (*found.get(name, ()), checksum)
    return found
