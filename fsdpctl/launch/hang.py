"""What is known of ranks that stand still, and which of them the others wait for."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

_STOPPED, _UNINTERRUPTIBLE = "T", "D"


@dataclass(frozen=True, slots=True)
class RankState:
    """Where a rank stands, as its launcher sees it."""

    rank: int
    host: str
    state: str  # of the process: the kernel's letter
    seconds: float  # since it said something of itself
    step: int | None
    place: str
    waits: bool  # for other ranks
    # Collectives it has begun, by process group; what they were is in the last entry.
    begun: dict[str, int] = field(default_factory=dict)
    pending: str = ""  # the collective that it began last and that is not over

    def __str__(self) -> str:
        step = "before its first step" if self.step is None else f"step {self.step}"
        words = {_STOPPED: ", stopped by a signal", _UNINTERRUPTIBLE: ", waits for a device"}
        waits = ", waits for others" if self.waits else ""
        pending = f" in {self.pending}" if self.pending else ""
        return (
            f"rank {self.rank} on {self.host}: {step}, {self.place or 'starting'}{waits}{pending}"
            f"{words.get(self.state, '')}, for {self.seconds:.0f} s"
        )


def culprits(states: Sequence[RankState]) -> list[int]:
    """The ranks that the others wait for, as far as it can be told; none where it cannot.

    Who is stopped, or hangs in a device, comes first; then who has begun fewer collectives than
    others of its process group; then who does not wait where others do.
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
    """Describe in one line which ranks hang, and where.

    Args:
        states: of all ranks.
        limit: seconds without a heartbeat after which a rank hangs.
        is_usual: whether that is launch.hang_timeout; before the first step it may be longer.
    """
    found = culprits(states)
    shown = [each for each in states if each.rank in found] or list(states)
    named = "; ".join(map(str, shown[:4]))
    more = f"; and {len(shown) - 4} more" if len(shown) > 4 else ""
    setting = (
        f"launch.hang_timeout={limit:g} s" if is_usual else f"{limit:g} s before its first step"
    )
    return f"stood still for more than {setting}: {named}{more}"
