"""The tensors of a model and its optimizer that checkpoints store."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fsdpctl.checkpoint.manifest import PARAMETER, tensor_key
from fsdpctl.plan.layout import Piece, Span
from fsdpctl.shards import FlatShard, Sharded, trainable_shards


class OptimizerRun(Protocol):
    """A part of a shard that the optimizer steps as one tensor."""

    @property
    def shard(self) -> FlatShard:
        """The shard that contains it."""
        ...

    @property
    def span(self) -> Span:
        """Its elements in the flat buffer."""
        ...


class ShardedOptimizer(Protocol):
    """The interface of an optimizer that checkpoints need."""

    def isolate(self, names: Collection[str]) -> None:
        """Step each of the named parameters separately from others."""
        ...

    def create_states(self) -> None:
        """Create the states that the first step would create."""
        ...

    def run_states(self) -> Iterator[tuple[OptimizerRun, dict[str, Tensor]]]:
        """Yield each run with its states: the scalar `step`, and tensors of the run's shape."""
        ...


@dataclass(frozen=True, slots=True)
class StatePiece:
    """A part of one parameter or of one of its optimizer states, in this rank's memory."""

    key: str
    piece: Piece
    values: Tensor  # 1-D, the elements `piece.in_param`


def model_pieces(
    model: Sharded, *, written: bool, trained_only: bool = False
) -> Iterator[StatePiece]:
    """Yield the parts of parameters that this rank writes, or all that it holds."""
    for shard in trainable_shards(model) if trained_only else model.flat_shards():
        for piece in shard.written_pieces() if written else shard.held_pieces():
            values = shard.view(shard.master, piece.in_flat)
            yield StatePiece(tensor_key(PARAMETER, piece.param.name), piece, values)


def optimizer_pieces(optimizer: ShardedOptimizer, *, written: bool) -> Iterator[StatePiece]:
    """Yield the same for the optimizer's states; nothing before the first step."""
    for run, states in optimizer.run_states():
        within = run.span.intersect(run.shard.written) if written else run.span
        if within is None:
            continue
        for piece in run.shard.layout.pieces(within):
            for kind, values in states.items():
                if kind != "step":
                    start = piece.in_flat.start - run.span.start
                    part = values[start : start + piece.in_flat.numel]
                    yield StatePiece(tensor_key(kind, piece.param.name), piece, part)


def optimizer_steps(optimizer: ShardedOptimizer) -> dict[str, int]:
    """Return the step counter of each parameter that this rank steps."""
    steps = {}
    for run, states in optimizer.run_states():
        if "step" in states:
            count = int(states["step"])
            for piece in run.shard.layout.pieces(run.span):
                steps[piece.param.name] = count
    return steps
