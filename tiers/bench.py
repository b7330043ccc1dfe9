"""Measure the tiers on this machine, each against the simplest loop that does the same, in alternation.

`python -m tiers.bench nvme DIR...` and `python -m tiers.bench dram` print the numbers (GB/s, GB is 1e9 bytes).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tiers.base import PAGE_NBYTES, round_up
from tiers.dram import DramTier
from tiers.nvme import UNIT_NBYTES, NvmeTier
from tiers.pages import Pages
from tiers.swapfile import disk_error
from tiers.transfer import Transfer

MIN_ROUNDS = 3
NUM_RAW_THREADS = 8

Job = Callable[[], object]
Move = Callable[[int, list[memoryview], int], int]
"""pwritev or preadv."""


def bench_nvme(paths: Sequence[str | os.PathLike[str]], nbytes: int = 1 << 30, seconds: float = 20.0) -> dict[str, Any]:
    """Measure writing, reading, and both at once (half each), by the tier and by raw threads: total GB/s and ratios."""
    pages = Pages(nbytes)
    pages.bytes.random_(0, 256)
    with (
        NvmeTier(paths=list(paths)) as tier,
        _RawLoop([Path(path) for path in paths], pages, tier.direct) as raw,
    ):
        block = tier.allocate(pages.nbytes)
        half = round_up(pages.nbytes // 2, PAGE_NBYTES)
        first, second = pages.bytes[:half], pages.bytes[half:]
        jobs: dict[str, Job] = {
            "raw_write": lambda: raw.move(os.pwritev, os.pwritev),
            "write": lambda: _finish(tier.write(block, pages.bytes)),
            "raw_read": lambda: raw.move(os.preadv, os.preadv),
            "read": lambda: _finish(tier.read(block, pages.bytes)),
            "raw_both": lambda: raw.move(os.pwritev, os.preadv),
            "both": lambda: _finish(tier.write(block, first), tier.read(block, second, half)),
        }
        rates = _alternate(jobs, pages.nbytes, seconds)
        result: dict[str, Any] = {"paths": [str(path) for path in paths], "nbytes": pages.nbytes, "direct": tier.direct}
    pages.release()
    return result | rates | _ratios(rates, ("write", "read", "both"))


def bench_dram_hbm(nbytes: int = 1 << 30, seconds: float = 10.0) -> dict[str, Any]:
    """Measure dram ↔ hbm by the tier and by plain pinned copies, each direction and both; without a GPU, dram."""
    return _bench_cuda(nbytes, seconds) if torch.cuda.is_available() else _bench_host(nbytes, seconds)


def _bench_cuda(nbytes: int, seconds: float) -> dict[str, Any]:
    device = torch.device("cuda", torch.cuda.current_device())
    above, below = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    pinned_in, pinned_out = (torch.ones(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    up, down = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def raw(*copies: tuple[torch.cuda.Stream, Tensor, Tensor]) -> None:
        for stream, target, source in copies:
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        up.synchronize()
        down.synchronize()

    with DramTier(2 * nbytes + (1 << 20)) as tier:
        first, second = tier.allocate(nbytes), tier.allocate(nbytes)
        torch.cuda.synchronize()
        jobs: dict[str, Job] = {
            "raw_up": lambda: raw((up, above, pinned_in)),
            "up": lambda: _finish(tier.read(first, above)),
            "raw_down": lambda: raw((down, pinned_out, below)),
            "down": lambda: _finish(tier.write(second, below)),
            "raw_both": lambda: raw((up, above, pinned_in), (down, pinned_out, below)),
            "both": lambda: _finish(tier.read(first, above), tier.write(second, below)),
        }
        rates = _alternate(jobs, nbytes, seconds)
        for name in ("raw_both", "both"):
            rates[name] *= 2
        found = {"device": torch.cuda.get_device_name(device), "nbytes": nbytes, "pinned": tier.pinned}
    return found | rates | _ratios(rates, ("up", "down", "both"))


def _bench_host(nbytes: int, seconds: float) -> dict[str, Any]:
    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    with DramTier(nbytes + (1 << 20)) as tier:
        block = tier.allocate(nbytes)
        jobs: dict[str, Job] = {
            "raw_write": lambda: target.copy_(source),
            "write": lambda: _finish(tier.write(block, source)),
            "read": lambda: _finish(tier.read(block, target)),
        }
        rates = _alternate(jobs, nbytes, seconds)
    rates["raw_read"] = rates["raw_write"]
    return {"device": "cpu", "nbytes": nbytes, "pinned": False} | rates | _ratios(rates, ("write", "read"))


def _finish(*transfers: Transfer) -> None:
    for transfer in transfers:
        transfer.synchronize()


def _alternate(jobs: dict[str, Job], nbytes: int, seconds: float) -> dict[str, float]:
    """Run the jobs in alternation, after one round that is not measured, and return each one's median GB/s.

    The first write to a region of a disk, and to pages of memory, is slow.
    """
    for job in jobs.values():
        job()
    times: dict[str, list[float]] = {name: [] for name in jobs}
    deadline = time.perf_counter() + seconds
    rounds = 0
    while rounds < MIN_ROUNDS or time.perf_counter() < deadline:
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            times[name].append(time.perf_counter() - start)
        rounds += 1
    return {name: nbytes / median(took) / 1e9 for name, took in times.items()}


def _ratios(rates: dict[str, float], names: Sequence[str]) -> dict[str, float]:
    return {f"{name}_ratio": rates[name] / rates[f"raw_{name}"] for name in names}


class _RawLoop:
    """Threads that each move every n-th unit with pwritev/preadv, without ordering: the raw speed of the disk."""

    def __init__(self, directories: Sequence[Path], pages: Pages, direct: bool) -> None:
        self._pages = pages
        self._threads = ThreadPoolExecutor(NUM_RAW_THREADS)
        self._files = []
        for directory in directories:
            fd, name = tempfile.mkstemp(prefix=".zerocli-bench-", dir=directory)
            os.close(fd)
            self._files.append(os.open(name, os.O_RDWR | (os.O_DIRECT if direct else 0)))
            os.unlink(name)
            try:
                os.posix_fallocate(self._files[-1], 0, pages.nbytes)
            except OSError as error:
                raise disk_error(error, directory, "reserve", pages.nbytes) from error

    def move(self, even: Move, odd: Move) -> None:
        """Move all units, the ones of every other thread by `odd`."""
        memory = self._pages.memory

        def work(thread: int) -> None:
            call = odd if thread % 2 else even
            for start in range(thread * UNIT_NBYTES, len(memory), NUM_RAW_THREADS * UNIT_NBYTES):
                fd = self._files[start // UNIT_NBYTES % len(self._files)]
                part = memory[start : start + UNIT_NBYTES]
                if call(fd, [part], start) != len(part):
                    raise OSError("the raw loop moved less than it was asked to")

        list(self._threads.map(work, range(NUM_RAW_THREADS)))

    def __enter__(self) -> _RawLoop:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        for fd in self._files:
            os.close(fd)


if __name__ == "__main__":
    if sys.argv[1:2] == ["nvme"]:
        print(json.dumps(bench_nvme(sys.argv[2:] or ["."])))
    else:
        print(json.dumps(bench_dram_hbm()))
