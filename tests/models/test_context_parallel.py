"""Ranks that share rows compute what one rank computes on whole rows."""

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdpctl.models.context_parallel import heads_to_tokens, tokens_to_heads
from fsdpctl.models.decoder_check import run_as_ranks
from fsdpctl.models.packed_documents import Lengths, pack_documents
from fsdpctl.plan.batch_plan import ContextParallel, context_groups, heads_per_rank, tokens_per_rank
from tests.matrix import fast
from tests.models.families import FEW, OTHERS, VOCABULARY, save_model
from tests.models.test_packed import gradients, opened, summed

LENGTH = 48
PACKED = ((5, 1, 17, 25), (30, 1, 1, 16))
CPU = torch.device("cpu")


def rows() -> tuple[Tensor, Tensor]:
    """Return tokens and targets; in the second row, only the last documents are trained."""
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(0, VOCABULARY, (2, 2, LENGTH), generator=generator)
    targets[1, :-9] = -100
    return tokens, targets


def shared_gradients(
    model: Any, ranks: int, packed: Lengths | None, sliced: Callable[..., Tensor]
) -> dict[str, Tensor]:
    """Return the gradients of the loss summed over ranks; `sliced` returns a rank's part."""
    tokens, targets = rows()
    models = [copy.deepcopy(model) for _ in range(ranks)]
    lengths = packed or ((LENGTH,),) * 2

    def run(context: ContextParallel) -> None:
        documents = pack_documents(lengths, CPU, context=context, one_per_row=packed is None)
        logits = models[context.index](sliced(tokens, context.index), documents=documents)
        summed(logits, sliced(targets, context.index)).backward()

    run_as_ranks(ranks, run)
    of_ranks = [gradients(each) for each in models]
    return {name: sum(each[name] for each in of_ranks) for name in of_ranks[0]}  # type: ignore[misc]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("packed", [None, PACKED])
@pytest.mark.parametrize("family", fast(*FEW, slow=OTHERS))
def test_gradients_are_those_of_whole_rows(tmp_path, family, packed, ranks):
    save_model(family, tmp_path)
    model = opened(tmp_path).double()
    tokens, targets = rows()
    options = {"documents": pack_documents(packed, CPU)} if packed else {}
    summed(model(tokens, **options), targets).backward()
    expected = gradients(model)
    result = shared_gradients(model, ranks, packed, lambda x, index: x.chunk(ranks, 1)[index])
    assert result.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max()) or 1.0
        limit = 1e-6 if "gemma" in family else 1e-12  # Gemma computes norms in float32
        torch.testing.assert_close(result[name] / scale, gradient / scale, rtol=0, atol=limit)


@pytest.mark.parametrize("packed", [None, PACKED])
def test_logits_are_those_of_whole_rows_to_the_bit(tmp_path, packed):
    save_model("llama", tmp_path)
    model, (tokens, _) = opened(tmp_path), rows()
    options = {"documents": pack_documents(packed, CPU)} if packed else {}
    with torch.no_grad():
        whole = model(tokens, **options)

    def run(context: ContextParallel) -> Tensor:
        lengths = packed or ((tokens.shape[1],),) * len(tokens)
        documents = pack_documents(lengths, CPU, context=context, one_per_row=packed is None)
        with torch.no_grad():
            logits: Tensor = model(tokens.chunk(2, 1)[context.index], documents=documents)
        return logits

    assert torch.equal(torch.cat(run_as_ranks(2, run), 1), whole)


def test_targets_that_are_shifted_after_the_cut_are_another_loss(tmp_path):
    """If each rank shifted its part, the last token of the part would have no target."""
    save_model("llama", tmp_path)
    model, (_, targets) = opened(tmp_path), rows()

    def cut_first(x: Tensor, index: int) -> Tensor:
        part = x.chunk(2, 1)[index].clone()
        if x.equal(targets):
            part[:, -1] = -100
        return part

    right = shared_gradients(model, 2, None, lambda x, index: x.chunk(2, 1)[index])
    wrong = shared_gradients(model, 2, None, cut_first)
    assert (right["lm_head.weight"] - wrong["lm_head.weight"]).abs().max() > 1e-3


HEADS = [(8, 8), (8, 2), (8, 1), (12, 3), (12, 4), (6, 2)]


@pytest.mark.parametrize(
    ("heads", "ranks"), [each for each in product(HEADS, (2, 3, 4)) if each[0][0] % each[1] == 0]
)
def test_each_rank_gets_the_keys_of_its_queries(heads, ranks):
    length, width = 6 * ranks, 4
    q, k, v = (torch.randn(2, count, length, width) for count in (heads[0], *heads[1:] * 2))
    of_queries = k.repeat_interleave(heads[0] // heads[1], 1)

    def run(context: ContextParallel) -> tuple[Tensor, ...]:
        own_q, own_k, own_v = (each.chunk(ranks, 2)[context.index] for each in (q, k, v))
        local_heads = tokens_to_heads(own_q, own_k, own_v, context)
        return *local_heads, heads_to_tokens(local_heads[0], context)

    mine = heads_per_rank(heads[0], heads[1], ranks)
    for index, (queries, keys, values, back) in enumerate(run_as_ranks(ranks, run)):
        span = slice(index * mine[0], (index + 1) * mine[0])
        assert ((queries.shape[1], keys.shape[1]), torch.equal(queries, q[:, span])) == (mine, True)
        assert torch.equal(keys.repeat_interleave(mine[0] // mine[1], 1), of_queries[:, span])
        assert (keys.shape, torch.equal(back, q.chunk(ranks, 2)[index])) == (values.shape, True)


@pytest.mark.parametrize(("length", "ranks", "each"), [(100, 1, 100), (100, 2, 64), (257, 4, 128)])
def test_parts_are_multiples_of_64_tokens(length, ranks, each):
    assert (tokens_per_rank(length, ranks), context_groups(4, 2)) == (each, [range(2), range(2, 4)])
