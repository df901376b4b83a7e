"""Plays a rank's tasks: one stream that computes, queues of collectives, links that they share.

A discrete-event simulation in which what is under way has a speed: transfers over one link share
it, a transfer takes arithmetic from what is computed beside it, and may get less of the link for
that. Speeds change only where something begins or ends, so that time goes from one such moment to
the next. Ranks that compute apart drift apart, like random walks: with the root of the time since
one waited for another; a collective flows when the last of them has begun it.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import sqrt

from fsdpctl.predict.tasks import Compute, Start, Task, Wait

COMPUTE = "compute"
_MOST_SLOWED = 0.9  # of the arithmetic, however much is under way
_DONE = 1e-12  # seconds


@dataclass(frozen=True, slots=True)
class Stretch:
    """Something that went on, from `began` until `ended`, in seconds since the start."""

    lane: str  # COMPUTE, or the name of a queue
    label: str
    began: float
    ended: float


@dataclass(slots=True)
class Played:
    """What came of it."""

    seconds: float = 0.0
    computing: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by phase
    waiting: float = 0.0  # nothing was computed, for a collective
    sent: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # bytes, by link
    stretches: list[Stretch] = field(default_factory=list)


@dataclass(slots=True)
class _Running:
    """A collective, until it is over."""

    start: Start
    latency: float
    seconds: float
    ready: float  # when the last rank has begun it
    began: float | None = None


class Player:
    """The state of a rank; what one `play` only started goes on in the next."""

    def __init__(self) -> None:
        self.played = Played()
        self._queues: dict[str, deque[_Running]] = defaultdict(deque)
        self._pending: set[int] = set()
        self._met = 0.0  # when this rank last waited for others

    def play(self, tasks: Iterable[Task]) -> Played:
        """Do `tasks`, from a time of 0."""
        before, self.played = self.played.seconds, Played()
        self._met -= before
        for running in (each for queue in self._queues.values() for each in queue):
            running.ready -= before
            if running.began is not None:
                running.began -= before
        for task in tasks:
            if isinstance(task, Compute):
                self._compute(task)
            elif isinstance(task, Start):
                self._start(task)
            elif isinstance(task, Wait):
                self._wait(task.key)
        return self.played

    def _start(self, task: Start) -> None:
        transfer, now = task.transfer, self.played.seconds
        self._pending.add(task.key)
        self.played.sent[transfer.link] += transfer.nbytes
        ready = now + transfer.drift * sqrt(now - self._met)
        running = _Running(task, transfer.latency, transfer.seconds, ready)
        self._queues[task.queue].append(running)

    def _compute(self, task: Compute) -> None:
        began, left = self.played.seconds, task.seconds
        while left > _DONE:
            left -= self._advance(left)
        self.played.computing[task.phase] += self.played.seconds - began
        if self.played.seconds > began:
            stretch = Stretch(COMPUTE, task.label, began, self.played.seconds)
            self.played.stretches.append(stretch)

    def _wait(self, key: int) -> None:
        began = self.played.seconds
        while key in self._pending:
            self._advance(None)
        if self.played.seconds > began:
            self._met = self.played.seconds
        self.played.waiting += self.played.seconds - began

    def _advance(self, computing: float | None) -> float:
        """Until something ends; returns how much of `computing` was done."""
        firsts, now = self._firsts(), self.played.seconds
        heads = [each for each in firsts if each.ready <= now + _DONE]
        flowing = [each for each in heads if each.latency <= _DONE]
        slowed = sum(each.start.transfer.slows for each in heads)
        speed = 1.0 - min(_MOST_SLOWED, slowed)
        rates = self._rates(flowing, computes=computing is not None)
        until = [each.ready - now for each in firsts if each.ready > now + _DONE]
        until += [each.latency for each in heads if each.latency > _DONE]
        until += [each.seconds / rates[id(each)] for each in flowing]
        if computing is not None:
            until.append(computing / speed)
        step = min(until)
        now = self.played.seconds = now + step
        for each in heads:
            if each.latency > _DONE:
                each.latency -= step
            else:
                each.seconds -= step * rates[id(each)]
            if each.latency <= _DONE and each.seconds <= _DONE:
                self._end(each, now)
        return step * speed

    def _firsts(self) -> list[_Running]:
        """The first of each queue, unless it has to wait for another."""
        firsts = []
        for queue in self._queues.values():
            if queue and queue[0].start.after not in self._pending:
                if queue[0].began is None:
                    queue[0].began = self.played.seconds
                firsts.append(queue[0])
        return firsts

    @staticmethod
    def _rates(flowing: list[_Running], *, computes: bool) -> dict[int, float]:
        on_link: dict[str, int] = defaultdict(int)
        for each in flowing:
            on_link[each.start.transfer.link] += 1
        rates = {}
        for each in flowing:
            transfer = each.start.transfer
            rate = 1.0 / on_link[transfer.link]
            rates[id(each)] = rate * (1.0 - transfer.yields) if computes else rate
        return rates

    def _end(self, each: _Running, now: float) -> None:
        assert each.began is not None
        self._queues[each.start.queue].popleft()
        self._pending.discard(each.start.key)
        self.played.stretches.append(Stretch(each.start.queue, each.start.label, each.began, now))
