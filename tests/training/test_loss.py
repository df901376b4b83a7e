"""The loss in chunks: the same loss and gradients, and at most the logits of one chunk."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpctl.config.compose import compose_config
from fsdpctl.engine.shard_model import shard_model
from fsdpctl.models.transformers_decoder import TransformersDecoder
from fsdpctl.resolve.prepare import prepare
from fsdpctl.resolve.run_plan import make_run_plan
from tests.commands.run import TINY, make_text
from tests.distributed import distributed
from tests.engine.models import gradients_beside
from tests.models.decoders import drawn

VOCAB, LENGTH = 64, 25


def decoder(*, tied: bool) -> TransformersDecoder:
    args = [
        f"model.vocab_size={VOCAB}", f"model.overrides.tie_word_embeddings={str(tied).lower()}",
    ]  # fmt: skip
    config = compose_config([*TINY, *args, "model.overrides.initializer_range=0.1"]).config
    return drawn(config.model).double()


def batch(rank: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    tokens, targets = torch.randint(0, VOCAB, (2, 2, LENGTH), generator=generator).unbind()
    targets[0, :3] = -100
    return tokens, targets


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 25, 50, 1000])
def test_chunks_give_the_same_loss_and_gradients(tied: bool, chunk: int) -> None:
    whole, chunked = decoder(tied=tied), decoder(tied=tied)
    expected, results = whole(*batch()), chunked(*batch(), chunk)
    expected.backward()
    results.backward()
    assert results.dtype == torch.float32
    torch.testing.assert_close(results, expected, rtol=1e-6, atol=0)
    for one, other in zip(whole.parameters(), chunked.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-5, atol=1e-7)


class Largest(TorchDispatchMode):
    """Records the most elements that a softmax of logits had."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **kwargs or {})
        if func.overloadpacket.__name__ == "_log_softmax":
            self.numel = max(self.numel, output.numel())
        return output


@pytest.mark.parametrize(("chunk", "tokens"), [(None, 2 * LENGTH), (7, 7), (20, 20)])
def test_logits_are_computed_one_chunk_at_a_time(chunk: int | None, tokens: int) -> None:
    with Largest() as largest:
        decoder(tied=False)(*batch(), chunk).backward()
    assert largest.numel == tokens * VOCAB


@distributed(world_size=2)
def test_a_sharded_model_computes_its_loss_in_chunks(rank: int, world_size: int) -> None:
    for tied in (False, True):
        for strategy in ("full_shard", "no_shard"):
            alone = decoder(tied=tied)
            (sum(alone(*batch(each)) for each in range(world_size)) / world_size).backward()
            model = shard_model(decoder(tied=tied), strategy)
            model(*batch(rank), 7).backward()
            gradients = {name: each.grad for name, each in alone.named_parameters()}
            for grads, part, _ in gradients_beside(model, gradients):
                torch.testing.assert_close(grads, part, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("args", "chunk"), [
    ([], 0), (["model.vocab_size=128256"], 0),
    (["model.vocab_size=128256", "train.global_batch_size=32"], 1024),
    (["model.vocab_size=16384", "train.global_batch_size=64"], 2048),
    (["model.vocab_size=128256", "train.global_batch_size=32", "accumulation.steps=4"], 0),
    (["train.loss_chunk_tokens=100"], 100),
])  # fmt: skip
def test_large_logits_are_chunked_by_default(tmp_path: Path, args: list[str], chunk: int) -> None:
    usual = [*TINY, f"data.path={make_text(tmp_path)}", "launch.nproc_per_node=1"]
    usual += ["launch.device=cpu", "train.seq_len=64", "train.global_batch_size=4"]
    composed = compose_config(list({w.split("=")[0]: w for w in [*usual, *args]}.values()))
    assert make_run_plan(prepare(composed).config).config.train.loss_chunk_tokens == chunk
