"""The kinds of faults, and how one is drawn for a case."""

from __future__ import annotations

import errno
import random
import signal
from collections.abc import Callable
from dataclasses import replace

from torture import disks
from torture.faults import Fault
from torture.setups import Setup, in_host_memory, on_disk

SAVE_STAGES = ["read", "write", "sync", "manifest", "rename", "commit", "committed", ""]
DISK_ERRORS = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EMFILE]
COMMAND_STEPS = 40
"""Steps of a run under the command: enough for a signal to find it training."""
FOREVER = 0

Made = tuple[Fault, Setup]
Draw = random.Random


def some(draw: Draw, setup: Setup) -> tuple[int, ...]:
    return (draw.randrange(setup.world),)


def kill_one(draw: Draw, setup: Setup) -> Made:
    return Fault("", "kill", "event", some(draw, setup), draw.randint(1, 150)), setup


def kill_all(draw: Draw, setup: Setup) -> Made:
    return Fault("", "kill", "event", tuple(range(setup.world)), draw.randint(1, 150)), setup


def kill_in_a_save(draw: Draw, setup: Setup) -> Made:
    stage = draw.choice(SAVE_STAGES)
    ranks = (0,) if stage in ("manifest", "rename", "commit", "committed") else some(draw, setup)
    if draw.random() < 0.3:
        ranks = tuple(range(setup.world))
    return Fault("", "kill", "event", ranks, draw.randint(1, 12 if not stage else 4), only=f"checkpoint {stage}"), setup


def kill_and_damage(draw: Draw, setup: Setup) -> Made:
    setup = setup.having("checkpoint.every=1", "checkpoint.keep=3")
    fault, setup = kill_all(draw, setup)
    return replace(fault, at=draw.randint(40, 110), damages=True), setup


def kill_at_a_line(draw: Draw, setup: Setup) -> Made:
    ranks = tuple(range(setup.world)) if draw.random() < 0.3 else some(draw, setup)
    return Fault("", "kill", "line", ranks, draw.randrange(1 << 30)), setup  # of so many as the run has: see `cases`


def signal_at_a_line(draw: Draw, setup: Setup) -> Made:
    number = draw.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
    return Fault("", "signal", "line", some(draw, setup), draw.randrange(1 << 30), number=number), setup


def stop_and_continue(draw: Draw, setup: Setup) -> Made:
    return Fault("", "stop", "event", some(draw, setup), draw.randint(1, 120), seconds=draw.choice([0.1, 1.0])), setup


def full_disk(draw: Draw, setup: Setup) -> Made:
    ranks = some(draw, setup) if draw.random() < 0.5 else tuple(range(setup.world))
    span = draw.choice([1, 3, 10, FOREVER])
    return Fault("", "error", "run", ranks, draw.randint(1, 20), span, "pwrite,pwritev", errno.ENOSPC), setup


def disk_error_in_a_save(draw: Draw, setup: Setup) -> Made:
    only = draw.choice(disks.WRITES)
    return Fault("", "error", "run", some(draw, setup), draw.randint(1, 5), 1, only, draw.choice(DISK_ERRORS)), setup


def short_writes(draw: Draw, setup: Setup) -> Made:
    ranks = tuple(range(setup.world))
    return Fault("", "short", "run", ranks, 1, FOREVER, "pwrite,pwritev", harmless=True), setup


def slow_disk(draw: Draw, setup: Setup) -> Made:
    only = draw.choice(["pwrite", "fsync", "rename", "open"])
    return Fault("", "slow", "run", some(draw, setup), draw.randint(1, 4), 4, only, seconds=0.3, harmless=True), setup


def stuck_disk(draw: Draw, setup: Setup) -> Made:
    only = draw.choice(["pwrite", "fsync", "rename"])
    return Fault("", "stuck", "run", some(draw, setup), draw.randint(1, 3), FOREVER, only), quick(setup)


def nvme_error(draw: Draw, setup: Setup) -> Made:
    only, number = draw.choice([("read", errno.EIO), ("write", errno.EIO), ("write", errno.ENOSPC)])
    return Fault("", "error", "nvme", some(draw, setup), draw.randint(1, 60), 1, only, number), on_disk(setup)


def nvme_short(draw: Draw, setup: Setup) -> Made:
    only = draw.choice(["read", "write", ""])
    return Fault("", "short", "nvme", tuple(range(setup.world)), 1, FOREVER, only, harmless=True), on_disk(setup)


def slow_transfer(draw: Draw, setup: Setup) -> Made:
    where = draw.choice(["nvme", "dram"])
    fault = Fault("", "slow", where, some(draw, setup), draw.randint(1, 60), 20, seconds=0.05, harmless=True)
    return fault, on_disk(setup) if where == "nvme" else in_host_memory(setup)


def stuck_transfer(draw: Draw, setup: Setup) -> Made:
    where = draw.choice(["nvme", "dram"])
    setup = quick(on_disk(setup) if where == "nvme" else in_host_memory(setup))
    return Fault("", "stuck", where, some(draw, setup), draw.randint(20, 120), 1), setup


def cut_link(draw: Draw, setup: Setup) -> Made:
    setup = setup.having(world=max(2, setup.world))
    return Fault("", "cut", "event", some(draw, setup), draw.randint(1, 120), only=""), setup


def read_error_on_resume(draw: Draw, setup: Setup) -> Made:
    setup = setup.having("checkpoint.every=1", "checkpoint.keep=3")
    only = draw.choice(["preadv", "open"])
    number = draw.choice([errno.EIO, errno.ESTALE]) if only == "preadv" else draw.choice([errno.EACCES, errno.EMFILE])
    fault = Fault("", "error", "run", some(draw, setup), draw.randint(1, 3), FOREVER, only, number, on_resume=True)
    return fault, setup


def short_reads_on_resume(draw: Draw, setup: Setup) -> Made:
    ranks = tuple(range(setup.world))
    return Fault("", "short", "run", ranks, 1, FOREVER, "preadv", on_resume=True, harmless=True), setup


def deleted_run_folder(draw: Draw, setup: Setup) -> Made:
    return Fault("", "delete", "event", (0,), draw.randint(1, 100)), setup


def at_the_command(where: str, numbers: list[int]) -> Callable[[Draw, Setup], Made]:
    def make(draw: Draw, setup: Setup) -> Made:
        at = draw.randint(0, COMMAND_STEPS - 2)
        number = draw.choice(numbers)
        if where == "launcher's line":
            at = int(10 ** draw.uniform(0, 4))
        fault = Fault("", "command", where, some(draw, setup), at, number=number, seconds=draw.random() * 0.1)
        return replace(fault, harmless=number == signal.SIGSTOP), setup.having(steps=COMMAND_STEPS)

    return make


def quick(setup: Setup) -> Setup:
    """Return the setup with a watchdog that does not wait long: what is stuck here stays so."""
    return setup.having("train.watchdog=4")


KILL = [signal.SIGKILL]
GENTLE = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]
KINDS: dict[str, tuple[int, Callable[[Draw, Setup], Made]]] = {
    "kill one rank": (14, kill_one),
    "kill all ranks": (8, kill_all),
    "kill in a save": (14, kill_in_a_save),
    "kill at a line": (10, kill_at_a_line),
    "kill, damage the newest": (5, kill_and_damage),
    "signal at a line": (8, signal_at_a_line),
    "stop and continue": (3, stop_and_continue),
    "full disk": (4, full_disk),
    "disk error in a save": (4, disk_error_in_a_save),
    "short writes": (1, short_writes),
    "slow disk": (2, slow_disk),
    "stuck disk": (2, stuck_disk),
    "nvme error": (4, nvme_error),
    "nvme short transfers": (2, nvme_short),
    "slow transfer": (2, slow_transfer),
    "stuck transfer": (2, stuck_transfer),
    "cut link": (4, cut_link),
    "read error on resume": (3, read_error_on_resume),
    "short reads on resume": (1, short_reads_on_resume),
    "run folder deleted": (1, deleted_run_folder),
    "command: kill launcher": (3, at_the_command("launcher", KILL)),
    "command: kill one rank": (2, at_the_command("one rank", KILL)),
    "command: kill everything": (2, at_the_command("everything", KILL)),
    "command: signal launcher": (3, at_the_command("launcher", GENTLE)),
    "command: signal at a line": (3, at_the_command("launcher's line", GENTLE[:3])),
    "command: stop, continue": (1, at_the_command("all ranks", [signal.SIGSTOP])),
}
"""Name: (how often, how it is made)."""


def draw_fault(draw: Draw, setup: Setup, only: str = "") -> Made:
    """Return a fault of a random kind (whose name contains `only`), and the setup that it needs."""
    names = [name for name in KINDS if only in name]
    if not names:
        raise SystemExit(f"no kind of fault is called {only!r}; there are: {', '.join(KINDS)}")
    [name] = draw.choices(names, [KINDS[name][0] for name in names])
    fault, setup = KINDS[name][1](draw, setup)
    return replace(fault, kind=name), setup
