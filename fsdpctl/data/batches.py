"""The micro-batches of each rank, computed from the seed, the position, the rank and the step."""

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from fsdpctl.data.mixture import MixedSamples
from fsdpctl.data.order import Indices
from fsdpctl.data.packing import IGNORE_INDEX, Samples
from fsdpctl.data.script_data import ScriptBatch
from fsdpctl.errors import UsageError
from fsdpctl.plan.batch_plan import BatchPlan, ContextParallel, tokens_per_rank

_STEPS_AHEAD = 8  # steps whose remote samples are fetched in advance


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tokens and their targets, both (micro_batch_size, seq_len) int64 on the CPU.

    With context parallelism, both have this rank's part of each row.
    """

    tokens: Tensor
    targets: Tensor
    # The lengths of the documents in each row, padding last; (): a row is one document.
    lengths: tuple[tuple[int, ...], ...] = ()
    context: ContextParallel | None = None
    isolates_documents: bool = False  # attention stays within a document
    padding_starts: tuple[int, ...] = ()  # the position at which padding begins in each row
    sources: tuple[int, ...] = ()  # the source of each row, if the data is a mixture
    script_batch: ScriptBatch | None = None  # a batch of the user's script replaces the tokens

    def index_of(self, position: int) -> int:
        """Return the index in `tokens` of a position in a row, clamped to this rank's part."""
        length = self.tokens.shape[1]
        first = 0 if self.context is None else self.context.index * length
        return min(max(position - first, 0), length)


