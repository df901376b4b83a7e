"""The mean loss over a validation set, in total and by source of a mixture."""

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
from fsdpctl.training.decoder_loss import count_targets, documents_of, summed_loss
from fsdpctl.training.script_loss import NamedSums, script_loss
from fsdpctl.training.train_step import reseed


class ValidationLoss(NamedTuple):
    """A mean loss in nats per token, in total and by source of a mixture."""

    mean: float
    tokens: int  # number of predicted tokens
    by_source: dict[str, float]
    named_means: dict[
        str, float
    ]  # the named sums that a script's loss returns, divided by the counts

    def to_line(self) -> dict[str, float | None]:
        values = {f"val_loss/{name}": loss for name, loss in self.by_source.items()}
        values |= {f"val_{name}": mean for name, mean in self.named_means.items()}
        return {"val_loss": finite(self.mean), **{name: finite(x) for name, x in values.items()}}


@torch.no_grad()
def validation_loss(
    model: Decoder,
    batches: Batches,
    collectives: Collectives,
    device: torch.device,
    *,
    max_batches: int,  # per source; 0: all
    chunk_tokens: int,
    should_continue: Callable[[int], bool] = lambda number: True,
) -> ValidationLoss | None:
    """Return the mean loss in nats per token over the validation data. Collective.

    Every rank runs the same number of passes, without repeating rows, and losses are added in
    float64. So the result depends on the number of ranks only by the rounding of each pass. After
    each global batch, calls `should_continue` with the number of batches so far. It must return the
    same on all ranks; if it returns False, the validation returns None.
    """
    sums: dict[str, list[float]] = {}  # loss and tokens by source
    named, named_totals, num_batches = NamedSums(), list[float](), 0
    for name, part in batches.by_source().items():
        total = torch.zeros(2, dtype=torch.float64, device=device)
        for number in range(part.num_validation_batches(max_batches)):
            for micro_step in range(part.num_validation_passes(number)):
                reseed(number, micro_step, collectives.rank)
                batch = part.validation(number, collectives.rank, micro_step)
                with eval_mode(model):
                    loss, count = _pass_loss(model, batch, device, chunk_tokens, named)
                total[0] += loss
                total[1] += count
            num_batches += 1
            if not should_continue(num_batches):
                return None
        # `take` compares names over all ranks after their first pass. Scripts have one source.
        total = torch.cat([total, named.take(collectives, device)])
        reduced = collectives.all_reduce(total).tolist()
        sums[name], named_totals = reduced[:2], reduced[2:]
    tokens = sum(count for _, count in sums.values())
    sums[""] = [sum(loss for loss, _ in sums.values()), tokens]
    # "" is the total of all sources. A loss mask may exclude all tokens.
    means = {name: loss / count if count else math.nan for name, (loss, count) in sums.items()}
    quotients = [total / tokens if tokens else math.nan for total in named_totals]
    named_means = dict(zip(named.names or (), quotients, strict=True))
    return ValidationLoss(means.pop(""), int(tokens), means, named_means)


def _pass_loss(
    model: Decoder, batch: MicroBatch, device: torch.device, chunk_tokens: int, named: NamedSums
) -> tuple[Tensor, int | Tensor]:
    if batch.script_batch is not None:
        return script_loss(model, batch.script_batch, device, named)
    count = count_targets(batch)
    if chunk_tokens:
        return summed_loss(model, batch, device, chunk_tokens), count
    tokens = copy_to_device(batch.tokens, device)
    logits = model(tokens, **documents_of(batch, device)).float().flatten(0, 1)
    targets = copy_to_device(batch.targets, device).flatten()
    losses = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="none")
    return losses.double().sum(), count


def describe_validation(validation: ValidationLoss, data: DataSet) -> str:
    loss = validation.mean
    text = f"validation loss {loss:.4f}"
    if isinstance(data.val, ScriptData):
        named = (f"{name} {mean:.4g}" for name, mean in validation.named_means.items())
        return ", ".join([text, *named])
    text += " nats per token"
    if validation.by_source:
        losses = (f"{name} {mean:.4f}" for name, mean in validation.by_source.items())
        text += f" ({', '.join(losses)})"
    bits = None if data.val is None else bits_per_byte(loss, data.val)
    return text if bits is None else f"{text}, {bits:.3f} bits per byte"


def bits_per_byte(loss: float, stream: Corpus) -> float | None:
    """Convert a loss in nats per token to bits per byte; None if the text's size is unknown."""
    size = stream.num_bytes
    return loss / math.log(2) * stream.num_tokens / size if size else None
