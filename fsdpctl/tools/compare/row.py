"""The results of one variant, measured or predicted, on which all reports are based."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdpctl.estimate.fit import LargestModel

# The status of a variant, or its beginning.
OK, REFUSED, TOO_LARGE, FAILED = "ok", "cannot run: ", "does not fit: ", "failed: "
NOT_REACHED = "not measured: the comparison was stopped first"

_TOLERANCE = 0.01  # relative, of a predicted speed: predictions closer than twice that are tied


@dataclass(frozen=True, slots=True)
class Round:
    """One run of a variant: medians over its steps after warm-up, as in `Row`.

    The parts of a step have the shares that they have in the total time of all these steps.
    """

    run_dir: str | None  # below the directory of the comparison; None: not kept
    tokens_per_second: float
    tokens_per_second_quartiles: tuple[float, float]  # over steps
    step_seconds: float
    compute_seconds: float
    exposed_communication_seconds: float | None  # None: included in the computation
    optimizer_seconds: float
    data_seconds: float
    mfu: float | None
    peak_engine_bytes: int | None
    peak_tensor_bytes: int | None
    peak_reserved_bytes: int | None
    final_loss: float | None
    drift: float = 1.0  # speed of the machine in this round relative to all rounds


@dataclass(frozen=True, slots=True)
class Row:
    """One variant; None for unknown values.

    Speeds and times are medians over the rounds after removing each round's drift; times are those
    of rank 0. Engine bytes are model, optimizer and buffers; tensor bytes include activations.
    """

    varied: dict[str, str]  # the settings that differ between variants
    strategy: str
    engine: str = "fsdpctl"
    world_size: int | None = None
    tokens_per_second: float | None = None
    # Slowest and fastest round; with a single round the quartiles of its steps.
    tokens_per_second_spread: tuple[float, float] | None = None
    step_seconds: float | None = None
    compute_seconds: float | None = None  # of a step: forward and backward
    exposed_communication_seconds: float | None = None  # of a step: computation waits
    optimizer_seconds: float | None = None
    data_seconds: float | None = None
    mfu: float | None = None  # model FLOPs utilization; None: peak FLOP/s of the device unknown
    sent_bytes_per_step: int | None = None  # by a rank, as planned
    peak_engine_bytes: int | None = None  # on the rank with the highest peak
    estimated_peak_engine_bytes: int | None = None
    peak_tensor_bytes: int | None = None  # of all tensors, on rank 0; CUDA only
    estimated_peak_tensor_bytes: int | None = None
    peak_reserved_bytes: int | None = None  # by the caching allocator of rank 0; CUDA only
    estimated_peak_reserved_bytes: int | None = None
    estimated_breakdown: dict[str, int] | None = None  # adds up to all tensors at the peak
    memory_bytes: int | None = None  # available to a rank's tensors
    largest: "LargestModel | None" = None  # that fits, with more or fewer blocks
    final_loss: float | None = None
    status: str = OK
    rounds: tuple[Round, ...] = ()

    @property
    def label(self) -> str:
        """The settings that identify the variant."""
        return " ".join(f"{name}={text}" for name, text in self.varied.items()) or (
            f"strategy={self.strategy}"
        )

    @property
    def speed(self) -> float:
        """Tokens per second; 0 if the variant did not finish."""
        return self.tokens_per_second or 0.0 if self.status == OK else 0.0

    @property
    def spread(self) -> tuple[float, float]:
        """The interval of its speed."""
        tolerance = _TOLERANCE if self.is_predicted else 0.0
        interval = self.speed * (1 - tolerance), self.speed * (1 + tolerance)
        return self.tokens_per_second_spread or interval

    @property
    def is_predicted(self) -> bool:
        """Whether its values were not measured."""
        return self.tokens_per_second is not None and not self.rounds

    @property
    def memory(self) -> int | None:
        """The device memory that a rank needs, if known: measured, else estimated."""
        known = self.peak_tensor_bytes or self.estimated_peak_tensor_bytes
        return known or self.peak_engine_bytes
