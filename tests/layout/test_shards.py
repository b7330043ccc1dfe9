"""Law: slices tile exactly, whatever the shapes and the number of ranks."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerocli.engine.units.buckets import plan_buckets
from zerocli.layout.shards import PARAM_ALIGN, SHARD_ALIGN, Span, lay_out, nearest_divisor, owned, padded_numel

shapes = st.lists(
    st.tuples(st.lists(st.integers(0, 40), max_size=3).map(tuple), st.integers(0, 2)), min_size=1, max_size=8
)


@given(st.integers(0, 10**12), st.integers(1, 4096))
def test_owned_slices_tile_exactly(numel, world):
    total = padded_numel(numel, world)
    assert numel <= total < numel + world * SHARD_ALIGN
    first, last = owned(total, world, 0), owned(total, world, world - 1)
    assert first.start == 0 and last.stop == total and first.numel * world == total
    middle = world // 2
    assert owned(total, world, middle).start == middle * first.numel
    assert first.numel % SHARD_ALIGN == 0


@given(shapes, st.integers(1, 9))
def test_layout_places_every_parameter_once(parameters, world):
    named = [(f"p{i}", shape, group) for i, (shape, group) in enumerate(parameters)]
    layout = lay_out(named, world)
    covered = torch.zeros(layout.total, dtype=torch.int32)
    for entry in layout.entries:
        assert entry.offset % PARAM_ALIGN == 0
        covered[entry.offset : entry.offset + entry.numel] += 1
    for gap in layout.gaps():
        covered[gap.start : gap.stop] += 1
    assert bool((covered == 1).all())
    assert {e.name for e in layout.entries} == {name for name, _, _ in named}
    for group, region in layout.regions:
        inside = [e for e in layout.entries if e.group == group]
        assert all(region.start <= e.offset and e.offset + e.numel <= region.stop for e in inside)
    assert sum(region.numel for _, region in layout.regions) == layout.total
    pieces = [layout.segments(owned(layout.total, world, rank)) for rank in range(world)]
    assert sum(span.numel for piece in pieces for _, span in piece) == layout.total


@given(shapes, st.integers(1, 5), st.integers(64, 4000))
@settings(max_examples=60, deadline=None)
def test_buckets_carry_every_element_to_its_owner(parameters, world, bucket_numel):
    layout = lay_out([(f"p{i}", shape, group) for i, (shape, group) in enumerate(parameters)], world)
    whole = torch.zeros(layout.total)
    sources = []
    for i, entry in enumerate(layout.entries):
        values = torch.arange(entry.numel) + 1000.0 * (i + 1)
        whole[entry.offset : entry.offset + entry.numel] = values
        sources.append(values)
    each = layout.total // world
    result = torch.full((world, each), -1.0)
    for plan in plan_buckets(layout, world, bucket_numel):
        assert plan.numel <= max(bucket_numel, world * SHARD_ALIGN)
        memory = torch.full((plan.numel,), -7.0)
        for copy in plan.copies:
            target = memory.as_strided(*copy.target)
            target.copy_(sources[copy.entry].as_strided(*copy.source)) if copy.entry >= 0 else target.zero_()
        result[:, plan.columns.start : plan.columns.stop] = memory.view(world, -1)
    assert torch.equal(result.flatten(), whole)


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 99))
def test_spans_intersect_and_tile(a, b, c, d, piece):
    one, two = Span(min(a, b), max(a, b)), Span(min(c, d), max(c, d))
    common = set(range(one.start, one.stop)) & set(range(two.start, two.stop))
    assert one.intersect(two).numel == len(common)
    assert sum(part.numel for part in one.pieces(piece)) == one.numel


@given(st.integers(1, 300), st.integers(1, 300))
def test_the_nearest_divisor_is_one_and_none_is_nearer(wanted, number):
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    assert nearest_divisor(wanted, number) == min(divisors, key=lambda d: (abs(d - wanted), d))


def test_the_nearest_divisor_of_a_huge_number_is_found_at_once():
    assert nearest_divisor(10**15, 10**15 + 7) >= 1
