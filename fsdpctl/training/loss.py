"""The loss of a micro-batch, of each source of a mixture, and of a validation set."""

import hashlib
import math
import random
from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpctl.comm.collectives import Collectives
from fsdpctl.data.batches import Batches, MicroBatch
from fsdpctl.data.data_set import Corpus, DataSet
from fsdpctl.data.mixture import MixedRows
from fsdpctl.data.own import OwnBatch, OwnData
from fsdpctl.data.packing import IGNORED
from fsdpctl.errors import UsageError
from fsdpctl.models.row_documents import Documents, make_documents, send
from fsdpctl.models.transformers_decoder import Decoder, OwnHead, evaluating
from fsdpctl.run.step_metrics import finite
from fsdpctl.training.named_sums import NamedSums, checked_sums


def summed_loss(
    model: Callable[..., Tensor], batch: MicroBatch, device: torch.device, chunk_tokens: int
) -> Tensor:
    """Return the cross entropy in nats, in float32, summed over targets that are not masked.

    Logits are computed for `chunk_tokens` tokens at a time; 0: for all at once.
    """
    tokens, targets = send(batch.tokens, device), send(batch.targets, device)
    loss: Tensor = model(tokens, targets, chunk_tokens or None, **_documents(batch, device))
    return loss


def own_loss(
    model: Any, own: OwnBatch, device: torch.device, named: NamedSums
) -> tuple[Tensor, int | Tensor]:
    """Return the sum and the count of a script's loss function, and add its other sums to `named`.

    `model` is a ShardedModel.
    """
    dtype = model.compute_dtype
    with torch.autocast(device.type, dtype, enabled=dtype == torch.bfloat16):
        total, count, *others = _checked(own.of.loss(model, _sent(own.value, device)))
    sums = checked_sums(others[0]) if others else {}
    named.add(sums if own.is_counted else dict.fromkeys(sums, 0.0))
    return (total, count) if own.is_counted else (0 * total, 0)


def _sent(value: Any, device: torch.device) -> Any:
    """Send the tensors of a batch to the device; what holds them keeps its class."""
    if isinstance(value, Tensor):
        is_plain = not value.is_cuda and value.layout is torch.strided
        return send(value, device) if is_plain else value.to(device)
    if callable(getattr(value, "to", None)):  # such as BatchEncoding, PackedSequence
        sent = value.to(device)
        return value if sent is None else sent
    if isinstance(value, tuple):
        each = [_sent(each, device) for each in value]
        return type(value)(*each) if hasattr(value, "_fields") else type(value)(each)
    if is_dataclass(value) and not isinstance(value, type):
        made: Any = copy(value)
        for name in (each.name for each in fields(value) if hasattr(value, each.name)):
            object.__setattr__(made, name, _sent(getattr(value, name), device))
        return made
    if isinstance(value, list | MutableMapping):
        items = value.items() if isinstance(value, MutableMapping) else enumerate(value)
        made = copy(value)
        for key, each in items:
            made[key] = _sent(each, device)
        return made
    if isinstance(value, Mapping):
        return {name: _sent(each, device) for name, each in value.items()}
    return value


def _checked(found: Any) -> tuple[Tensor, int | Tensor, *tuple[Any, ...]]:
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        got = f"{len(found)} values" if isinstance(found, tuple) else type(found).__name__
        raise UsageError(f"loss: expected a tuple (sum, count) or (sum, count, dict), got {got}")
    total, count, *others = found
    if not isinstance(total, Tensor) or total.numel() != 1:
        what = f"shape {list(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        raise UsageError(f"loss: expected a sum, a tensor with one element, got {what}")
    if torch.is_grad_enabled() and not total.requires_grad:
        raise UsageError("loss: the sum depends on no trained parameter; was it detached?")
    if isinstance(count, Tensor):
        is_whole = count.numel() == 1 and not (count.is_floating_point() or count.is_complex())
        count = count.detach().reshape(()) if is_whole else count
    else:
        is_whole = isinstance(count, int | np.integer) and int(count) >= 0
    if not is_whole:
        raise UsageError(f"loss: expected a whole number as the count, got {count!r:.60}")
    return total.reshape(()), count, *others


def _documents(batch: MicroBatch, device: torch.device) -> dict[str, Documents]:
    if not batch.lengths:
        return {}
    are_rows = not batch.holds_documents
    documents = make_documents(
        batch.lengths, device, context=batch.context, are_rows=are_rows, ends=batch.ends
    )
    return {"documents": documents}


