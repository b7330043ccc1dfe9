"""A rank's own side of a launch: who it is, whose life it shares, and where it leaves word of its failure.

torchrun's and SLURM's variables say who we are, and those of `launch`, which are torchrun's too; a rank that fails
writes its message into an error file, with the time, whose variable is torchrun's as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from zerocli.errors import FAILURE, USAGE, UserError
from zerocli.regular_files import write_text

PR_SET_PDEATHSIG = 1
FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""SLURM's numbers from here on are of steps that srun has not started: interactive ones, the batch script."""
STORE_FD = "ZEROCLI_STORE_FD"
"""Variable of rank 0: the listening socket that `launch` has left it for the ranks' store."""


def worker_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """Return the variables torch wants if torchrun, SLURM or `launch` made this process a rank; None if nobody did."""
    if "RANK" in environ:
        wanted = ["WORLD_SIZE"] if environ.get("WORLD_SIZE") == "1" else ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
        missing = [name for name in wanted if name not in environ]
        if missing:
            raise UserError(
                f"RANK is set, but not {' and '.join(missing)}", hint="torchrun, or unset RANK to run alone"
            )
        _check_numbers(environ)
        world = environ["WORLD_SIZE"]
        local_world = environ.get("LOCAL_WORLD_SIZE", world)
        found = {
            "LOCAL_RANK": environ.get("LOCAL_RANK", str(int(environ["RANK"]) % int(local_world))),
            "LOCAL_WORLD_SIZE": local_world,
            "MASTER_ADDR": environ.get("MASTER_ADDR", "127.0.0.1"),
            "MASTER_PORT": environ.get("MASTER_PORT") or str(free_port()),
        }
        return {"RANK": environ["RANK"], "WORLD_SIZE": world, **found}
    # A batch script and an interactive shell have SLURM's variables of a rank too: only srun's steps have such numbers.
    step = environ.get("SLURM_STEP_ID", "")
    started = step.isdecimal() and int(step) < FIRST_SPECIAL_STEP
    return _slurm_environment(environ) if started and {"SLURM_PROCID", "SLURM_NTASKS"} <= environ.keys() else None


def _check_numbers(environ: Mapping[str, str]) -> None:
    """Raise UserError for a rank, a number of ranks or a port that is none."""
    limits = {"RANK": (0, 2**31), "WORLD_SIZE": (1, 2**31), "LOCAL_RANK": (0, 2**31), "LOCAL_WORLD_SIZE": (1, 2**31)}
    for name, (low, high) in (limits | {"MASTER_PORT": (1, 1 << 16)}).items():
        text = environ.get(name) or str(low)
        if not text.isdecimal() or not low <= int(text) < high:
            wanted = f"a number from {low} to {high - 1}" if name == "MASTER_PORT" else f"a number from {low} on"
            raise UserError(f"{name}={text} is not {wanted}", hint=f"torchrun, or unset {name} to run alone")
    if int(environ["RANK"]) >= int(environ["WORLD_SIZE"]):
        raise UserError(
            f"RANK={environ['RANK']}, but WORLD_SIZE={environ['WORLD_SIZE']}: ranks count from 0",
            hint="torchrun, or unset RANK to run alone",
        )


def _slurm_environment(environ: Mapping[str, str]) -> dict[str, str]:
    nodes = next((environ[name] for name in ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
                  if name in environ), "127.0.0.1")  # fmt: skip
    tasks = expand_tasks(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or "")
    node = int(environ.get("SLURM_NODEID", "0"))
    job = int(environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or "0")
    alone = (environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES")) == "1"  # then loopback will do
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_NTASKS"],
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(tasks[node]) if node < len(tasks) else environ["SLURM_NTASKS"],
        "MASTER_ADDR": environ.get("MASTER_ADDR") or ("127.0.0.1" if alone else first_host(nodes)),
        # Below 30000: above it lie the ports that kernels lend to outgoing connections.
        "MASTER_PORT": environ.get("MASTER_PORT") or str(10000 + job % 20000),
    }


def job_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return the name of the elastic job that this process is a rank of; empty if of none that has one."""
    name = environ.get("TORCHELASTIC_RUN_ID", "none")
    return "" if name == "none" else name


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: `gpu[01-04,7],login` gives `gpu01`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes.strip())
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else "")


def expand_tasks(text: str) -> list[int]:
    """Return the tasks of each node from SLURM's short form: `2(x3),1` gives [2, 2, 2, 1]."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def die_with_parent(environ: Mapping[str, str] = os.environ) -> None:
    """Tie this rank's life to `launch`'s: once the parent is gone, however it went, this process is killed."""
    parent = int(environ.get("ZEROCLI_PARENT", "0"))
    if not parent:
        return

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(FAILURE)

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=follow, daemon=True).start()
    if os.getppid() != parent:  # it went before we asked
        os._exit(FAILURE)


def record_failure(text: str, code: int) -> bool:
    """Write this rank's failure where its launcher looks for it; say whether that is enough.

    Our launcher shows it. torchrun lists it in its summary; what is wrong with a command, which all ranks find, is
    shown by rank 0 besides.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    record = {"message": text, "timestamp": time.time(), "exit_code": code}
    with contextlib.suppress(OSError):
        write_text(Path(path), json.dumps(record), sync=False)
        return "ZEROCLI_PARENT" in os.environ or (code == USAGE and os.environ.get("RANK") != "0")
    return False


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


T = TypeVar("T")


def within(seconds: float, act: Callable[[], T]) -> T | None:
    """Return the result of `act`, None if it fails or takes longer; a slow `act` is abandoned in its thread."""
    result: list[T] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            result.append(act())

    thread = threading.Thread(target=run, name="zerocli-within", daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else None
