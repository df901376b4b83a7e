"""The interface of decoders."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Decoder(Protocol):
    """A module that takes tokens, or a wrapper of one."""

    training: bool

    def train(self, mode: bool = True) -> Any:
        """Set the training mode."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return logits, or with targets their loss."""
        ...


@contextmanager
def evaluating(module: Decoder) -> Iterator[None]:
    was_training = module.training
    module.train(False)
    try:
        yield
    finally:
        module.train(was_training)
