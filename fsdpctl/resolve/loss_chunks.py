"""How many tokens of a pass have logits at a time."""

from fsdpctl.config.schema import Config
from fsdpctl.errors import UsageError

_CHUNK_BYTES = 128 << 20  # of float32 logits
_LEAST_CHUNK_TOKENS = 1024
_MOST_CHUNKS = 128  # each is some kernels, and a moment of every estimate


def loss_chunk_tokens(config: Config, micro_batch_size: int) -> int:
    """Chunks where the logits of a pass are large; not so small that matrices become slow.

    Raises:
        UsageError: those asked for are too many.
    """
    tokens = micro_batch_size * config.train.seq_len
    least = -(-tokens // _MOST_CHUNKS)
    asked = config.train.loss_chunk_tokens
    if asked is not None:
        if 0 < asked < least:
            raise UsageError(
                f"train.loss_chunk_tokens={asked}: {tokens:,} tokens of a pass would be more than "
                f"{_MOST_CHUNKS} chunks; at least {least}"
            )
        return asked
    assert config.model.vocab_size is not None
    chunk = max(_LEAST_CHUNK_TOKENS, _CHUNK_BYTES // (4 * config.model.vocab_size), least)
    return chunk if tokens >= 2 * chunk else 0
