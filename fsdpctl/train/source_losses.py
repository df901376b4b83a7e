"""The training loss of each source of a mixture."""

import torch
from torch import Tensor, nn

from fsdpctl.data.batches import Batches, MicroBatch
from fsdpctl.data.mixture import MixedRows
from fsdpctl.models.row_documents import send
from fsdpctl.models.token_loss import LossHead


class SourceLosses:
    """The losses of a step on this rank, by source."""

    def __init__(self, module: nn.Module, batches: Batches, device: torch.device) -> None:
        """Begin a step. There are none without a mixture, or a head that computes losses."""
        self._device = device
        self._head: LossHead | None = None
        if isinstance(batches.rows, MixedRows):
            self._head = next((m for m in module.modules() if isinstance(m, LossHead)), None)
            self._count = len(batches.rows.parts)
            self._losses = torch.zeros(self._count, dtype=torch.float64, device=device)
            self._tokens = torch.zeros(self._count, dtype=torch.float64)

    def begin(self) -> None:
        """Keep the losses of the tokens of the next forward pass."""
        if self._head is not None:
            self._head.token_losses = []

    def add(self, batch: MicroBatch) -> None:
        """Add the losses of a forward pass, before its backward pass."""
        if self._head is None:
            return
        assert self._head.token_losses is not None
        losses = torch.cat(self._head.token_losses).view(batch.targets.shape)
        self._head.token_losses.clear()
        is_of = torch.zeros(self._count, len(losses), dtype=torch.bool)
        is_of[list(batch.sources), range(len(batch.sources))] = True
        self._tokens += is_of.double() @ (batch.targets >= 0).sum(1).double()
        # Not a product: a loss that is not finite is that of its source only.
        rows = losses.sum(1, dtype=torch.float64)
        self._losses += torch.where(send(is_of, self._device), rows, 0.0).sum(1)

    def sums(self) -> Tensor | None:
        """Return the losses and target tokens of each source, (2, sources) in float64."""
        if self._head is None:
            return None
        self._head.token_losses = None
        return torch.stack([self._losses, send(self._tokens, self._device)])
