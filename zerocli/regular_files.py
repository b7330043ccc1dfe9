"""Regular files of a run folder: never a link, a pipe or a device by their name, and read up to a size. No torch.

A run folder may come from somebody else. What lies there by the name of one of our files must not lead us to write
elsewhere, to wait for ever, or to fill the memory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerocli.console import quoted
from zerocli.errors import UserError

PathLike = str | os.PathLike[str]

MAX_CONFIG_NBYTES = 16 << 20
"""A longer config is none: the largest that we have seen have some hundred kilobytes."""
MAX_LINE_NBYTES = 1 << 20
"""A longer line is none of a run's metrics."""
MAX_PROFILE_NBYTES = 256 << 20
"""A longer profile.json was not written by zerocli: the timeline in it is cut long before."""


class NotRegular(UserError):
    """What is there by the name of a file of ours is a link, a pipe, a folder or a device."""

    def __init__(self, path: PathLike) -> None:
        super().__init__(
            f"{path} is {kind_of(path)}: zerocli reads and writes regular files only there, and follows no links",
            hint=f"ls -l {quoted(path)}; remove it, or choose another --run-dir",
        )


def kind_of(path: PathLike) -> str:
    """Return what a path is, itself and not what it leads to, in words."""
    try:
        mode = os.lstat(path).st_mode
    except OSError as error:
        return f"unreadable ({error.strerror})"
    kinds = [
        (stat.S_ISLNK, "a link"),
        (stat.S_ISFIFO, "a named pipe"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISREG, "a regular file"),
    ]
    return next((words for test, words in kinds if test(mode)), "a device")


def open_regular(path: PathLike, flags: int) -> int:
    """Return a descriptor of a regular file; raise NotRegular for anything else, at once and without touching it."""
    try:
        # O_NONBLOCK: opening a pipe for reading would wait for its writer. It has no effect on a regular file.
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        # A link; a folder; a pipe that nobody reads, or a socket.
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO) and os.path.lexists(path):
            raise NotRegular(path) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotRegular(path)
    return fd


def read_regular(path: PathLike, max_nbytes: int) -> bytes:
    """Return a regular file's bytes; raise UserError if there are more than `max_nbytes`."""
    fd = open_regular(path, os.O_RDONLY)
    with os.fdopen(fd, "rb") as file:
        data = file.read(max_nbytes + 1)
    if len(data) > max_nbytes:
        raise UserError(
            f"{path} has {os.path.getsize(path)} bytes; no file of that kind has more than {max_nbytes}",
            hint=f"ls -l {quoted(path)}",
        )
    return data


def lines_of(path: PathLike, max_nbytes: int = MAX_LINE_NBYTES) -> Iterator[bytes]:
    """Yield a regular file's lines with their ends; one that is too long is cut short, the rest of it passed over."""
    fd = open_regular(path, os.O_RDONLY)
    with os.fdopen(fd, "rb") as file:
        while line := file.readline(max_nbytes):
            yield line
            while line and not line.endswith(b"\n") and len(line) >= max_nbytes:
                line = file.readline(max_nbytes)


def own_folder(path: PathLike) -> Path:
    """Make a folder of a run folder, unless it is there; raise NotRegular where something else is by its name."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        raise NotRegular(path)
    return Path(path)


def remove(path: PathLike) -> None:
    """Remove a folder with all in it, or a file, or a link but not what it leads to; what cannot be removed stays."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)


def write_text(path: Path, text: str, sync: bool = True) -> None:
    """Have the file hold the text, or what it held before: killed or out of room, it is never cut short."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        remove(part)  # a dead process of our number left it, or a stranger
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        error.filename = str(path)
        raise


def sync_folder(path: PathLike) -> None:
    """Have the folder's names on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's pairs as a dictionary; a name that is there twice means two things, so none."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found
