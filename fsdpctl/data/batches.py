"""The micro-batches of a rank: a function of seed, position, rank and micro-step."""

from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from fsdpctl.data.mixture import MixedSamples
from fsdpctl.data.order import Indices
from fsdpctl.data.packing import IGNORE_INDEX, Samples
from fsdpctl.data.script_data import ScriptBatch
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
    isolates_documents: bool = False  # which do not see one another
    ends: tuple[int, ...] = ()  # where padding begins in each row
    sources: tuple[int, ...] = ()  # of the rows with samples, in a mixture
    script_batch: ScriptBatch | None = None  # of a script, in place of tokens

    def index_of(self, place: int) -> int:
        """Return the index in `tokens` of a place in a row, or of the end that is nearest to it."""
        length = self.tokens.shape[1]
        first = 0 if self.context is None else self.context.index * length
        return min(max(place - first, 0), length)


_STEPS_AHEAD = 8  # whose samples are being fetched


@dataclass(frozen=True, slots=True)
class Batches:
    """The samples of each rank and micro-step."""

    samples: Samples
    plan: BatchPlan
    seed: int
    vocab_size: int

    def __post_init__(self) -> None:
        if self.num_samples == 0:
            raise UsageError(self.samples.empty_message)

    @property
    def num_samples(self) -> int:
        return len(self.samples)

    def sample_indices(self, position: int, rank: int | None = None) -> list[int]:
        """Return the samples of the step after `position` samples, or those of one rank."""
        order = self.samples.order(position, self.plan.global_batch_size, self.seed)
        if rank is None:
            return [int(each) for each in order]
        spans = [self.plan.samples(rank, each) for each in range(self.plan.num_micro_batches)]
        return [int(each) for span in spans for each in order[span.start : span.stop]]

    def count_tokens(self, position: int) -> int:
        """Return the tokens of the step after `position` samples, without padding."""
        if not self.samples.isolates_documents:
            return self.plan.global_batch_size * self.samples.seq_len
        return self.samples.count_tokens(self.sample_indices(position))

    def training(self, position: int, rank: int, micro_step: int) -> MicroBatch:
        """Return a micro-batch of the step that begins after `position` samples."""
        order = self.samples.order(position, self.plan.global_batch_size, self.seed)
        span = self.plan.samples(rank, micro_step)
        own = order[span.start : span.stop]
        if self.samples.is_remote and micro_step == 0:
            for step in range(_STEPS_AHEAD):
                after = position + step * self.plan.global_batch_size
                self.samples.fetch(self.sample_indices(after, rank))
        return self._gather(own, rank, self.plan.micro_batch_size)

    def validation(self, number: int, rank: int, micro_step: int) -> MicroBatch:
        """Return a micro-batch of the `number`-th global batch of validation, which is in order.

        It has only rows that exist, as evenly on all ranks as possible, and no tokens after the
        last target of the longest one. A rank without a row has one token without a target.
        """
        start, count = self._validation_span(number)
        size, most = self.plan.micro_batch_size, self._max_per_rank(count)
        first = rank // self.plan.context_parallel * most
        share = range(start, start + count)[first : first + most]
        own = np.array(share[micro_step * size : (micro_step + 1) * size], dtype=np.uint64)
        return _trimmed(self._gather(own, rank, max(len(own), 1)))

    def num_validation_passes(self, number: int) -> int:
        """Return the micro-batches of every rank in the `number`-th global batch of validation."""
        _, count = self._validation_span(number)
        return -(-self._max_per_rank(count) // self.plan.micro_batch_size)

    def _validation_span(self, number: int) -> tuple[int, int]:
        start = number * self.plan.global_batch_size
        return start, min(self.plan.global_batch_size, self.num_samples - start)

    def _max_per_rank(self, count: int) -> int:
        return -(-count // (self.plan.world_size // self.plan.context_parallel))

    def num_validation_batches(self, at_most: int) -> int:
        """Return the global batches that cover the data.

        At most `at_most` of each source, unless that is 0.
        """
        size = self.plan.global_batch_size
        needed = [-(-each.num_samples // size) for each in self.by_source().values()]
        return sum(min(each, at_most) if at_most else each for each in needed)

    def by_source(self) -> dict[str, "Batches"]:
        """Return the batches of each source of a mixture by name, or these."""
        if not isinstance(self.samples, MixedSamples):
            return {"": self}
        of_part = zip(self.samples.sources, self.samples.per_source, strict=True)
        about = self.plan, self.seed, self.vocab_size
        return {part.name: Batches(rows, *about) for part, rows in of_part}

    def _gather(self, samples: Indices, rank: int, num_rows: int) -> MicroBatch:
        context = self.plan.context(rank)
        size = tokens_per_rank(self.samples.seq_len, self.plan.context_parallel)
        length, padding = (
            self.samples.seq_len,
            size * self.plan.context_parallel - self.samples.seq_len,
        )
        shape = num_rows, length + padding
        tokens = np.zeros(shape, dtype=np.int64)
        targets = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        # No longer than samples: there may be no positions after theirs.
        filling = tuple(min(length, padding - start) for start in range(0, padding, length))
        lengths: list[tuple[int, ...]] = [(length, *filling)] * len(tokens)
        ends = [0] * len(tokens)
        self.samples.fetch(samples.tolist())
        for row, number in enumerate(samples.tolist()):
            sample = self.samples[number]
            tokens[row, :length], targets[row, :length] = sample.tokens, sample.targets
            lengths[row] = (*(sample.lengths or (length,)), *filling)
            ends[row] = length - sample.padding
        largest = max(tokens.max(initial=0), targets.max(initial=0))
        least = min(tokens.min(initial=0), targets.min(initial=0, where=targets != IGNORE_INDEX))
        if largest >= self.vocab_size or least < 0:
            raise UsageError(
                f"{self.samples.origin}: corrupted, or made with another vocabulary: expected "
                f"tokens below {self.vocab_size}, got {least if least < 0 else largest}"
            )
        packs = self.samples.isolates_documents
        split = tuple(lengths) if packs or context is not None else ()
        # Targets were shifted before: that of a part's last token is in the next part.
        first = 0 if context is None else context.index * size
        tokens, targets = (
            np.ascontiguousarray(each[:, first : first + size]) for each in (tokens, targets)
        )
        own = torch.from_numpy(tokens), torch.from_numpy(targets)
        sources: tuple[int, ...] = ()
        if isinstance(self.samples, MixedSamples):
            sources = tuple(map(self.samples.source_of, samples.tolist()))
        content = self.samples.script_batch(samples.tolist())
        return MicroBatch(*own, split, context, packs, tuple(ends), sources, content)


def _trimmed(batch: MicroBatch) -> MicroBatch:
    """Cut what follows the last target of all rows, unless ranks share the rows."""
    if batch.context is not None:
        return batch
    used = (batch.targets != IGNORE_INDEX).any(0).nonzero()
    end = int(used[-1]) + 1 if len(used) else 1
    lengths = tuple(_truncated(each, end) for each in batch.lengths)
    return replace(
        batch, tokens=batch.tokens[:, :end], targets=batch.targets[:, :end], lengths=lengths
    )


def _truncated(lengths: tuple[int, ...], end: int) -> tuple[int, ...]:
    ends = [min(each, end) for each in accumulate(lengths)]
    found = [stop - start for start, stop in zip([0, *ends], ends, strict=False)]
    return tuple(each for each in found if each)
