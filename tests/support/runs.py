"""Whole training runs for tests: the trainer itself, in forked ranks, which a test may kill wherever it likes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ranks import _context, hold_port

from zerocli import config as configs
from zerocli.config.options import RunOptions
from zerocli.engine.events import BACKWARD, FORWARD, Events

TINY = [
    "train.steps=6",
    "train.batch=2",
    "train.seq=8",
    "model.layers=2",
    "model.hidden=16",
    "model.heads=2",
    "checkpoint.every=2",
]


STUCK = -999


@dataclass
class Death:
    """Ends a rank by SIGKILL at the `at`-th event of a seeded choice of kinds."""

    ranks: tuple[int, ...]
    at: int
    only: str = ""
    """Count only events whose name starts with this."""
    signal: int = signal.SIGKILL
    """0 is no signal: the rank's main thread stands still for good."""
    act: Callable[[], None] | None = None
    """Called instead, where something else than death is to happen; a function of a module's."""


@dataclass
class Ended:
    """How a run ended: exit codes by rank (None: an exception), and what each said on stderr."""

    codes: list[int]
    said: list[str] = field(default_factory=list)


class SlowDisk(Events):
    """A disk on which a step's transfers take many times as long as its compute, however fast the machine is.

    Each transfer keeps its caller waiting for a share of what the fastest forward and backward so far took, from step
    `first` on (3 at least: the first step is no measure) and for as many steps as `period`, then for as many not.
    """

    def __init__(self, share: float = 0.5, first: int = 3, period: int = 1 << 30) -> None:
        self._share, self._first, self._period = share, first, period
        self._step, self._computed, self._fastest, self._slept = 1, 0.0, float("inf"), 0.0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter() - self._slept
        yield
        if name in (FORWARD, BACKWARD):
            self._computed += time.perf_counter() - self._slept - began

    def step(self) -> None:
        self._fastest = min(self._fastest, self._computed)
        self._computed, self._step = 0.0, self._step + 1

    def transfer(self, block: Any, transfer: Any, writes: bool, began: float) -> None:
        late = self._step - self._first
        if block.tier.name == "nvme" and late >= 0 and late // self._period % 2 == 0:
            began = time.perf_counter()
            time.sleep(max(0.0, self._share * self._fastest))  # other threads sleep while nothing computes
            self._slept += time.perf_counter() - began


def _rank(rank: int, world: int, port: int, folder: str, sets: list[str], given: dict[str, Any], death: Death) -> None:
    import torch

    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    count, said_to = 0, f"{folder}.said{rank}"
    folder = given.pop("before", lambda rank, folder: folder)(rank, folder)
    if file_nbytes := given.pop("file_nbytes", 0):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_nbytes, file_nbytes))

    def probe(name: str) -> None:
        nonlocal count
        count += name.startswith(death.only)
        if rank in death.ranks and count == death.at and name.startswith(death.only):
            if death.act is not None:
                death.act()
            else:
                os.kill(os.getpid(), death.signal) if death.signal else threading.Event().wait()

    Path(folder).mkdir(parents=True, exist_ok=True)
    with open(said_to, "w", buffering=1) as said, contextlib.redirect_stderr(said):
        from zerocli.engine.events import Probe
        from zerocli.errors import ShownElsewhere, UserError
        from zerocli.run import trainer

        try:
            config = configs.load("tiny", [*TINY, *sets])
            events = (Probe(probe), *given.pop("events", ()))
            code = trainer.work(config, RunOptions(folder, events=events, **given))
        except UserError as error:
            if not isinstance(error, ShownElsewhere):
                print(error.render(), file=sys.stderr)
            code = error.exit_code
        except BaseException:
            traceback.print_exc()
            code = 1
        said.flush()
        os._exit(code)


def train(
    folder: Path,
    *sets: str,
    world: int = 2,
    death: Death | None = None,
    seconds: float = 600,
    awaited: Sequence[int] | None = None,
    **given: Any,
) -> Ended:
    """Run the trainer on `world` ranks to its end, however it ends; no process is left.

    `before`, a function of a module, is called in each rank first with its number and the run folder, which it returns.
    Once those that are `awaited` have ended, the others are killed, and their code is STUCK; default: all are awaited.
    """
    held = hold_port()
    port = held.getsockname()[1]
    death = death or Death((), 0)
    processes = [
        _context.Process(target=_rank, args=(rank, world, port, str(folder), list(sets), given, death), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + seconds
    for rank in range(world) if awaited is None else awaited:
        processes[rank].join(max(0.0, deadline - time.monotonic()))
    codes = []
    for process in processes:
        stuck = process.is_alive()
        process.kill()
        process.join()
        codes.append(STUCK if stuck else process.exitcode or 0)
    held.close()
    return Ended(codes, [Path(f"{folder}.said{rank}").read_text() for rank in range(world)])


def as_rank_0(folder: Path, words: list[str]) -> tuple[int, str, str]:
    """Run a command as the only rank of a launcher, in a fork that has torch; return code, stdout and stderr."""
    process = _context.Process(target=_be_rank_0, args=(str(folder), words))
    process.start()
    process.join(600)
    process.kill()
    return process.exitcode or 0, (folder / "shown").read_text(), (folder / "said").read_text()


def _be_rank_0(folder: str, words: list[str]) -> None:
    from zerocli.cli import main

    os.chdir(folder)
    os.environ.update({"RANK": "0", "WORLD_SIZE": "1"})
    with open("shown", "w") as shown, open("said", "w", buffering=1) as said:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(said):
            code = main.run(words)
    os._exit(code)


def losses(folder: Path) -> dict[int, float]:
    """The loss of each step; the later line of a step counts."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows}


def deaths(seed: int, number: int, world: int) -> list[Death]:
    """Seeded deaths: of one rank or of all, anywhere in a run or at a stage of its saves."""
    draw = random.Random(seed)
    stages = ["write", "rename", "read", "commit", "manifest", "sync"]
    kinds = ["", *(f"checkpoint {stage}" for stage in stages), "", "checkpoint"]
    found = []
    for index in range(number):
        only = kinds[index % len(kinds)]
        rank = 0 if only.split()[-1:] in (["manifest"], ["rename"], ["commit"]) else draw.randrange(world)
        most = {"": 110, "checkpoint": 10}.get(only, 3)  # three saves, each a handful of events on a rank
        every = tuple(range(world)) if draw.random() < 0.4 else (rank,)
        found.append(Death(every, draw.randint(1, most), only))
    return found