@dataclass(frozen=True, slots=True)
class Batches:
    """Divides samples into the micro-batches of all ranks."""

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
        """Return the sample indices of the step that begins after `position` samples.

        With `rank`, only the indices of that rank are returned.
        """
        order = self.samples.order(position, self.plan.global_batch_size, self.seed)
        if rank is None:
            return [int(index) for index in order]
        spans = [self.plan.samples(rank, index) for index in range(self.plan.num_micro_batches)]
        return [int(index) for span in spans for index in order[span.start : span.stop]]

    def count_tokens(self, position: int) -> int:
        """Count the tokens of the step after `position` samples, without padding."""
        if not self.samples.isolates_documents:
            return self.plan.global_batch_size * self.samples.seq_len
        return self.samples.count_tokens(self.sample_indices(position))

    def training(self, position: int, rank: int, micro_step: int) -> MicroBatch:
        """Return a micro-batch of the step that begins after `position` samples."""
        order = self.samples.order(position, self.plan.global_batch_size, self.seed)
        span = self.plan.samples(rank, micro_step)
        indices = order[span.start : span.stop]
        if self.samples.is_remote and micro_step == 0:
            for step in range(_STEPS_AHEAD):
                next_position = position + step * self.plan.global_batch_size
                self.samples.fetch(self.sample_indices(next_position, rank))
        return self._read_rows(indices, rank, self.plan.micro_batch_size)

    def validation(self, number: int, rank: int, micro_step: int) -> MicroBatch:
        """Return a micro-batch of the `number`-th global batch of validation, in order.

        Rows are spread evenly over ranks, without repeats, and cut after the last target of all
        rows of the micro-batch, unless ranks share samples. A rank without a row gets no target.
        """
        start, count = self._validation_span(number)
        size, max_rows = self.plan.micro_batch_size, self._max_per_rank(count)
        first = rank // self.plan.context_parallel * max_rows
        share = range(start, start + count)[first : first + max_rows]
        indices = np.array(share[micro_step * size : (micro_step + 1) * size], dtype=np.uint64)
        return _trim(self._read_rows(indices, rank, max(len(indices), 1)))

    def num_validation_passes(self, number: int) -> int:
        """Return how many micro-batches each rank runs for a global batch of validation."""
        _, count = self._validation_span(number)
        return -(-self._max_per_rank(count) // self.plan.micro_batch_size)

    def _validation_span(self, number: int) -> tuple[int, int]:
        start = number * self.plan.global_batch_size
        return start, min(self.plan.global_batch_size, self.num_samples - start)

    def _max_per_rank(self, count: int) -> int:
        return -(-count // (self.plan.world_size // self.plan.context_parallel))

    def num_validation_batches(self, at_most: int) -> int:
        """Return how many global batches cover the data, at most `at_most` per source (0: all)."""
        size = self.plan.global_batch_size
        counts = [-(-each.num_samples // size) for each in self.by_source().values()]
        return sum(min(count, at_most) if at_most else count for count in counts)

    def by_source(self) -> dict[str, "Batches"]:
        """Return the batches of each source of a mixture by name; "": the data has one source."""
        if not isinstance(self.samples, MixedSamples):
            return {"": self}
        pairs = zip(self.samples.sources, self.samples.per_source, strict=True)
        return {source.name: replace(self, samples=samples) for source, samples in pairs}

    def _read_rows(self, indices: Indices, rank: int, num_rows: int) -> MicroBatch:
        samples, context, sample_indices = self.samples, self.plan.context(rank), indices.tolist()
        length = samples.seq_len
        local_length = tokens_per_rank(length, self.plan.context_parallel)
        padding = local_length * self.plan.context_parallel - length
        shape = num_rows, length + padding
        tokens = np.zeros(shape, dtype=np.int64)
        targets = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        # Padding is split into pieces no longer than a sample: a model may have no more positions.
        padding_lengths = tuple(min(length, padding - start) for start in range(0, padding, length))
        lengths: list[tuple[int, ...]] = [(length, *padding_lengths)] * len(tokens)
        padding_starts = [0] * len(tokens)
        samples.fetch(sample_indices)
        for row, index in enumerate(sample_indices):
            sample = samples[index]
            tokens[row, :length], targets[row, :length] = sample.tokens, sample.targets
            lengths[row] = (*(sample.lengths or (length,)), *padding_lengths)
            padding_starts[row] = length - sample.padding
        largest = max(tokens.max(initial=0), targets.max(initial=0))
        smallest = min(tokens.min(initial=0), targets.min(initial=0, where=targets != IGNORE_INDEX))
        if largest >= self.vocab_size or smallest < 0:
            raise UsageError(
                f"{samples.origin}: corrupted, or made with another vocabulary: expected "
                f"tokens below {self.vocab_size}, got {smallest if smallest < 0 else largest}"
            )
        # Targets are shifted before rows are cut: the target of a rank's last token is the first
        # token of the next rank.
        first = 0 if context is None else context.index * local_length
        columns = slice(first, first + local_length)
        tokens, targets = (np.ascontiguousarray(each[:, columns]) for each in (tokens, targets))
        sources = (
            map(samples.source_of, sample_indices) if isinstance(samples, MixedSamples) else ()
        )
        needs_lengths = samples.isolates_documents or context is not None
        return MicroBatch(
            torch.from_numpy(tokens), torch.from_numpy(targets),
            lengths=tuple(lengths) if needs_lengths else (), context=context,
            isolates_documents=samples.isolates_documents, padding_starts=tuple(padding_starts),
            sources=tuple(sources), script_batch=samples.script_batch(sample_indices),
        )  # fmt: skip


def _trim(batch: MicroBatch) -> MicroBatch:
    """Cut the columns after the last target of all rows, unless ranks share the rows."""
    if batch.context is not None:
        return batch
    columns = (batch.targets != IGNORE_INDEX).any(0).nonzero()
    end = int(columns[-1]) + 1 if len(columns) else 1
    lengths = tuple(_truncate(each, end) for each in batch.lengths)
    tokens, targets = batch.tokens[:, :end], batch.targets[:, :end]
    return replace(batch, tokens=tokens, targets=targets, lengths=lengths)


def _truncate(lengths: tuple[int, ...], end: int) -> tuple[int, ...]:
    ends = (min(each, end) for each in accumulate(lengths))
    return tuple(stop - start for start, stop in pairwise([0, *ends]) if stop > start)
