"""Properties of flat layouts and optimizer spans."""

from hypothesis import given
from hypothesis import strategies as st

from fsdpctl.plan.layout import ALIGNMENT, ParamSpec, Span, flat_layout, optimizer_spans

shapes = st.lists(st.integers(1, 40), max_size=3).map(tuple)
param_lists = st.lists(shapes, min_size=1, max_size=8).map(
    lambda each: [ParamSpec(f"p{index}", shape) for index, shape in enumerate(each)]
)
shard_counts = st.integers(1, 9)


@given(param_lists, shard_counts)
def test_every_element_is_owned_exactly_once(params, num_shards):
    layout = flat_layout(params, num_shards)
    owned: dict[str, list[Span]] = {param.name: [] for param in params}
    for part in layout.shard_spans:
        for piece in layout.param_slices(part):
            owned[piece.param.name].append(piece.in_param)
    for param in params:
        spans = sorted(owned[param.name])
        assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
        assert spans[-1].stop == param.numel


@given(param_lists, shard_counts)
def test_parts_are_equal_aligned_and_cover_the_buffer(params, num_shards):
    layout = flat_layout(params, num_shards)
    assert len({part.numel for part in layout.shard_spans}) == 1
    assert all(part.start % ALIGNMENT == 0 for part in layout.shard_spans)
    assert (layout.shard_spans[0].start, layout.shard_spans[-1].stop) == (0, layout.numel)
    assert all(placement.span.start % ALIGNMENT == 0 for placement in layout.param_spans)


@given(param_lists, shard_counts, st.integers(1, 5))
def test_shares_are_equal_aligned_and_divide_each_part(params, num_shards, shares):
    layout = flat_layout(params, num_shards, shares)
    assert layout.numel % (num_shards * shares * ALIGNMENT) == 0
    for rank, part in enumerate(layout.shard_spans):
        owned = [layout.owned_span(rank, copy) for copy in range(shares)]
        assert [owned[0].start, owned[-1].stop] == [part.start, part.stop]
        assert all(a.stop == b.start for a, b in zip(owned, owned[1:], strict=False))
        assert {span.numel for span in owned} == {part.numel // shares}
        assert [each.shift(part.start) for each in layout.share_spans] == owned


@given(param_lists, shard_counts)
def test_padding_is_outside_all_parameters(params, num_shards):
    layout = flat_layout(params, num_shards)
    padding = layout.numel - sum(param.numel for param in params)
    assert sum(span.numel for span in layout.padding) == padding
    for gap in layout.padding:
        assert layout.param_slices(gap) == ()
    assert padding < ALIGNMENT * (len(params) + num_shards)


@given(param_lists, shard_counts, st.data())
def test_runs_cover_every_piece_and_have_one_group(params, num_shards, data):
    layout = flat_layout(params, num_shards)
    part = data.draw(st.sampled_from(layout.shard_spans))
    runs = optimizer_spans(layout, part, lambda param: len(param.shape) > 1)
    for piece in layout.param_slices(part):
        inside = [run for run in runs if run.span.intersect(piece.in_flat) == piece.in_flat]
        assert [run.group for run in inside] == [len(piece.param.shape) > 1]
    assert all(run.span.start % ALIGNMENT == run.span.stop % ALIGNMENT == 0 for run in runs)
    assert len(runs) <= 2
    assert all(a.span.stop <= b.span.start for a, b in zip(runs, runs[1:], strict=False))
