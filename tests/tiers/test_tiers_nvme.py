"""The swap tier: its files leave no trace, its space is bounded, and each fault of a disk gives one clear error."""

from __future__ import annotations

import concurrent.futures.thread
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from leaks import nothing_left_open
from toy_tiers import faulty

from tiers import swapfile
from tiers.conformance import MIB, pattern
from tiers.errors import TierError, TierFull
from tiers.file_workers import FileWorker
from tiers.nvme import NvmeTier
from tiers.pages import Pages
from tiers.swapfile import PREFIX, SwapFile, sweep

UNIT = 64 << 10
ROOT = Path(__file__).resolve().parents[2]


def small(
    tmp_path: Path, worker: type[FileWorker] = FileWorker, capacity: int | None = 32 * MIB, **options
) -> NvmeTier:
    kind = type("SmallTier", (NvmeTier,), {"worker_class": worker})
    return kind(capacity, **{"paths": tmp_path, "workers": 2, "unit_nbytes": UNIT, "grow_nbytes": MIB, **options})


def round_trip(tier: NvmeTier, nbytes: int, seed: int = 0) -> bool:
    block, source, target = tier.allocate(nbytes), pattern(nbytes, seed), torch.zeros(nbytes, dtype=torch.uint8)
    tier.write(block, source).wait()
    tier.read(block, target).wait()
    tier.free(block)
    return torch.equal(source, target)


# Files

CHILD = """
import sys, torch
from tiers.nvme import NvmeTier
from tiers.swapfile import SwapFile
if sys.argv[2] == "named":
    SwapFile._remove_name = lambda self: False
tier = NvmeTier(paths=sys.argv[1])
tier.write(tier.allocate(1 << 20), torch.ones(1 << 20, dtype=torch.uint8)).wait()
print("ready", flush=True)
if sys.argv[3] == "stay":
    sys.stdin.read()
else:
    tier.write(tier.allocate(1 << 26), torch.ones(1 << 26, dtype=torch.uint8))  # and off, with this in flight
"""


def child(tmp_path: Path, name: str, end: str) -> subprocess.Popen:
    command = [sys.executable, "-c", CHILD, str(tmp_path), name, end]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.long
