"""Keys and values of tokens that a decoder has seen, so that it need not see them again."""

from torch import Tensor, cat

from fsdpctl.models.sight import Sight


class LayerCache:
    """Of one layer; shapes are (batch, heads, length, head_dim)."""

    def __init__(self) -> None:
        self._seen: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        """How many tokens it has."""
        return 0 if self._seen is None else self._seen[0].shape[2]

    def extended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values, with these as the last; they are kept."""
        if self._seen is not None:
            keys, values = cat([self._seen[0], keys], 2), cat([self._seen[1], values], 2)
        self._seen = keys, values
        return self._seen


class Cache:
    """Of all layers. After the first call, which fills it, a decoder takes one token at a time."""

    def __init__(self) -> None:
        self._layers: dict[int, LayerCache] = {}

    def __len__(self) -> int:
        """How many tokens it has."""
        return len(self.layer(0))

    def layer(self, index: int) -> LayerCache:
        """That of a layer."""
        return self._layers.setdefault(index, LayerCache())


def beside(
    cache: Cache | None, index: int, sight: Sight | None
) -> tuple[LayerCache | Sight | None, ...]:
    """What a layer is given beside tensors: nothing in training on whole rows."""
    layer = None if cache is None else cache.layer(index)
    if sight is not None:
        return layer, sight
    return () if layer is None else (layer,)
