"""Layers that every decoder has."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fsdpctl.config.hugging_face import default_activation
from fsdpctl.config.model import ModelConfig

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def activation_of(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """The function that `model.activation` names."""
    return _ACTIVATIONS[config.activation or default_activation(config.architecture)]


def embedding(rows: int, width: int) -> nn.Embedding:
    """An embedding without drawn values: drawing imports half of torch, on meta devices too."""
    made: nn.Embedding = nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)
    return made


class Decoder(Protocol):
    """A module that takes tokens, or what stands for one."""

    training: bool

    def train(self, mode: bool = True) -> Any:
        """Into training or out of it."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Logits, or with targets their loss."""
        ...


@contextmanager
def evaluating(module: Decoder) -> Iterator[None]:
    """Nothing is left out by dropout in the block."""
    was_training = module.training
    module.train(False)
    try:
        yield
    finally:
        module.train(was_training)


class Head(nn.Linear):
    """The projection to the vocabulary, or the loss of what it gives.

    Note: why torch's `linear_cross_entropy` is not used. It saves the same memory, and returns the
    loss in the dtype of the hidden states: a sum over thousands of tokens in bfloat16.
    """

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__(width, vocab_size, bias=False)

    def forward(
        self, x: Tensor, targets: Tensor | None = None, chunk_tokens: int | None = None
    ) -> Tensor:
        """Logits of shape (..., vocab_size); with `targets` the summed cross entropy, in float32.

        A target of -100 does not count. With `chunk_tokens`, logits exist for so many tokens at a
        time, and are computed again in backward.
        """
        if targets is None:
            return super().forward(x)
        x, targets = x.flatten(0, -2), targets.flatten()
        if chunk_tokens is None or len(targets) <= chunk_tokens:
            return self._loss(x, targets)
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        for chunk, wanted in zip(x.split(chunk_tokens), targets.split(chunk_tokens), strict=True):
            loss = loss + checkpoint(self._loss, chunk, wanted, use_reentrant=False)
        return loss

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = super().forward(x).float()
        return F.cross_entropy(logits, targets, reduction="sum")
