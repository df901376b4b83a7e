"""The mean loss over a validation set: of all data, and of each source of a mixture."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fsdpctl.comm.collectives import Collectives
from fsdpctl.data.batches import Batches, MicroBatch
from fsdpctl.data.data_set import Corpus, DataSet
from fsdpctl.data.packing import IGNORE_INDEX
from fsdpctl.data.script_data import ScriptData
from fsdpctl.models.packed_documents import copy_to_device
from fsdpctl.models.transformers_decoder import Decoder, eval_mode
from fsdpctl.run.step_metrics import finite
from fsdpctl.training.decoder_loss import documents_of, summed_loss
from fsdpctl.training.script_loss import NamedSums, script_loss
from fsdpctl.training.train_step import reseed


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
    for name, part in batches.by_source().items():
        total = torch.zeros(2, dtype=torch.float64, device=device)
        for number in range(part.num_validation_batches(at_most)):
            for micro_step in range(part.num_validation_passes(number)):
                reseed(number, micro_step, collectives.rank)
                batch = part.validation(number, collectives.rank, micro_step)
                with eval_mode(model):
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
    if batch.script_batch is not None:
        return script_loss(model, batch.script_batch, device, named)
    count = int((batch.targets != IGNORE_INDEX).sum())
    if chunk_tokens:
        return summed_loss(model, batch, device, chunk_tokens), count
    tokens = copy_to_device(batch.tokens, device)
    logits = model(tokens, **documents_of(batch, device)).float().flatten(0, 1)
    targets = copy_to_device(batch.targets, device).flatten()
    losses = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="none")
    return losses.double().sum(), count


def describe_validation(found: ValidationLoss, data: DataSet) -> str:
    loss = found.mean
    text = f"validation loss {loss:.4f}"
    if isinstance(data.val, ScriptData):
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
