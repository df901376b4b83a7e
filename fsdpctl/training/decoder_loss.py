"""The loss of a decoder's micro-batch, and of each source of a mixture."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fsdpctl.data.batches import Batches, MicroBatch
from fsdpctl.data.mixture import MixedSamples
from fsdpctl.data.packing import IGNORE_INDEX
from fsdpctl.models.packed_documents import PackedDocuments, copy_to_device, pack_documents
from fsdpctl.models.transformers_decoder import OutputHead


def summed_loss(
    model: Callable[..., Tensor], batch: MicroBatch, device: torch.device, chunk_tokens: int
) -> Tensor:
    """Return the cross entropy in nats, in float32, summed over targets that are not masked.

    Computes logits for `chunk_tokens` tokens at a time; 0: for all tokens at once.
    """
    tokens, targets = copy_to_device(batch.tokens, device), copy_to_device(batch.targets, device)
    loss: Tensor = model(tokens, targets, chunk_tokens or None, **documents_of(batch, device))
    return loss


def documents_of(batch: MicroBatch, device: torch.device) -> dict[str, PackedDocuments]:
    """Return the model's keyword argument for the documents of a batch, if it has documents."""
    if not batch.lengths:
        return {}
    # If documents are not isolated, attention sees whole rows.
    documents = pack_documents(
        batch.lengths, device, context=batch.context, one_per_row=not batch.isolates_documents,
        padding_starts=batch.padding_starts,
    )  # fmt: skip
    return {"documents": documents}


def count_targets(batch: MicroBatch) -> int:
    return int((batch.targets != IGNORE_INDEX).sum())


class SourceLosses:
    """The losses of a step on this rank, by source of a mixture."""

    def __init__(self, module: nn.Module, batches: Batches, device: torch.device) -> None:
        """Start a step; nothing is recorded without a mixture or without an OutputHead."""
        self._device = device
        self._head: OutputHead | None = None
        if isinstance(batches.samples, MixedSamples):
            self._head = next((m for m in module.modules() if isinstance(m, OutputHead)), None)
            self._count = len(batches.samples.sources)
            self._losses = torch.zeros(self._count, dtype=torch.float64, device=device)
            self._tokens = torch.zeros(self._count, dtype=torch.float64)

    def start_forward(self) -> None:
        """Have the head keep the losses of the tokens of the next forward pass."""
        if self._head is not None:
            self._head.token_losses = []

    def add(self, batch: MicroBatch) -> None:
        """Add the losses of a forward pass, before its backward pass."""
        if self._head is None:
            return
        assert self._head.token_losses is not None
        losses = torch.cat(self._head.token_losses).view(batch.targets.shape)
        self._head.token_losses.clear()
        in_source = torch.zeros(self._count, len(losses), dtype=torch.bool)
        # One-hot: the source of each row of the batch.
        in_source[list(batch.sources), range(len(batch.sources))] = True
        self._tokens += in_source.double() @ (batch.targets != IGNORE_INDEX).sum(1).double()
        # Not a matrix product: a non-finite loss must not reach the sums of other sources.
        rows = losses.sum(1, dtype=torch.float64)
        self._losses += torch.where(copy_to_device(in_source, self._device), rows, 0.0).sum(1)

    def sums(self) -> Tensor | None:
        """Return the losses and target tokens of each source in float64, shape (2, sources)."""
        if self._head is None:
            return None
        self._head.token_losses = None  # the head records nothing
        return torch.stack([self._losses, copy_to_device(self._tokens, self._device)])
