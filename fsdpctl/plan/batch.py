"""How the samples of a step are shared out to ranks and micro-batches."""

from dataclasses import dataclass

from fsdpctl.errors import UsageError


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """`global_batch_size` samples a step, in `num_micro_batches` passes of every rank.

    Where they do not divide evenly, some ranks see fewer samples; the gradient is that of the mean
    over all target tokens either way.
    """

    global_batch_size: int
    micro_batch_size: int
    num_micro_batches: int
    world_size: int

    def samples(self, rank: int, micro_step: int) -> range:
        """Which of a step's samples `rank` takes in its `micro_step`-th pass."""
        per_rank = self.micro_batch_size * self.num_micro_batches
        start = rank * per_rank + micro_step * self.micro_batch_size
        stop = start + self.micro_batch_size
        return range(min(start, self.global_batch_size), min(stop, self.global_batch_size))


def plan_batches(
    global_batch_size: int,
    world_size: int,
    *,
    micro_batch_size: int | None = None,
    num_micro_batches: int | None = None,
) -> BatchPlan:
    """Fill in what is None so that every sample of the global batch is seen once.

    Raises:
        UsageError: fewer samples than ranks, or sizes that contradict each other.
    """
    if global_batch_size < world_size:
        raise UsageError(
            f"train.global_batch_size={global_batch_size}: fewer samples than the "
            f"{world_size} ranks; use at least {world_size}"
        )
    per_rank = -(-global_batch_size // world_size)
    if micro_batch_size is None:
        micro_batch_size = -(-per_rank // (num_micro_batches or 1))
    if micro_batch_size > per_rank:
        raise UsageError(
            f"train.micro_batch_size={micro_batch_size}: a step of {global_batch_size} samples on "
            f"{world_size} ranks gives each at most {per_rank}"
        )
    needed = -(-per_rank // micro_batch_size)
    if num_micro_batches is not None and num_micro_batches != needed:
        raise UsageError(
            f"accumulation.steps={num_micro_batches}: {global_batch_size} samples on {world_size} "
            f"ranks in micro-batches of {micro_batch_size} take {needed}; use that or auto"
        )
    return BatchPlan(global_batch_size, micro_batch_size, needed, world_size)
