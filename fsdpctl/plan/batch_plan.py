"""The distribution of a step's samples to ranks and micro-batches.

With context parallelism, groups of adjacent ranks share each sample.
"""

from dataclasses import dataclass

from fsdpctl.errors import UsageError

_MULTIPLE = 64  # tokens per rank: kernels are fast at multiples of it


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """The position of a rank's tokens in its samples: chunk `index` of `size`."""

    size: int
    index: int
    exchange_index: int = 0  # key of the all-to-all for attention (models.context_parallel)


def tokens_per_rank(seq_len: int, context_parallel: int) -> int:
    """Return the number of a sample's tokens on each of its ranks, with padding."""
    if context_parallel == 1:
        return seq_len
    return -(-seq_len // (context_parallel * _MULTIPLE)) * _MULTIPLE


def context_groups(num_ranks: int, context_parallel: int) -> list[range]:
    """Return the groups of ranks that share samples."""
    starts = range(0, num_ranks, context_parallel)
    return [range(start, start + context_parallel) for start in starts]


def heads_per_rank(num_heads: int, num_kv_heads: int, context_parallel: int) -> tuple[int, int]:
    """Return a rank's number of query heads, and its number of key-value heads.

    Key-value heads are repeated if their number is not a multiple of the ranks.
    """
    if num_kv_heads % context_parallel:
        ranks_share_heads = context_parallel % num_kv_heads == 0
        num_kv_heads = context_parallel if ranks_share_heads else num_heads
    return num_heads // context_parallel, num_kv_heads // context_parallel


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """`global_batch_size` samples per step, in `num_micro_batches` passes of every rank.

    If the samples do not divide evenly, some ranks process fewer. The gradient is that of the mean
    over all target tokens in any case. `context_parallel` adjacent ranks share each sample.
    """

    global_batch_size: int
    micro_batch_size: int
    num_micro_batches: int
    world_size: int
    context_parallel: int = 1

    def context(self, rank: int) -> ContextParallel | None:
        """Return the position of `rank` in its group; None without context parallelism."""
        if self.context_parallel == 1:
            return None
        return ContextParallel(self.context_parallel, rank % self.context_parallel)

    def samples(self, rank: int, micro_batch: int) -> range:
        """Return the indices of a step's samples that `rank` processes in `micro_batch`."""
        per_rank = self.micro_batch_size * self.num_micro_batches
        start = rank // self.context_parallel * per_rank + micro_batch * self.micro_batch_size
        stop = start + self.micro_batch_size
        return range(min(start, self.global_batch_size), min(stop, self.global_batch_size))


def plan_batches(
    global_batch_size: int,
    world_size: int,
    *,
    micro_batch_size: int | None = None,
    num_micro_batches: int | None = None,
    context_parallel: int = 1,
) -> BatchPlan:
    """Complete the sizes so that every sample of the global batch is processed once."""
    groups = world_size // context_parallel
    each = "rank" if context_parallel == 1 else f"{context_parallel} ranks"
    if not groups:
        raise UsageError(f"train.context_parallel={context_parallel}: more than {world_size} ranks")
    if global_batch_size < groups:
        problem = f"expected at least {groups}, one sample per {each}"
        raise UsageError(f"train.global_batch_size={global_batch_size}: {problem}")
    samples = f"{global_batch_size} samples on {world_size} ranks"
    per_rank = -(-global_batch_size // groups)
    if micro_batch_size is None:
        micro_batch_size = -(-per_rank // (num_micro_batches or 1))
    if micro_batch_size > per_rank:
        problem = f"expected at most {per_rank}: a step has {samples}"
        raise UsageError(f"train.micro_batch_size={micro_batch_size}: {problem}")
    needed = -(-per_rank // micro_batch_size)
    if num_micro_batches is not None and num_micro_batches != needed:
        problem = f"expected {needed} or auto for {samples} in micro-batches of {micro_batch_size}"
        raise UsageError(f"accumulation.steps={num_micro_batches}: {problem}")
    return BatchPlan(global_batch_size, micro_batch_size, needed, world_size, context_parallel)
