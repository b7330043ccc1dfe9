"""`SwapFile`: one private, unlinked file in one directory, its free space and its workers.

The file is unlinked as soon as every handle is open, so it disappears with the process, however that ends. If the file
system refuses that, the file is locked while its owner lives, and the next run removes it if it is not locked.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import stat
import uuid
import weakref
from pathlib import Path
from typing import Literal

from tiers.base import PAGE_NBYTES, round_up
from tiers.errors import TierError, TierFull, format_nbytes
from tiers.extents import Extents
from tiers.file_workers import FileWorker
from tiers.pages import Pages

PREFIX = ".zerocli-swap-"
TIER = "nvme"


def disk_error(error: OSError, path: Path, action: str, nbytes: int = 0) -> TierError:
    """Return the error to show for a failed disk operation on `nbytes` bytes."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return TierFull(
            tier=TIER,
            needed=max(nbytes, PAGE_NBYTES),
            available=free_nbytes(path),
            path=str(path),
            reason=os.strerror(error.errno),
            hint="free space there, or add a directory on another disk",
        )
    why = error.strerror or str(error)
    what = f"{action} {format_nbytes(nbytes)}" if nbytes else action
    hints = {
        errno.EROFS: "give a directory on a file system that can be written",
        errno.EACCES: "give a directory that this user may write to",
        errno.EIO: "look at the kernel log (dmesg): the disk reports errors",
    }
    return TierError(
        f"{TIER} could not {what} in {path}: {why} ({format_nbytes(free_nbytes(path))} free)",
        tier=TIER,
        path=str(path),
        hint=hints.get(error.errno or 0, "give another directory"),
    )


def free_nbytes(path: Path) -> int:
    """Return the free bytes for an unprivileged user on `path`'s file system (0 if unknown)."""
    try:
        info = os.statvfs(path)
    except OSError:
        return 0
    return info.f_bavail * info.f_frsize


class SwapFile:
    """A swap file in `directory`: extents of it are taken and given back, workers move bytes."""

    def __init__(self, directory: Path, direct: bool | Literal["auto"], grow_nbytes: int) -> None:
        self.directory = directory
        self.notes: list[str] = []
        self.readers: asyncio.Queue[FileWorker] = asyncio.Queue()
        self.writers: asyncio.Queue[FileWorker] = asyncio.Queue()
        self._workers: list[FileWorker] = []
        self.extents = Extents()
        """What the file takes on disk, and which of it is in use."""
        self._grow_nbytes = grow_nbytes
        _check_directory(directory)
        sweep(directory)
        self.path, self.fd = self._create()
        self._remove = weakref.finalize(self, _unlink, str(self.path))
        try:
            self.direct = self._choose_direct(direct)
        except BaseException:
            self._remove()
            os.close(self.fd)
            raise

    async def open_workers(self, worker_class: type[FileWorker], num_readers: int, num_writers: int) -> None:
        """Open every handle, then unlink the file."""
        for queue, count in ((self.readers, num_readers), (self.writers, num_writers)):
            for _ in range(count):
                worker = worker_class(f"{TIER}-worker", self.direct)
                self._workers.append(worker)
                await worker.open(str(self.path))
                queue.put_nowait(worker)
        if not self._remove_name():
            self.notes.append(f"{self.directory} does not let an open file be unlinked: {self.path.name} goes at exit")

    def take(self, nbytes: int, growth_limit: int) -> int:
        """Reserve `nbytes` (whole pages), growing the file if needed, and return their start."""
        start = self.extents.take(nbytes)
        if start is None:
            self.grow(max(nbytes, min(self._grow_nbytes, growth_limit)), at_least=nbytes)
            start = self.extents.take(nbytes)
        assert start is not None
        return start

    def grow(self, nbytes: int, at_least: int) -> None:
        """Reserve `nbytes` more on disk, or as much as fits, but at least `at_least`."""
        room = free_nbytes(self.directory) // PAGE_NBYTES * PAGE_NBYTES
        nbytes = round_up(min(nbytes, max(room, at_least)), PAGE_NBYTES)
        if room < nbytes:
            raise disk_error(OSError(errno.ENOSPC, "disk full"), self.directory, "reserve", nbytes)
        try:
            self._reserve(nbytes)
        except OSError as error:
            raise disk_error(error, self.directory, "reserve", nbytes) from error
        self.extents.grow(nbytes)

    async def close(self) -> None:
        """Close every handle; the file is gone after this."""
        for worker in self._workers:
            await worker.close()
        self._remove()
        os.close(self.fd)

    def _create(self) -> tuple[Path, int]:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            path = self.directory / f"{PREFIX}{os.getpid()}-{uuid.uuid4().hex}"
            try:
                fd = os.open(path, flags, 0o600)
            except OSError as error:
                raise disk_error(error, self.directory, "create a swap file") from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_nlink:
                    return path, fd
            except BlockingIOError:
                pass  # another process's sweep removed it between our two calls: retry
            except OSError:
                self.notes.append(f"{self.directory} has no file locks: a swap file left by a crash stays there")
                return path, fd
            os.close(fd)

    def _choose_direct(self, wanted: bool | Literal["auto"]) -> bool:
        """Return whether to use O_DIRECT: it is requested, and a test page can be written and read back."""
        if not wanted:
            return False
        refusal = self._probe_direct()
        if refusal is None:
            return True
        if refusal.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_error(refusal, self.directory, "write", PAGE_NBYTES)
        why = f"{self.directory} does not take O_DIRECT ({refusal.strerror or refusal})"
        if wanted is True:
            hint = "give another directory, or allow buffered I/O"
            raise TierError(why, tier=TIER, path=str(self.directory), hint=hint)
        self.notes.append(f"{why}: buffered I/O, slower, and it fills the page cache")
        return False

    def _probe_direct(self) -> OSError | None:
        page = Pages(PAGE_NBYTES)
        memory = page.memory
        try:
            fd = self._open_direct()
            try:
                page.bytes.fill_(0x5A)
                if os.pwritev(fd, [memory], 0) != PAGE_NBYTES:
                    return OSError(errno.EINVAL, "a page was not written whole")
                page.bytes.zero_()
                if os.preadv(fd, [memory], 0) != PAGE_NBYTES or not bool((page.bytes == 0x5A).all()):
                    return OSError(errno.EINVAL, "a page did not come back")
            finally:
                os.close(fd)
                os.ftruncate(self.fd, 0)
        except OSError as error:
            return error
        return None

    def _open_direct(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)

    def _reserve(self, nbytes: int) -> None:
        try:
            os.posix_fallocate(self.fd, self.extents.size, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            os.ftruncate(self.fd, self.extents.size + nbytes)

    def _remove_name(self) -> bool:
        try:
            os.unlink(self.path)
        except OSError:
            return False
        self._remove.detach()
        return True


def sweep(directory: Path) -> list[Path]:
    """Remove swap files whose owner is gone, and return them; locked files are left alone."""
    removed = []
    for path in sorted(directory.glob(f"{PREFIX}*")):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            info = os.fstat(fd)
            if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
                removed.append(path)
        except OSError:
            pass
        finally:
            os.close(fd)
    return removed


def _check_directory(directory: Path) -> None:
    if not directory.exists():
        raise TierError(
            f"{TIER} directory {directory} is missing", tier=TIER, path=str(directory), hint=f"mkdir -p {directory}"
        )
    if not directory.is_dir():
        raise TierError(f"{TIER} path {directory} is not a directory", tier=TIER, path=str(directory))


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass
