"""The number of tokens of a micro-batch whose logits, or activations, exist at the same time."""

from fsdpctl.config.schema import Config
from fsdpctl.errors import UsageError
from fsdpctl.plan.batch import tokens_per_rank

_CHUNK_BYTES = 128 << 20  # of float32 logits
_LEAST_CHUNK_TOKENS = 1024
_MULTIPLE = 64  # of tokens in a chunk
_MOST_CHUNKS = 128  # each costs kernels, and time in every estimate


def loss_chunk_tokens(config: Config, micro_batch_size: int) -> int:
    """Return the tokens of a chunk, or 0 if the logits are small enough to exist all at once.

    A chunk is never so small that matrix products become slow.
    """
    assert config.model.vocab_size is not None
    few = _CHUNK_BYTES // (4 * config.model.vocab_size)
    tokens, asked = _tokens(config, micro_batch_size), config.train.loss_chunk_tokens
    if asked is None and config.engine.facts.keeps_logits:
        return 0
    return _chunk("train.loss_chunk_tokens", asked, tokens, few)


def mlp_chunk_tokens(config: Config, micro_batch_size: int) -> int:
    """Return the tokens that feed-forward layers run on at a time, or 0 for all.

    Automatically, a chunk's activations need about as much memory as a hidden state of all tokens.
    """
    model, tokens = config.model, _tokens(config, micro_batch_size)
    alike = tokens * model.hidden_size // (3 * model.intermediate_size)
    few = -(-alike // _MULTIPLE) * _MULTIPLE
    return _chunk("train.mlp_chunk_tokens", config.train.mlp_chunk_tokens, tokens, few)


def _tokens(config: Config, micro_batch_size: int) -> int:
    return micro_batch_size * tokens_per_rank(config.train.seq_len, config.train.context_parallel)


def _chunk(key: str, asked: int | None, tokens: int, few: int) -> int:
    """Return `asked`, or `few` tokens within limits; 0 if that would be nearly all."""
    least = -(-tokens // _MOST_CHUNKS)
    if asked is None:
        chunk = max(_LEAST_CHUNK_TOKENS, few, least)
        return chunk if tokens >= 2 * chunk else 0
    if 0 < asked < least:
        raise UsageError(
            f"{key}={asked}: {tokens:,} tokens of a micro-batch would be more than {_MOST_CHUNKS} "
            f"chunks; expected at least {least}"
        )
    return asked
