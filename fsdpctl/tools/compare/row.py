"""What is known of one variant, measured or foreseen: what every report is made of."""

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdpctl.estimate.fit import LargestModel

# The status of a variant, or what it begins with.
OK, REFUSED, TOO_LARGE, FAILED = "ok", "cannot run: ", "does not fit: ", "failed: "
NOT_REACHED = "not measured: stopped before its turn"

_FORESEEN = 0.01  # of a foreseen speed: what is less than twice that apart is alike


@dataclass(frozen=True, slots=True)
class Round:
    """One run of a variant: medians of its steps without those that warm up, as in `Row`.

    What a step consists of is as the time of all its steps was shared out.
    """

    run_dir: str | None  # below the folder of the comparison; None: it was not kept
    tokens_per_second: float
    tokens_per_second_quartiles: tuple[float, float]  # of the steps
    step_seconds: float
    compute_seconds: float
    exposed_communication_seconds: float | None  # None: it is within the computation
    optimizer_seconds: float
    data_seconds: float
    mfu: float | None
    peak_allocated_bytes: int | None
    peak_tensor_bytes: int | None
    peak_reserved_bytes: int | None
    final_loss: float | None
    drift: float = 1.0  # how fast the machine was beside its other rounds, by all variants


@dataclass(frozen=True, slots=True)
class Row:
    """One variant; None where nothing is known.

    Speeds and times are medians over the rounds, out of each of which its drift was taken; times
    are those of rank 0. What the engine owns is model, optimizer and buffers; all tensors are
    activations too.
    """

    varied: dict[str, str]  # what tells it from the others
    strategy: str
    engine: str = "fsdpctl"
    world_size: int | None = None
    tokens_per_second: float | None = None
    # From the slowest round to the fastest; of a single one the quartiles of its steps.
    tokens_per_second_spread: tuple[float, float] | None = None
    step_seconds: float | None = None
    compute_seconds: float | None = None  # of a step: forward and backward
    exposed_communication_seconds: float | None = None  # in which computation waits
    optimizer_seconds: float | None = None
    data_seconds: float | None = None
    mfu: float | None = None  # model FLOPs utilisation; None: the device's peak is not known
    sent_bytes_per_step: int | None = None  # by a rank, as the plan has it
    peak_allocated_bytes: int | None = None  # of what the engine owns, on the fullest rank
    estimated_peak_allocated_bytes: int | None = None
    peak_tensor_bytes: int | None = None  # all tensors, on rank 0; CUDA
    estimated_peak_tensor_bytes: int | None = None
    peak_reserved_bytes: int | None = None  # by the caching allocator of rank 0; CUDA
    estimated_peak_reserved_bytes: int | None = None
    estimated_breakdown: dict[str, int] | None = None  # adds up to all tensors at the peak
    memory_bytes: int | None = None  # that a rank may use for tensors
    largest: "LargestModel | None" = None  # of this kind that fits, with more or fewer blocks
    final_loss: float | None = None
    status: str = OK
    rounds: tuple[Round, ...] = ()

    @property
    def label(self) -> str:
        """The words that make it what it is."""
        return " ".join(f"{name}={text}" for name, text in self.varied.items()) or (
            f"strategy={self.strategy}"
        )

    @property
    def speed(self) -> float:
        """Tokens per second of one that ran to its end; 0 of any other."""
        return self.tokens_per_second or 0.0 if self.status == OK else 0.0

    @property
    def spread(self) -> tuple[float, float]:
        """Between which its speed lies."""
        foreseen = _FORESEEN if self.is_foreseen else 0.0
        within = self.speed * (1 - foreseen), self.speed * (1 + foreseen)
        return self.tokens_per_second_spread or within

    @property
    def is_foreseen(self) -> bool:
        """Whether its figures were not measured."""
        return self.tokens_per_second is not None and not self.rounds

    @property
    def memory(self) -> int | None:
        """What a rank needs of the device, as far as it is known: measured, else estimated."""
        known = self.peak_tensor_bytes or self.estimated_peak_tensor_bytes
        return known or self.peak_allocated_bytes

    def to_dict(self) -> dict[str, Any]:
        """What `compare --json` prints of it."""
        return asdict(self)


def figures_of(row: Row) -> dict[str, Any]:
    """Its single figures and words by name, without what consists of several."""
    several = ("varied", "estimated_breakdown", "largest", "rounds", "tokens_per_second_spread")
    return {each.name: getattr(row, each.name) for each in fields(row) if each.name not in several}
