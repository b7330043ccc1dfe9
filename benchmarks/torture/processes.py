"""The processes of a case: ranks forked from a server that has torch already, or the command itself.

Forked ranks run the whole command as torchrun's would, with a fault in them. Whoever starts them waits for their end
within a limit. A process that is still there at the limit writes its stacks, is ended, and counts as hung.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ranks import _context, hold_port

from torture import ROOT, leftovers
from torture.faults import Fault, install
from torture.setups import Setup
from zerocli.cli.run_dirs import has_run

LIMIT_SECONDS = 150.0
"""Of one run; it takes one or two seconds where nothing else is going on."""
GRACE_SECONDS = 75.0
"""For ranks to end by themselves after another has: some times the watchdog's limit."""
START_SECONDS = 4.0
"""For ranks that were not training yet when another ended: their launcher ends them, as it would here."""
POLLING = threading.Lock()
"""Held while processes are started or asked how they ended: starting one asks all others of this process as well, and
of two threads that ask at once the second is told 255."""
MARKER = "ZEROCLI_TORTURE_CASE"


@dataclass
class Place:
    """The folder of a case: its run, its swap files, its temporary files, and what its processes said."""

    path: Path
    run: Path = field(init=False)
    nvme: Path = field(init=False)
    tmp: Path = field(init=False)
    notes: Path = field(init=False)

    def __post_init__(self) -> None:
        for name in ("run", "nvme", "tmp", "notes"):
            setattr(self, name, self.path / name)
        for folder in (self.nvme, self.tmp, self.notes):
            folder.mkdir(parents=True, exist_ok=True)


@dataclass
class Ended:
    """How a run ended: exit codes by rank (the launcher's alone for the command), what was said, and what hung."""

    codes: list[int]
    said: list[str] = field(default_factory=list)
    hung: str = ""
    struck: bool = False
    lines: int = 0
    """Lines of this project's code that the main thread of rank 0 ran, where they were counted."""
    left: list[str] = field(default_factory=list)
    """Processes that outlived it."""

    @property
    def text(self) -> str:
        return "\n".join(self.said)


def words(setup: Setup, place: Place, resume: bool) -> list[str]:
    """Return the command's arguments."""
    sets = [
        *setup.sets,
        f"train.steps={setup.steps}",
        f"offload.nvme_path={place.nvme}",
        f"parallel.ranks={setup.world}",
    ]
    given = [word for each in sets for word in ("--set", each)]
    # A start that ended before its first step left no run: it is started again.
    resume = resume and has_run(place.run)
    return ["train", "tiny", *given, "--run-dir", str(place.run), *(["--resume"] if resume else [])]


def forked(
    setup: Setup,
    place: Place,
    fault: Fault,
    resume: bool = False,
    count_lines: bool = False,
    seconds: float = LIMIT_SECONDS,
    prepare: Callable[[], None] | None = None,
) -> Ended:
    """Run the ranks of a setup to their end, however it comes; no process of theirs is left.

    `prepare` is called in each of them first.
    """
    for note in place.notes.iterdir():
        note.unlink()
    held = hold_port()
    port = held.getsockname()[1]
    given = (words(setup, place, resume), setup.world, place, fault, count_lines, prepare)
    ranks = [_context.Process(target=_rank, args=(rank, port, *given), daemon=True) for rank in range(setup.world)]
    with POLLING:
        for process in ranks:
            process.start()
    deadline = time.monotonic() + seconds
    ended_early = False
    while (alive := _alive(ranks)) and time.monotonic() < deadline:
        multiprocessing.connection.wait([p.sentinel for p in alive], min(0.25, deadline - time.monotonic()))
        if fault.act == "stop":
            leftovers.continue_stopped([p.pid or 0 for p in alive], fault.seconds)
        if not ended_early and any(_codes(ranks)):
            ended_early = True
            training = all((place.notes / f"training{rank}").exists() for rank in range(setup.world))
            deadline = min(deadline, time.monotonic() + (GRACE_SECONDS if training else START_SECONDS))
    hung = [rank for rank, process in enumerate(ranks) if process in _alive(ranks)]
    if ended_early and not training:
        hung = []  # left to the launcher, which is us
        _end([process.pid or 0 for process in _alive(ranks)], signal.SIGTERM, 2.0)
    _end([process.pid or 0 for process in _alive(ranks)], signal.SIGABRT, 3.0)
    with POLLING:
        for process in ranks:
            process.kill()
            process.join()
    held.close()
    codes = _codes(ranks)
    said = [_read(place.notes / f"said{rank}") for rank in range(setup.world)]
    lines = _read(place.notes / "lines0")
    return Ended(
        codes,
        said,
        "\n".join(f"rank {rank}:\n{said[rank][-6000:]}" for rank in hung),
        any((place.notes / f"struck{rank}").exists() for rank in range(setup.world)),
        int(lines or 0),
        leftovers.processes(sessions=[process.pid or 0 for process in ranks]),
    )


