"""Two ranks that stay up and run program after program; after a hang or a death the next program gets new ones."""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
import time
import traceback
import warnings
from typing import Any

import ranks

from fuzz.program import WORLD, Program

HANG_SECONDS = 600.0
START_SECONDS = 600.0
LATE_SECONDS = 3.0
"""How long one rank may go on after another has failed: it waits for a collective that never comes."""


class RanksFailed(AssertionError):
    """A rank raised, died or hung."""


def _serve(rank: int, folder: str, connection: Any) -> None:
    import torch
    import torch.distributed as dist

    from fuzz.sharded import run_program

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.pop("RANK", None)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    connection.send_bytes(b"ready")
    while True:
        try:
            program, defect = pickle.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)  # the parent is gone, or done with us
        try:
            answer = ("ok", run_program(program, folder, defect))
            if not program.uneven:
                dist.barrier()
        except BaseException:
            answer = ("error", traceback.format_exc())
        try:
            connection.send_bytes(pickle.dumps(answer))
        except OSError:
            os._exit(0)


class Ranks:
    """A pair of ranks, started when first needed."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._ends: list[Any] = []
        self._folder = ""
        self._hung = False

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="zerocli-fuzz-")
        for rank in range(WORLD):
            here, there = ranks._context.Pipe()
            process = ranks._context.Process(target=_serve, args=(rank, self._folder, there), daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)
        for rank, end in enumerate(self._ends):
            if not end.poll(START_SECONDS):
                self.close()
                raise TimeoutError(f"rank {rank} did not start in {START_SECONDS:.0f} s")
            end.recv_bytes()

    def close(self) -> None:
        """End the ranks; the next program starts new ones."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.kill()
            process.join()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._ends = [], []

    def run(self, program: Program, defect: str = "") -> list[Any]:
        """Return the outcome of each rank; RanksFailed if one raises, dies, or gives no answer."""
        if not self._processes:
            self._start()
        for end in self._ends:
            end.send_bytes(pickle.dumps((program, defect)))
        limit = time.monotonic() + (HANG_SECONDS if not self._hung else HANG_SECONDS / 4)
        answers: list[Any] = [None] * WORLD
        while None in answers:
            waiting = [rank for rank in range(WORLD) if answers[rank] is None]
            for rank in waiting:
                if self._ends[rank].poll(0.05 if len(waiting) > 1 else max(0.0, limit - time.monotonic())):
                    try:
                        answers[rank] = pickle.loads(self._ends[rank].recv_bytes())
                    except EOFError:
                        answers[rank] = ("error", "died without a word")
                    if answers[rank][0] == "error":
                        limit = min(limit, time.monotonic() + LATE_SECONDS)
            if time.monotonic() > limit:
                break
        if all(answer is not None and answer[0] == "ok" for answer in answers):
            if program.uneven:
                self.close()  # what ranks that were refused apart have in flight must not meet the next program
            return [answer[1] for answer in answers]
        self.close()
        if not any(answers):
            self._hung = True
        said = [
            f"rank {rank}: {'no answer: it hangs' if answer is None else 'ok' if answer[0] == 'ok' else answer[1]}"
            for rank, answer in enumerate(answers)
        ]
        raise RanksFailed("\n".join(said))
