"""Keys and values of tokens that a decoder has processed, so that it need not repeat them."""


class Cache:
    """The cache of transformers. Once the first call has filled it, calls take one token each."""

    def __init__(self) -> None:
        self.kept: object = None
        self._length = 0  # tokens in it

    def __len__(self) -> int:
        return self._length

    def keep(self, kept: object, count: int) -> None:
        """Keep the cache of a model that has processed `count` more tokens.

        A model that returns None processes all tokens again.
        """
        self.kept = kept
        self._length = 0 if kept is None else self._length + count
