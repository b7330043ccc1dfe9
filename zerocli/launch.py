"""Start the ranks of a run on this machine, watch them, and tell whose failure ended it.

Parent side: `launch` starts one process a rank and never leaves one behind. Rank 0's stdout and stderr reach the
terminal; everything a rank says on stderr is in RUN/logs/rank<k>.log too. A rank that fails writes its message into
an error file instead of the terminal, with the time: the earliest one is the cause and is shown, the others are
consequences and stay in the logs. The file and its variable are torchrun's, so torchrun names the right rank as well.

Worker side: `worker_environment` reads who we are from torchrun's or SLURM's variables; `die_with_parent` ties a rank's
life to the parent's; `record_failure` writes the error file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from zerocli import machine
from zerocli.errors import UserError
from zerocli.lost import standing

POLL_SECONDS = 0.2
TAIL_LINES = 60
PORT_ATTEMPTS = 3
EXIT_OK, EXIT_FAILURE, EXIT_USAGE, EXIT_DOES_NOT_FIT, EXIT_PREEMPTED, EXIT_INTERRUPTED = 0, 1, 2, 3, 75, 130
PR_SET_PDEATHSIG = 1
JOB_FILE = "job"
"""In the run folder: the name of the elastic job that wrote its checkpoints."""
SAVING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""A run that has checkpoints saves one when it gets one of these."""


@dataclass(frozen=True)
class RunOptions:
    """What a run is asked to do beside its config."""

    run_dir: str
    """Folder of metrics, config, checkpoints and logs; the same on all ranks."""
    resume: bool = False
    """Go on from the newest checkpoint in `run_dir`."""
    check: int = 0
    """Train this many steps unsharded too and report the largest difference in loss; 0 is no check."""
    dry_run: bool = False
    """Print the config and what each rank would hold; train nothing, write nothing."""
    json: bool = False
    """Rank 0 prints one JSON document on stdout."""
    source: str = "tiny"
    """CONFIG as it was given, for the command to try next."""
    probe: Callable[[str], None] = lambda name: None
    """Called at each gather, reduce, update and stage of a save; tests end processes here."""


# --- worker side


def worker_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """Return the variables torch wants if torchrun, SLURM or `launch` made this process a rank; None if nobody did."""
    if "RANK" in environ:
        wanted = ["WORLD_SIZE"] if environ.get("WORLD_SIZE") == "1" else ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
        missing = [name for name in wanted if name not in environ]
        if missing:
            raise UserError(
                f"RANK is set, but not {' and '.join(missing)}", hint="torchrun, or unset RANK to run alone"
            )
        world = environ["WORLD_SIZE"]
        local_world = environ.get("LOCAL_WORLD_SIZE", world)
        found = {
            "LOCAL_RANK": environ.get("LOCAL_RANK", str(int(environ["RANK"]) % int(local_world))),
            "LOCAL_WORLD_SIZE": local_world,
            "MASTER_ADDR": environ.get("MASTER_ADDR", "127.0.0.1"),
            "MASTER_PORT": environ.get("MASTER_PORT") or str(free_port()),
        }
        return {"RANK": environ["RANK"], "WORLD_SIZE": world, **found}
    if "SLURM_PROCID" in environ and "SLURM_NTASKS" in environ:
        return _slurm_environment(environ)
    return None


def _slurm_environment(environ: Mapping[str, str]) -> dict[str, str]:
    nodes = next((environ[name] for name in ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
                  if name in environ), "127.0.0.1")  # fmt: skip
    tasks = expand_tasks(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or "")
    node = int(environ.get("SLURM_NODEID", "0"))
    job = int(environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or "0")
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_NTASKS"],
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(tasks[node]) if node < len(tasks) else environ["SLURM_NTASKS"],
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_host(nodes),
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
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_exit_without, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it went before we asked
        os._exit(EXIT_FAILURE)


