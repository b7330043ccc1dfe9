"""The rendezvous store: which address it listens on, and which interface the ranks' own connections use.

Neither torch's store nor gloo's connections are authenticated: anyone who can reach them can read and write. So on one
machine everything listens on loopback, and on several the store listens on the configured master address.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch.distributed as dist

from zerocli.console import say
from zerocli.errors import FAILURE, UserError
from zerocli.ranks.attempts import answers, join_attempt, never
from zerocli.ranks.worker import STORE_FD, free_port

CONNECT_SECONDS = 300.0
"""How long a rank waits for the store to come up by default."""
ANSWER_SECONDS = 1800.0
"""Timeout of a store operation; torch waits this long for ranks that start late."""
RETRY_SECONDS = 0.1
LAZY = "TORCH_GLOO_LAZY_INIT"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def on_one_machine(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether all ranks are known to be on this machine."""
    of_torchrun = "TORCHELASTIC_RUN_ID" in environ and environ.get("GROUP_WORLD_SIZE") == "1"
    return "ZEROCLI_PARENT" in environ or of_torchrun or _is_loopback(environ.get("MASTER_ADDR", ""))


def stay_on_loopback(environ: MutableMapping[str, str] = os.environ) -> None:
    """Make gloo and NCCL use loopback if all ranks are on this machine; the user's own settings are kept."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if names and on_one_machine(environ):
        for variable in INTERFACES:
            environ.setdefault(variable, names[0])


@contextlib.contextmanager
def connecting_when_needed(environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Let gloo groups that are made in the body connect two ranks when they first send to each other.

    By default each rank of a group connects to every other one, and reads from the store what each has written for all
    of them. The user's own setting is kept.
    """
    before = environ.get(LAZY)
    environ.setdefault(LAZY, "1")
    try:
        yield
    finally:
        if before is None:
            del environ[LAZY]


def open_store(rank: int, world: int, seconds: float = CONNECT_SECONDS, told: Callable[[], str] = never) -> dist.Store:
    """Return the store of this run, hosted by rank 0 or torchrun, once all ranks have come to it.

    Wait at most `seconds` for it to come up, and as long for the ranks. `told` is as in `join_attempt`.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = (_serve if rank == 0 and not agent else _connect)(host, port, world, datetime.timedelta(seconds=seconds))
    store.set_timeout(datetime.timedelta(seconds=ANSWER_SECONDS))
    return join_attempt(store, rank, world, seconds, lasts=agent, told=told)


def read_all(store: Any, keys: list[str]) -> list[bytes]:
    """Return the values of keys, once all are there; in one message if the store can do that."""
    together = bool(keys) and store.has_extended_api()
    found: list[bytes] = store.multi_get(keys) if together else [store.get(key) for key in keys]
    return found


def read_text(store: Any, key: str) -> str:
    """Return the text of a key; an empty one if it is not there."""
    return str(store.get(key).decode()) if store.check([key]) else ""


def cloned(store: Any) -> Any:
    """Return a new connection to a store, or the store itself if it cannot be cloned: a blocked call on one must not
    block the other.
    """
    with contextlib.suppress(Exception):
        return store.clone()
    return store


def _connect(host: str, port: int, world: int, patience: datetime.timedelta) -> dist.TCPStore:
    # torch tries once or twice, each for the full timeout, with long warnings, so we poll ourselves.
    deadline = time.monotonic() + patience.total_seconds()
    while not answers(host, port, CONNECT_SECONDS / 10):
        if time.monotonic() > deadline:
            raise UserError(
                f"the rendezvous store ({host}, port {port}) did not come up within "
                f"{patience.total_seconds():.0f} s: rank 0 has not started, has ended, or cannot be reached",
                hint="the log of rank 0, and whether this machine reaches MASTER_ADDR and MASTER_PORT",
                exit_code=FAILURE,
            )
        time.sleep(RETRY_SECONDS)
    return dist.TCPStore(host, port, world, is_master=False, timeout=patience, wait_for_workers=False)


def _serve(host: str, port: int, world: int, patience: datetime.timedelta) -> dist.TCPStore:
    listener = _inherited() or listen(host, port, loopback=on_one_machine())
    if listener is None and not _resolves(host):
        raise UserError(
            f"MASTER_ADDR {host}: no such host (rank 0 cannot resolve the name)",
            hint="MASTER_ADDR with a name or an address of rank 0's machine: hostname -I lists those of this one",
            exit_code=FAILURE,
        )
    given: dict[str, Any] = {"master_listen_fd": listener.detach()} if listener is not None else {}
    if not given:
        why = f"MASTER_ADDR {host} is no address of this machine that others reach"
        say(f"note: the store listens on all interfaces: {why}")
    try:
        return dist.TCPStore(host, port, world, is_master=True, timeout=patience, wait_for_workers=False, **given)
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise _taken(f"port {port}") from error


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except (socket.gaierror, UnicodeError):
        return False


def _inherited() -> socket.socket | None:
    """Return the listening socket inherited from the launcher, or None; it can be taken only once."""
    fd = os.environ.pop(STORE_FD, "")
    if not fd:
        return None
    os.set_inheritable(int(fd), False)
    return socket.socket(fileno=int(fd))


def listen(host: str, port: int, loopback: bool) -> socket.socket | None:
    """Return a socket that listens on the first address of `host` that belongs to this machine, None if none does.

    `loopback` says whether a loopback address is acceptable: Debian's /etc/hosts maps a machine's own name to
    127.0.1.1. Raises UserError if the port is taken.
    """
    with contextlib.suppress(socket.gaierror):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            if not loopback and _is_loopback(str(address[0])):
                continue
            made = socket.socket(family, kind, protocol)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                made.bind(address)
                made.listen(socket.SOMAXCONN)
                return made
            except OSError as error:
                made.close()
                if error.errno == errno.EADDRINUSE:
                    raise _taken(f"port {port} of {address[0]}") from error
    return None


def _taken(port: str) -> UserError:
    return UserError(
        f"{port} is taken by another program: the store of this run needs it",
        hint=f"another MASTER_PORT, such as {free_port()}; under torchrun --master-port {free_port()}",
        exit_code=FAILURE,
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
