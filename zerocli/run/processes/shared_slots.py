"""Slots of a host, one per rank, in memory that the ranks of one host share.

A rank writes its heartbeat there as often as it likes, without a message. The memory has no name in the file system:
the rank that makes it tells the others of its host, through the ranks' store, where they can open it, and it is gone
with the last of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import tempfile
import weakref
from pathlib import Path
from typing import Any

SLOT_NBYTES = 2048
NAME = "zerocli-slots"


class SharedSlots:
    """Slots of text; each has one writer, and any rank of the host reads them all."""

    def __init__(self, fd: int, where: str = "") -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd)  # not earlier: another thread may be writing
        self.where = where
        """What `open` needs."""

    @classmethod
    def make(cls) -> SharedSlots:
        """Return new slots."""
        name = f"{NAME}-{secrets.token_hex(8)}"
        if not hasattr(os, "memfd_create"):  # not Linux: no other rank opens it
            with tempfile.TemporaryFile() as file:
                return cls(os.dup(file.fileno()))
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        return cls(fd, f"{os.getpid()} {fd} {name}")

    @classmethod
    def open(cls, where: str) -> SharedSlots | None:
        """Return the slots that another rank of this host made; None if it cannot be reached."""
        with contextlib.suppress(OSError, ValueError):
            pid, number, name = where.split()
            path = f"/proc/{int(pid)}/fd/{int(number)}"
            if NAME in name and name in os.readlink(path):  # else another process has got this number since
                return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), where)
        return None

    def write(self, slot: int, text: str) -> None:
        """Write a text into a slot, at most SLOT_NBYTES of it."""
        os.pwrite(self._fd, text.encode()[:SLOT_NBYTES].ljust(SLOT_NBYTES), slot * SLOT_NBYTES)

    def read(self) -> list[str]:
        """Return the text of every slot; one that is being written may be mixed up."""
        data = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        cuts = range(0, len(data), SLOT_NBYTES)
        return [data[at : at + SLOT_NBYTES].decode(errors="replace").strip("\0 ") for at in cuts]

    def claim(self) -> bool:
        """Return whether this is the first call on these slots, by any rank of the host."""
        try:
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)  # which can be added once
        except PermissionError:
            return False
        except (OSError, AttributeError):  # not Linux: nobody shares it
            pass
        return True


Process = tuple[int, int]
"""A process by its number and when it started: numbers are used again."""


def process_of(name: str) -> Process | None:
    """Return a process that lives, by its number or `self`; None where others cannot see whether it is alive."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        number, _, rest = Path(f"/proc/{name}/stat").read_text().partition(" ")
        fields = rest.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else (int(number), int(fields[19]))
    return None


def host_name() -> str:
    """Return what all processes have in common that share memory and a network.

    Containers on one machine may have networks of their own, of which one can fail alone.
    """
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = "/".join(str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("pid", "net"))
        return f"{boot}/{spaces}/{os.getuid()}"
    return f"{os.uname().nodename}/{os.getuid()}"


def join(store: Any, host: str) -> tuple[str, SharedSlots, int]:
    """Return this host's name in the store, its slots, and this rank's slot; three messages to the store.

    A rank that cannot share memory with the others of its host is a host of its own.
    """
    made = SharedSlots.make()
    where = store.compare_set(f"shared/{host}", "", made.where or " ").decode()
    if where == made.where:
        return host, made, _slot(store, host)
    found = SharedSlots.open(where)
    if found is None:
        host = f"{host}/{secrets.token_hex(8)}"
        return host, made, _slot(store, host)
    return host, found, _slot(store, host)


def _slot(store: Any, host: str) -> int:
    return int(store.add(f"slots/{host}", 1)) - 1