def _rank(
    rank: int,
    port: int,
    given: list[str],
    world: int,
    place: Place,
    fault: Fault,
    count: bool,
    prepare: Callable[[], None] | None,
) -> None:
    (place.notes / f"pid{rank}").write_text(str(os.getpid()))
    os.setsid()  # so that what it leaves behind can be told from others' processes
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"})
    os.environ["TMPDIR"] = str(place.tmp)
    fd = os.open(place.notes / f"said{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr)  # SIGABRT shows every thread's stack

    import torch

    from zerocli.cli import main as cli
    from zerocli.engine.events import Probe
    from zerocli.run import trainer

    torch.set_num_threads(1)
    if prepare is not None:
        prepare()
    work = trainer.work
    striker = install(fault, rank, place, count)

    def with_probe(config, options, *rest):
        return work(config, replace(options, events=(Probe(striker.probe),)), *rest)

    trainer.work = with_probe  # type: ignore[assignment]
    code = striker.run(lambda: cli.run(given))
    sys.stdout.flush()
    os._exit(code)


def _alive(ranks: list[Any]) -> list[Any]:
    with POLLING:
        return [process for process in ranks if process.is_alive()]


def _codes(ranks: list[Any]) -> list[int]:
    with POLLING:
        return [process.exitcode or 0 for process in ranks]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _end(pids: list[int], number: int, seconds: float) -> None:
    """Signal processes and give them some time to end."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + seconds
    while pids and time.monotonic() < deadline and any(leftovers.runs(pid) for pid in pids):
        time.sleep(0.05)


# -- the command itself ------------------------------------------------------------------------------------------------

DRIVER = """
import sys
sys.path.insert(0, {folder!r})
from torture.faults import Lines
import os, runpy, signal
sys.argv = ["zerocli", *sys.argv[3:]]
import zerocli.entry  # from here on it handles an interrupt itself
def act():
    open({struck!r}, "w").close()
    signal.raise_signal(int({number}))
Lines(int({at}), act).start()
runpy.run_module("zerocli", run_name="__main__")
"""


def command(setup: Setup, place: Place, fault: Fault, marker: str, resume: bool = False) -> Ended:
    """Run `zerocli train` as a user does, with a fault from outside or at a line of the launcher's."""
    for note in place.notes.iterdir():
        note.unlink()
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    environ |= {MARKER: marker, "TMPDIR": str(place.tmp), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    program = ["-m", "zerocli"]
    if fault.where == "launcher's line":
        struck = str(place.notes / "struck")
        text = DRIVER.format(folder=str(ROOT / "benchmarks"), struck=struck, number=int(fault.number), at=fault.at)
        program = ["-c", text, "x", "x"]
    with (place.notes / "said").open("wb") as said:
        run = subprocess.Popen(
            [sys.executable, *program, *words(setup, place, resume)],
            cwd=place.path,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    deadline = time.monotonic() + LIMIT_SECONDS
    struck_now = fault.where == "launcher's line"
    hung = ""
    while run.poll() is None:
        if not struck_now and _due(fault, place):
            struck_now = True
            time.sleep(fault.seconds)
            strike_outside(fault, run.pid, marker, place)
        if time.monotonic() > deadline:
            hung = f"the command still runs after {LIMIT_SECONDS:.0f} s"
            _end([run.pid, *leftovers.with_marker(MARKER, marker)], signal.SIGABRT, 3.0)
            break
        time.sleep(0.002 if not struck_now else 0.02)
    left = leftovers.processes(marker=(MARKER, marker)) if not hung else []
    for pid in leftovers.with_marker(MARKER, marker):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.kill()
    code = run.wait()
    said = [_read(place.notes / "said"), *(_read(path) for path in sorted(place.run.glob("logs/*.log")))]
    struck = (place.notes / "struck").exists()
    return Ended([code], said, f"{hung}\n{said[0][-6000:]}" if hung else "", struck, left=left)


def _due(fault: Fault, place: Place) -> bool:
    """Say whether the run has come as far as the fault wants it: `at` lines of metrics, or the first of its files."""
    if fault.at == 0:
        return place.run.exists()
    return _read(place.run / "metrics.jsonl").count("\n") >= fault.at


def strike_outside(fault: Fault, launcher: int, marker: str, place: Place) -> None:
    """Signal the launcher, one of its ranks, all of them, or everything at once."""
    ranks = [pid for pid in leftovers.with_marker(MARKER, marker) if pid != launcher]
    ranks.sort(key=lambda pid: leftovers.environment(pid).get("RANK", ""))
    one = ranks[fault.ranks[0] % len(ranks) : fault.ranks[0] % len(ranks) + 1] if ranks else []
    chosen = {"launcher": [launcher], "one rank": one, "all ranks": ranks, "everything": [launcher, *ranks]}
    pids = chosen[fault.where]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, fault.number)
    if pids:
        (place.notes / "struck").touch()
    if fault.number == signal.SIGSTOP:
        time.sleep(0.5)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
