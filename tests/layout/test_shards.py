"""Law: slices tile exactly, whatever the shapes and the number of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.placement import Placement
from zerocli.engine.units.buckets import plan_buckets
from zerocli.errors import WrongValue
from zerocli.layout.flats import Sizing, flat_spec, place
from zerocli.layout.shards import (
    PARAM_ALIGN,
    SHARD_ALIGN,
    Span,
    check_shard_ranks,
    divisors,
    lay_out,
    nearest_divisor,
    owned,
    padded_numel,
)
from zerocli.layout.stage import STAGES

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
    known = [d for d in range(1, number + 1) if number % d == 0]
    assert nearest_divisor(wanted, number) == min(known, key=lambda d: (abs(d - wanted), d))


def test_the_nearest_divisor_of_a_huge_number_is_found_at_once():
    assert nearest_divisor(10**15, 10**15 + 7) >= 1


@given(st.integers(1, 300))
def test_divisors_are_all_there_are(number):
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


def test_groups_of_ranks_tile_the_ranks_and_a_node_or_are_refused_with_those_that_do():
    for right in ((0, 7), (1, 7), (7, 7), (8, 24, 8), (16, 32, 8), (2, 24, 8), (3, 3, 0)):
        check_shard_ranks(*right)
    for wrong, said in {
        (2, 7): "shard_ranks 2 does not divide the 7 data-parallel ranks: 1 or 7 does",
        (2, 1): "shard_ranks 2 does not divide the 1 data-parallel rank: only 1 does",
        (3, 24, 8): "shard_ranks 3 does not divide the 8 data-parallel ranks of a node: 1, 2, 4 or 8 does",
        (12, 24, 8): "shard_ranks 12 does not divide the 8 data-parallel ranks of a node: 1, 2, 4 or 8 does",
    }.items():
        with pytest.raises(WrongValue, match=said):
            check_shard_ranks(*wrong)


def test_flats_of_nearly_equal_sizes_share_gather_buffers():
    """A head with a norm and an embedding; not a block, nor a flat that stays whole on the device."""
    sizing = Sizing(STAGES[3], world=2)
    places = {"embed": (64_000,), "blocks.0": (30_000,), "head": (64_256,), "other": (66_000,)}
    flats = [flat_spec(unit, lay_out([(unit, shape, 0)], 2), 2, STAGES[3], 2) for unit, shape in places.items()]
    embed, block, head, other = place(flats, Placement({}), sizing)
    assert embed.gather_size == head.gather_size and embed.gather_size[0] == head.total > embed.total
    assert block.room == head.room == other.room == 0 and other.gather_size[0] > head.total
    alone = Sizing(STAGES[3], world=1)
    assert not any(flat.room for flat in place(flats, Placement({}), alone))
