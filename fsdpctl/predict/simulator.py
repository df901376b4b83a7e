"""Simulates the tasks of a rank: a compute stream, queues of transfers, and shared links.

A discrete-event simulation, in which computation and transfers in progress have a speed. Transfers
over one link share its bandwidth. A transfer slows down concurrent computation, and computation may
slow down a transfer. Speeds change only when a task starts or ends, so time jumps to these events.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

_MAX_SLOWDOWN = 0.9  # share of the computing speed that concurrent transfers can take
_EPSILON = 1e-12  # seconds


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective, or work of the host, with its times if it runs alone."""

    link: str  # transfers over the same link share it
    latency: float  # seconds before data is transferred
    seconds: float  # in which data is transferred, with the whole link
    nbytes: float = 0.0  # sent by a rank over the link
    compute_slowdown: float = 0.0  # share of the computing speed that is lost during the transfer
    comm_slowdown: float = 0.0  # share of the link's speed that is lost during computation


@dataclass(frozen=True, slots=True)
class Compute:
    """An operation of the compute stream."""

    seconds: float
    label: str
    phase: str = "compute"  # or optimizer


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a transfer in a queue, which runs one transfer at a time."""

    key: int
    queue: str
    transfer: Transfer
    label: str
    after: tuple[int, ...] = ()  # the transfers that have to end first


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait of the compute stream until a transfer ends."""

    key: int
    phase: str | None = None  # the phase that includes the wait; None: exposed communication


Task = Compute | Start | Wait


@dataclass(slots=True)
class SimulatedStep:
    """The result of a simulation."""

    seconds: float = 0.0
    seconds_by_phase: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    exposed_communication: float = 0.0  # seconds in which the compute stream waited for transfers
    sent_bytes: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # key: link


@dataclass(slots=True)
class _QueuedTransfer:
    """A transfer that has not ended, with its remaining times."""

    start: Start
    latency: float
    seconds: float


class StepSimulator:
    """A simulated rank. Collectives in flight at the end of a `run` continue in the next `run`."""

    def __init__(self) -> None:
        self._step = SimulatedStep()
        self._queues: dict[str, deque[_QueuedTransfer]] = defaultdict(deque)
        self._pending: set[int] = set()

    def run(self, tasks: Iterable[Task]) -> SimulatedStep:
        """Execute `tasks`, starting at time 0."""
        self._step = SimulatedStep()
        for task in tasks:
            if isinstance(task, Compute):
                self._compute(task)
            elif isinstance(task, Start):
                self._start(task)
            else:
                self._wait(task)
        return self._step

    def _start(self, task: Start) -> None:
        transfer = task.transfer
        self._pending.add(task.key)
        self._step.sent_bytes[transfer.link] += transfer.nbytes
        self._queues[task.queue].append(_QueuedTransfer(task, transfer.latency, transfer.seconds))

    def _compute(self, task: Compute) -> None:
        began, remaining = self._step.seconds, task.seconds
        while remaining > _EPSILON:
            remaining -= self._advance(remaining)
        self._step.seconds_by_phase[task.phase] += self._step.seconds - began

    def _wait(self, task: Wait) -> None:
        began = self._step.seconds
        while task.key in self._pending:
            self._advance(computing=None)
        if task.phase is None:
            self._step.exposed_communication += self._step.seconds - began
        else:
            self._step.seconds_by_phase[task.phase] += self._step.seconds - began

    def _advance(self, computing: float | None) -> float:
        """Advance until something ends; return the seconds done of `computing` (None: a wait)."""
        heads = self._queue_heads()
        flowing = [each for each in heads if each.latency <= _EPSILON]
        # A collective's kernel occupies the device during its latency, too.
        slowdown = sum(each.start.transfer.compute_slowdown for each in heads)
        speed = 1.0 - min(_MAX_SLOWDOWN, slowdown)
        rates = self._rates(flowing, computes=computing is not None)
        durations = [each.latency for each in heads if each.latency > _EPSILON]
        durations += [each.seconds / rates[id(each)] for each in flowing]
        if computing is not None:
            durations.append(computing / speed)
        assert durations, "all transfers wait for transfers that never start"
        step = min(durations)
        self._step.seconds += step
        for each in heads:
            if each.latency > _EPSILON:
                each.latency -= step
            else:
                each.seconds -= step * rates[id(each)]
            if each.latency <= _EPSILON and each.seconds <= _EPSILON:
                self._end(each)
        return step * speed

    def _queue_heads(self) -> list[_QueuedTransfer]:
        """Return the first transfer of each queue, unless it waits for another transfer."""
        heads = (queue[0] for queue in self._queues.values() if queue)
        return [each for each in heads if self._pending.isdisjoint(each.start.after)]

    @staticmethod
    def _rates(flowing: list[_QueuedTransfer], *, computes: bool) -> dict[int, float]:
        on_link = Counter(each.start.transfer.link for each in flowing)
        rates = {}
        for each in flowing:
            transfer = each.start.transfer
            rate = 1.0 / on_link[transfer.link]
            rates[id(each)] = rate * (1.0 - transfer.comm_slowdown) if computes else rate
        return rates

    def _end(self, each: _QueuedTransfer) -> None:
        self._queues[each.start.queue].popleft()
        self._pending.discard(each.start.key)
