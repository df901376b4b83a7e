"""What workers that were started again know of the failure before."""

import os
import time
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

RESTART = "FSDPCTL_RESTART"  # in the environment


@dataclass(frozen=True, slots=True)
class Restart:
    """Why ranks were started again, and what it cost."""

    number: int
    reason: str
    failed_at: float  # seconds since the epoch
    lost_steps: int  # done before, and to be done again

    def to_text(self) -> str:
        """For the environment of the next workers."""
        return msgspec.json.encode(self).decode()

    def to_line(self, step: int) -> dict[str, Any]:
        """What metrics.jsonl says of it, once `step` is done."""
        seconds = round(time.time() - self.failed_at, 3)
        return {"step": step, "restart": {**asdict(self), "seconds_to_next_step": seconds}}


def restart_of() -> Restart | None:
    """Of the workers to which this one belongs; None where they were not started again."""
    text = os.environ.get(RESTART)
    return None if text is None else msgspec.json.decode(text, type=Restart)
