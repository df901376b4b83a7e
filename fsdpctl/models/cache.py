"""Keys and values of tokens that a decoder has processed, so that it need not repeat them."""

from torch import Tensor, cat

from fsdpctl.models.attention import AttentionMask, attend, attend_all


class LayerCache:
    """The cache of one layer; shapes are (batch, heads, length, head_dim)."""

    def __init__(self) -> None:
        self._seen: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return 0 if self._seen is None else self._seen[0].shape[2]

    def extended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values, and return all of them."""
        if self._seen is not None:
            keys, values = cat([self._seen[0], keys], 2), cat([self._seen[1], values], 2)
        self._seen = keys, values
        return self._seen


class Cache:
    """The cache of all layers. Once the first call has filled it, calls take one token each."""

    def __init__(self) -> None:
        self._layers: dict[int, LayerCache] = {}
        self.foreign: object = None  # the cache of a model of transformers
        self._length = 0  # tokens in it

    def __len__(self) -> int:
        return len(self.layer(0)) if self.foreign is None else self._length

    def keep(self, foreign: object, count: int) -> None:
        """Keep the cache of a model of transformers that has processed `count` more tokens.

        A model that returns None processes all tokens again.
        """
        self.foreign = foreign
        self._length = 0 if foreign is None else self._length + count

    def layer(self, index: int) -> LayerCache:
        """Return the cache of a layer."""
        return self._layers.setdefault(index, LayerCache())


def layer_arguments(
    cache: Cache | None, index: int, mask: AttentionMask | None
) -> tuple[LayerCache | AttentionMask | None, ...]:
    """Return a layer's arguments besides tensors: none in training on full rows."""
    layer = None if cache is None else cache.layer(index)
    if mask is not None:
        return layer, mask
    return () if layer is None else (layer,)


def attend_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: LayerCache | None,
    mask: AttentionMask | None,
    window: int | None = None,
) -> Tensor:
    """Attend causally, also to the tokens in `cache`, to which these are added."""
    is_next = cache is not None and len(cache) > 0  # one token that follows those in the cache
    if cache is not None:
        k, v = cache.extended(k, v)
    if not is_next:
        return attend(q, k, v, mask)
    start = 0 if window is None else -window
    return attend_all(q, k[:, :, start:], v[:, :, start:])