def _exit_without(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(EXIT_FAILURE)


def record_failure(text: str, code: int) -> bool:
    """Write this rank's failure where its launcher looks for it; say whether that launcher will show it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    record = {"message": text, "timestamp": time.time(), "exit_code": code}
    with contextlib.suppress(OSError):
        Path(f"{path}.part").write_text(json.dumps(record))
        os.replace(f"{path}.part", path)
        return "ZEROCLI_PARENT" in os.environ
    return False


# --- parent side


def launch(
    config: Any,
    options: RunOptions,
    arguments: Sequence[str] = ("train",),
    *,
    fresh: bool = False,
    worker: Sequence[str] | None = None,
) -> int:
    """Run one process a rank on this machine until all have ended; return the exit code of the run.

    `arguments` are zerocli's own (the command first); `fresh` wants a run folder that nobody else has; `worker` is the
    command of a rank, for tests.
    """
    num_ranks, reason = choose_ranks(config.parallel.ranks or 0, config.parallel.tp or 1, len(machine.gpus()))
    run_dir = create_run_dir(options.run_dir, fresh)
    say(f"ranks {num_ranks} ({reason})")
    say(f"the same by hand: {torchrun_line(num_ranks, arguments)}")
    say(f"run folder: {run_dir}")
    command = list(worker or [sys.executable, "-m", "zerocli", *arguments])
    for _ in range(PORT_ATTEMPTS):
        job = Job(command, num_ranks, run_dir, saves=saves(config))
        code = job.run()
        if not job.port_was_taken():
            break
    job.tell()
    return code


def saves(config: Any) -> bool:
    """Say whether a run is saved at all; then it also saves when it is told to stop, and needs time for it."""
    checkpoint = getattr(config, "checkpoint", None)
    return checkpoint is not None and (checkpoint.every > 0 or checkpoint.time_limit > 0)


def choose_ranks(asked: int, tp: int, num_gpus: int) -> tuple[int, str]:
    """Return (number of ranks, the reason); refuse more ranks than GPUs unless ZEROCLI_SHARE_GPU=1."""
    if asked and num_gpus and asked > num_gpus:
        if os.environ.get("ZEROCLI_SHARE_GPU") != "1":
            raise UserError(
                f"{asked} ranks, but {num_gpus} GPU{'s' if num_gpus > 1 else ''} on this machine",
                hint=f"--ranks {num_gpus}, or several machines with torchrun\n"
                "ZEROCLI_SHARE_GPU=1 lets ranks share a GPU over gloo (slow, for tests)\n"
                "CUDA_VISIBLE_DEVICES= trains on the CPU",
            )
        return asked, f"as asked; they share {num_gpus} GPU{'s' if num_gpus > 1 else ''} over gloo"
    if asked:
        return asked, "as asked"
    if num_gpus % tp:
        raise UserError(
            f"tp {tp} does not divide the {num_gpus} GPUs of this machine", hint=f"--ranks {num_gpus // tp * tp or tp}"
        )
    if num_gpus:
        return num_gpus, "one process a GPU"
    return tp * math.ceil(2 / tp), "no GPU: two processes so that partitioning is real" if tp <= 2 else "no GPU: --tp"


def torchrun_line(num_ranks: int, arguments: Sequence[str]) -> str:
    """Return the torchrun command that starts the same ranks, ready for pasting into a shell."""
    return shlex.join(["torchrun", "--standalone", "--nproc-per-node", str(num_ranks), "-m", "zerocli", *arguments])


def create_run_dir(path: str, fresh: bool = False) -> Path:
    """Create the run folder with its logs and return it; `fresh` picks a name that no other run has taken."""
    run_dir = Path(path).absolute()
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        for number in range(2, 1000):
            try:
                run_dir.mkdir(exist_ok=not fresh)
                break
            except FileExistsError:
                if not fresh:
                    raise
                run_dir = Path(f"{Path(path).absolute()}-{number}")
        (run_dir / "logs").mkdir(exist_ok=True)
        probe = run_dir / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"cannot write the run folder {run_dir}: {error.strerror}", hint="--run-dir with a folder you may write to"
        ) from error
    return run_dir


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Rank:
    """One worker process, its log, and how it ended."""

    def __init__(self, index: int, command: list[str], environ: dict[str, str], logs: Path):
        self.index = index
        self.code: int | None = None
        self.peak_nbytes = 0
        self.kept: dict[str, Any] | None = None
        self.log = logs / f"rank{index}.log"
        self.log_start = self.log.stat().st_size if self.log.exists() else 0
        self.error_file = logs / f"rank{index}.error"
        self.error_file.unlink(missing_ok=True)
        own = {"RANK": str(index), "LOCAL_RANK": str(index), "TORCHELASTIC_ERROR_FILE": str(self.error_file)}
        log = self.log.open("ab", buffering=0)
        self.tee = Tee(log) if index == 0 else None
        self.process = subprocess.Popen(
            command,
            env=environ | own,
            stdin=subprocess.DEVNULL,
            stdout=log if index else None,
            stderr=self.tee.writer if self.tee else log,
            start_new_session=True,  # Ctrl-C reaches the parent alone, and the rank's own children can be ended with it
        )
        if self.tee:
            self.tee.start()
        else:
            log.close()

    def poll(self) -> bool:
        """Say whether the process has ended; note its code and the most host memory it ever held."""
        if self.code is None:
            pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
            if pid:
                self.code = self.process.returncode = os.waitstatus_to_exitcode(status)
                self.peak_nbytes = usage.ru_maxrss * (1024 if sys.platform == "linux" else 1)
        return self.code is not None

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def record(self) -> dict[str, Any] | None:
        """Return the failure that this rank wrote down itself, if it did."""
        if self.kept:
            return self.kept
        try:
            return json.loads(self.error_file.read_text())
        except (OSError, ValueError):
            return None

    def keep_record(self) -> None:
        """Move the error file's message into the log, where it is looked for later."""
        if record := self.record():
            self.kept = record
            with self.log.open("a") as log:
                log.write(f"{record['message']}\n")
            self.error_file.unlink(missing_ok=True)

    def tail(self) -> str:
        """Return the last lines that this rank wrote to its log in this run."""
        with self.log.open("rb") as log:
            log.seek(self.log_start)
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])


