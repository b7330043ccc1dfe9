"""A step's seconds are charged to what held it up: with a disk that is slow, nearly all of them are waits for it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import torch
from deep import WIDTH, Deep
from toy_tiers import SMALL_DISK

import zerocli
from tiers.file_workers import FileWorker
from tiers.nvme import NvmeTier


class SlowWorker(FileWorker):
    """A disk on which every operation takes 100 ms."""

    async def _read(self, memory: memoryview) -> int | None:
        await asyncio.sleep(0.1)
        return await super()._read(memory)

    async def _write(self, memory: memoryview) -> int | None:
        await asyncio.sleep(0.1)
        return await super()._write(memory)


def descheduled() -> float:
    """Return the seconds that this thread has been ready to run while others had the cores."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def waits_of_a_slow_disk(folder, device: str, placement: str, update: str) -> tuple[float, float, dict[str, float]]:
    """Return the seconds of two steps, those of them in which other programs had the cores, and the waits by cause."""
    model = Deep(4).to(device)
    engine = zerocli.shard(
        *(model,),
        **{"stage": 3, "precision": "bf16", "update": update, "accumulate": 2, "offload": placement},
        **{
            "nvme_path": (str(folder),),
            "staging_nbytes": 1 << 20,
            "read_ahead_nbytes": 1 << 20,
            "tier_options": {"nvme": SMALL_DISK},
        },
    )

    def finish() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    try:
        for step in range(4):
            if step == 2:
                began, before = finish(), descheduled()
                engine.waits.take()
            for _ in range(2):
                engine.backward(model(torch.randn(4, WIDTH, device=device)))
            engine.step()
        seconds = finish() - began
        return seconds, descheduled() - before, engine.waits.take().seconds()
    finally:
        engine.close()


def check_waits(folder, device: str, placement: str, update: str) -> None:
    seconds, others, waits = waits_of_a_slow_disk(folder, device, placement, update)
    assert sum(waits.values()) <= 1.02 * seconds
    assert waits["transfers"] > 0.7 * (seconds - others), (seconds, others, waits)


CASES = [
    ("optimizer=nvme", "cpu"),
    ("optimizer=nvme", "stream"),
    ("params=nvme", "stream"),
    ("grads=nvme", "cpu"),
    ("activations=nvme", "cpu"),
]


@pytest.mark.parametrize(
    ("placement", "update"), [*(pytest.param(*each, marks=pytest.mark.long) for each in CASES[2:]), *CASES[:2]]
)
def test_waiting_for_a_slow_disk_is_not_called_compute(tmp_path, monkeypatch, placement, update):
    monkeypatch.setattr(NvmeTier, "worker_class", SlowWorker)
    check_waits(tmp_path, "cpu", placement, update)


@pytest.mark.gpu
@pytest.mark.parametrize(("placement", "update"), CASES)
def test_nor_is_it_beside_a_gpu(tmp_path, monkeypatch, placement, update):
    monkeypatch.setattr(NvmeTier, "worker_class", SlowWorker)
    check_waits(tmp_path, "cuda", placement, update)
