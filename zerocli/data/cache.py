"""Files of arrays that are made once and read as memory maps: written atomically, checked before they are used.

The first rank of each node makes them, and the others wait.

A file is a sequence of sections, each an array, and a footer that names them with their offsets, lengths and checksums.
The footer comes last: a file that was cut short has none, and is made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from zerocli.console import progress, say
from zerocli.errors import FAILURE, UserError
from zerocli.ranks.startup import STARTUP

FOLDER = ".zerocli-cache"
PART = ".part-"
"""Begins the names of files that are being written; each is locked by its writer."""
MAGIC = b"zerocli1"
ALIGN = 64
READ_NBYTES = 16 * 2**20
_TAIL = 24
"""Bytes after the footer: its length, its checksum and MAGIC."""

Moved = Callable[[int], None]
"""Called with the bytes that were read since the last call."""
_ROUNDS = itertools.count()


class Broken(Exception):
    """A cache file that is not whole."""


class Writer:
    """Writes the sections of a cache file, in any order and piece by piece; none of them is held in memory."""

    def __init__(self, folder: Path, sections: Mapping[str, Any]) -> None:
        self._kinds = {name: np.dtype(kind).newbyteorder("<") for name, kind in sections.items()}
        # The first section is written where it stays, the others to temporary files that are appended at the end.
        sweep(folder)
        self._main = tempfile.NamedTemporaryFile(dir=folder, prefix=PART, delete=False)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._main, fcntl.LOCK_EX | fcntl.LOCK_NB)
        spools: list[IO[bytes]] = [tempfile.TemporaryFile(dir=folder) for _ in list(sections)[1:]]
        self._files: dict[str, Any] = dict(zip(sections, [self._main, *spools], strict=True))
        self._crcs = dict.fromkeys(sections, 0)
        self.numels = dict.fromkeys(sections, 0)

    def add(self, name: str, values: Any) -> None:
        """Append values to a section."""
        data = np.ascontiguousarray(values, self._kinds[name])
        view = memoryview(data.tobytes() if data.nbytes < READ_NBYTES else data.view(np.uint8).data)
        self._files[name].write(view)
        self._crcs[name] = zlib.crc32(view, self._crcs[name])
        self.numels[name] += len(data)

    def finish(self, target: Path, about: Mapping[str, Any]) -> None:
        """Have `target` hold all of it, on the disk; killed at any moment, it holds this or what it held before."""
        sections: dict[str, dict[str, Any]] = {}
        for name, file in self._files.items():
            start = 0
            if file is not self._main:
                self._main.write(b"\0" * (-self._main.tell() % ALIGN))
                start = self._main.tell()
                file.seek(0)
                shutil.copyfileobj(file, self._main, READ_NBYTES)
                STARTUP.move()
            kind = self._kinds[name]
            sections[name] = {"offset": start, "numel": self.numels[name], "dtype": kind.str, "crc": self._crcs[name]}
        footer = json.dumps({"sections": sections, "about": dict(about)}).encode()
        tail = len(footer).to_bytes(8, "little") + zlib.crc32(footer).to_bytes(8, "little") + MAGIC
        self._main.write(footer + tail)
        self._main.flush()
        os.fsync(self._main.fileno())
        os.chmod(self._main.name, 0o644)
        os.replace(self._main.name, target)
        self.close()

    def close(self) -> None:
        """Close all files and remove what was not finished."""
        for file in self._files.values():
            file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._main.name)


class Reader:
    """A whole cache file: its sections as memory maps, and what its writer said about them."""

    def __init__(self, path: Path, verify: bool = True) -> None:
        """Open the file; raise Broken if it is not whole. With `verify` every byte is compared with its checksum."""
        self.path = path
        nbytes = os.path.getsize(path)
        with open(path, "rb") as file:
            footer = _footer(file, nbytes)
            try:
                self.about: dict[str, Any] = footer["about"]
                sections = {
                    name: (int(s["offset"]), int(s["numel"]), np.dtype(s["dtype"]), int(s["crc"]))
                    for name, s in footer["sections"].items()
                }
            except (KeyError, TypeError, ValueError) as error:
                raise Broken(f"{path}: its footer cannot be read") from error
            self.sections: dict[str, np.ndarray] = {}
            for name, (offset, numel, kind, crc) in sections.items():
                if offset < 0 or numel < 0 or offset + numel * kind.itemsize > nbytes:
                    raise Broken(f"{path}: section {name} is cut short")
                if verify and _crc(file, offset, numel * kind.itemsize) != crc:
                    raise Broken(f"{path}: section {name} is damaged")
                mapped = np.memmap(path, kind, "r", offset, numel) if numel else np.zeros(0, kind)
                self.sections[name] = mapped

    def __getitem__(self, name: str) -> np.ndarray:
        return self.sections[name]


def _footer(file: IO[bytes], nbytes: int) -> dict[str, Any]:
    if nbytes < _TAIL:
        raise Broken("too short")
    file.seek(nbytes - _TAIL)
    tail = file.read(_TAIL)
    length = int.from_bytes(tail[:8], "little")
    if tail[16:] != MAGIC or length > nbytes - _TAIL:
        raise Broken("it has no footer")
    file.seek(nbytes - _TAIL - length)
    text = file.read(length)
    if zlib.crc32(text) != int.from_bytes(tail[8:16], "little"):
        raise Broken("its footer is damaged")
    footer: dict[str, Any] = json.loads(text)
    return footer


def _crc(file: IO[bytes], start: int, nbytes: int) -> int:
    file.seek(start)
    crc = 0
    while nbytes:
        data = file.read(min(nbytes, READ_NBYTES))
        if not data:
            return -1
        crc, nbytes = zlib.crc32(data, crc), nbytes - len(data)
        STARTUP.move()
    return crc


def sweep(folder: Path) -> None:
    """Remove what killed writers left: a file of a living one is locked."""
    for left in folder.glob(f"{PART}*"):
        with contextlib.suppress(OSError), open(left, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()


def fingerprint(*parts: Any) -> str:
    """Return a hash of JSON-able values, for a file's name."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]


