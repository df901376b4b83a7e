"""The candidates for `auto`, ranked."""

from dataclasses import dataclass
from typing import Any

from fsdpctl.config.auto import Selection
from fsdpctl.errors import UsageError
from fsdpctl.estimate.run_estimate import RunEstimate

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Candidate:
    """A selection that fits into memory."""

    selection: Selection
    estimate: RunEstimate
    seconds: float  # predicted, per step
    measured: float | None = None  # per step, if it was probed


@dataclass(frozen=True, slots=True)
class Ranking:
    """The candidates that fit, the selected one first."""

    names: tuple[str, ...]  # the settings that are `auto`
    ranked: tuple[Candidate, ...]  # the best that fit; they differ in more than prefetch
    count: int  # of combinations
    whose: str  # the source of the hardware specs
    closest: RunEstimate | None = None  # of the combination that lacks least, if none fits
    failures: tuple[str, ...] = ()  # of probes, a line each
    probing: float = 0.0  # seconds spent on all probes

    @property
    def estimate(self) -> RunEstimate:
        """The estimate of the selected candidate, or of the combination closest to fitting."""
        found = self.ranked[0].estimate if self.ranked else self.closest
        assert found is not None
        return found

    @property
    def best(self) -> Candidate:
        """The selected candidate.

        Raises:
            UsageError: If nothing fits.
        """
        if not self.ranked:
            raise UsageError(self.lacks)
        return self.ranked[0]

    @property
    def lacks(self) -> str:
        """The message if nothing fits: the closest combination and the memory that it lacks."""
        left = " ".join(f"{name}=auto" for name in self.names)
        found = self.estimate
        return (
            f"{left}: nothing fits; closest is {self.text(Selection.of(found.config))}, which "
            f"needs {_size(found.peak_reserved)} per rank, {_size(-found.margin)} more than "
            "available"
        )

    def text(self, selection: Selection) -> str:
        """Return a selection as KEY=VALUE settings."""
        return selection.text(self.names)

    def to_dict(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {
            "names": list(self.names),
            "combinations": self.count,
            "prediction_source": self.whose,
            "ranked": [
                {
                    "settings": self.text(each.selection),
                    "step_seconds": each.seconds,
                    "peak_reserved_bytes": each.estimate.peak_reserved,
                }
                for each in self.ranked
            ],
        }


def _size(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f} GiB" if nbytes >= _GIB else f"{max(0, nbytes) / (1 << 20):.1f} MiB"
