"""What a rank does in a step, in its order: computing, starting collectives, waiting for them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective, priced as if nothing else were going on."""

    link: str  # what it shares with other transfers
    latency: float  # seconds before bytes flow
    seconds: float  # that bytes flow, with the whole link
    nbytes: float = 0.0  # that a rank sends over the link
    slows: float = 0.0  # share of the arithmetic that is lost while they flow
    yields: float = 0.0  # share of the link's speed that is lost while something is computed
    drift: float = 0.0  # how much later others begin: seconds per root of a second apart


@dataclass(frozen=True, slots=True)
class Compute:
    """The stream that computes is busy."""

    seconds: float
    label: str
    phase: str = "compute"  # or optimizer


@dataclass(frozen=True, slots=True)
class Start:
    """A collective is put in a queue; one in each is under way at a time."""

    key: int
    queue: str
    transfer: Transfer
    label: str
    after: int | None = None  # the collective that has to be over before


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing is computed until a collective is over."""

    key: int


Task = Compute | Start | Wait
