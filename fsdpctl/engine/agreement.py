"""What the ranks must agree on, and how they find out that they do not."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from fsdpctl.comm.base import Collectives, Handle
from fsdpctl.engine.runtime import Runtime
from fsdpctl.errors import EngineError
from fsdpctl.plan.layout import Span

T = TypeVar("T")
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def agreed(
    collectives: Collectives, make: Callable[[], T], describe: Callable[[T], Iterable[str]]
) -> T:
    """What `make()` gives, if it gives the same on every rank. Collective.

    Args:
        collectives: the ranks.
        make: may raise; then every rank raises.
        describe: what must be equal, part by part.

    Raises:
        Exception: what `make()` raised here.
        EngineError: it failed on another rank, or gave something else there.
    """
    made: T | None = None
    parts: tuple[str, ...] = ()
    error: Exception | None = None
    try:
        made = make()
        parts = tuple(describe(made))
    except Exception as caught:  # whatever it is, the others must not wait for this rank
        error = caught
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    answers = collectives.gather_objects([digest] if error is None else [digest, str(error)])
    if error is not None:
        raise error
    for rank, (_, *messages) in enumerate(answers):
        for message in messages:
            raise EngineError(f"rank {rank}: {message}")
    if len({digest for digest, *_ in answers}) > 1:  # the parts are many, and as a rule not needed
        _refuse_difference(parts, collectives)
    assert made is not None
    return made


def _refuse_difference(ours: Sequence[str], collectives: Collectives) -> NoReturn:
    everybody = collectives.gather_objects(list(ours))
    other = next(rank for rank, theirs in enumerate(everybody) if theirs != everybody[0])
    first, second = next(
        (mine, theirs)
        for mine, theirs in zip_longest(everybody[0], everybody[other], fillvalue="nothing more")
        if mine != theirs
    )
    raise EngineError(
        "the ranks were given different models or settings: "
        f"rank 0 has {first}, rank {other} has {second}"
    )


class Agreement:
    """Which parameters had gradients, and whether all ranks gathered the same, once a backward."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._all_present: tuple[int, Tensor] | None = None  # with which fingerprint
        self._started: tuple[int, Handle] | None = None  # with which fingerprint
        self._sums: Tensor | None = None  # what came of it: counts, and that of the fingerprints
        self._unchecked: tuple[int, Tensor, torch.cuda.Event] | None = None
        units = runtime.units.values()
        self._buffers = [buffer for unit in units for buffer in unit.trained_buffers]
        self._names = [param.name for b in self._buffers for param in b.layout.params]
        runtime.when_all_is_sent = self.start

    def start(self) -> None:
        """Begin to add up what the ranks know, while the last gradients are on their way."""
        if self._started is not None:
            self._started[1].wait()  # nobody asked; its memory must not be used again before
        handle = self._runtime.mesh.world.start_all_reduce(self._own())
        self._started, self._sums = (self._runtime.gatherer.fingerprint, handle), None

    def absent_everywhere(self) -> frozenset[str]:
        """Names of the trainable parameters that had a gradient on no rank. Collective.

        Raises:
            EngineError: the ranks did not gather the same units in the same order.
        """
        if self._started is not None:
            (fingerprint, handle), self._started = self._started, None
            self._sums = handle.wait()
            self._check(fingerprint, self._sums)
        if self._runtime.has_all_gradients or self._sums is None:
            return frozenset()
        *counts, _ = self._sums.tolist()
        pairs = zip(self._names, counts, strict=True)
        return frozenset(name for name, count in pairs if not count)

    def _own(self) -> Tensor:
        """This rank's presence bits and fingerprint; those of a usual step are kept."""
        runtime = self._runtime
        fingerprint = runtime.gatherer.fingerprint
        if runtime.has_all_gradients:
            if self._all_present is None or self._all_present[0] != fingerprint:
                values = [1.0] * len(self._names) + [float(fingerprint)]
                self._all_present = fingerprint, self._on_device(values)
            return self._all_present[1].clone()
        present = [
            float(index in buffer.present)
            for buffer in self._buffers
            for index in range(len(buffer.params))
        ]
        return self._on_device([*present, float(fingerprint)])

    def _check(self, fingerprint: int, sums: Tensor) -> None:
        """Whether all ranks had this fingerprint.

        On CUDA the fingerprint is looked at a step later, when it has long arrived.
        """
        runtime = self._runtime
        expected = fingerprint * runtime.mesh.world.size
        runtime.gatherer.fingerprint = 0
        if not runtime.strategy.shards_params:
            return
        if not sums.is_cuda:
            _check_fingerprint(expected, sums[-1])
            return
        if self._unchecked is not None:
            before, found, arrived = self._unchecked
            arrived.synchronize()
            _check_fingerprint(before, found)
        found = sums[-1].to("cpu", non_blocking=True)
        self._unchecked = expected, found, torch.cuda.current_stream().record_event()

    def _on_device(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._runtime.device)


def _check_fingerprint(expected: int, found: Tensor) -> None:
    if int(found) != expected:
        raise EngineError(
            "the ranks ran the model's units in different orders, so what they gathered was mixed "
            "up: every rank must call the same units in the same order"
        )


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
        if runtime.strategy.keeps_whole_params:
            alike.append((Span(0, buffer.layout.numel), buffer.whole))
        if shard.is_replicated or runtime.strategy.shards_params:
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
