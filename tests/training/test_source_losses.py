"""The training loss of each source of a mixture."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpctl.data.packing import IGNORE_INDEX
from fsdpctl.models.transformers_decoder import OutputHead
from fsdpctl.optim.record import SpikeLimits
from fsdpctl.run.step_metrics import StepClock
from fsdpctl.training.decoder_loss import summed_loss
from fsdpctl.training.train_step import run_passes
from tests.commands.run import make_text
from tests.distributed import distributed
from tests.training.ranks import new_trainer, run_args


class Head(OutputHead):
    def __init__(self):
        nn.Linear.__init__(self, 8, 40, bias=False)

    def _logits(self, hidden, outputs):
        return F.linear(hidden, self.weight)


def expected_sum(head: Head, x: Tensor, targets: Tensor) -> float:
    return F.cross_entropy(head(x).flatten(0, 1), targets.flatten(), reduction="sum").item()


@pytest.mark.parametrize("chunk", [None, 5])
def test_losses_of_tokens_change_no_bit_of_a_gradient(chunk):
    torch.manual_seed(0)
    head = Head()
    x, targets = torch.randn(2, 7, 8), torch.randint(0, 40, (2, 7))
    targets[1, 3:] = IGNORE_INDEX
    results = []
    for gradients in (None, list[torch.Tensor]()):
        head.token_losses = gradients
        hidden = x.clone().requires_grad_()
        loss = head(hidden, targets, chunk)
        if gradients is not None:
            losses = torch.cat(gradients).view(2, 7)
            gradients.clear()
            assert float(losses.sum()) == pytest.approx(expected_sum(head, x, targets), rel=1e-6)
            assert losses[1, 3:].eq(0).all()
        loss.backward()
        assert hidden.grad is not None
        assert head.weight.grad is not None
        results.append((hidden.grad, head.weight.grad))
        head.weight.grad = None
        assert loss.item() == pytest.approx(expected_sum(head, x, targets), rel=1e-6)
    (one, of_one), (other, of_other) = results
    assert one.equal(other)
    assert of_one.equal(of_other)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("train.context_parallel=2",)])
def test_a_step_has_the_loss_of_each_source(tmp_path, more):
    make_text(tmp_path)
    (tmp_path / "other.txt").write_text("zebra " * 400)
    shares = ("a", "words", 0.7), ("b", "other", 0.2), ("c", "other", 0.1)
    path = ",".join(f"{name}={tmp_path}/{file}.txt:{share}" for name, file, share in shares)
    options = (f"data.path={path}", "data=text", "train.loss_chunk_tokens=32", *more)
    typed = run_args(tmp_path, 2, *options)
    check_step(world_size=2, typed=[*typed, f"train.run_dir={tmp_path / 'run'}"])


@distributed()
def check_step(rank: int, world_size: int, typed: list[str]) -> None:
    parts = new_trainer(typed).parts
    batches, size = parts.train_batches, parts.config.train.global_batch_size
    seen = 0
    for position in range(0, 4 * size, size):
        sums = torch.zeros(2, 3, dtype=torch.float64)
        for micro_step in range(batches.plan.num_micro_batches):
            batch = batches.training(position, rank, micro_step)
            for row, source in enumerate(batch.sources):
                only = torch.full_like(batch.targets, IGNORE_INDEX)
                only[row] = batch.targets[row]
                with torch.no_grad():
                    loss = summed_loss(parts.model, replace(batch, targets=only), parts.device, 0)
                sums[0, source] += loss.item()
                sums[1, source] += int((only >= 0).sum())
        parts.model.collectives.all_reduce(sums)
        expected = [a / b if b else None for a, b in sums.t().tolist()]
        clock = StepClock(parts.device, None)
        figures = run_passes(parts, 0, position, clock, limits=SpikeLimits()).stats()
        pairs = zip(figures.source_losses, expected, strict=True)
        assert all(a == (b and pytest.approx(b, rel=1e-5)) for a, b in pairs)
        total = sums.sum(1)
        assert figures.loss == pytest.approx(float(total[0] / total[1]), rel=1e-5)
        assert (len(figures.rank_losses), figures.tokens) == (2, int(total[1]))
        seen += sum(each is not None for each in expected)
    assert 8 <= seen <= 12