class Tee(threading.Thread):
    """Copies what rank 0 writes on stderr to ours and to its log; to the rank it looks like our own terminal."""

    def __init__(self, log: IO[bytes]):
        super().__init__(daemon=True)
        self.log = log
        if os.isatty(2):
            self.reader, self.writer = pty.openpty()
            tty.setraw(self.writer)  # bytes pass as they are; our terminal does the rest
            with contextlib.suppress(termios.error):
                termios.tcsetwinsize(self.writer, termios.tcgetwinsize(2))
        else:
            self.reader, self.writer = os.pipe()

    def start(self) -> None:
        os.close(self.writer)  # the rank has it now, and its end must be the last one
        super().start()

    def run(self) -> None:
        with contextlib.suppress(OSError):  # a pty ends with EIO, a pipe with no bytes
            while chunk := os.read(self.reader, 65536):
                self.log.write(chunk)
                with contextlib.suppress(OSError):
                    os.write(2, chunk)
        self.log.close()
        os.close(self.reader)


class Job:
    """The ranks of one run on this machine, from start to the last one's end."""

    def __init__(self, command: list[str], num_ranks: int, run_dir: Path, saves: bool = False):
        self.command = command
        self.saves = saves
        self.num_ranks = num_ranks
        self.run_dir = run_dir
        self.grace_seconds = float(os.environ.get("ZEROCLI_GRACE_SECONDS", "5"))
        self.ranks: list[Rank] = []
        self.failed: list[Rank] = []
        self.signals: list[int] = []

    def run(self) -> int:
        """Start all ranks, wait for their end, and return the run's exit code; no process outlives this call."""
        with self._catching_signals():
            try:
                self._start()
                self._watch()
            finally:
                self._end()
        return self._exit_code()

    def tell(self) -> None:
        """Tell the user how the run failed, if it did: the cause's own words first."""
        cause = self._cause()
        if self._was_interrupted():
            say("interrupted: all ranks have ended")
        elif cause:
            say(describe_failure(cause))
            if cause.code is not None and cause.code < 0 and cause.record() is None:
                fact, hint = standing(self.run_dir, {})
                say(f"{fact}\ntry: {hint}")
            if self._exit_code() == EXIT_FAILURE:
                say(f"logs of all ranks: {self.run_dir / 'logs'}")

    def port_was_taken(self) -> bool:
        """Say whether rank 0 failed because another program took its port between our choice and its use."""
        cause = self._cause()
        words = ("EADDRINUSE", os.strerror(errno.EADDRINUSE).lower())
        text = str((cause.record() or {}).get("message", "")) if cause and cause.index == 0 else ""
        return words[0] in text or words[1] in text.lower()

    def _start(self) -> None:
        environ = {
            **os.environ,
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_WORLD_SIZE": str(self.num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "ZEROCLI_RUN_DIR": str(self.run_dir),
            "ZEROCLI_PARENT": str(os.getpid()),
        }
        environ.setdefault("OMP_NUM_THREADS", str(max(1, machine.cores() // self.num_ranks)))
        environ.setdefault("PYTHONFAULTHANDLER", "1")
        for index in range(self.num_ranks):
            self.ranks.append(Rank(index, self.command, environ, self.run_dir / "logs"))

    def _watch(self) -> None:
        """Return when all ranks have ended, one has failed, or a signal wants us to stop."""
        deadline = math.inf
        while not self.signals:
            running = [rank for rank in self.ranks if not rank.poll()]
            self.failed = [
                rank for rank in self.ranks if rank.code not in (None, 0, EXIT_PREEMPTED) or rank.error_file.exists()
            ]
            if self.failed or not running or time.monotonic() > deadline:
                return
            if deadline == math.inf and any(rank.code == EXIT_PREEMPTED for rank in self.ranks):
                deadline = time.monotonic() + self.grace_seconds
            time.sleep(POLL_SECONDS)

    def _end(self) -> None:
        """End every rank that still runs: SIGTERM, the grace, SIGKILL; a second Ctrl-C cuts the grace short."""
        running = [rank for rank in self.ranks if not rank.poll()]
        stop = self.signals[0] if self.saves and self.signals else signal.SIGTERM
        for rank in running:
            rank.signal(stop)
        deadline = time.monotonic() + self.grace_seconds
        num_signals = len(self.signals) or 1
        if stop in SAVING_SIGNALS and self.saves and self.signals and running:
            say(f"{signal.Signals(stop).name}: saving, then ending; a second signal ends at once")
            deadline = math.inf
        while not all([rank.poll() for rank in running]):
            if time.monotonic() > deadline or len(self.signals) > num_signals:
                break
            time.sleep(POLL_SECONDS / 10)
        if self.saves and self.signals:  # whoever failed while it was saving
            self.failed = [rank for rank in self.ranks if (rank.code or 0) > 0 and rank.code != EXIT_PREEMPTED]
        for rank in self.ranks:
            rank.signal(signal.SIGKILL)  # the rank's own children too
        while not all([rank.poll() for rank in self.ranks]):
            time.sleep(POLL_SECONDS / 10)
        for rank in self.ranks:
            if rank.tee:
                rank.tee.join(timeout=2)
            rank.keep_record()

    @contextlib.contextmanager
    def _catching_signals(self) -> Iterator[None]:
        previous = {}
        caught = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *([signal.SIGUSR1] if self.saves else [])]
        for number in caught:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup stays nohup
                previous[number] = signal.signal(number, lambda number, frame: self.signals.append(number))
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _cause(self) -> Rank | None:
        """Return the rank whose failure came first: one killed without a word, else the earliest error file."""
        if self._was_interrupted():
            return None
        suspects = [rank for rank in self.ranks if rank in self.failed or rank.record()]

        def order(rank: Rank) -> tuple[bool, float, int]:
            record = rank.record()
            died_silently = record is None and rank in self.failed and (rank.code or 0) < 0
            return (not died_silently, record["timestamp"] if record else math.inf, rank.index)

        return min(suspects, key=order, default=None)

    def _was_interrupted(self) -> bool:
        """Say whether we were told to stop, rather than a rank having failed by itself before."""
        ended_alike = all(rank.code in (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP) for rank in self.failed)
        return bool(self.signals) and ended_alike and not any(rank.code == EXIT_PREEMPTED for rank in self.ranks)

    def _exit_code(self) -> int:
        if self._was_interrupted():
            return EXIT_INTERRUPTED
        if cause := self._cause():
            code = (cause.record() or {}).get("exit_code", cause.code)
            return code if code in (EXIT_USAGE, EXIT_DOES_NOT_FIT, EXIT_INTERRUPTED) else EXIT_FAILURE
        return EXIT_PREEMPTED if any(rank.code == EXIT_PREEMPTED for rank in self.ranks) else EXIT_OK


def describe_failure(rank: Rank) -> str:
    """Return what to tell of a rank's failure: its own words where it left some, and what the kernel says."""
    record = rank.record()
    if record:
        code, text = record.get("exit_code", rank.code), record["message"]
        blame = "" if code in (EXIT_USAGE, EXIT_DOES_NOT_FIT) else f"rank {rank.index} failed, exit code {code}:\n"
        return blame + text
    # Rank 0's own words are on the terminal already.
    text = rank.tail() if rank.index else ""
    if rank.code in (EXIT_USAGE, EXIT_DOES_NOT_FIT):
        return text or f"rank {rank.index} ended with exit code {rank.code}"
    if rank.code == -signal.SIGKILL:
        total = machine.memory()
        limit = min(total.total, total.limit or total.total)
        fact = (
            f"error: rank {rank.index} was killed by the kernel (SIGKILL); "
            f"it had reached {_gib(rank.peak_nbytes)} of host memory\n"
            f"try: fewer --ranks, a smaller --batch or --offload optimizer=nvme: it is likely that host memory ran out "
            f"({_gib(limit)} in all)"
        )
    elif rank.code is not None and rank.code < 0:
        fact = f"error: rank {rank.index} was ended by {signal.Signals(-rank.code).name}"
    else:
        fact = f"rank {rank.index} failed, exit code {rank.code}"
    return f"{fact}:\n{text}" if text and rank.code != -signal.SIGKILL else fact


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
