"""The division of gradients into messages."""

from itertools import pairwise

from hypothesis import given

from fsdpctl.plan.layout import ParamSpec, Span, flat_layout
from fsdpctl.plan.transport import gradient_stretches
from tests.plan.test_layout import param_lists, part_counts


@given(param_lists, part_counts)
def test_every_parameter_is_sent_once_and_only_small_ones_are_copied(params, num_parts):
    layout = flat_layout(params, num_parts)
    stretches = gradient_stretches(layout)
    assert [i for _, indices in stretches for i in indices] == list(range(len(params)))
    for span, indices in stretches:
        placed = [layout.placements[index].span for index in indices]
        assert span == Span(placed[0].start, placed[-1].stop)
        assert len(indices) == 1 or span.numel <= layout.numel // 2
    for (span, _), (following, _) in pairwise(stretches):
        assert following.stop - span.start > layout.numel // 2


def test_a_message_of_several_gradients_is_small() -> None:
    layout = flat_layout([ParamSpec(f"p{index}", (1 << 16,)) for index in range(8)], 2)
    assert [indices for _, indices in gradient_stretches(layout)] == [
        (0, 1),
        (2, 3),
        (4, 5),
        (6, 7),
    ]