def identity(files: Sequence[Path]) -> list[list[Any]]:
    """Return what tells these files from others, and from themselves once changed: path, size, time of change."""
    found = []
    for file in files:
        about = file.stat()
        found.append([str(file.absolute()), about.st_size, about.st_mtime_ns])
    return found


def folders(path: str, chosen: str = "") -> list[Path]:
    """Return the folders that the cache of data at `path` may be in, the preferred one first."""
    if chosen:
        return [Path(chosen)]
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zerocli" / "data"
    if not path:
        return [users]
    beside = Path(path).absolute()
    return [(beside if beside.is_dir() else beside.parent) / FOLDER, users]


def find(places: Sequence[Path], name: str, verify: bool) -> tuple[Reader | None, str]:
    """Return the first whole file of that name, or None and why a file that is there was not taken."""
    why = ""
    for folder in places:
        try:
            return Reader(folder / name, verify), ""
        except Broken as error:
            why = f"{folder / name}: {error}"
        except (OSError, ValueError):
            continue
    return None, why


def make(places: Sequence[Path], name: str, build: Callable[[Path, Path], None]) -> Reader:
    """Have `build(folder, target)` write the file into the first folder that can be written; return it.

    A folder that is read-only or full is passed over; UserError if none is left.
    """
    failures = []
    for folder in places:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            build(folder, folder / name)
            return Reader(folder / name, verify=False)
        except OSError as error:
            if error.filename is not None and not str(error.filename).startswith(str(folder)):
                raise  # it is not the cache that cannot be written or read
            failures.append(f"{folder}: {error.strerror or error}")
    raise UserError(
        f"the tokens cannot be written: {'; '.join(failures)}",
        hint="--set data.cache=DIR with a folder that can be written and has room",
        exit_code=FAILURE,
    )


class Node:
    """A rank's part in making cache files: the first rank of each node makes them, the others wait and map them."""

    def __init__(self, rank: int = 0, world: int = 1, leader: bool = True) -> None:
        self._world = world
        self._leader = leader
        self._shows = rank == 0

    def wait(self) -> None:
        """Return once every rank has called this; all ranks make the same calls in one order."""
        if self._world == 1:
            return
        import torch.distributed as dist

        store, key = dist.distributed_c10d._get_default_store(), f"zerocli/data/{next(_ROUNDS)}"
        # Polled: a get would end with the store's timeout, and tokenising may take hours.
        with STARTUP.waiting("tokenising the data"):
            arrived, pause = store.add(key, 1), 0.005
            while arrived < self._world:
                time.sleep(pause)
                pause = min(0.5, 1.5 * pause)
                arrived = store.add(key, 0)

    def cached(self, path: str, folder: str, name: str, build: Callable[[Path, Path], None]) -> Reader:
        """Return the cache file of data at `path`; `build(folder, target)` writes it where it is missing. Collective.

        The rank that may build it compares every byte with its checksum first.
        """
        places = folders(path, folder)
        reader = None
        if self._leader:
            reader, why = find(places, name, verify=True)
            if why and self._shows:
                say(f"{why}: it is made again")
            reader = reader or make(places, name, build)
        self.wait()
        if reader is None:
            reader, why = find(places, name, verify=False)
            # The first rank's folder is not this rank's: a home folder of its own, for example.
            reader = reader or make(places, name, build)
        return reader

    @contextlib.contextmanager
    def progress(self, what: str, nbytes: int) -> Iterator[Moved]:
        """Show the progress of reading `nbytes`: a bar on a terminal, a line now and then elsewhere."""
        if not self._shows:
            yield lambda moved: None
        else:
            with progress(what, nbytes, "B") as move:
                yield move


ALONE = Node()
"""One process that has nobody to wait for."""


def this_node() -> Node:
    """Return this process' part: of its process group, or alone."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return ALONE
    rank = dist.get_rank()
    return Node(rank, dist.get_world_size(), rank == 0 or os.environ.get("LOCAL_RANK") == "0")