def test_a_killed_process_leaves_no_file(tmp_path):
    """A living one has none: test_swap_is_private_and_nameless."""
    with child(tmp_path, "nameless", "stay") as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_file_that_kept_its_name_is_swept_once_its_owner_is_dead(tmp_path):
    with child(tmp_path, "named", "stay") as process:
        assert process.stdout.readline() == "ready\n"
        (left,) = tmp_path.iterdir()
        assert left.name.startswith(f"{PREFIX}{process.pid}-") and left.stat().st_mode & 0o777 == 0o600
        assert sweep(tmp_path) == [] and left.exists()
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert left.exists()
    small(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("name", ("nameless", "named"))
def test_a_process_that_forgets_to_close_ends_quietly_and_leaves_nothing(tmp_path, name):
    with child(tmp_path, name, "leave") as process:
        assert process.wait() == 0
        assert process.stderr.read() == ""
    assert list(tmp_path.iterdir()) == []


def test_sweeping_touches_only_our_own_dead_swap(tmp_path):
    others = [tmp_path / "precious", tmp_path / ".zerocli-swa"]
    for path in others:
        path.write_bytes(b"x")
    (tmp_path / f"{PREFIX}folder").mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(others[0])
    dead = tmp_path / f"{PREFIX}1-dead"
    dead.write_bytes(b"x")
    assert sweep(tmp_path) == [dead]
    assert all(path.exists() for path in others) and (tmp_path / f"{PREFIX}link").is_symlink()


def test_swap_is_private_and_nameless(tmp_path):
    umask = os.umask(0)
    try:
        with small(tmp_path) as tier:
            assert os.fstat(tier._files[0].fd).st_mode & 0o777 == 0o600
            assert list(tmp_path.iterdir()) == []
    finally:
        os.umask(umask)


def test_handles_threads_and_disk_stay_constant(tmp_path):
    with nothing_left_open():
        for _ in range(5):
            small(tmp_path).close()
    with small(tmp_path) as tier:
        round_trip(tier, 300_001)
        size = tier.footprint
        with nothing_left_open():
            assert all(round_trip(tier, 300_001, seed) for seed in range(60))
        assert tier.footprint == size
        assert sum(pages.nbytes for pages in tier._staging.made) <= 64 * MIB


def test_close_waits_for_threads_that_end_late(tmp_path, monkeypatch):
    def late(*arguments) -> None:
        run(*arguments)
        time.sleep(0.05)

    run = concurrent.futures.thread._worker
    monkeypatch.setattr(concurrent.futures.thread, "_worker", late)
    with nothing_left_open(), small(tmp_path) as tier:
        assert round_trip(tier, 300_001)


# Striping and space


def test_units_are_dealt_to_the_directories_in_turn(tmp_path):
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.mkdir()
    with small(tmp_path, paths=paths) as tier:
        block = tier.allocate(7 * UNIT + 5)
        assert [unit.file.directory for unit in block._handle.units] == [paths[i % 3] for i in range(8)]
        assert block._handle.units[-1].nbytes == 5
        assert tier.used == 7 * UNIT + 4096


def test_aligned_memory_goes_to_disk_without_staging(tmp_path):
    with small(tmp_path) as tier:
        if not tier.direct:
            pytest.skip("this file system has no O_DIRECT")
        pages = Pages(MIB)
        block = tier.allocate(MIB - 5)
        tier.write(block, pages.bytes[: MIB - 5]).wait()
        tier.read(block, pages.bytes[: MIB - 5]).wait()
        assert not tier._staging.made and [pages.nbytes for pages in tier._tails.made] == [4096]
        assert round_trip(tier, MIB - 5)


def test_a_disk_without_room_is_full_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("tiers.swapfile.free_nbytes", lambda path: 2 * MIB)
    monkeypatch.setattr("tiers.nvme.free_nbytes", lambda path: 2 * MIB)
    with small(tmp_path, capacity=None) as tier:
        assert tier.capacity == 2 * MIB
        with pytest.raises(TierFull) as full:
            tier.allocate(3 * MIB)
        assert (full.value.needed, full.value.available) == (3 * MIB, 2 * MIB)
        assert tier.footprint == 0
    with small(tmp_path, capacity=64 * MIB) as tier:
        with pytest.raises(TierFull, match="3 MiB needed, 2 MiB free in") as full:
            tier.allocate(3 * MIB)
        assert full.value.path == str(tmp_path) and full.value.hint
        assert (tier.used, tier.footprint) == (0, 0)


def test_a_disk_that_fills_up_while_growing_gives_the_space_back(tmp_path, monkeypatch):
    def refuse(fd, start, nbytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    with small(tmp_path) as tier:
        kept = tier.allocate(MIB)
        monkeypatch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(TierFull) as full:
            tier.allocate(4 * MIB)
        assert full.value.path == str(tmp_path)
        assert tier.used == MIB
        tier.free(kept)
        assert round_trip(tier, MIB)


def test_a_full_directory_leaves_the_rest_to_the_others(tmp_path, monkeypatch):
    paths = [tmp_path / "small", tmp_path / "large"]
    for path in paths:
        path.mkdir()
    monkeypatch.setattr("tiers.swapfile.free_nbytes", lambda path: 0 if path.name == "small" else 1 << 30)
    with small(tmp_path, paths=paths) as tier:
        assert round_trip(tier, MIB)
        assert {unit.file.directory.name for unit in tier.allocate(MIB)._handle.units} == {"large"}


# Directories


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(TierError, match="is missing") as error:
        small(tmp_path / "nowhere")
    assert error.value.path == str(tmp_path / "nowhere") and "mkdir" in error.value.hint


def test_a_file_is_not_a_directory(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TierError, match="not a directory"):
        small(tmp_path / "file")


@pytest.mark.parametrize("code", (errno.EROFS, errno.EACCES, errno.ENOSPC))
def test_a_directory_that_cannot_be_written_is_named(tmp_path, monkeypatch, code):
    real = os.open

    def refuse(path, flags, *rest, **more):
        if flags & os.O_CREAT and PREFIX in str(path):
            raise OSError(code, os.strerror(code))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(swapfile.os, "open", refuse)
    with nothing_left_open(), pytest.raises(TierError, match=os.strerror(code)) as error:
        small(tmp_path)
    assert error.value.path == str(tmp_path) and error.value.hint and str(tmp_path) in str(error.value)


def test_a_bad_second_directory_undoes_the_first(tmp_path):
    with nothing_left_open(), pytest.raises(TierError, match="missing"):
        small(tmp_path, paths=[tmp_path, tmp_path / "nowhere"])
    assert list(tmp_path.iterdir()) == []


def test_without_direct_io_it_goes_on_buffered_and_says_so(tmp_path, monkeypatch):
    def refuse(self):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(SwapFile, "_open_direct", refuse)
    with small(tmp_path) as tier:
        assert not tier.direct
        assert "does not take O_DIRECT" in tier.notes[0] and "buffered" in tier.describe()
        assert round_trip(tier, 300_001)
    with pytest.raises(TierError, match="O_DIRECT") as error:
        small(tmp_path, direct=True)
    assert error.value.path == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


# Faults in the middle


def test_a_disk_full_in_the_middle_is_reported_and_spoils_nothing_else(tmp_path):
    worker = faulty(write_fault=OSError(errno.ENOSPC, "No space left on device"), at=9)
    with small(tmp_path, worker) as tier:
        safe, block = tier.allocate(4 * UNIT), tier.allocate(16 * UNIT)
        source, target = pattern(16 * UNIT), torch.zeros(16 * UNIT, dtype=torch.uint8)
        tier.write(safe, source[: 4 * UNIT]).wait()
        transfer = tier.write(block, source)
        with pytest.raises(TierFull) as full:
            transfer.wait()
        assert transfer.done and transfer.error is full.value
        assert (full.value.tier, full.value.path, full.value.needed) == ("nvme", str(tmp_path), UNIT)
        with pytest.raises(TierFull):
            transfer.synchronize()
        with pytest.raises(TierError, match="last write failed"):
            tier.read(block, target).wait()
        tier.read(safe, target[: 4 * UNIT]).wait()
        assert torch.equal(target[: 4 * UNIT], source[: 4 * UNIT])
        tier.write(block, source).wait()
        tier.read(block, target).wait()
        assert torch.equal(target, source)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("direct", ("auto", False))
@pytest.mark.parametrize("step", (4096, 5000, 12_288))
def test_short_writes_and_reads_are_carried_on(tmp_path, step, direct):
    with small(tmp_path, faulty(write_fault=step, read_fault=step), direct=direct, verify=True) as tier:
        assert round_trip(tier, 3 * UNIT + 77)


@pytest.mark.parametrize("kind", ("write", "read"))
def test_no_progress_is_an_error_and_not_a_loop(tmp_path, kind):
    with small(tmp_path, faulty(**{f"{kind}_fault": 0})) as tier:
        with pytest.raises(TierError, match=rf"could not {kind} 64 KiB in .*only 0 of 65536 bytes"):
            round_trip(tier, 3 * UNIT)


def test_a_read_error_is_reported_once_and_clearly(tmp_path):
    worker = faulty(read_fault=OSError(errno.EIO, "Input/output error"))
    with small(tmp_path, worker) as tier:
        block, source, target = tier.allocate(8 * UNIT), pattern(8 * UNIT), torch.zeros(8 * UNIT, dtype=torch.uint8)
        tier.write(block, source).wait()
        with pytest.raises(TierError, match="could not read 64 KiB in .*Input/output error") as error:
            tier.read(block, target).wait()
        assert "dmesg" in error.value.hint
        tier.read(block, target).wait()
        assert torch.equal(target, source)


@pytest.mark.parametrize("nbytes", (UNIT * 3, 5000, 1))
def test_a_changed_byte_on_disk_is_noticed(tmp_path, nbytes):
    with small(tmp_path, verify=True) as tier:
        block, source = tier.allocate(nbytes), pattern(nbytes)
        tier.write(block, source).wait()
        unit = block._handle.units[-1]
        with open(f"/proc/self/fd/{unit.file.fd}", "r+b") as file:
            os.pwrite(file.fileno(), bytes([source[-1].item() ^ 1]), unit.start + unit.nbytes - 1)
            os.fsync(file.fileno())
        target = torch.zeros(nbytes, dtype=torch.uint8)
        with pytest.raises(TierError, match="checksum") as error:
            tier.read(block, target).wait()
        assert error.value.path == str(tmp_path)
        with pytest.raises(TierError, match="checksum"):
            tier.read(block, target[-1:], nbytes - 1).wait()


def test_bad_options_are_refused(tmp_path):
    for options in ({"workers": 0}, {"unit_nbytes": 1000}, {"paths": []}, {"capacity": -1}):
        with pytest.raises(ValueError):
            small(tmp_path, **options)
