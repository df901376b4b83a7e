"""Comparison of values that several ranks hold."""

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from fsdpctl.comm.base import Collectives
from fsdpctl.errors import EngineError

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(values: Tensor) -> Tensor:
    """Return the bits of values; their sum is a checksum in any order."""
    return values.view(_INTEGERS[values.itemsize])


def compare_replicas(
    world: Collectives, place: int, checksums: Mapping[str, tuple[int, ...]]
) -> None:
    """Compare the replicas of parameters by `checksums`; ranks with an equal `place` are replicas.

    Raises:
        EngineError: If a parameter differs; the message names it and the rank.
    """
    places = world.gather_objects(place)
    answers = world.gather_objects(dict(checksums))
    for part in sorted(set(places)):
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
                    f"{name} on rank {', '.join(odd)} differs from the other replicas, because of "
                    "a hardware fault or a write to the parameters of one rank only"
                )
