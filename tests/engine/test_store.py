"""What a run listens on: loopback where all ranks are on one machine; and nothing that arrives there can run code."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from runs import TINY
from saved_engines import engine_of

from zerocli.checkpoint import Saver, load, reader
from zerocli.checkpoint.manifest import Damaged, Unfinished
from zerocli.engine.comm import separate_gloo_group
from zerocli.errors import UserError
from zerocli.ranks import store
from zerocli.ranks.exchange import broadcast_json, collect_json, first_problem
from zerocli.ranks.worker import free_port, worker_environment

SOURCES = [
    path for name in ("zerocli", "offload", "tiers") for path in Path(store.__file__).parents[2].glob(f"{name}/**/*.py")
]
LISTENING = "0A"


def listeners(pid: int) -> set[str]:
    """Return the addresses, in the kernel's hexadecimal, on which a process listens."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(fd)))
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == LISTENING and row[9] in inodes}


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
"""127.0.0.1, ::1 and the former as an IPv6 address."""


@pytest.mark.long
def test_a_run_on_one_machine_listens_on_loopback_alone(tmp_path):
    """The launcher, and every rank while it trains and saves: the store, and the groups of training and of saving."""
    sets = [word for each in (*TINY, "train.steps=1000000", "train.log_every=1000") for word in ("--set", each)]
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", *store.INTERFACES)}
    command = [sys.executable, "-m", "zerocli", "train", "tiny", *sets, "--ranks", "2", "--run-dir", str(tmp_path)]
    command = [*on_a_reachable_host(), *command]
    environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 300
        while not (tmp_path / "checkpoints/step-00000002/manifest.json").exists():
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        found = {pid: listeners(pid) for pid in (run.pid, *children(run.pid))}
        run.send_signal(signal.SIGTERM)
        run.wait(60)
    finally:
        run.kill()
        run.wait()
    assert len(found) == 3 and sum(bool(each) for each in found.values()) == 2, found
    assert set().union(*found.values()) <= LOOPBACK


def on_a_reachable_host() -> list[str]:
    """Return what gives a command a host name that is an address others reach, where that can be had.

    gloo listens on the address of the host's name, which on many machines is a loopback address by itself.
    """
    address = reachable_address()
    prefix = ["unshare", "--user", "--map-root-user", "--uts", "sh", "-c", f'hostname {address} && exec "$@"', "sh"]
    with contextlib.suppress(OSError):
        if address and subprocess.run([*prefix, "true"], stderr=subprocess.DEVNULL).returncode == 0:
            return prefix
    return []


def reachable_address() -> str:
    """Return an address of this machine's that others reach; nothing where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("198.51.100.1", 9))  # sends nothing
        return probe.getsockname()[0]
    return ""


def test_the_store_listens_on_the_masters_address_and_no_other(monkeypatch, capfd):
    address, port = reachable_address(), free_port()
    if not address:
        pytest.skip("this machine has no network interface beside loopback")
    with store.listen(address, port, loopback=False) as made:
        assert made.getsockname() == (address, port)
        with pytest.raises(UserError, match=f"port {port} of {address} is taken"):
            store.listen(address, port, loopback=False)
    for name, value in {"MASTER_ADDR": address, "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(store.STORE_FD, raising=False)
    kept = store.open_store(0, 1)
    kept.set("key", "value")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10)
    assert capfd.readouterr().err == ""


def test_a_name_that_others_would_not_reach_is_not_listened_on(monkeypatch, capfd):
    """Debian gives a machine's own name as 127.0.1.1; a service's address is nobody's own. It is said, once."""
    assert store.listen("127.0.1.1", 0, loopback=False) is None
    assert store.listen("198.51.100.1", 0, loopback=False) is None
    assert store.listen("no-such-host.invalid", 0, loopback=False) is None
    monkeypatch.setattr(store, "listen", lambda *_, **__: None)
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    store.open_store(0, 1).set("key", "value")
    assert capfd.readouterr().err.count("the store listens on all interfaces: MASTER_ADDR localhost") == 1


