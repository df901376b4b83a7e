"""Names units and collectives in a profile."""

from contextlib import AbstractContextManager, nullcontext

from torch.profiler import record_function

_NOTHING = nullcontext()


class Ranges:
    """Named stretches of time; while it is off nothing is recorded, and nothing costs time."""

    def __init__(self) -> None:
        self.is_on = False
        self._open: list[record_function] = []

    def around(self, what: str, unit: str) -> AbstractContextManager[object]:
        """A block with a name."""
        return record_function(f"{what} {unit}") if self.is_on else _NOTHING

    def begin(self, what: str, unit: str) -> None:
        """From here on, until `end`; stretches nest."""
        if self.is_on:
            named = record_function(f"{what} {unit}")
            named.__enter__()
            self._open.append(named)

    def end(self) -> None:
        """The innermost one is over; does nothing where there is none."""
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def end_all(self) -> None:
        """None is left open, as after an exception."""
        while self._open:
            self.end()
