"""In-process cases: a worker that has an engine ready does them one after another, and is watched from outside."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import shutil
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ranks import _context

from torture import leftovers
from torture.cases import NO_FAULT
from torture.processes import POLLING, Place, forked
from torture.setups import Setup
from torture.tally import Result

LIMIT_SECONDS = 60.0
"""Of one case; it takes some hundredths of a second."""
NUM_WARM_UP = 24
"""Cases before descriptors and threads are counted: what torch opens and starts once is there by then."""
EVERY_TRANSFER = 12
"""Each so many-th case is one of transfers."""
COMMON = ("train.batch=2", "train.seq=8", "model.heads=2", "checkpoint.every=1", "checkpoint.keep=9")
FIXTURES = {
    "gpt2-2ranks": Setup(2, (*COMMON, "zero.stage=3", "model.layers=1", "model.hidden=16", "train.precision=bf16"), 3),
    "llama-1rank": Setup(
        1,
        (*COMMON, "zero.stage=2", "model.layers=1", "model.family=llama", "model.hidden=16"),
        3,
    ),
    "gpt2-3ranks": Setup(3, (*COMMON, "zero.stage=1", "model.layers=1", "model.hidden=8", "train.precision=fp16"), 3),
}
"""Runs whose folders are damaged: of other models, ranks and precisions, with a checkpoint of each step."""
_making = threading.Lock()


def make_fixtures(root: Path, names: Sequence[str] = tuple(FIXTURES)) -> list[Path]:
    """Make the good run folders once a campaign, all at a time; return them."""
    with _making, ThreadPoolExecutor(len(names)) as threads:
        return list(threads.map(lambda name: _make(root, name), names))


def _make(root: Path, name: str) -> Path:
    target = root / "fixtures" / name
    if not target.exists():
        place = Place(root / f"making-{name}")
        ended = forked(FIXTURES[name], place, NO_FAULT)
        if any(ended.codes):
            raise RuntimeError(f"{FIXTURES[name].key} ended with {ended.codes}: {ended.text}")
        target.parent.mkdir(exist_ok=True)
        place.run.rename(target)
        shutil.rmtree(place.path)
    return target


class Inside:
    """Runs in-process cases of a seed in a worker process; a worker that hangs is ended, and the next one goes on."""

    def __init__(self, seed: int, root: Path, name: str = "0") -> None:
        self._seed, self._root, self._scratch = seed, root, root / f"inside-{name}"
        self._process: Any = None

    def __enter__(self) -> Inside:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def run(self, first: int, last: int, tell: Callable[[Result], None]) -> None:
        """Run the cases `first` up to `last`, and tell of each."""
        for index in range(first, last):
            if self._process is None:
                self._start()
            self._ours.send(index)
            try:
                result = self._ours.recv() if self._ours.poll(LIMIT_SECONDS) else self._hang(index)
            except EOFError:
                result = Result(
                    f"{self._seed}:inside:{index}", "inside", "", wrong=[f"it ended: {self._said()[-4000:]}"]
                )
                self._stop()
            tell(result)

    def _start(self) -> None:
        fixtures = make_fixtures(self._root)
        self._scratch.mkdir(parents=True, exist_ok=True)
        self._ours, theirs = _context.Pipe()
        args = (theirs, self._seed, [str(path) for path in fixtures], str(self._scratch))
        self._process = _context.Process(target=_worker, args=args, daemon=True)
        with POLLING:
            self._process.start()
        theirs.close()

    def _hang(self, index: int) -> Result:
        os.kill(self._process.pid, signal.SIGABRT)  # shows where it is
        with POLLING:
            self._process.join(5)
        said = self._said()
        self._stop()
        return Result(f"{self._seed}:inside:{index}", "inside", "", hangs=[said[-6000:]])

    def _stop(self) -> None:
        if self._process is not None:
            with POLLING:
                self._process.kill()
                self._process.join()
            self._ours.close()
            self._process = None

    def _said(self) -> str:
        path = self._scratch / "said"
        return path.read_text(errors="replace") if path.exists() else ""


def _worker(ours: Any, seed: int, fixtures: list[str], scratch: str) -> None:
    fd = os.open(Path(scratch, "said"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    os.dup2(fd, 2)
    os.close(fd)
    faulthandler.enable(2)
    import torch

    torch.set_num_threads(1)
    from torture import loading, transfers

    ready = [loading.Fixture.of(Path(path)) for path in fixtures]

    def one(index: int) -> Result:
        name, draw = f"{seed}:inside:{index}", random.Random(f"{seed}:inside:{index}")
        try:
            if index % EVERY_TRANSFER == EVERY_TRANSFER - 1:
                return transfers.case(name, draw, Path(scratch, "tiers"))
            return loading.case(name, draw, ready, Path(scratch, "case"))
        except Exception:
            return Result(name, "inside", "", wrong=[traceback.format_exc()])

    for index in range(NUM_WARM_UP):
        one(index)
    while True:
        try:
            index = ours.recv()
        except EOFError:
            return
        gc.collect(0)
        before = leftovers.descriptors(), leftovers.thread_names()
        result = one(index)
        if (leftovers.descriptors(), leftovers.thread_names()) != before:
            gc.collect()
            _compare(result, *before)
        ours.send(result)


def _compare(result: Result, descriptors: dict[str, str], threads: list[str]) -> None:
    now, running = leftovers.descriptors(), leftovers.thread_names()
    if len(now) > len(descriptors):
        result.leftovers.append(f"open: {sorted(set(now.values()) - set(descriptors.values()))}")
    if len(running) > len(threads):
        result.leftovers.append(f"threads: {running}, before: {threads}")
