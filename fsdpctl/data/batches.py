"""The micro-batches of a rank: a function of seed, position, rank and micro-step."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fsdpctl.data.order import Indices, samples_at
from fsdpctl.data.tokens import TokenStream
from fsdpctl.errors import UsageError
from fsdpctl.plan.batch import BatchPlan

IGNORED = -100  # a target that does not count


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tokens and the tokens that follow them, both (micro_batch_size, seq_len) int64 on the CPU."""

    tokens: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True)
class Batches:
    """The samples of a token stream, dealt out to ranks and micro-steps."""

    stream: TokenStream
    seq_len: int
    plan: BatchPlan
    seed: int
    vocab_size: int

    def __post_init__(self) -> None:
        if self.num_samples == 0:
            raise UsageError(
                f"train.seq_len={self.seq_len}: longer than the data, which has "
                f"{len(self.stream.tokens)} tokens"
            )

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return self.stream.num_samples(self.seq_len)

    def numbers(self, position: int, rank: int | None = None) -> list[int]:
        """Which samples the step has that begins after `position` samples, or `rank` has of it."""
        order = samples_at(position, self.plan.global_batch_size, self.num_samples, self.seed)
        if rank is None:
            return [int(each) for each in order]
        spans = [self.plan.samples(rank, each) for each in range(self.plan.num_micro_batches)]
        return [int(each) for span in spans for each in order[_as_slice(span)]]

    def training(self, position: int, rank: int, micro_step: int) -> MicroBatch:
        """What `rank` sees in a micro-step of the step that begins after `position` samples."""
        order = samples_at(position, self.plan.global_batch_size, self.num_samples, self.seed)
        return self._gather(order[_as_slice(self.plan.samples(rank, micro_step))])

    def validation(self, number: int, rank: int, micro_step: int) -> MicroBatch:
        """The same for the `number`-th global batch of validation, which goes in order."""
        start = number * self.plan.global_batch_size
        stop = min(start + self.plan.global_batch_size, self.num_samples)
        order = np.arange(start, stop, dtype=np.uint64)
        return self._gather(order[_as_slice(self.plan.samples(rank, micro_step))])

    def num_validation_batches(self, at_most: int) -> int:
        """Global batches that cover the stream, the last one short; `at_most` of them unless 0."""
        needed = -(-self.num_samples // self.plan.global_batch_size)
        return min(needed, at_most) if at_most else needed

    def _gather(self, samples: Indices) -> MicroBatch:
        """The samples, filled up with ignored targets to a whole micro-batch."""
        size = self.plan.micro_batch_size
        rows = np.zeros((size, self.seq_len + 1), dtype=np.int64)
        for row, sample in enumerate(samples.tolist()):
            start = sample * self.seq_len
            rows[row] = self.stream.tokens[start : start + self.seq_len + 1]
        if rows.max(initial=0) >= self.vocab_size:
            raise UsageError(
                f"{self.stream.origin}: damaged, or not of this vocabulary: token {rows.max()}, "
                f"where it has {self.vocab_size}"
            )
        targets = torch.from_numpy(rows[:, 1:].copy())
        targets[len(samples) :] = IGNORED
        return MicroBatch(torch.from_numpy(rows[:, :-1].copy()), targets)


def _as_slice(span: range) -> slice:
    return slice(span.start, span.stop)