def test_a_store_that_never_comes_up_is_not_waited_for_long(monkeypatch):
    """Rank 0 ended before it listened, and no launcher of ours is there to see it: SLURM's ranks."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="did not come up within 1 s: rank 0 has not started") as error:
        store.open_store(1, 2, seconds=1)
    assert error.value.exit_code == 1


def test_which_ranks_are_known_to_be_on_one_machine():
    assert store.on_one_machine({"MASTER_ADDR": "127.0.0.1"}) and store.on_one_machine({"MASTER_ADDR": "::1"})
    assert store.on_one_machine({"MASTER_ADDR": "gpu01", "TORCHELASTIC_RUN_ID": "a", "GROUP_WORLD_SIZE": "1"})
    assert not store.on_one_machine({"MASTER_ADDR": "gpu01", "TORCHELASTIC_RUN_ID": "a", "GROUP_WORLD_SIZE": "2"})
    assert not store.on_one_machine({"MASTER_ADDR": "gpu01", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"})
    slurm = {
        "SLURM_PROCID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_NODELIST": "gpu01",
        "SLURM_NNODES": "1",
    }
    assert worker_environment(slurm)["MASTER_ADDR"] == "127.0.0.1"
    assert worker_environment(slurm | {"SLURM_NNODES": "2"})["MASTER_ADDR"] == "gpu01"
    chosen = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "eth7"}
    store.stay_on_loopback(chosen)
    assert chosen["GLOO_SOCKET_IFNAME"] == "eth7" and chosen["NCCL_SOCKET_IFNAME"] in ("lo", "lo0")
    several = {"MASTER_ADDR": "gpu01"}
    store.stay_on_loopback(several)
    assert several == {"MASTER_ADDR": "gpu01"}


# -- no pickles --------------------------------------------------------------------------------------------------------

PICKLES = re.compile(r"\b\w+_object(_list)?\(|\bpickle\b|\btorch\.load\(|\bshelve\b|\bmarshal\b")
ALLOWED = {
    "zerocli/ranks/ending.py": "py_object(",  # of ctypes: a reference count
    "zerocli/data/tokens.py": "allow_pickle=False",
    # Over pipes to the processes that `zerocli.check` starts itself, as multiprocessing's own messages are.
    **dict.fromkeys(("zerocli/check/loop.py", "zerocli/check/loop_ranks.py", "zerocli/check/pool.py"), "pickle"),
    "zerocli/errors.py": "pickle would otherwise",  # a comment: multiprocessing's own pickles of errors
}
"""Lines of our source that name any of these, and why they may."""


def test_nothing_of_ours_pickles_or_unpickles():
    assert len(SOURCES) > 100
    for path in SOURCES:
        place = str(path.relative_to(Path(store.__file__).parents[2]))
        for number, line in enumerate(path.read_text().splitlines(), 1):
            allowed = ALLOWED.get(place)
            assert not PICKLES.search(line) or (allowed is not None and allowed in line), f"{place}:{number}: {line}"


def save_and_load_by_oneself(folder: str) -> tuple[list[str], list[str]]:
    """Save and load on all ranks; return the files that this rank opened for the load, and what it unpickled."""
    opened: list[str] = []
    unpickled: list[str] = []
    open_file = reader.open_file

    def look(path: Path, name: str) -> int:
        opened.append(name)
        return open_file(path, name)

    class Noted(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            unpickled.append(f"{module}.{name}")
            return super().find_class(module, name)

    _, engine = engine_of({"stage": 3})
    reader.open_file, dist.distributed_c10d._unpickler = look, Noted
    for asynchronous in (False, True):
        saver = Saver(engine, folder, asynchronous=asynchronous)
        saver.save(1)
        saver.close()
        assert saver.failure is None
    load(engine, saver.folder.of(1))
    engine.close()
    noted = list(unpickled)
    dist.all_gather_object([None] * dist.get_world_size(), torch.Size([1]))
    assert unpickled != noted, "what is unpickled is not seen"
    return sorted(set(opened)), noted


def test_a_rank_that_saves_and_loads_opens_what_it_needs_and_unpickles_nothing(tmp_path):
    """The ranks that saved: each reads its own file, and in the first rank's what all have (the model's buffer)."""
    for rank, (opened, unpickled) in enumerate(run_ranks(3, save_and_load_by_oneself, str(tmp_path))):
        assert opened == sorted({"rank-00000.bin", f"rank-{rank:05d}.bin"}) and unpickled == []


def connections() -> list[int]:
    """How many sockets more this rank has after each: a group for messages, another group, a message to all."""

    def open_sockets() -> list[str]:
        found = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/self/fd/{name}"))
        return [each for each in found if each.startswith("socket:")]

    counts = [len(open_sockets())]
    group = separate_gloo_group(dist.group.WORLD)
    counts.append(len(open_sockets()))
    everyone = list(range(dist.get_world_size()))
    dist.new_group(everyone, backend="gloo")
    counts.append(len(open_sockets()))
    first_problem(None, (Damaged,), group)
    counts.append(len(open_sockets()))
    return [after - before for before, after in itertools.pairwise(counts)]


def test_groups_for_messages_connect_the_ranks_that_send_to_each_other():
    """A ring: two connections, and the socket that listens, whatever the ranks; torch's groups connect all of them."""
    for own, torchs, used in run_ranks(6, connections):
        assert own == 1 and torchs >= 6 and used <= 2


def exchanged() -> tuple[list, str, str, object]:
    rank = dist.get_rank()
    values = collect_json({"rank": rank, "path": "\udcff/é" * rank, "nothing": None}, dist.group.WORLD)
    problem = Unfinished("half written") if rank == 1 else None
    first = first_problem(problem, (Damaged, Unfinished), dist.group.WORLD)
    told = broadcast_json({"from": rank, "text": "é" * 9 * rank}, dist.group.WORLD, 1)
    assert told == {"from": 1, "text": "é" * 9}
    return values, type(first).__name__, str(first), first_problem(None, (Damaged,), dist.group.WORLD)


def test_ranks_exchange_words():
    every = [{"rank": 0, "path": "", "nothing": None}, {"rank": 1, "path": "\udcff/é", "nothing": None}]
    assert run_ranks(2, exchanged) == [(told, "Unfinished", "half written", None) for told in (every, [])]
