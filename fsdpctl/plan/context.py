"""Context parallelism: groups of adjacent ranks that share each sample."""

from dataclasses import dataclass

_MULTIPLE = 64  # tokens per rank: kernels are fast at multiples of it


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """This rank's place among the ranks that share its samples, in the order of their tokens."""

    size: int
    index: int
    exchange: int = 0  # the number of the exchange that attention uses


def tokens_per_rank(seq_len: int, context_parallel: int) -> int:
    """Return the tokens of a sample on each of its ranks, with padding."""
    if context_parallel == 1:
        return seq_len
    return -(-seq_len // (context_parallel * _MULTIPLE)) * _MULTIPLE


def context_groups(num_ranks: int, context_parallel: int) -> list[range]:
    """Return the ranks that share samples with one another."""
    starts = range(0, num_ranks, context_parallel)
    return [range(start, start + context_parallel) for start in starts]


def heads_per_rank(num_heads: int, num_kv_heads: int, context_parallel: int) -> tuple[int, int]:
    """Return the heads of queries, and of keys and values, that a rank attends with.

    Heads of keys and values are repeated if there are too few for the ranks.
    """
    if num_kv_heads % context_parallel:
        shares = context_parallel % num_kv_heads == 0
        num_kv_heads = context_parallel if shares else num_heads
    return num_heads // context_parallel, num_kv_heads // context_parallel
