"""On a GPU: transfers keep the order of the caller's stream, under delays that would show it if they did not."""

from __future__ import annotations

import weakref

import pytest
import torch

from tiers.base import Tier
from tiers.conformance import MIB, pattern
from tiers.dram import DramTier
from tiers.hbm import HbmTier
from tiers.nvme import NvmeTier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NBYTES = 8 * MIB + 12_345


def delay() -> None:
    """Keep the current stream busy for some tens of milliseconds."""
    torch.cuda._sleep(50_000_000)


@pytest.fixture(params=("hbm", "dram", "nvme"))
def tier(request, tmp_path):
    with {
        "hbm": lambda: HbmTier(128 * MIB),
        "dram": lambda: DramTier(128 * MIB, pin=True),
        "nvme": lambda: NvmeTier(128 * MIB, paths=tmp_path, verify=True),
    }[request.param]() as tier:
        yield tier


def test_arenas_are_pinned():
    with DramTier(64 * MIB, pin=True) as tier:
        view = tier.view(tier.allocate(NBYTES))
        assert view.is_pinned() and tier.pinned and tier.pinned_nbytes == tier.footprint
    assert not view.is_pinned()


def test_memory_is_unmapped_though_its_transfers_are_kept():
    target = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    with DramTier(96 * MIB, pin=True) as tier:
        block = tier.allocate(target.nbytes)
        mapping = weakref.ref(tier._arenas[0].pages._mapping)
        delay()
        transfer = tier.read(block, target)
        transfer.wait()  # the stream waits, the host does not
        torch.cuda.synchronize()
        tier.free(block)
        del block
        tier.allocate(80 * MIB)  # there is no room for both
        assert transfer.nbytes == target.nbytes and mapping() is None


def test_a_write_waits_for_the_source_to_be_computed(tier: Tier):
    source, result = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda"), pattern(NBYTES, 1, "cuda")
    block, target = tier.allocate(NBYTES), torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    delay()
    source.copy_(result)
    tier.write(block, source).wait()
    source.fill_(255)
    tier.read(block, target).wait()
    assert torch.equal(target, result)


def test_a_read_waits_for_the_last_use_of_its_target(tier: Tier):
    first, second = pattern(NBYTES, 1, "cuda"), pattern(NBYTES, 2, "cuda")
    block, target, seen = tier.allocate(NBYTES), first.clone(), torch.zeros_like(first)
    tier.write(block, second).synchronize()
    delay()
    seen.copy_(target)
    tier.read(block, target).wait()
    assert torch.equal(seen, first) and torch.equal(target, second)


def test_dropped_device_memory_is_not_reused_under_a_copy(tier: Tier):
    block = tier.allocate(NBYTES)
    for seed in range(4):
        delay()
        transfer = tier.write(block, pattern(NBYTES, seed, "cuda"))
        usurpers = [torch.full((NBYTES,), 255, dtype=torch.uint8, device="cuda") for _ in range(3)]
        transfer.wait()
        target = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
        tier.read(block, target).wait()
        assert torch.equal(target.cpu(), pattern(NBYTES, seed))
        del usurpers


def test_a_freed_block_is_not_reused_under_a_copy(tier: Tier):
    block, target = tier.allocate(NBYTES), torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    tier.write(block, pattern(NBYTES, 1)).synchronize()
    delay()
    transfer = tier.read(block, target)
    tier.free(block)
    other = tier.allocate(NBYTES)
    tier.write(other, torch.full((NBYTES,), 255, dtype=torch.uint8)).synchronize()
    transfer.synchronize()
    assert torch.equal(target.cpu(), pattern(NBYTES, 1))
    assert tier.used == other.reserved


def test_wait_does_not_stop_the_host():
    with DramTier(64 * MIB, pin=True) as tier:
        block, source = tier.allocate(NBYTES), pattern(NBYTES, 1, "cuda")
        delay()
        delay()
        transfer = tier.write(block, source)
        transfer.wait()
        assert not transfer.done
        transfer.synchronize()
        assert transfer.done and torch.equal(tier.view(block), source.cpu())


def test_host_memory_ordered_on_a_stream_goes_to_the_disk_in_that_order(tmp_path):
    source = pattern(NBYTES, 1, "cuda")
    with DramTier(64 * MIB, pin=True) as dram, NvmeTier(64 * MIB, paths=tmp_path, verify=True) as nvme:
        middle, block = dram.allocate(NBYTES), nvme.allocate(NBYTES)
        dram.view(middle).zero_()
        delay()
        dram.write(middle, source).wait()
        nvme.write(block, dram.view(middle)).wait()
        target = torch.zeros(NBYTES, dtype=torch.uint8)
        nvme.read(block, target).wait()
        assert torch.equal(target, source.cpu())


def test_a_pinned_buffer_is_refilled_from_disk_only_after_its_last_copy_up(tmp_path):
    with DramTier(64 * MIB, pin=True) as dram, NvmeTier(64 * MIB, paths=tmp_path) as nvme:
        buffer, blocks = dram.allocate(NBYTES), [nvme.allocate(NBYTES) for _ in range(2)]
        targets = [torch.zeros(NBYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
        for seed, block in enumerate(blocks):
            nvme.write(block, pattern(NBYTES, seed)).wait()
        for block, target in zip(blocks, targets, strict=True):
            nvme.read(block, dram.view(buffer)).wait()
            delay()
            dram.read(buffer, target).wait()
        for seed, target in enumerate(targets):
            assert torch.equal(target.cpu(), pattern(NBYTES, seed))


def test_device_memory_returns_as_soon_as_a_transfer_is_waited_for():
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with HbmTier(256 * MIB) as tier, DramTier(64 * MIB, pin=True) as dram:
        away = dram.allocate(NBYTES)
        for _ in range(20):
            delay()
            block = tier.allocate(NBYTES)
            dram.read(away, tier.view(block)).wait()
            dram.write(away, tier.view(block)).wait()
            tier.free(block)
            assert torch.cuda.memory_allocated() == before
