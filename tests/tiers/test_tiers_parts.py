"""The small parts: which bytes are free, how a block is cut, how a transfer ends, how a tier is found."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from concurrent.futures import Future
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiers
from tiers import registry
from tiers.errors import TierError, TierFull, format_nbytes
from tiers.extents import Extents
from tiers.null import NullTier
from tiers.pages import Pages, Registrar, resident_nbytes
from tiers.staging import Staging
from tiers.stripes import Record, Unit, cut
from tiers.transfer import Transfer

ROOT = Path(__file__).resolve().parents[2]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=80))
def test_extents_never_overlap_and_come_back_whole(steps):
    extents, taken = Extents(200), []
    for takes, number in steps:
        if takes:
            start = extents.take(number)
            largest = max((length for length, _ in extents._by_size), default=0)
            assert start is not None or largest < number
            if start is not None:
                taken.append((start, number))
        elif taken:
            extents.give(*taken.pop(number % len(taken)))
        covered = [byte for start, length in taken for byte in range(start, start + length)]
        assert len(set(covered)) == len(covered) == 200 - extents.free
        assert all(0 <= byte < 200 for byte in covered)
    for span in taken:
        extents.give(*span)
    assert extents._by_size == [(200, 0)]


def test_extents_take_an_exact_fit_before_a_larger_one():
    extents = Extents(100)
    starts = [extents.take(10) for _ in range(10)]
    extents.give(starts[2], 10)
    extents.give(starts[5], 10)
    extents.give(starts[6], 10)
    assert extents.take(10) == starts[2]
    extents.grow(5)
    assert extents.take(25) is None and extents.take(20) == starts[5]


@given(st.integers(1, 300), st.data())
def test_pieces_tile_a_transfer_exactly(nbytes, data):
    file = SimpleNamespace(direct=False)
    units = [Unit(file, 0, min(64, nbytes - start)) for start in range(0, nbytes, 64)]
    offset = data.draw(st.integers(0, nbytes - 1))
    length = data.draw(st.integers(1, nbytes - offset))
    pieces = cut(Record(units), torch.arange(length), offset, 64)
    assert torch.equal(torch.cat([piece.data for piece in pieces]), torch.arange(length))
    assert [64 * piece.index + piece.start for piece in pieces][0] == offset
    for piece in pieces:
        assert 0 <= piece.start < piece.end <= piece.unit.nbytes
        assert piece.data.numel() == piece.nbytes


def test_a_transfer_is_waited_for_as_often_as_one_likes():
    transfer = Transfer.finished(7)
    for _ in range(2):
        transfer.wait()
        transfer.synchronize()
    assert transfer.done and transfer.error is None and transfer.nbytes == 7


def test_a_transfer_holds_its_tensors_until_it_is_done():
    future: Future = Future()
    transfer = Transfer(3, future=future, hold=(torch.zeros(3),))
    assert not transfer.done and transfer._hold and "in flight" in repr(transfer)
    future.set_result(None)
    transfer.wait()
    assert transfer.done and not transfer._hold


def test_an_ended_copy_holds_nothing_though_nobody_waits_for_it():
    event = SimpleNamespace(query=lambda: over, wait=lambda stream: None)
    over = False
    transfer = Transfer(3, event=event, hold=(torch.zeros(3),))
    transfer.wait()
    assert not transfer.done and transfer._hold
    over = True
    assert transfer.done and not transfer._hold


def test_a_failed_transfer_raises_every_time():
    future: Future = Future()
    transfer = Transfer(3, future=future)
    error = TierError("gone", tier="toy")
    assert transfer.error is None
    future.set_exception(error)
    for _ in range(2):
        with pytest.raises(TierError, match="gone"):
            transfer.wait()
    assert transfer.done and transfer.error is error
    cancelled: Future = Future()
    cancelled.cancel()
    with pytest.raises(TierError, match="closed"):
        Transfer(3, future=cancelled).wait()


def test_null_counts_and_stores_nothing():
    with NullTier() as tier:
        block = tier.allocate(10**15)
        assert tier.capacity is None and tier.used == 10**15
        tier.write(block, torch.ones(10)).wait()
        target = torch.full((5,), 3.0)
        tier.read(block, target).wait()
        assert (tier.bytes_written, tier.bytes_read) == (40, 20)
        assert bool((target == 3).all())


def test_errors_carry_the_fact_the_place_and_the_numbers():
    error = TierFull(tier="nvme", needed=3 << 30, available=1 << 29, path="/scratch", hint="add a disk")
    assert str(error) == "nvme is full: 3 GiB needed, 512 MiB free in /scratch"
    assert (error.tier, error.path, error.needed, error.available) == ("nvme", "/scratch", 3 << 30, 1 << 29)
    assert [format_nbytes(n) for n in (0, 1023, 1536, 5 << 40)] == ["0 B", "1023 B", "1.5 KiB", "5 TiB"]


# Host memory


def test_unpinned_memory_takes_only_the_pages_that_are_used():
    pages = Pages(16 << 20)
    pages.bytes[:1] = 1
    pages.bytes[5 << 20 : (5 << 20) + 4097] = 1
    assert resident_nbytes(pages.bytes) == 3 * 4096
    pages.prefault()
    assert resident_nbytes(pages.bytes) == 16 << 20


def test_staging_reuses_the_buffer_that_was_used_as_far_before():
    async def used() -> list[int]:
        staging = Staging(3, 1 << 20, Registrar())

        async def lend(nbytes: int) -> None:
            async with staging.buffer(nbytes) as pages:
                pages.bytes[:nbytes] = 1

        async with staging.buffer(4096):
            await lend(1 << 19)
        for nbytes in (1 << 19, 4096, 1 << 18, 1 << 19):
            await lend(nbytes)
        return sorted(resident_nbytes(pages.bytes) for pages in staging.made)

    assert asyncio.run(used()) == [4096 * (index == 0) or 1 << 19 for index in range(2)]


def test_a_transfer_waits_for_a_buffer_that_is_lent_to_a_smaller_one():
    """Otherwise another buffer would be used as far, and in time each: more than a plan of what is in flight."""

    async def used() -> list[int]:
        staging = Staging(3, 1 << 20, Registrar())

        async def lend(nbytes: int, turns: int) -> None:
            async with staging.buffer(nbytes) as pages:
                pages.bytes[:nbytes] = 1
                for _ in range(turns):
                    await asyncio.sleep(0)

        await lend(1 << 19, 0)
        for _ in range(3):
            await asyncio.gather(*(lend(nbytes, 9) for nbytes in (4096, 4096, 1 << 19, 4096)))
        return sorted(resident_nbytes(pages.bytes) for pages in staging.made)

    assert asyncio.run(used()) == [4096, 1 << 19]


# The registry


def test_tiers_are_found_by_name_and_cpu_means_dram():
    assert set(registry.TIERS) >= {"hbm", "dram", "nvme", "null"}
    with tiers.open_tier("cpu", capacity=4096) as tier:
        assert (tier.name, tier.capacity) == ("dram", 4096)
    with pytest.raises(TypeError):
        registry.TIERS["mine"] = "x"


def test_an_unknown_tier_gives_its_neighbours():
    with pytest.raises(TierError, match="no tier 'nvmee'; there are cpu, dram, hbm, null, nvme") as error:
        tiers.open_tier("nvmee")
    assert "did you mean nvme" in error.value.hint and "zerocli.tiers" in error.value.hint


def test_a_third_party_registers_a_tier(monkeypatch):
    monkeypatch.setattr(registry, "_paths", dict(registry._paths))
    tiers.register("attic", "tiers.null.NullTier")
    tiers.register("attic", "tiers.null.NullTier")
    assert isinstance(tiers.open_tier("attic"), NullTier)
    for name in ("attic", "nvme", "cpu"):
        with pytest.raises(ValueError, match="taken"):
            tiers.register(name, "somewhere:Else")


def test_a_package_offers_a_tier_by_entry_point(monkeypatch):
    points = [
        EntryPoint("cellar", "tiers.null:NullTier", registry.ENTRY_POINT_GROUP),
        EntryPoint("broken", "no_such_package.tier:Tier", registry.ENTRY_POINT_GROUP),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "zerocli.tiers" else [])
    assert isinstance(tiers.open_tier("cellar"), NullTier)
    with pytest.raises(TierError, match="could not be loaded") as error:
        tiers.open_tier("broken")
    assert "no_such_package" in error.value.hint


def test_looking_at_the_registry_does_not_import_torch():
    code = "import sys, tiers; assert 'nvme' in tiers.TIERS and tiers.TierError; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_package_hands_on_what_it_says():
    assert all(getattr(tiers, name) is not None for name in tiers.__all__)
    with pytest.raises(AttributeError):
        tiers.nothing  # noqa: B018
