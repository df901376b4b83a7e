"""Adds bytes to planned events: what each collective sends, and the buffers it needs."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from fsdpctl.plan.reductions import Reductions
from fsdpctl.plan.schedule import Buffer, Event, EventKind
from fsdpctl.plan.sizes import Sending, UnitBytes

K = EventKind


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a unit that one reduction covers, of each of its flat buffers."""

    sendings: list[Sending]
    first: int  # the number of its first buffer
    is_last: bool  # of the unit

    def numbered(self) -> Iterator[tuple[int, int, Sending]]:
        """Yield the number of each flat buffer with a sending, that of the sending, and itself."""
        for number, sending in enumerate(self.sendings):
            if sending.whole_grads:
                yield number, self.first + number, sending


class Replay:
    """Adds bytes and buffers to planned events."""

    def __init__(
        self,
        units: Mapping[str, UnitBytes],
        reductions: Reductions,
        *,
        leaves: bool = False,
    ) -> None:
        self.units = units
        self.leaves = leaves  # gradients go to the host once they are reduced, one unit at a time
        self._left: str | None = None  # the last unit of which they went
        self.combines = reductions.combines
        self.chained = (
            reductions.chained > 0
        )  # the second collective follows before the first is waited for
        self.events: list[Event] = []
        self._held: dict[tuple[Buffer, str, int], int] = {}
        self._holding: set[str] = set()  # units whose gradients wait for a later backward
        self._next_piece: Counter[str] = Counter()
        self._reducing: dict[str, deque[_Piece]] = defaultdict(deque)
        self._combining: dict[str, deque[_Piece]] = defaultdict(deque)

    def play(self, events: Iterable[Event]) -> list[Event]:
        """Return `events` with bytes, and with the buffers that they allocate and free."""
        for event in events:
            self._play(event.kind, event.unit, self.units[event.unit])
        return self.events

    def _play(self, kind: EventKind, name: str, unit: UnitBytes) -> None:
        if kind is K.GATHER and not unit.resident:
            self._allocate(Buffer.PARAMS, name, 0, unit.slot)
        sent = {K.GATHER: unit.params, K.SYNC: unit.renewed}.get(kind, 0)
        piece: _Piece | None = None
        if kind is K.HOLD:
            self._hold(name, unit)
        elif kind is K.REDUCE:
            piece = self._start(name, unit)
            sent = sum(each.whole_grads for each in piece.sendings)
        elif kind is K.REDUCED:
            piece = self._reducing[name].popleft()
            self._finish(name, unit, piece)
            if not self.combines:
                self._settle(name, unit, piece)
            elif not self.chained:
                self._combining[name].append(piece)
        elif kind is K.COMBINE:
            if self.chained:
                self._chain(name)
            piece = self._combining[name][-1]
            sent = self._combine(name, piece)
        elif kind is K.COMBINED:
            piece = self._combining[name].popleft()
            self._settle(name, unit, piece)
        elif kind is K.LEAVE:
            self._leave(None)
        self.events.append(Event(kind, name, sent, is_last=piece is None or piece.is_last))
        if kind is K.RELEASE and not unit.resident:
            self._free(Buffer.PARAMS, name, 0)

    def _leave(self, name: str | None) -> None:
        """Free the gradients that went to the host before those of unit `name`."""
        if self._left is not None:
            for number in range(len(self.units[self._left].flats)):
                self._free(Buffer.GRADS, self._left, number)
        self._left = name

    def _hold(self, name: str, unit: UnitBytes) -> None:
        if name not in self._holding:
            self._holding.add(name)
            for index, flat in enumerate(unit.flats):
                self._allocate(Buffer.WHOLE_GRADS, name, index, flat.held.whole_grads)

    def _start(self, name: str, unit: UnitBytes) -> _Piece:
        """Start a reduction, and return what it covers."""
        was_held, number = name in self._holding, self._next_piece[name]
        self._holding.discard(name)
        sendings = [each.held if was_held else each.fresh[number] for each in unit.flats]
        is_last = was_held or all(number + 1 == len(each.fresh) for each in unit.flats)
        self._next_piece[name] = 0 if is_last else number + 1
        piece = _Piece(sendings, number * len(unit.flats), is_last)
        for _, index, sending in piece.numbered():
            if not was_held:
                self._allocate(Buffer.WHOLE_GRADS, name, index, sending.whole_grads, is_last)
            if sending.workspace:
                self._allocate(Buffer.WORKSPACE, name, index, sending.workspace, is_last)
        self._reducing[name].append(piece)
        return piece

    def _chain(self, name: str) -> None:
        piece = self._reducing[name][-1]
        for _, index, sending in piece.numbered():
            self._allocate(Buffer.SUM, name, index, sending.sum)
        self._combining[name].append(piece)

    def _combine(self, name: str, piece: "_Piece") -> int:
        """Start the second collective and return the bytes that are sent."""
        for _, index, sending in piece.numbered():
            if sending.combining:
                self._allocate(Buffer.COMBINING, name, index, sending.combining)
        return sum(each.sum for each in piece.sendings)

    def _finish(self, name: str, unit: UnitBytes, piece: "_Piece") -> None:
        for number, index, sending in piece.numbered():
            flat = unit.flats[number]
            if flat.in_place:
                self._free(Buffer.WHOLE_GRADS, name, index, into=(Buffer.SUM, index))
            if not self.chained:
                self._allocate(Buffer.SUM, name, index, sending.sum)
            if (Buffer.WORKSPACE, name, index) in self._held:
                self._free(Buffer.WORKSPACE, name, index)
            if not flat.in_place:
                self._free(Buffer.WHOLE_GRADS, name, index)

    def _settle(self, name: str, unit: UnitBytes, piece: "_Piece") -> None:
        for number, index, sending in piece.numbered():
            grads, is_new = unit.flats[number].grads, (Buffer.GRADS, name, number) not in self._held
            becomes = is_new and sending.becomes
            if sending.combining:
                self._free(Buffer.COMBINING, name, index)
            if becomes:
                self._free(Buffer.SUM, name, index, into=(Buffer.GRADS, number))
            if is_new:
                self._allocate(Buffer.GRADS, name, number, grads)
            if not becomes:
                self._free(Buffer.SUM, name, index)
        waiting = self._reducing[name] or self._combining[name] or self._next_piece[name]
        if self.leaves and not waiting:
            self._leave(name)

    def _allocate(
        self, buffer: Buffer, name: str, index: int, nbytes: int, is_last: bool = True
    ) -> None:
        self._held[buffer, name, index] = nbytes
        self.events.append(Event(K.ALLOCATE, name, nbytes, buffer, index, is_last=is_last))

    def _free(
        self, buffer: Buffer, name: str, index: int, into: tuple[Buffer, int] | None = None
    ) -> None:
        nbytes = self._held.pop((buffer, name, index))
        self.events.append(Event(K.FREE, name, nbytes, buffer, index, into))
