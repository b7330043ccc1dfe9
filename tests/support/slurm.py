"""A SLURM of two nodes on this machine's loopback, in a folder: the real programs, by their own configuration."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "squeue")
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SchedulerParameters=requeue_delay=1
NodeName=one NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[1]} CPUs=2 RealMemory=1000 State=UNKNOWN
NodeName=two NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[2]} CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Return why there can be no SLURM here; an empty text if there can."""
    lost = [name for name in PROGRAMS if shutil.which(name) is None]
    if lost:
        return f"SLURM is not installed (no {', '.join(lost)}): apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "SLURM's daemons are started as root"


class Slurm:
    """The daemons, from `open` to `close`; `environ` is what SLURM's commands need."""

    def __init__(self, folder: Path, ports: tuple[int, int, int]) -> None:
        self.folder = folder
        self.environ = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        text = CONF.format(host=socket.gethostname(), folder=folder, ports=ports)
        (folder / "slurm.conf").write_text(text)
        (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        (folder / "state").mkdir()
        key = folder / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)

    def open(self) -> None:
        folder = self.folder
        options = {"key-file": "key", "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log"}
        munge = [f"--{name}={folder / file}" for name, file in (options | {"seed-file": "munge.seed"}).items()]
        self.run("munged", "--force", *munge)
        self.run("slurmctld", "-c")
        for node in ("one", "two"):
            self.run("slurmd", "-N", node)
        self.wait(lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2")

    def close(self) -> None:
        for name in ("one", "two", "slurmctld", "munge"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((self.folder / f"{name}.pid").read_text()), signal.SIGTERM)

    def run(self, *words: str) -> str:
        done = subprocess.run(words, env=self.environ, cwd=self.folder, capture_output=True, text=True, timeout=600)
        return done.stdout

    def submit(self, script: str) -> int:
        """Submit a batch script; return the job's number."""
        path = self.folder / "script.slurm"
        path.write_text(script)
        return int(self.run("sbatch", "--parsable", str(path)))

    def finish(self, job: int) -> None:
        """Wait until a job has ended: failed, completed, timed out or cancelled, and not requeued."""
        self.wait(lambda: self.state(job) in ("", "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"))

    def state(self, job: int) -> str:
        shown = self.run("scontrol", "-o", "show", "job", str(job))
        return shown.partition("JobState=")[2].partition(" ")[0]

    def wait(self, happened, seconds: float = 600) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < deadline, (self.folder / "slurmctld.log").read_text()[-3000:]
            time.sleep(0.2)
