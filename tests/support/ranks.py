"""Real gloo ranks for tests: each call runs a function in fresh processes that form one process group."""

from __future__ import annotations

import gc
import multiprocessing as mp
import multiprocessing.forkserver as forkserver
import os
import pickle
import socket
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import util
from typing import Any

OWN_MODULES = r"(zerocli|offload|tiers)(\..*)?$"
"""Modules whose warnings are errors in ranks, as in pytest's own process: see `filterwarnings` in pyproject.toml."""

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "pytest", "zerocli.engine.api", "zerocli.models", "zerocli.models.parallel", "zerocli.run.trainer"]
    + ["zerocli.run.own_loop", "zerocli.run.folders.resume", "zerocli.engine.states.ema", "tiers.nvme"]
    + ["torch._dynamo"]  # any torch.optim optimizer imports it
    + ["before_fork"]
)


def hold_port() -> socket.socket:
    """Return a socket that keeps its port for ranks of ours until it is closed.

    It does not listen, so one that allows it (SO_REUSEADDR, as `zerocli.ranks.store` does) can listen there. A port
    that was merely free a moment ago may be given to any other program's connection.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def start_server() -> None:
    """Start the process that ranks are forked from, which finds the modules of this folder by PYTHONPATH alone.

    It is forked from this process, which has imported nearly all of its modules, and those of the tests, already. So it
    must be started before the first test runs: later torch has threads, which a fork does not have. Where there is a
    GPU it is a new process: ranks could not use a driver that was open before the fork.
    """
    import torch

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *([before] if before else [])])
    spawn = util.spawnv_passfds
    if not torch.cuda.is_available():
        util.spawnv_passfds = _fork_server
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = spawn
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


def _fork_server(path: bytes, words: Sequence[str], kept: Sequence[int]) -> int:
    """Run the command that multiprocessing starts its server with in a fork; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for number in map(int, os.listdir("/dev/fd")):
            if number not in (2, *kept):  # not closed: Python's objects still know the numbers
                os.dup2(null, number)
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
        sys.stderr = open(2, "w", buffering=1, closefd=False)
        forkserver._forkserver._lock = threading.Lock()  # the other one is held
        exec(words[-1], {})
    finally:
        os._exit(0)


def _worker(rank: int, world: int, store: str, connection: Any, function: Callable[..., Any], packed: bytes) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.filterwarnings("error", module=OWN_MODULES)
    warnings.filterwarnings("default", ".*deterministic", UserWarning)
    warnings.filterwarnings("default", "mkldnn_matmul failed", UserWarning)
    os.environ.pop("RANK", None)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        result = function(*pickle.loads(packed))
        dist.barrier()
        connection.send_bytes(pickle.dumps(("ok", result)))
        dist.destroy_process_group()
    except BaseException:
        connection.send_bytes(pickle.dumps(("error", traceback.format_exc())))


def run_ranks(world: int, function: Callable[..., Any], *args: Any, seconds: float = 600) -> list[Any]:
    """Return `function(*args)` of each of `world` ranks; a rank's exception fails the test with its traceback."""
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ends, processes = [], []
        packed = pickle.dumps(args)  # plain pickle copies tensors; multiprocessing's own would share their memory
        for rank in range(world):
            here, there = _context.Pipe(duplex=False)
            process = _context.Process(target=_worker, args=(rank, world, store, there, function, packed), daemon=True)
            process.start()
            there.close()
            ends.append(here)
            processes.append(process)
        results: list[Any] = []
        try:
            for rank, end in enumerate(ends):
                if not end.poll(seconds):
                    raise TimeoutError(f"rank {rank} of {world} gave no answer in {seconds} s")
                try:
                    kind, value = pickle.loads(end.recv_bytes())
                except EOFError:
                    raise RuntimeError(f"rank {rank} of {world} died without a word") from None
                if kind == "error":
                    raise RuntimeError(f"rank {rank} of {world} failed:\n{value}")
                results.append(value)
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
        return results


def run_cases(
    world: int, function: Callable[..., Any], cases: Sequence[tuple[Any, ...]], seconds: float = 600
) -> list[list[Any]]:
    """Return `run_ranks(world, function, *case)` of each case; all run in one set of ranks, whose start costs most."""
    everyone = run_ranks(world, _each_case, function, cases, seconds=seconds)
    return [list(results) for results in zip(*everyone, strict=True)]


def _each_case(function: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    results = []
    for case in cases:
        results.append(function(*case))
        gc.collect()  # the engine of one case is gone before the next begins
    return results
