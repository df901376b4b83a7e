"""Packing of documents into sequences."""

import math
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpctl.data.batches import Batches
from fsdpctl.data.order import pack_sequences
from fsdpctl.data.packing import IGNORE_INDEX, DocumentSet, Packing
from fsdpctl.data.streams import TokenStream
from fsdpctl.errors import UsageError
from fsdpctl.plan.batch_plan import plan_batches

ROOM = 16


def some(*lengths: int, trained: float = 0.6, packing: Packing = Packing()) -> DocumentSet:
    """Return documents of distinct tokens."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.arange(1, starts[-1] + 1, dtype=np.uint16)
    flags = np.random.default_rng(0).random(len(tokens)) < trained
    return DocumentSet(tokens, flags, starts, packing)


@given(st.lists(st.integers(1, ROOM), max_size=80), st.integers(0, 9))
def test_every_document_is_in_one_sequence_that_has_room_for_it(lengths, seed):
    rows = pack_sequences(lengths, ROOM, seed)
    assert sorted(chain(*rows)) == list(range(len(lengths)))
    assert all(0 < sum(lengths[each] for each in row) <= ROOM for row in rows)


@given(st.lists(st.integers(1, ROOM), min_size=1, max_size=80))
def test_no_two_sequences_fit_into_one(lengths):
    filled = sorted(sum(lengths[each] for each in row) for row in pack_sequences(lengths, ROOM, 0))
    assert len(filled) < 2 or filled[0] + filled[1] > ROOM


def test_packing_leaves_little_padding():
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1, 20_000).astype(np.int64), 1, 2048)
    assert int(lengths.sum()) / (len(pack_sequences(lengths, 2048, 0)) * 2048) > 0.997


def test_packing_depends_on_the_seed_only():
    lengths = [3, 5, 7, 2, 9, 4, 6, 1] * 10
    assert pack_sequences(lengths, ROOM, 1) == pack_sequences(lengths, ROOM, 1)
    assert pack_sequences(lengths, ROOM, 1) != pack_sequences(lengths, ROOM, 2)


@pytest.mark.parametrize("shares_rows", [True, False])
@pytest.mark.parametrize("too_long", ["truncate", "drop"])
@given(lengths=st.lists(st.integers(2, 2 * ROOM), min_size=1, max_size=40))
def test_each_trained_token_is_a_target_once_after_its_predecessor(lengths, shares_rows, too_long):
    documents = some(*lengths, packing=Packing(shares_rows, too_long))
    rows = documents.samples(ROOM)
    wanted = set[int]()
    for start, end in zip(documents.starts, documents.starts[1:], strict=False):
        if end - start - 1 <= ROOM or too_long == "truncate":
            part = range(start + 1, min(end, start + 1 + ROOM))
            wanted |= {document + 1 for document in part if documents.loss_mask[document]}
    results = list[int]()
    for number in range(len(rows)):
        row = rows[number]
        assert row.tokens.shape == row.targets.shape == (ROOM,)
        assert sum(row.lengths) == ROOM
        assert shares_rows or len(row.lengths) <= 2
        counts = row.targets != IGNORE_INDEX
        assert (row.targets[counts] == row.tokens[counts] + 1).all()
        results += row.targets[counts].tolist()
        assert not counts[ROOM - row.padding :].any()
        starts = np.cumsum([0, *row.lengths])[:-1]
        firsts = row.tokens[starts[: len(row.lengths) - bool(row.padding)]]
        assert set(firsts.tolist()) <= {int(each) + 1 for each in documents.starts[:-1]}
    assert (sorted(results), rows.num_targets) == (sorted(wanted), len(wanted))
    filled = sum(rows[number].padding for number in range(len(rows)))
    assert rows.num_tokens == len(rows) * ROOM - filled


def test_documents_without_trained_tokens_are_dropped_and_counted():
    documents = some(5, 40, 6)
    documents.loss_mask[:] = False
    documents.loss_mask[[3, 30, 47]] = True  # the second document's exceeds ROOM
    rows = documents.samples(ROOM)
    assert (rows.num_too_long, rows.num_untrained, rows.num_targets) == (1, 1, 2)
    rows = some(5, 40, 6, packing=Packing(too_long="drop"), trained=1).samples(ROOM)
    assert (rows.num_too_long, rows.num_untrained, len(rows)) == (1, 0, 1)


def test_the_error_says_why_nothing_is_left():
    rows = some(30, 40, packing=Packing(too_long="drop")).samples(ROOM)
    with pytest.raises(UsageError, match=r"seq_len=16: of 2 samples, 2 are longer and 0 have"):
        Batches(rows, plan_batches(1, 1), 0, 500)


def test_a_micro_batch_has_the_lengths_of_documents_and_padding():
    batches = Batches(some(9, 9, 5, 4, 12, trained=1).samples(ROOM), plan_batches(8, 2), 0, 500)
    batch = batches.training(0, 1, 0)
    assert batch.tokens.shape == (4, ROOM)
    assert (all(sum(each) == ROOM for each in batch.lengths), len(batch.lengths)) == (True, 4)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_validation_computes_no_row_and_no_end_of_a_row_without_targets(ranks):
    rows = some(9, 9, 5, 4, 12, trained=1, packing=Packing(shares_sequences=False)).samples(ROOM)
    batches = Batches(rows, plan_batches(15, ranks, micro_batch_size=2), 0, 500)
    passes = batches.num_validation_passes(0)
    assert passes == math.ceil(math.ceil(5 / ranks) / 2)
    seen = [batches.validation(0, rank, n) for rank in range(ranks) for n in range(passes)]
    assert sum(int((each.targets != IGNORE_INDEX).sum()) for each in seen) == rows.num_targets
    for batch in seen:
        assert all(sum(each) == batch.tokens.shape[1] for each in batch.lengths)
        if (batch.targets != IGNORE_INDEX).any():
            assert (batch.targets[:, -1] != IGNORE_INDEX).any()
        else:
            assert batch.tokens.numel() == 1
    assert sum(each.tokens.numel() for each in seen) < 5 * ROOM


@pytest.mark.parametrize("packs", [True, False])
def test_padding_for_ranks_that_share_a_row_has_no_later_positions(packs):
    documents = some(9, 5, 4, 12, trained=1)
    text = TokenStream(documents.tokens, None)
    data: DocumentSet | TokenStream = documents if packs else text
    batches = Batches(data.samples(ROOM), plan_batches(2, 4, context_parallel=4), 0, 500)
    batch = batches.training(0, 3, 0)
    assert batch.isolates_documents == packs
    assert [sum(each) for each in batch.lengths] == [4 * batch.tokens.shape[1]] * 2
    assert max(chain(*batch.lengths)) <= ROOM


def test_a_sequence_can_be_split_into_its_documents():
    (first, second) = sorted(some(9, 5, trained=1).samples(ROOM)[0].documents())
    assert (first, second) == (list(range(1, 10)), list(range(10, 15)))


def test_the_fingerprint_includes_mask_and_packing():
    first, second = some(5, 6), some(5, 6)
    assert first.fingerprint == second.fingerprint
    assert some(5, 6, packing=Packing(seed=1)).fingerprint != first.fingerprint
    second = some(5, 6)
    second.loss_mask[3] ^= True
    assert second.fingerprint != first.fingerprint
