"""Agents of torchrun: their ranks, their first checkpoint, their end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from zerocli.checkpoint.folder import Folder


def workers(agent: subprocess.Popen) -> list[int]:
    """The ranks that an agent has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"PPid:\t{agent.pid}\n" in (entry / "status").read_text():
                    if b"zerocli" in (entry / "cmdline").read_bytes():
                        found.append(int(entry.name))
            except OSError:
                continue
    return sorted(found)


def wait_for_a_checkpoint(folder: Path, agents: list[subprocess.Popen], seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not Folder(folder / "run/checkpoints").committed():
        assert time.monotonic() < deadline and all(agent.poll() is None for agent in agents)
        time.sleep(0.02)


def kill_all(agents: list[subprocess.Popen]) -> None:
    for agent in agents:
        for pid in [*workers(agent), agent.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        agent.wait()
