"""The diagnosis of a hang: finds the ranks that the other ranks wait for."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

# States of a process, in addition to the kernel's letters.
EXITED, UNKNOWN = "", "?"
_PROCESS_PROBLEMS = {  # in the order of blame
    EXITED: ", has exited", "T": ", stopped by a signal", "D": ", blocked in a device"
}  # fmt: skip
_MOST_NAMED = 4  # ranks that a report names


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of a rank, as the watchdog of its host sees it."""

    rank: int
    host: str
    process_state: str  # the kernel's letter, EXITED or UNKNOWN
    silent_seconds: float  # without progress
    step: int | None
    phase: str
    is_waiting: bool  # whether it waits for other ranks
    # Number of collectives that the rank has started, by process group.
    started_collectives: dict[str, int] = field(default_factory=dict)
    pending: str = ""  # the last started collective, if it is not complete
    # False: a thread holds the interpreter lock, or the host is unreachable.
    is_responsive: bool = True

    @property
    def step_text(self) -> str:
        return "before its first step" if self.step is None else f"step {self.step}"

    def __str__(self) -> str:
        waits = ", waits for other ranks" if self.is_waiting else ""
        pending = f" in {self.pending}" if self.pending else ""
        problem = "" if self.is_responsive else ", does not answer"
        problem = _PROCESS_PROBLEMS.get(self.process_state, problem)
        # The host of such a rank does not respond.
        prefix = "last seen " if self.process_state == UNKNOWN and not self.is_responsive else ""
        return (
            f"rank {self.rank} on {self.host}: {prefix}{self.step_text}, "
            f"{self.phase or 'starting'}{waits}{pending}{problem}, for {self.silent_seconds:.0f} s"
        )


def blamed_ranks(states: Sequence[RankState]) -> list[int]:
    """Return the ranks that the other ranks wait for, or an empty list if they are unknown.

    Returns the first group that has ranks: exited, stopped, blocked in a device, neither answering
    nor waiting, behind in the collectives of a process group, not waiting while others wait.
    """
    # If no rank waits, the ranks that have exited may be finished.
    some_wait = any(each.is_waiting for each in states)
    for letter in _PROCESS_PROBLEMS:
        ranks = [each.rank for each in states if each.process_state == letter]
        if ranks and (some_wait or letter != EXITED):
            return ranks
    unresponsive = [each.rank for each in states if not (each.is_responsive or each.is_waiting)]
    if 0 < len(unresponsive) < len(states):
        return unresponsive
    behind = Counter[int]()
    for group in {name for each in states for name in each.started_collectives}:
        started = ((each.rank, each.started_collectives.get(group)) for each in states)
        counts = {rank: count for rank, count in started if count is not None}
        lowest, highest = min(counts.values()), max(counts.values())
        behind.update(rank for rank, count in counts.items() if count == lowest < highest)
    if behind:
        return sorted(behind)
    busy = [each.rank for each in states if not each.is_waiting]
    return busy if len(busy) < len(states) else []


def describe_hang(
    states: Sequence[RankState], limit: float, *, before_first_step: bool = False
) -> str:
    """Describe in one line which ranks made no progress for `limit` seconds, and in which phase.

    With `before_first_step`, `limit` is longer than launch.hang_timeout.
    """
    blamed = blamed_ranks(states)
    shown = [each for each in states if each.rank in blamed] or list(states)
    named = "; ".join(map(str, shown[:_MOST_NAMED]))
    more = f"; and {len(shown) - _MOST_NAMED} more" if len(shown) > _MOST_NAMED else ""
    if others := [each for each in states if blamed and each.rank not in blamed]:
        example = min(others, key=lambda each: not each.pending)
        waiting = f"rank {example.rank} waits"
        if len(others) > 1:
            waiting = f"{len(others)} ranks wait, rank {example.rank}"
        more += f"; {waiting} in {example.pending or example.phase or 'starting'}"
        more += f", {example.step_text}"
    limit_text = f"launch.hang_timeout={limit:g} s"
    if before_first_step:
        limit_text = f"{limit:g} s before its first step"
    return f"no progress for more than {limit_text}: {named}{more}"
