"""The failure before a restart, as the restarted workers record it."""

import os
import time
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

RESTART = "FSDPCTL_RESTART"  # in the environment


@dataclass(frozen=True, slots=True)
class Restart:
    """The cause and the cost of a restart."""

    number: int
    reason: str
    failed_at: float  # seconds since the epoch
    lost_steps: int  # completed before, and to be repeated

    def to_text(self) -> str:
        """Return the value for the environment of the workers."""
        return msgspec.json.encode(self).decode()

    def to_line(self, step: int) -> dict[str, Any]:
        """Return the object for metrics.jsonl once `step` is completed."""
        seconds = round(time.time() - self.failed_at, 3)
        return {"step": step, "restart": {**asdict(self), "seconds_to_next_step": seconds}}


def current_restart() -> Restart | None:
    """Return the restart that started this worker, or None."""
    text = os.environ.get(RESTART)
    return None if text is None else msgspec.json.decode(text, type=Restart)
