"""The interface between the training step of an engine and recorders of its cost."""

from collections import defaultdict
from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from fsdpctl.plan.layout import ParamSpec
from fsdpctl.plan.schedule import BufferKind
from fsdpctl.predict.hardware import CollectiveKind, HostQueue
from fsdpctl.predict.model_pass import PassPart, Work

# Queues of collectives. Each queue runs one collective at a time.
GATHERS, REDUCTIONS, REPLICA_SUMS = "gathers", "reductions", "sums over replicas"


TransferKeys = tuple[int, ...]  # keys that `start_collective` and `start_host` returned


class Category(StrEnum):
    """The purpose of memory."""

    PARAMETERS = "parameters"  # master weights, and shards to be gathered in another dtype
    GRADIENTS = "gradients"  # reduced gradients, and gradients of autograd
    OPTIMIZER_STATES = "optimizer_states"
    GATHERED_UNITS = "gathered_units"  # unsharded parameters for computation
    REDUCE_BUFFERS = "reduce_buffers"
    ACTIVATIONS = "activations"
    LOGITS_AND_LOSS = "logits_and_loss"
    WORKSPACES = "workspaces"  # memory of kernels


CATEGORY_OF = dict.fromkeys(BufferKind, Category.REDUCE_BUFFERS) | {
    BufferKind.PARAMS: Category.GATHERED_UNITS,
    BufferKind.GRADS: Category.GRADIENTS,
    BufferKind.OFFLOADING: Category.GRADIENTS,
}


class RankGroup(StrEnum):
    """The ranks that take part in a collective."""

    SHARD = "shard"  # the ranks of one replica of the model
    REPLICAS = "replicas"  # the ranks with the same shard of different replicas
    WORLD = "world"
    CONTEXT = "context"  # the ranks that share each sample


class StepRecorder:
    """The interface of recorders of a rank's actions: its methods do nothing by default.

    Each engine describes its step once, as calls of these methods. Recorders of memory, time and
    traffic override the methods that they need. Sizes are in bytes.
    """

    def compute(self, part: PassPart, unit: str = "") -> None:
        """Compute a part of a forward-backward pass."""

    def has_gradient(self, param: ParamSpec) -> bool:
        """Return whether backward computes a gradient of a parameter."""
        return param.trainable

    # ---- memory, in the order in which the host requests it ------------------------------

    def begin_phase(self, activity: str, unit: str = "") -> None:
        """Begin a phase of the step, such as "gathering" a unit."""

    def allocate(
        self, category: Category, unit: str, description: str, nbytes: int, *, stream: int = 0
    ) -> int:
        """Allocate memory on a stream; return the key with which it is freed."""
        return 0

    def free(self, *keys: int | None) -> None:
        """Free memory by its keys; None is ignored."""

    def recategorize(self, key: int, category: Category, description: str) -> None:
        """Change the purpose of allocated memory."""

    def allocate_temporary(self, nbytes: int) -> None:
        """Allocate memory and free it at once."""

    def gradient(self, param: str) -> int | None:
        """Return the key of the gradient of a parameter that autograd computed in this pass."""
        return None

    def keep_gradient(self, key: int) -> None:
        """Keep a gradient of autograd beyond its pass."""

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
        after: TransferKeys = (),
    ) -> int:
        """Start a collective over a buffer of `nbytes` and return the key to wait for.

        Collectives of one `queue` run one after another. The collective starts after the transfers
        with the keys `after` have ended.
        """
        return 0

    def start_host(
        self, queue: HostQueue, nbytes: float, label: str, *, after: TransferKeys = ()
    ) -> int:
        """Start a copy of `nbytes`, or an update of them on the host; return the key to wait for.

        It starts after earlier work of its queue, and after the transfers with the keys `after`.
        """
        return 0

    def wait(self, key: int | None, phase: str | None = None) -> None:
        """Let the compute stream wait for a transfer, if there is a key.

        The wait counts as time of `phase`; None: as exposed communication.
        """

    def gradient_norm(self, nbytes: float) -> None:
        """Compute the norm of gradients of `nbytes`, and reduce it over all ranks."""

    def optimizer_step(self, numel: float, itemsize: int, moments: int, traffic: float = 0) -> None:
        """Compute the gradient norm, and update `numel` elements with `moments` per element.

        An AdamW step in tiles reads and writes `traffic` bytes; 0: no tiles (optim/tiles.py).
        """

    def optimizer_operators(self, works: Sequence[Work], label: str) -> None:
        """Run operators of the optimizer's step."""

    def end_step(self) -> None:
        """Add the time between two steps."""


class Steps(Protocol):
    """The steps of a rank with an engine; a step continues with the state of the step before."""

    def setup(self, *, draws: bool) -> None:
        """Build the model; `draws`: initialize its weights on the device, one unit at a time."""

    def step(self) -> None:
        """Record a step: forward-backward passes, reductions and the optimizer."""


class TrafficRecorder(StepRecorder):
    """A recorder of the bytes of collectives by kind and group."""

    def __init__(self) -> None:
        self.nbytes: dict[tuple[CollectiveKind, RankGroup], float] = defaultdict(float)

    def start_collective(
        self, kind: CollectiveKind, nbytes: float, group: RankGroup, label: str, **_: object
    ) -> int:
        self.nbytes[kind, group] += nbytes
        return 0

    def sent_bytes(self, group: RankGroup, ranks: int) -> float:
        """Return the bytes that a rank sends to a group of `ranks` ranks.

        In a ring of n ranks, each rank sends (n - 1) / n of a tensor in an all-gather or a
        reduce-scatter, and twice as much in an all-reduce. Direct exchanges, and broadcasts of all
        shards, have the same average over the ranks.
        """
        total = sum(
            nbytes * (2 if kind is CollectiveKind.ALL_REDUCE else 1)
            for (kind, of_group), nbytes in self.nbytes.items()
            if of_group is group
        )
        return total * (ranks - 1) / ranks
