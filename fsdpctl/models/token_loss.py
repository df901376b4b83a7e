"""The cross entropy of a head, summed over tokens whose logits exist in chunks."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class LossHead(nn.Linear):
    """A projection to the vocabulary that computes the loss of its logits too.

    While `token_losses` is a list, each loss that is computed appends those of its tokens, of shape
    (tokens,); the recomputation of a chunk in backward appends them again.
    """

    token_losses: list[Tensor] | None = None

    def summed(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy in nats, in float32, summed over targets other than -100.

        Args:
            logits: Shape (tokens, vocab_size).
            targets: Shape (tokens,).
        """
        if self.token_losses is None:
            return F.cross_entropy(logits.float(), targets, reduction="sum")
        losses = F.cross_entropy(logits.float(), targets, reduction="none")
        self.token_losses.append(losses.detach())
        return losses.sum()


def in_chunks(
    loss_of: Callable[[Tensor, Tensor], Tensor], x: Tensor, targets: Tensor, size: int | None
) -> Tensor:
    """Return the loss of hidden states, `size` tokens at a time; backward recomputes their logits.

    Args:
        loss_of: Returns the summed loss of hidden states (tokens, width) and targets (tokens,).
        x: Hidden states, (..., width).
        targets: Shape (...).
        size: None for all tokens at once.
    """
    x, targets = x.flatten(0, -2), targets.flatten()
    if size is None or len(targets) <= size:
        return loss_of(x, targets)
    loss = torch.zeros((), dtype=torch.float32, device=x.device)
    for chunk, wanted in zip(x.split(size), targets.split(size), strict=True):
        loss = loss + checkpoint(loss_of, chunk, wanted, use_reentrant=False)
    return loss
