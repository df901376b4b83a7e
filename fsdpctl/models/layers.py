"""Layers of all decoders."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpctl.config.model import ModelConfig
from fsdpctl.models.cache import Cache
from fsdpctl.models.row_documents import Documents
from fsdpctl.models.token_loss import LossHead, in_chunks

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def activation_of(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """Return the function that `model.activation` names."""
    return _ACTIVATIONS[config.activation or "silu"]


def embedding(rows: int, width: int) -> nn.Embedding:
    """Return an uninitialized embedding: drawing imports half of torch, even on meta devices."""
    made: nn.Embedding = nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)
    return made


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
    """Disable dropout in a block."""
    was_training = module.training
    module.train(False)
    try:
        yield
    finally:
        module.train(was_training)


class Head(LossHead):
    """The projection to the vocabulary, or the loss of its logits.

    Note: why torch's `linear_cross_entropy` is not used. It saves the same memory, and returns the
    loss in the dtype of the hidden states: a sum over thousands of tokens in bfloat16.
    """

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__(width, vocab_size, bias=False)

    def forward(
        self, x: Tensor, targets: Tensor | None = None, chunk_tokens: int | None = None
    ) -> Tensor:
        """Return logits of shape (..., vocab_size), or the cross entropy in nats, in float32.

        Args:
            x: Hidden states.
            targets: If given, the result is the cross entropy summed over targets other than -100.
            chunk_tokens: The number of tokens whose logits exist at a time; backward recomputes
                them.
        """
        if targets is None:
            return super().forward(x)
        return in_chunks(self._loss, x, targets, chunk_tokens)

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.summed(super().forward(x), targets)


class CausalDecoder(nn.Module):
    """A decoder whose input is token ids and whose output is next-token logits or their loss."""

    def __init__(self, backbone: nn.Module, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.model = backbone
        self.lm_head = Head(config.hidden_size, vocab_size)
        if config.tie_embeddings:
            self.lm_head.weight = self.get_input_embeddings().weight

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the token embedding."""
        found: nn.Embedding = self.model.embed_tokens  # type: ignore[assignment]  # its place is known
        return found

    def get_output_embeddings(self) -> Head:
        """Return the output head."""
        return self.lm_head

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        chunk_tokens: int | None = None,
        cache: Cache | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Return logits of shape (batch, length, vocab_size), or a summed loss.

        Args:
            tokens: Shape (batch, length). With a filled `cache`, one token per row.
            targets: As in `Head`, shaped like `tokens`.
            chunk_tokens: As in `Head`.
            cache: The cache of earlier tokens, which `tokens` follow.
            documents: The documents that are packed into rows without seeing one another.
        """
        hidden = self.model(tokens, cache, documents)
        out: Tensor = self.lm_head(hidden, targets, chunk_tokens)
        return out
