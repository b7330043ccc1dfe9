"""Files around the page cache: every byte where it belongs, whatever the order, the sizes and the file system."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from zerocli import files
from zerocli.files import BlockFile, DirectFile, pread


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 3 * 8192, 50_001])
def test_a_block_file_holds_what_threads_gave_in_any_order(tmp_path, monkeypatch, nbytes):
    monkeypatch.setattr(files, "BLOCK_NBYTES", 8192)
    dice = random.Random(nbytes)
    data = dice.randbytes(nbytes)
    cuts = sorted({0, nbytes, *(dice.randrange(nbytes) for _ in range(20))})
    parts = list(zip(cuts, cuts[1:], strict=False))
    dice.shuffle(parts)
    file = BlockFile(tmp_path / "file", nbytes)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda part: file.write(memoryview(data[part[0] : part[1]]), part[0]), parts))
    file.finish()
    file.close()
    assert (tmp_path / "file").read_bytes() == data


def test_blocks_in_memory_are_those_that_are_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK_NBYTES", 8192)
    made = []
    pages = files.Pages
    monkeypatch.setattr(files, "Pages", lambda nbytes: made.append(nbytes) or pages(nbytes))
    file = BlockFile(tmp_path / "file", 100 * 8192)
    for index in range(100):
        file.write(memoryview(bytes(8192)), index * 8192)
    file.finish()
    file.close()
    assert made == [8192]


def test_a_file_that_was_not_given_all_its_bytes_is_never_finished(tmp_path):
    file = BlockFile(tmp_path / "file", 100)
    file.write(memoryview(bytes(99)), 0)
    with pytest.raises(AssertionError):
        file.finish()
    file.close()


@pytest.mark.parametrize("direct", [False, True])
def test_any_span_is_read_as_it_is(tmp_path, direct):
    data = random.Random(3).randbytes(40_000)
    (tmp_path / "file").write_bytes(data)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    other = os.open(tmp_path / "file", os.O_RDONLY | os.O_DIRECT) if direct else None
    for start, stop in ((0, 1), (1, 4097), (4096, 8192), (64, 39_999), (39_990, 40_000), (0, 40_000)):
        assert pread(fd, stop - start, start, other).numpy().tobytes() == data[start:stop]
    assert pread(fd, 100, 39_950, other).numpy().tobytes() == data[39_950:]  # it ends there
    for each in (fd, other):
        if each is not None:
            os.close(each)


def test_a_file_system_without_direct_access_is_written_and_read_all_the_same(tmp_path, monkeypatch):
    """Some refuse O_DIRECT when it is asked for, others at the first transfer."""
    real_write, real_read = os.pwrite, os.preadv
    (tmp_path / "file").touch()
    with DirectFile(tmp_path / "file") as file:
        direct = file._direct

        def refusing(fd, *rest):
            if fd == direct:
                raise OSError(22, "Invalid argument")
            return real_write(fd, *rest)

        monkeypatch.setattr(os, "pwrite", refusing)
        file.write(memoryview(b"x" * 4096), 4096)
    assert (tmp_path / "file").read_bytes() == bytes(4096) + b"x" * 4096
    fd, other = (os.open(tmp_path / "file", os.O_RDONLY) for _ in range(2))

    def refusing_read(which, *rest):
        if which == other:
            raise OSError(22, "Invalid argument")
        return real_read(which, *rest)

    monkeypatch.setattr(os, "preadv", refusing_read)
    assert pread(fd, 10, 4090, other).numpy().tobytes() == bytes(6) + b"xxxx"
    os.close(fd)
    os.close(other)
