"""A tier that fails in the middle of training gives one clear error, and nothing of it stays behind."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from deep import WIDTH, Deep
from leaks import nothing_left_open
from toy_tiers import SMALL_DISK, faulty

import zerocli
from tiers.errors import TierError
from tiers.nvme import NvmeTier


def train(folder, steps: int = 4, **settings) -> None:
    model = Deep(3)
    options = {"nvme": SMALL_DISK} | settings.pop("tier_options", {})
    engine = zerocli.shard(
        model, stage=3, precision="bf16", offload="nvme", nvme_path=(str(folder),), tier_options=options, **settings
    )
    try:
        for _ in range(steps):
            engine.backward(model(torch.randn(4, WIDTH)))
            engine.step()
    finally:
        engine.tiers.close()


@pytest.mark.parametrize("update", ["cpu", "stream"])
@pytest.mark.parametrize(
    ("faults", "fact"),
    [
        ({"write_fault": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "at": 60}, "No space left"),
        ({"read_fault": OSError(errno.EIO, os.strerror(errno.EIO)), "at": 40}, "Input/output error"),
    ],
    ids=["disk full", "read error"],
)
def test_a_disk_that_fails_in_the_middle_of_a_step(tmp_path, monkeypatch, update, faults, fact):
    monkeypatch.setattr(NvmeTier, "worker_class", faulty(**faults))
    with pytest.raises(TierError, match=fact) as caught:
        train(tmp_path, steps=50, update=update)
    assert str(tmp_path) in str(caught.value) and caught.value.tier == "nvme"
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fails_while_the_engine_is_built_leaves_no_handle_and_no_thread(tmp_path, monkeypatch):
    """There is no engine to close then."""
    monkeypatch.setattr(NvmeTier, "worker_class", faulty(write_fault=OSError(errno.ENOSPC, "No space left"), at=1))
    with nothing_left_open(), pytest.raises(TierError, match="No space left"):
        train(tmp_path)
    assert not list(tmp_path.iterdir())


def test_short_writes_and_reads_change_nothing(tmp_path, monkeypatch):
    train(tmp_path)
    monkeypatch.setattr(NvmeTier, "worker_class", faulty(write_fault=4096))
    train(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(TierError, match="nowhere"):
        train(tmp_path / "nowhere")


def test_pinning_refused_by_the_limit_is_said(monkeypatch):
    """Where pinning must succeed and cannot, the tier says so, with the limit; nothing hangs."""
    with pytest.raises(TierError, match="cannot be pinned|was refused"):
        zerocli.shard(Deep(2), stage=3, offload="cpu", device="cpu", tier_options={"dram": {"pin": True}})
