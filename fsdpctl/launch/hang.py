"""The states of ranks in a hang, and the ranks that cause it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

_STOPPED, _UNINTERRUPTIBLE = "T", "D"


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of a rank, as its launcher sees it."""

    rank: int
    host: str
    state: str  # of the process: the kernel's letter
    seconds: float  # since its last heartbeat
    step: int | None
    place: str
    waits: bool  # for other ranks
    # Number of collectives it has started, by process group; the last one's kind is in `pending`.
    begun: dict[str, int] = field(default_factory=dict)
    pending: str = ""  # the collective that it started last, if that is not complete

    def __str__(self) -> str:
        step = "before its first step" if self.step is None else f"step {self.step}"
        blocked = {_STOPPED: ", stopped by a signal", _UNINTERRUPTIBLE: ", blocked in a device"}
        waits = ", waits for other ranks" if self.waits else ""
        pending = f" in {self.pending}" if self.pending else ""
        return (
            f"rank {self.rank} on {self.host}: {step}, {self.place or 'starting'}{waits}{pending}"
            f"{blocked.get(self.state, '')}, for {self.seconds:.0f} s"
        )


def culprits(states: Sequence[RankState]) -> list[int]:
    """Return the ranks that the others wait for, or an empty list if unknown.

    Stopped ranks come first, then ranks blocked in a device, then ranks that started fewer
    collectives than their process group, then ranks that do not wait while others do.
    """
    for letter in (_STOPPED, _UNINTERRUPTIBLE):
        if found := [each.rank for each in states if each.state == letter]:
            return found
    behind = Counter[int]()
    for group in {name for each in states for name in each.begun}:
        counts = {each.rank: each.begun[group] for each in states if group in each.begun}
        least, most = min(counts.values()), max(counts.values())
        behind.update(rank for rank, count in counts.items() if count == least < most)
    if behind:
        return sorted(behind)
    busy = [each.rank for each in states if not each.waits]
    return busy if len(busy) < len(states) else []


def report(states: Sequence[RankState], limit: float, *, is_usual: bool = True) -> str:
    """Describe in one line which ranks have had no heartbeat for `limit` seconds, and where.

    `is_usual`: the limit is launch.hang_timeout; before the first step it may be longer.
    """
    found = culprits(states)
    shown = [each for each in states if each.rank in found] or list(states)
    named = "; ".join(map(str, shown[:4]))
    more = f"; and {len(shown) - 4} more" if len(shown) > 4 else ""
    setting = (
        f"launch.hang_timeout={limit:g} s" if is_usual else f"{limit:g} s before its first step"
    )
    return f"no progress for more than {setting}: {named}{more}"