class ValidationLoss(NamedTuple):
    """A mean loss in nats per token, of all data and of each source of a mixture."""

    mean: float
    tokens: int  # predicted ones
    by_source: dict[str, float]
    named: dict[str, float]  # other sums of a script's loss, divided by its count

    def to_line(self) -> dict[str, float | None]:
        found = {f"val_loss/{name}": loss for name, loss in self.by_source.items()}
        found |= {f"val_{name}": each for name, each in self.named.items()}
        return {"val_loss": finite(self.mean), **{name: finite(x) for name, x in found.items()}}


@torch.no_grad()
def validation_loss(
    model: Decoder,
    batches: Batches,
    collectives: Collectives,
    device: torch.device,
    *,
    at_most: int,
    chunk_tokens: int,
    goes_on: Callable[[int], bool] = lambda number: True,
) -> ValidationLoss | None:
    """Return the mean loss in nats per token over the validation data. Collective.

    Every rank runs the same number of passes, over rows that exist, and losses are added in
    float64, so that the result does not depend on the number of ranks beyond the rounding of single
    passes. After each global batch, `goes_on(NUMBER)` is called; if it returns False, as on all
    ranks, this returns None.
    """
    sums, others, named, done = {}, list[float](), NamedSums(), 0
    for name, part in batches.parts().items():
        total = torch.zeros(2, dtype=torch.float64, device=device)
        for number in range(part.num_validation_batches(at_most)):
            for micro_step in range(part.num_validation_passes(number)):
                reseed(number, micro_step, collectives.rank)
                batch = part.validation(number, collectives.rank, micro_step)
                with evaluating(model):
                    loss, count = _pass_loss(model, batch, device, chunk_tokens, named)
                total[0] += loss
                total[1] += count
            done += 1
            if not goes_on(done):
                return None
        total = torch.cat([total, named.take(collectives, device)])
        sums[name], others = (found := collectives.all_reduce(total).tolist())[:2], found[2:]
    tokens = sum(count for _, count in sums.values())
    sums[""] = [sum(each for each, _ in sums.values()), tokens]
    # A loss mask may exclude all tokens.
    means = {name: each / count if count else math.nan for name, (each, count) in sums.items()}
    of_loss = [each / tokens if tokens else math.nan for each in others]
    named_means = dict(zip(named.names or (), of_loss, strict=True))
    return ValidationLoss(means.pop(""), int(tokens), means, named_means)


def _pass_loss(
    model: Decoder, batch: MicroBatch, device: torch.device, chunk_tokens: int, named: NamedSums
) -> tuple[Tensor, int | Tensor]:
    if batch.content is not None:
        return own_loss(model, batch.content, device, named)
    count = int((batch.targets != IGNORED).sum())
    if chunk_tokens:
        return summed_loss(model, batch, device, chunk_tokens), count
    tokens = send(batch.tokens, device)
    logits = model(tokens, **_documents(batch, device)).float().flatten(0, 1)
    targets = send(batch.targets, device).flatten()
    losses = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    return losses.double().sum(), count


def describe_validation(found: ValidationLoss, data: DataSet) -> str:
    loss = found.mean
    text = f"validation loss {loss:.4f}"
    if isinstance(data.val, OwnData):
        return ", ".join([text, *(f"{name} {each:.4g}" for name, each in found.named.items())])
    text += " nats per token"
    if found.by_source:
        text += f" ({', '.join(f'{name} {each:.4f}' for name, each in found.by_source.items())})"
    bits = None if data.val is None else bits_per_byte(loss, data.val)
    return text if bits is None else f"{text}, {bits:.3f} bits per byte"


def bits_per_byte(loss: float, stream: Corpus) -> float | None:
    """Return a loss in nats per token as bits per byte; None if the text's size is unknown."""
    size = stream.num_bytes
    return loss / math.log(2) * stream.num_tokens / size if size else None


class SourceLosses:
    """The losses of a step on this rank, by source."""

    def __init__(self, module: nn.Module, batches: Batches, device: torch.device) -> None:
        """Begin a step. There are none without a mixture, or a head that computes losses."""
        self._device = device
        self._head: OwnHead | None = None
        if isinstance(batches.rows, MixedRows):
            self._head = next((m for m in module.modules() if isinstance(m, OwnHead)), None)
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


def reseed(*place: int) -> None:
    """Seed the generators from the position in the run: Datasets of scripts use all of them."""
    seed = int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=8).digest(), "little")
    torch.manual_seed(seed >> 1)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
