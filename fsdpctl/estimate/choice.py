"""What was chosen where a configuration said `auto`, and what it was chosen from."""

from dataclasses import dataclass
from typing import Any

from fsdpctl.config.choosing import words_of
from fsdpctl.config.schema import Config
from fsdpctl.errors import UsageError
from fsdpctl.estimate.run_estimate import RunEstimate

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration that may be chosen."""

    config: Config  # placed
    estimate: RunEstimate
    seconds: float  # of a step, as foreseen
    measured: float | None = None  # the same, where it was probed


@dataclass(frozen=True, slots=True)
class Choice:
    """What fits, the chosen one first."""

    names: tuple[str, ...]  # of what was left to choose
    ranked: tuple[Candidate, ...]  # the best that fit, which differ in more than prefetch
    count: int  # of combinations
    whose: str  # the figures that time was foreseen by, in words
    closest: RunEstimate | None = None  # to fitting, where nothing fits
    failures: tuple[str, ...] = ()  # of probes, a line each
    probing: float = 0.0  # seconds that all probes took

    @property
    def estimate(self) -> RunEstimate:
        """Of what was chosen, or of what comes closest to fitting."""
        found = self.ranked[0].estimate if self.ranked else self.closest
        assert found is not None
        return found

    @property
    def chosen(self) -> Config:
        """The configuration that has what was chosen.

        Raises:
            UsageError: nothing fits.
        """
        if not self.ranked:
            raise UsageError(self.lacks)
        return self.ranked[0].config

    @property
    def lacks(self) -> str:
        """What is missing where nothing fits."""
        left = " ".join(f"{name}=auto" for name in self.names)
        found = self.estimate
        return (
            f"{left}: nothing fits; closest is {self.words(found.config)}, which needs "
            f"{_size(found.peak_reserved)} a rank, {_size(-found.margin)} more than it may use"
        )

    def words(self, config: Config) -> str:
        """What was chosen in `config`, as it is typed."""
        return words_of(config, self.names)

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints of it."""
        return {
            "names": list(self.names),
            "combinations": self.count,
            "figures": self.whose,
            "ranked": [
                {
                    "words": self.words(each.config),
                    "step_seconds": each.seconds,
                    "peak_reserved_bytes": each.estimate.peak_reserved,
                }
                for each in self.ranked
            ],
        }


def _size(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f} GiB" if nbytes >= _GIB else f"{max(0, nbytes) / (1 << 20):.1f} MiB"
