"""The interface between the description of a training step and what it costs."""

from collections import defaultdict
from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from fsdpctl.plan.layout import ParamSpec
from fsdpctl.plan.schedule import BufferKind
from fsdpctl.predict.hardware import CollectiveKind, HostQueue
from fsdpctl.predict.model_pass import PassPart, Work

# Queues of collectives.
GATHERS, REDUCTIONS, REPLICA_SUMS = "gathers", "reductions", "sums over replicas"


class Category(StrEnum):
    """The purpose of memory."""

    PARAMETERS = "parameters"  # at rest: master weights, and parts to be gathered in another dtype
    GRADIENTS = "gradients"  # reduced, or as autograd made them
    OPTIMIZER_STATES = "optimizer_states"
    GATHERED_UNITS = "gathered_units"  # parameters to compute with
    REDUCE_BUFFERS = "reduce_buffers"
    ACTIVATIONS = "activations"
    LOGITS_AND_LOSS = "logits_and_loss"
    WORKSPACES = "workspaces"  # of kernels


CATEGORY_OF = dict.fromkeys(BufferKind, Category.REDUCE_BUFFERS) | {
    BufferKind.PARAMS: Category.GATHERED_UNITS,
    BufferKind.GRADS: Category.GRADIENTS,
    BufferKind.OFFLOADING: Category.GRADIENTS,
}


class RankGroup(StrEnum):
    """The ranks that take part in a collective."""

    SHARD = "shard"  # they share one replica of the model
    REPLICAS = "replicas"  # they hold the same part of different replicas
    WORLD = "world"
    CONTEXT = "context"  # they share each sample


class StepRecorder:
    """Receives what a rank does in a training step, and ignores it.

    Each engine describes its step once. Memory, time and traffic are recorders that override the
    methods that concern them. Sizes are in bytes.
    """

    def compute(self, part: PassPart, unit: str = "") -> None:
        """Run a part of a forward-backward pass."""

    def has_gradient(self, param: ParamSpec) -> bool:
        """Return whether backward makes a gradient of a parameter."""
        return param.trainable

    # ---- memory, in the order in which the host requests it ------------------------------

    def begin_phase(self, doing: str, unit: str = "") -> None:
        """Name the moment of the step that begins."""

    def allocate(
        self, category: Category, unit: str, what: str, nbytes: int, *, stream: int = 0
    ) -> int:
        """Allocate memory on a stream and return the key that frees it."""
        return 0

    def free(self, *keys: int | None) -> None:
        """Free memory by its keys, if there are any."""

    def recategorize(self, key: int, category: Category, what: str) -> None:
        """Change the purpose of allocated memory."""

    def allocate_temporary(self, nbytes: int) -> None:
        """Allocate memory and free it at once."""

    def gradient(self, param: str) -> int | None:
        """Return the key of the gradient that autograd made of a parameter in this pass."""
        return None

    def keep_gradient(self, key: int) -> None:
        """Let a gradient of autograd outlive its pass."""

    # ---- time, in the order in which the device executes it ------------------------------

    def copy(self, nbytes: float, label: str) -> None:
        """Read and write `nbytes` in total on the compute stream."""

    def start_collective(
        self,
        kind: CollectiveKind,
        nbytes: float,
        group: RankGroup,
        label: str,
        *,
        queue: str,
        after: tuple[int, ...] = (),
    ) -> int:
        """Start a collective over a buffer of `nbytes` and return the key to wait for.

        Collectives of one `queue` run one after another. This one starts after those with the keys
        `after` have ended.
        """
        return 0

    def start_on_host(
        self, queue: HostQueue, nbytes: float, label: str, *, after: tuple[int, ...] = ()
    ) -> int:
        """Start a copy of `nbytes`, or a step of the host that moves as many; return its key.

        Like a collective, it runs behind others of its queue and those with the keys `after`.
        """
        return 0

    def wait(self, key: int | None, phase: str | None = None) -> None:
        """Let the compute stream wait, if there is a key; `phase` as in `simulator.Wait`."""

    def gradient_norm(self, nbytes: float) -> None:
        """Compute the norm of gradients of `nbytes`, and exchange it with other ranks."""

    def optimizer_step(self, numel: float, itemsize: int, moments: int, stored: float = 0) -> None:
        """Compute the gradient norm and update `numel` elements with `moments` per element.

        A step in tiles reads and writes `stored` bytes of gradients, weights and states.
        """

    def optimizer_operators(self, works: Sequence[Work], label: str) -> None:
        """Run operators of the optimizer's step."""

    def end_step(self) -> None:
        """Account for the time between two steps."""


class Steps(Protocol):
    """The steps of a rank under some engine; the state carries over from one to the next."""

    def setup(self, *, draws: bool) -> None:
        """Build the model; `draws`: initialize its values on the device, one unit at a time."""

    def step(self) -> None:
        """Run all forward-backward passes, the reductions and the optimizer."""


class TrafficRecorder(StepRecorder):
    """Sums the bytes of collectives by their kind and group."""

    def __init__(self) -> None:
        self.nbytes: dict[tuple[CollectiveKind, RankGroup], float] = defaultdict(float)

    def start_collective(
        self, kind: CollectiveKind, nbytes: float, group: RankGroup, label: str, **_: object
    ) -> int:
        self.nbytes[kind, group] += nbytes
        return 0

    def sent(self, group: RankGroup, ranks: int) -> float:
        """Return the bytes that one of `ranks` ranks sends to its group.

        In a ring of n ranks, each sends (n - 1) / n of a tensor that is gathered or
        reduce-scattered, and twice that of one that is all-reduced. Direct exchanges and broadcasts
        of all parts average the same over the ranks.
        """
        total = sum(
            nbytes * (2 if kind is CollectiveKind.ALL_REDUCE else 1)
            for (kind, among), nbytes in self.nbytes.items()
            if among is group
        )
        return total * (ranks - 1) / ranks
