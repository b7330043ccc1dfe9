"""The processes in which `zerocli.check` runs its ranks, with a time limit for each run."""

from __future__ import annotations

import multiprocessing as mp
import multiprocessing.connection
import multiprocessing.forkserver
import pickle
import shutil
import tempfile
import time
from typing import TYPE_CHECKING, Any

from zerocli.errors import FAILURE, UserError

if TYPE_CHECKING:
    from zerocli.check.loop_ranks import Job

START_SECONDS = 120.0
LATE_SECONDS = 5.0
"""How long a rank may go on after another has failed: one that waits in a collective never ends."""
NOT_GUARDED = 77
"""Exit code of a rank whose script calls `check` while it is imported."""


PRELOAD = ["zerocli.check.loop_ranks", "zerocli.engine.api", "torch._dynamo"]
"""What ranks need, imported once; the last takes seconds, and any torch.optim optimizer imports it."""


class Pool:
    """Processes that run jobs; started when first needed, and again after one of them failed or hung."""

    def __init__(self, ranks: int, packed: bytes, seconds: float) -> None:
        self.ranks, self.packed, self.seconds = ranks, packed, seconds
        # No fork: a copy of a process that has run torch's threads hangs in them.
        self._context: Any = mp.get_context("forkserver")
        own = getattr(multiprocessing.forkserver, "_forkserver", None)
        if getattr(own, "_preload_modules", None) in (None, ["__main__"]):  # nobody else has said what to import
            self._context.set_forkserver_preload(PRELOAD)
        self._processes: list[Any] = []
        self._ends: list[Any] = []
        self._folder = ""

    def _start(self) -> None:
        from zerocli.check.loop_ranks import serve

        self._folder = tempfile.mkdtemp(prefix="zerocli-check-")
        for rank in range(self.ranks):
            here, there = self._context.Pipe()
            process = self._context.Process(
                target=serve, args=(rank, self.ranks, self._folder, there, self.packed), daemon=True
            )
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)
        for rank, end in enumerate(self._ends):
            try:
                if end.poll(START_SECONDS) and end.recv_bytes():
                    continue
                said = f"rank {rank} did not start in {START_SECONDS:.0f} s"
            except EOFError:
                self._processes[rank].join(LATE_SECONDS)
                said = f"rank {rank} ended before the loop began (exit code {self._processes[rank].exitcode})"
                if self._processes[rank].exitcode == NOT_GUARDED:
                    said = "the script calls zerocli.check when a rank imports it"
            self.close()
            raise UserError(said, hint='if __name__ == "__main__": zerocli.check(...)', exit_code=FAILURE)

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.kill()
            process.join()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._ends = [], []

    def run(self, job: Job) -> tuple[str, Any]:
        """Return ("ok", each rank's numbers), or another verdict and its message."""
        if not self._processes:
            self._start()
        for end in self._ends:
            end.send_bytes(pickle.dumps(job))
        answers = self._collect(time.monotonic() + self.seconds)
        if all(answer is not None and answer[0] == "ok" for answer in answers):
            return "ok", [answer[1] for answer in answers if answer is not None]
        self.close()
        return _failure(answers, self.seconds)

    def _collect(self, limit: float) -> list[tuple[str, Any] | None]:
        answers: list[tuple[str, Any] | None] = [None] * self.ranks
        while None in answers and time.monotonic() < limit:
            waiting = {self._ends[rank]: rank for rank, answer in enumerate(answers) if answer is None}
            for end in mp.connection.wait(list(waiting), timeout=max(0.0, limit - time.monotonic())):
                rank = waiting[end]
                try:
                    answers[rank] = pickle.loads(self._ends[rank].recv_bytes())
                except EOFError:
                    self._processes[rank].join(LATE_SECONDS)
                    answers[rank] = ("error", f"rank {rank} died (exit code {self._processes[rank].exitcode})")
                answer = answers[rank]
                if answer is not None and answer[0] != "ok":
                    limit = min(limit, time.monotonic() + LATE_SECONDS)
        return answers


def _failure(answers: list[tuple[str, Any] | None], seconds: float) -> tuple[str, str]:
    """Return a verdict and its words: a refusal only if every rank has it."""
    said = [(rank, *answer) for rank, answer in enumerate(answers) if answer is not None and answer[0] != "ok"]
    if not said:
        late = [str(rank) for rank, answer in enumerate(answers) if answer is None]
        return "hung", f"rank{'s' * (len(late) > 1)} {', '.join(late)} did not finish within {seconds:g} s"
    if len(said) == len(answers) and all(verdict == "refused" for _, verdict, _ in said):
        return "refused", said[0][2]
    rank, _, message = next((each for each in said if each[1] == "error"), said[0])
    alone = f"rank {rank}: " if len({text for _, _, text in said}) > 1 or len(said) < len(answers) else ""
    return "error", f"{alone}{message}"
