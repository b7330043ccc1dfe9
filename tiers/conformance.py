"""The rules of every tier as a test class: subclass it, define how to make your tier, and run pytest.

    class TestMyTier(TierConformance):
        def make_tier(self, tmp_path, capacity):
            return MyTier(capacity=capacity)

        def peek(self, block):                  # optional: the stored bytes, read around the tier
            return ...

A tier with `stores = False` is tested for accounting, lifetimes and sizes, and must leave a read's target untouched.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tiers.base import Block, Tier
from tiers.errors import TierError, TierFull

MIB = 1 << 20
SIZES = (0, 1, 3, 511, 512, 4095, 4096, 4097, 3 * 4096, 100_001, MIB + 1, 3 * MIB)
_NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ("cpu", pytest.param("cuda", marks=(pytest.mark.gpu, _NO_GPU)))


def pattern(nbytes: int, seed: int = 0, device: str = "cpu") -> Tensor:
    """Return `nbytes` bytes that differ by seed and by position."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.empty(-(-nbytes // 8), dtype=torch.int64).random_(generator=generator)  # eight bytes at a time
    return words.view(torch.uint8)[:nbytes].to(device)


class TierConformance:
    """Rules of a tier; `capacity_nbytes` is the capacity of the small tiers under test."""

    capacity_nbytes = 16 * MIB

    def make_tier(self, tmp_path: Path, capacity: int) -> Tier:
        """Return a new tier of `capacity` bytes that may keep files below `tmp_path`."""
        raise NotImplementedError

    def peek(self, block: Block) -> bytes | None:
        """Return the stored bytes, read without using the tier; None if that is impossible."""
        return None

    def poke(self, block: Block, data: bytes) -> bool:
        """Change the stored bytes without using the tier; return False if that is impossible."""
        return False

    def leftovers(self, tmp_path: Path) -> list[Path]:
        """Return the files that remain after `close`; there must be none."""
        return [path for path in tmp_path.rglob("*") if not path.is_dir()]

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        with self.make_tier(tmp_path, self.capacity_nbytes) as tier:
            yield tier
        assert not self.leftovers(tmp_path)

    def expect(self, tier: Tier, got: Tensor, stored: Tensor, before: Tensor | None = None) -> None:
        """Check a read: it gives the stored bytes, or for a tier that stores nothing the unchanged target (zeros)."""
        before = torch.zeros_like(stored) if before is None else before
        assert torch.equal(got.cpu(), (stored if tier.stores else before).cpu())

    def expect_read(self, tier: Tier, block: Block, stored: Tensor, offset: int = 0) -> None:
        """Read as many bytes at `offset` as are expected to be stored there, and check them."""
        target = torch.zeros_like(stored)
        tier.read(block, target, offset).synchronize()
        self.expect(tier, target, stored)

    # Bytes

    @pytest.mark.parametrize("device", DEVICES)
    def test_bytes_come_back_whatever_the_length(self, tier: Tier, device: str) -> None:
        for nbytes in SIZES:
            block = tier.allocate(nbytes)
            assert (block.tier, block.nbytes) == (tier, nbytes)
            source, target = pattern(nbytes, 1, device), pattern(nbytes, 2, device)
            before = target.clone()
            write = tier.write(block, source)
            write.wait()
            assert write.nbytes == nbytes
            read = tier.read(block, target)
            read.wait()
            assert read.nbytes == nbytes
            read.wait()
            read.synchronize()
            assert read.done and read.error is None
            self.expect(tier, target, source, before)

    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.bool, torch.int64))
    def test_any_dtype_is_bytes(self, tier: Tier, dtype: torch.dtype) -> None:
        source = pattern(24 * 8, 3).to(dtype).reshape(8, 24)
        block = tier.allocate(source.nbytes)
        tier.write(block, source).wait()
        self.expect_read(tier, block, source)
        with pytest.raises(ValueError, match="contiguous"):
            tier.write(block, source.t())

    def test_bytes_are_where_the_tier_says(self, tier: Tier) -> None:
        source = pattern(2 * MIB + 77, 4)
        block = tier.allocate(source.numel())
        tier.write(block, source).synchronize()
        around = self.peek(block)
        if around is not None:
            assert around == source.numpy().tobytes()
        other = pattern(source.numel(), 5)
        if self.poke(block, other.numpy().tobytes()):
            self.expect_read(tier, block, other)

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("nbytes", (1, 100, 4096, 70_000))
    def test_parts_are_written_and_read_alone(self, tier: Tier, nbytes: int, device: str) -> None:
        whole, part = pattern(100_000, 6, device), pattern(nbytes, 7, device)
        for offset in (0, 1, 4095, 4096, 8192, 12_345):
            block = tier.allocate(whole.numel())
            tier.write(block, whole).wait()
            tier.write(block, part, offset).wait()
            expected = whole.clone()
            expected[offset : offset + nbytes] = part
            parts = ((0, whole.numel()), (offset, offset + nbytes), (max(offset - 3, 0), offset + nbytes + 5))
            for start, end in parts:
                self.expect_read(tier, block, expected[start:end], start)

    def test_what_lies_outside_a_block_is_refused(self, tier: Tier) -> None:
        block = tier.allocate(10)
        for offset, nbytes in ((0, 11), (10, 1), (-1, 1), (5, 6)):
            with pytest.raises(ValueError, match="outside"):
                tier.write(block, pattern(nbytes), offset)
            with pytest.raises(ValueError, match="outside"):
                tier.read(block, pattern(nbytes), offset)

    def test_a_misaligned_buffer_is_as_good(self, tier: Tier) -> None:
        memory = pattern(300_000, 8)
        for shift in (0, 1, 17, 4095):
            source = memory[shift : shift + 200_000]
            landing = torch.zeros(200_064, dtype=torch.uint8)
            block = tier.allocate(source.numel())
            tier.write(block, source).wait()
            tier.read(block, landing[33 : 33 + source.numel()]).synchronize()
            self.expect(tier, landing[33:200_033], source)
            assert not landing[:33].any() and not landing[200_033:].any()
            tier.free(block)

    # Order and lifetimes of buffers

    @pytest.mark.parametrize("device", DEVICES)
    def test_overlapping_transfers_happen_in_order(self, tier: Tier, device: str) -> None:
        nbytes = MIB + 5
        block = tier.allocate(nbytes)
        targets, transfers, sources = [], [], []
        for seed in range(6):
            sources.append(pattern(nbytes, seed, device))
            targets.append(torch.zeros(nbytes, dtype=torch.uint8, device=device))
            transfers += [tier.write(block, sources[-1]), tier.read(block, targets[-1])]
        for transfer in reversed(transfers):
            transfer.synchronize()
        for source, target in zip(sources, targets, strict=True):
            self.expect(tier, target, source)

    def test_neighbouring_parts_in_flight_do_not_disturb_each_other(self, tier: Tier) -> None:
        parts = [pattern(1000 + 7 * index, index) for index in range(50)]
        whole = torch.cat(parts)
        block = tier.allocate(whole.numel())
        transfers, offset = [], 0
        for part in parts:
            transfers.append(tier.write(block, part, offset))
            offset += part.numel()
        for transfer in transfers:
            transfer.wait()
        self.expect_read(tier, block, whole)

    @pytest.mark.parametrize("device", DEVICES)
    def test_a_source_may_be_dropped_right_after_write(self, tier: Tier, device: str) -> None:
        block = tier.allocate(2 * MIB)
        for seed in range(5):
            transfer = tier.write(block, pattern(2 * MIB, seed, device))
            # New owners of the dropped memory must not affect the write.
            usurpers = [torch.full((2 * MIB,), 255, dtype=torch.uint8, device=device) for _ in range(3)]
            transfer.wait()
            target = torch.zeros(2 * MIB, dtype=torch.uint8, device=device)
            tier.read(block, target).wait()
            self.expect(tier, target, pattern(2 * MIB, seed))
            del usurpers

    @pytest.mark.parametrize("device", DEVICES)
    def test_a_source_may_be_overwritten_after_wait(self, tier: Tier, device: str) -> None:
        block = tier.allocate(2 * MIB)
        source = pattern(2 * MIB, 1, device)
        transfer = tier.write(block, source)
        # wait() orders an overwriting kernel on a stream, but not the host.
        transfer.wait() if device == "cuda" else transfer.synchronize()
        source.fill_(255)
        self.expect_read(tier, block, pattern(2 * MIB, 1, device))

    # Space

    def test_a_full_tier_says_so_and_has_room_again_after_free(self, tmp_path: Path) -> None:
        with self.make_tier(tmp_path, 4 * MIB) as tier:
            assert tier.capacity == 4 * MIB
            blocks = [tier.allocate(MIB) for _ in range(4)]
            assert tier.used == 4 * MIB
            with pytest.raises(TierFull) as full:
                tier.allocate(MIB + 1)
            assert (full.value.tier, full.value.available) == (tier.name, 0)
            assert full.value.needed >= MIB + 1
            assert tier.name in str(full.value) and "MiB needed" in str(full.value)
            tier.free(blocks.pop())
            block = tier.allocate(MIB)
            tier.write(block, pattern(MIB, 9)).wait()
            self.expect_read(tier, block, pattern(MIB, 9))
            for each in [*blocks, block]:
                tier.free(each)
            assert tier.used == 0
            tier.free(tier.allocate(4 * MIB))
            assert tier.peak == 4 * MIB

    def test_a_thousand_lives_take_no_more_space_than_the_first(self, tier: Tier) -> None:
        sizes = (100, 5000, 70_001, 300_000, 4096)
        footprint = None
        for turn in range(200):
            blocks = [tier.allocate(size) for size in sizes]
            used = tier.used
            tier.write(blocks[turn % 5], pattern(sizes[turn % 5])).wait()
            for block in blocks[turn % 5 :] + blocks[: turn % 5]:
                tier.free(block)
            assert tier.used == 0
            footprint = footprint or tier.footprint
            assert tier.footprint == footprint
            assert tier.peak == used

    def test_freed_in_flight_is_freed_in_the_end(self, tier: Tier) -> None:
        source, transfers = pattern(self.capacity_nbytes // 2), []
        for _ in range(8):
            block = tier.allocate(source.numel())
            transfers.append(tier.write(block, source))
            tier.free(block)
            with pytest.raises(TierError, match="freed"):
                tier.read(block, pattern(1))
        for transfer in transfers:
            transfer.synchronize()
        assert tier.used == 0

    def test_stale_and_foreign_blocks_are_refused(self, tier: Tier, tmp_path: Path) -> None:
        block = tier.allocate(100)
        tier.free(block)
        again = tier.allocate(100)
        assert again.generation != block.generation
        for use in (tier.free, tier.view, lambda b: tier.write(b, pattern(1)), lambda b: tier.read(b, pattern(1))):
            with pytest.raises(TierError, match="freed"):
                use(block)
        with self.make_tier(tmp_path, MIB) as other:
            with pytest.raises(TierError, match="belongs"):
                other.free(again)
        with pytest.raises(ValueError):
            tier.allocate(-1)

    def test_a_view_is_the_memory_itself(self, tier: Tier) -> None:
        block = tier.allocate(5001)
        if not tier.addressable:
            with pytest.raises(TierError):
                tier.view(block)
            return
        view = tier.view(block)
        assert (view.dtype, view.numel()) == (torch.uint8, 5001)
        view.copy_(pattern(5001, 3))
        target = torch.zeros(5001, dtype=torch.uint8, device=view.device)
        tier.read(block, target).synchronize()
        assert torch.equal(target, view)
        assert tier.view(tier.allocate(0)).numel() == 0

    # Threads and the end

    def test_readers_and_writers_of_several_threads_keep_apart(self, tier: Tier) -> None:
        def live(seed: int) -> None:
            for turn in range(8):
                source = pattern(50_000 + 4099 * seed + turn, 100 * seed + turn)
                block = tier.allocate(source.numel())
                tier.write(block, source)
                self.expect_read(tier, block, source)
                tier.free(block)

        with ThreadPoolExecutor(6) as threads:
            list(threads.map(live, range(6)))
        assert tier.used == 0

    def test_many_threads_may_read_one_block(self, tier: Tier) -> None:
        source = pattern(MIB, 1)
        block = tier.allocate(MIB)
        tier.write(block, source)

        with ThreadPoolExecutor(6) as threads:
            list(threads.map(lambda _: self.expect_read(tier, block, source), range(18)))

    def test_close_ends_what_is_in_flight(self, tmp_path: Path) -> None:
        tier = self.make_tier(tmp_path, self.capacity_nbytes)
        before = threading.active_count()
        blocks = [tier.allocate(2 * MIB) for _ in range(8)]
        transfers = [tier.write(block, pattern(2 * MIB, 1)) for block in blocks]
        transfers += [tier.read(block, torch.zeros(2 * MIB, dtype=torch.uint8)) for block in blocks]
        tier.close()
        tier.close()
        for transfer in transfers:
            assert transfer.done
            try:
                transfer.wait()
            except TierError as error:
                assert error is transfer.error
        assert not self.leftovers(tmp_path)
        assert threading.active_count() <= before
        for use in (lambda: tier.allocate(1), lambda: tier.write(blocks[0], pattern(1)), lambda: tier.free(blocks[0])):
            with pytest.raises(TierError, match="closed"):
                use()
        assert tier.used == 0
