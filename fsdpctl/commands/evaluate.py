"""The loss of a checkpoint or a Hugging Face directory on data."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from fsdpctl.checkpoint.base import pretrained_weights
from fsdpctl.checkpoint.load import load_weights
from fsdpctl.checkpoint.manifest import read_manifest
from fsdpctl.checkpoint.pretrained import weights_folder
from fsdpctl.comm.base import Collectives
from fsdpctl.config.auto import Selection
from fsdpctl.config.schema import PrefetchConfig
from fsdpctl.config.sealed import MANIFEST
from fsdpctl.data.batches import Batches
from fsdpctl.io.activity import doing
from fsdpctl.plan.strategy import strategies_of
from fsdpctl.resolve.data import vocabulary_of
from fsdpctl.resolve.run import Opened
from fsdpctl.resolve.settle import settle
from fsdpctl.train.assemble import make_model, strategy_alone
from fsdpctl.train.loss import validation_loss

_OF_THE_DATA = ("data", "train.seq_len")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of an evaluation."""

    loss: float  # nats per token
    perplexity: float
    bits_per_byte: float | None  # None if the size of the text is unknown
    tokens: int  # number of predicted tokens
    loss_by_source: dict[str, float]  # of a mixture


def words_of(source: Path) -> list[str]:
    """Return the settings of the model in a checkpoint or directory, with its training data."""
    words = ["model=hf", f"model.path={source}", "launch.nproc_per_node=1"]
    if (source / MANIFEST).exists():
        words += [
            f"{name}={text}"
            for name, text in read_manifest(source).config.items()
            if name.startswith(_OF_THE_DATA) and name != "data.tokenizer"
        ]
    return words


def evaluate_run(opened: Opened) -> Evaluation:
    """Compute the loss of a model on one rank on the validation data, or on all without any."""
    # All strategies compute the same on one rank: `auto` selects none.
    strategy = strategies_of(opened.config.engine.name)[0]
    plan = settle(opened.config, Selection(strategy, "none", PrefetchConfig(), None))
    config, data = plan.config, opened.data
    stream = data.val or data.train
    device = torch.device(str(config.launch.device))
    folder = weights_folder(config.model)
    with doing(f"loading {folder}"):
        model = make_model(config, device, strategy=strategy_alone(config), empty=True)
        load_weights(pretrained_weights(config.model, folder, model.collectives), model)
    vocab_size = data.vocab_size or vocabulary_of(config, data)
    batches = Batches(stream.rows(config.train.seq_len), plan.batches, 0, vocab_size)
    total = batches.num_validation_batches(0)

    with doing("evaluating", "batches", total) as advance:

        def tell(number: int) -> bool:
            advance(1)
            return True

        found = validation_loss(
            model,
            batches,
            Collectives(),
            device,
            at_most=0,
            chunk_tokens=config.train.loss_chunk_tokens or 0,
            goes_on=tell,
        )
    assert found is not None
    loss, size = found.mean, stream.num_bytes
    bits = loss / math.log(2) * stream.num_tokens / size if size else None
    return Evaluation(loss, math.exp(min(loss, 700.0)), bits, found.tokens, found.by_source)
