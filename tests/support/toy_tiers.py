"""Tiers for tests: a disk of small files, host memory that is late, and workers that fail."""

from __future__ import annotations

import random
import time

from tiers.dram import DramTier
from tiers.file_workers import FileWorker

SMALL_DISK = {"verify": True, "workers": 2, "grow_nbytes": 1 << 20, "staging_nbytes": 1 << 20, "unit_nbytes": 1 << 18}
NVME = {"tier_options": {"nvme": SMALL_DISK}}


class Tardy(DramTier):
    """Host memory whose transfers all take a random while, and finish in any order."""

    name = "tardy"
    dice = random.Random(0)

    def _read(self, handle, target, offset, after):
        return self._late(handle.bytes(offset, target.numel()), target, after)

    def _write(self, handle, source, offset, after):
        return self._late(source, handle.bytes(offset, source.numel()), after)

    def _late(self, source, target, after):
        from tiers.transfer import Transfer

        delay = self.dice.random() * 0.004

        def work():
            for earlier in after:
                earlier.wait_for_host()
            time.sleep(delay)
            target.copy_(source)

        if not hasattr(self, "_many"):
            from concurrent.futures import ThreadPoolExecutor

            self._many = ThreadPoolExecutor(16)
        return Transfer(source.numel(), future=self._many.submit(work), hold=(source, target), tier=self.name)


class FaultyWorker(FileWorker):
    """Fails operation `at` of a kind with the given error, or moves at most the given number of bytes at a time."""

    count = 0
    at = 3
    write_fault: OSError | int | None = None
    read_fault: OSError | int | None = None

    async def _write(self, memory):
        return await self._spoil(super()._write, memory, self.write_fault)

    async def _read(self, memory):
        return await self._spoil(super()._read, memory, self.read_fault)

    async def _spoil(self, operation, memory, fault):
        type(self).count += fault is not None
        if isinstance(fault, OSError) and type(self).count == self.at:
            raise fault
        if isinstance(fault, int):
            return min(fault, await operation(memory[: -(-fault // 4096) * 4096]))
        return await operation(memory)


def faulty(**faults) -> type[FileWorker]:
    return type("Faulty", (FaultyWorker,), {"count": 0, **faults})
