"""Two gloo ranks that serve one case after another, and are replaced when a case leaves them in doubt."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import pickle
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
from ranks import _context

from zoo.case import VARIANTS, Case

WORLD = 2
SECONDS = 600.0
"""How long a case may take, the import of the packages it needs included."""
GRACE = 120.0
"""How long a rank may take when another has ended otherwise than by equal numbers."""


@dataclass(frozen=True)
class Outcome:
    """How a case ended on one rank: exact, refused, different, error, reference, or silent."""

    kind: str
    text: str = ""


class Server:
    """Starts the ranks when the first case comes, and again after one that failed."""

    def __init__(self) -> None:
        self._ranks: list[tuple[Any, Connection]] = []
        self._folder = ""

    def run(self, case: str, variant: str, device: str, seconds: float = SECONDS) -> list[Outcome]:
        """Return how the case ended on each rank; the ranks are used again if all came to the same end of it."""
        if not self._ranks:
            self._start()
        for _, end in self._ranks:
            end.send_bytes(pickle.dumps((case, variant, device)))
        outcomes = self._answers(time.monotonic() + seconds)
        kinds = {outcome.kind for outcome in outcomes}
        if len(kinds) > 1 or not kinds <= {"exact", "different", "refused"}:
            self.stop()
        return outcomes

    def _answers(self, deadline: float) -> list[Outcome]:
        answers: dict[int, Outcome] = {}
        ends = {end: rank for rank, (_, end) in enumerate(self._ranks)}
        while len(answers) < len(self._ranks):
            ready = wait([end for end, rank in ends.items() if rank not in answers], deadline - time.monotonic())
            if not ready:
                break
            for end in ready:
                assert isinstance(end, Connection)
                try:
                    outcome = Outcome(*pickle.loads(end.recv_bytes()))
                except (EOFError, ConnectionError):
                    outcome = Outcome("silent", "the rank died")
                answers[ends[end]] = outcome
                if outcome.kind != "exact":
                    deadline = min(deadline, time.monotonic() + GRACE)
        return [answers.get(rank, Outcome("silent", "no answer in time")) for rank in range(len(self._ranks))]

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp()
        for rank in range(WORLD):
            here, there = _context.Pipe()
            process = _context.Process(target=_serve, args=(rank, self._folder, there), daemon=True)
            process.start()
            there.close()
            self._ranks.append((process, here))
        for _, end in self._ranks:
            assert end.poll(600), "the ranks did not start"
            end.recv_bytes()

    def stop(self) -> None:
        """End the ranks; the next case starts new ones."""
        for process, end in self._ranks:
            end.close()
            process.kill()
            process.join()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._ranks = []


def _serve(rank: int, folder: str, end: Connection) -> None:
    import torch
    import torch.distributed as dist

    from zoo import cases

    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    os.environ.pop("RANK", None)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    references: dict[tuple[str, str], Any] = {}
    gc.freeze()
    end.send_bytes(b"ready")
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            name, variant, device = pickle.loads(end.recv_bytes())
            end.send_bytes(pickle.dumps(_outcome(cases.load(name), variant, device, folder, references)))


def _outcome(case: Case, variant: str, device: str, folder: str, references: dict[Any, Any]) -> tuple[str, str]:
    from zoo.compare import differences
    from zoo.trainers import Run, is_refusal

    try:
        if (case.name, device) not in references:
            plain = Run(None, device)
            case.program(plain)
            references[case.name, device] = plain.finish()
    except Exception:
        return "reference", traceback.format_exc()
    settings = dict(VARIANTS[variant])
    if settings.get("offload") == "nvme":
        settings["nvme_path"] = (folder,)
    run = Run(settings, device)
    try:
        case.program(run)
        lines = differences(
            run.finish(), references[case.name, device], case.tolerance * (100 if device == "cuda" else 1)
        )
        return ("different", "\n".join(lines[:12])) if lines else ("exact", "")
    except Exception as error:
        return ("refused", str(error)) if is_refusal(error) else ("error", traceback.format_exc())
    finally:
        with contextlib.suppress(Exception):
            for trainer in run.trainers:
                trainer.engine.close()
        del run
        gc.collect()


def failure(case: Case, variant: str, outcomes: Sequence[Outcome]) -> str:
    """Return why the outcomes are not what the case expects of the variant, or an empty string."""
    expected = case.expected(variant)
    if all(expected.admits(outcome.kind, outcome.text) for outcome in outcomes):
        return ""
    ends = "\n".join(f"rank {rank}: {outcome.kind}: {outcome.text}" for rank, outcome in enumerate(outcomes))
    return f"{case.name} at {variant}: expected {expected}\n{ends}"


def missing_package(needs: tuple[str, ...]) -> str:
    """Return the first needed package that is not installed, or an empty string."""
    return next((name for name in needs if importlib.util.find_spec(name) is None), "")


def serving() -> Iterator[Server]:
    """Yield the ranks of one test file and stop them; a fixture's function."""
    ranks = Server()
    yield ranks
    ranks.stop()


def check_case(server: Server, case: Case, variant: str, device: str) -> None:
    """Fail unless the case ends as it expects of the variant; skip it if a package that it needs is missing."""
    if missing := missing_package(case.needs):
        pytest.skip(f"{missing} is not installed")
    message = failure(case, variant, server.run(case.name, variant, device))
    assert not message, message
