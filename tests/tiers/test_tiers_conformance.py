"""Law 7: every tier, null and third-party ones too, passes one conformance suite."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tiers.base import Block, Tier
from tiers.conformance import MIB, TierConformance
from tiers.dram import DramTier
from tiers.hbm import HbmTier
from tiers.null import NullTier
from tiers.nvme import NvmeTier
from tiers.transfer import Transfer


class TestHbm(TierConformance):
    device = "cpu"

    def make_tier(self, tmp_path, capacity):
        return HbmTier(capacity, device=self.device)

    def peek(self, block: Block) -> bytes:
        return block._handle.cpu().numpy().tobytes()

    def poke(self, block: Block, data: bytes) -> bool:
        block._handle.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return True


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestHbmOnGpu(TestHbm):
    device = "cuda"


class TestDram(TierConformance):
    def make_tier(self, tmp_path, capacity):
        return DramTier(capacity, arena_nbytes=MIB)

    def peek(self, block: Block) -> bytes:
        place = block._handle
        return place.arena.pages.memory[place.start : place.start + block.nbytes].tobytes()

    def poke(self, block: Block, data: bytes) -> bool:
        place = block._handle
        place.arena.pages.memory[place.start : place.start + block.nbytes] = data
        return True


class TestNvme(TierConformance):
    options: dict = {}
    num_directories = 1

    def make_tier(self, tmp_path, capacity):
        paths = [tmp_path / f"disk{index}" for index in range(self.num_directories)]
        for path in paths:
            path.mkdir(exist_ok=True)
        options = {"workers": 2, "unit_nbytes": 256 << 10, "grow_nbytes": MIB, "verify": True} | self.options
        return NvmeTier(capacity, paths=paths, **options)

    def peek(self, block: Block) -> bytes:
        return b"".join(_pread(unit.file.fd, unit.nbytes, unit.start) for unit in block._handle.units)


def _pread(fd: int, nbytes: int, start: int) -> bytes:
    with open(f"/proc/self/fd/{fd}", "rb") as file:
        return os.pread(file.fileno(), nbytes, start)


@pytest.mark.long
@pytest.mark.long
class TestNvmeTwoDirectories(TestNvme):
    num_directories = 2


class TestNvmeUnverified(TestNvme):
    num_directories = 2
    options = {"verify": False}

    def poke(self, block: Block, data: bytes) -> bool:
        done = 0
        for unit in block._handle.units:
            with open(f"/proc/self/fd/{unit.file.fd}", "r+b") as file:
                os.pwrite(file.fileno(), data[done : done + unit.nbytes], unit.start)
                os.fsync(file.fileno())
            done += unit.nbytes
        return True


class TestNvmeBuffered(TestNvme):
    options = {"direct": False}


@pytest.mark.long
@pytest.mark.long
class TestNvmeBufferedUnverified(TestNvmeUnverified):
    options = {"direct": False, "verify": False}


class TestNull(TierConformance):
    def make_tier(self, tmp_path, capacity):
        return NullTier(capacity)


class ToyTier(Tier):
    """What somebody else might write: bytearrays, moved by one slow thread."""

    name = "toy"

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__(capacity)
        self._thread = ThreadPoolExecutor(1)

    def _allocate(self, nbytes: int) -> bytearray:
        return bytearray(nbytes)

    def _free(self, handle: bytearray) -> None:
        handle.clear()

    def _write(self, handle: bytearray, source: Tensor, offset: int, after: Sequence[Transfer]) -> Transfer:
        def store() -> None:
            handle[offset : offset + source.numel()] = source.cpu().numpy().tobytes()

        return Transfer(source.numel(), future=self._thread.submit(store), hold=(source,))

    def _read(self, handle: bytearray, target: Tensor, offset: int, after: Sequence[Transfer]) -> Transfer:
        def load() -> None:
            target.copy_(torch.frombuffer(handle[offset : offset + target.numel()], dtype=torch.uint8))

        return Transfer(target.numel(), future=self._thread.submit(load), hold=(target,))

    def _close(self) -> None:
        self._thread.shutdown()


class TestToy(TierConformance):
    def make_tier(self, tmp_path: Path, capacity: int) -> Tier:
        return ToyTier(capacity)

    def peek(self, block: Block) -> bytes:
        return bytes(block._handle)
