"""The micro-batches of a rank: a function of seed, position, rank and micro-step."""

from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from fsdpctl.data.mixture import MixedRows
from fsdpctl.data.order import Indices
from fsdpctl.data.own import OwnBatch
from fsdpctl.data.packing import IGNORED, Rows
from fsdpctl.errors import UsageError
from fsdpctl.plan.batch_plan import BatchPlan, ContextParallel, tokens_per_rank


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tokens and their targets, both (micro_batch_size, seq_len) int64 on the CPU.

    With `context`, these are this rank's tokens of each row, and their targets.
    """

    tokens: Tensor
    targets: Tensor
    lengths: tuple[tuple[int, ...], ...] = ()  # of documents and padding; (): rows are full
    context: ContextParallel | None = None
    holds_documents: bool = False  # which do not see one another
    ends: tuple[int, ...] = ()  # where padding begins in each row
    sources: tuple[int, ...] = ()  # of the rows with samples, in a mixture
    content: OwnBatch | None = None  # of a script, in place of tokens

    def own(self, place: int) -> int:
        """Return the index in `tokens` of a place in a row, or of the end that is nearest to it."""
        length = self.tokens.shape[1]
        first = 0 if self.context is None else self.context.index * length
        return min(max(place - first, 0), length)


_STEPS_AHEAD = 8  # whose samples are being fetched


@dataclass(frozen=True, slots=True)
class Batches:
    """The samples of each rank and micro-step."""

    rows: Rows
    plan: BatchPlan
    seed: int
    vocab_size: int

    def __post_init__(self) -> None:
        if self.num_samples == 0:
            raise UsageError(self.rows.emptiness)

    @property
    def num_samples(self) -> int:
        return len(self.rows)

    def numbers(self, position: int, rank: int | None = None) -> list[int]:
        """Return the samples of the step after `position` samples, or those of one rank."""
        order = self.rows.order(position, self.plan.global_batch_size, self.seed)
        if rank is None:
            return [int(each) for each in order]
        spans = [self.plan.samples(rank, each) for each in range(self.plan.num_micro_batches)]
        return [int(each) for span in spans for each in order[span.start : span.stop]]

    def count_tokens(self, position: int) -> int:
        """Return the tokens of the step after `position` samples, without padding."""
        if not self.rows.holds_documents:
            return self.plan.global_batch_size * self.rows.seq_len
        return self.rows.count_tokens(self.numbers(position))

    def training(self, position: int, rank: int, micro_step: int) -> MicroBatch:
        """Return a micro-batch of the step that begins after `position` samples."""
        order = self.rows.order(position, self.plan.global_batch_size, self.seed)
        span = self.plan.samples(rank, micro_step)
        own = order[span.start : span.stop]
        if self.rows.is_remote and micro_step == 0:
            for step in range(_STEPS_AHEAD):
                after = position + step * self.plan.global_batch_size
                self.rows.fetch(self.numbers(after, rank))
        return self._gather(own, rank, self.plan.micro_batch_size)

    def validation(self, number: int, rank: int, micro_step: int) -> MicroBatch:
        """Return a micro-batch of the `number`-th global batch of validation, which is in order.

        It has only rows that exist, as evenly on all ranks as possible, and no tokens after the
        last target of the longest one. A rank without a row has one token without a target.
        """
        start, count = self._validated(number)
        size, most = self.plan.micro_batch_size, self._most(count)
        first = rank // self.plan.context_parallel * most
        share = range(start, start + count)[first : first + most]
        own = np.array(share[micro_step * size : (micro_step + 1) * size], dtype=np.uint64)
        return _without_rest(self._gather(own, rank, max(len(own), 1)))

    def num_validation_passes(self, number: int) -> int:
        """Return the micro-batches of every rank in the `number`-th global batch of validation."""
        _, count = self._validated(number)
        return -(-self._most(count) // self.plan.micro_batch_size)

    def _validated(self, number: int) -> tuple[int, int]:
        start = number * self.plan.global_batch_size
        return start, min(self.plan.global_batch_size, self.num_samples - start)

    def _most(self, count: int) -> int:
        return -(-count // (self.plan.world_size // self.plan.context_parallel))

    def num_validation_batches(self, at_most: int) -> int:
        """Return the global batches that cover the data.

        At most `at_most` of each source, unless that is 0.
        """
        size = self.plan.global_batch_size
        needed = [-(-each.num_samples // size) for each in self.parts().values()]
        return sum(min(each, at_most) if at_most else each for each in needed)

    def parts(self) -> dict[str, "Batches"]:
        """Return the batches of each source of a mixture by name, or these."""
        if not isinstance(self.rows, MixedRows):
            return {"": self}
        of_part = zip(self.rows.parts, self.rows.of_part, strict=True)
        about = self.plan, self.seed, self.vocab_size
        return {part.name: Batches(rows, *about) for part, rows in of_part}

    def _gather(self, samples: Indices, rank: int, num_rows: int) -> MicroBatch:
        context = self.plan.context(rank)
        size = tokens_per_rank(self.rows.seq_len, self.plan.context_parallel)
        length, padding = self.rows.seq_len, size * self.plan.context_parallel - self.rows.seq_len
        shape = num_rows, length + padding
        tokens = np.zeros(shape, dtype=np.int64)
        targets = np.full(shape, IGNORED, dtype=np.int64)
        # No longer than samples: there may be no positions after theirs.
        filling = tuple(min(length, padding - start) for start in range(0, padding, length))
        lengths: list[tuple[int, ...]] = [(length, *filling)] * len(tokens)
        ends = [0] * len(tokens)
        self.rows.fetch(samples.tolist())
        for row, number in enumerate(samples.tolist()):
            sample = self.rows[number]
            tokens[row, :length], targets[row, :length] = sample.tokens, sample.targets
            lengths[row] = (*(sample.lengths or (length,)), *filling)
            ends[row] = length - sample.filling
        largest = max(tokens.max(initial=0), targets.max(initial=0))
        least = min(tokens.min(initial=0), targets.min(initial=0, where=targets != IGNORED))
        if largest >= self.vocab_size or least < 0:
            raise UsageError(
                f"{self.rows.origin}: corrupted, or made with another vocabulary: expected tokens "
                f"below {self.vocab_size}, got {least if least < 0 else largest}"
            )
        packs = self.rows.holds_documents
        split = tuple(lengths) if packs or context is not None else ()
        # Targets were shifted before: that of a part's last token is in the next part.
        first = 0 if context is None else context.index * size
        tokens, targets = (
            np.ascontiguousarray(each[:, first : first + size]) for each in (tokens, targets)
        )
        own = torch.from_numpy(tokens), torch.from_numpy(targets)
        sources: tuple[int, ...] = ()
        if isinstance(self.rows, MixedRows):
            sources = tuple(map(self.rows.source_of, samples.tolist()))
        content = self.rows.content(samples.tolist())
        return MicroBatch(*own, split, context, packs, tuple(ends), sources, content)


def _without_rest(batch: MicroBatch) -> MicroBatch:
    """Cut what follows the last target of all rows, unless ranks share the rows."""
    if batch.context is not None:
        return batch
    used = (batch.targets != IGNORED).any(0).nonzero()
    end = int(used[-1]) + 1 if len(used) else 1
    lengths = tuple(_first(each, end) for each in batch.lengths)
    return replace(
        batch, tokens=batch.tokens[:, :end], targets=batch.targets[:, :end], lengths=lengths
    )


def _first(lengths: tuple[int, ...], end: int) -> tuple[int, ...]:
    ends = [min(each, end) for each in accumulate(lengths)]
    found = [stop - start for start, stop in zip([0, *ends], ends, strict=False)]
    return tuple(each for each in found if each)
