"""Ranks that wait for each other in different calls: found within seconds, and named.

A rank that waits in a call of an engine does not know why another does not come. It may still compute; or it waits for
this rank in a collective of the user's own code, which never ends; or it has ended. So each rank has a thread that
looks at what the main thread does. If that is inside one call of torch.distributed for some seconds, the thread says so
in the ranks' store. A rank that has waited as long reads there what the others do: if all of them wait, and some of
them outside of the engine, they wait for each other. A rank that ends says that in the store too.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing import util
from types import FrameType
from typing import Any

import torch.distributed as dist

from zerocli.console import say
from zerocli.ranks.store import cloned, read_text
from zerocli.ranks.worker import within

PATIENCE_SECONDS = 4.0
"""How long a rank waits before it looks at what the others do."""
INTERVAL_SECONDS = 1.0
ANSWER_SECONDS = 2.0
"""How long to wait for the store, which may be gone with the rank that held it."""
MOST_RANKS = 256
"""Number of ranks above which the others are not asked: each question is a message to one store."""
_OUTSIDE, _WAITS, _ENDED, _VERDICT = "zerocli/outside/", "zerocli/waits/", "zerocli/ended/", "zerocli/verdict"


class Monitor(threading.Thread):
    """Says in the store when the main thread waits in a collective that the user's own code called."""

    _running: Monitor | None = None

    def __init__(self, store: Any, rank: int) -> None:
        super().__init__(name="zerocli-monitor", daemon=True)
        self.base, self.store, self.rank = store, cloned(store), rank
        self._main = threading.main_thread().ident
        self._closed = threading.Event()

    @classmethod
    def start_once(cls) -> None:
        """Start the thread of this process, unless it runs for the current process group."""
        store = dist.distributed_c10d._get_default_store()
        if cls._running is None or cls._running.base is not store:
            if cls._running is not None:
                cls._running.close()
            cls._running = cls(store, dist.get_rank())
            cls._running.start()
            # Unlike atexit's, these run at the end of a process that multiprocessing started, too.
            util.Finalize(None, cls._running.end, exitpriority=100)

    def close(self) -> None:
        self._closed.set()

    def end(self) -> None:
        """Stop the thread, and say in the store that this rank has ended and with what error."""
        if self._closed.is_set():
            return
        self.close()
        error = getattr(sys, "last_value", None)
        why = f"with {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}" if error is not None else ""
        with contextlib.suppress(Exception):
            self.store.set(f"{_ENDED}{self.rank}", f"has ended {why}".strip())

    def run(self) -> None:
        seen, since, said = None, 0.0, False
        while not self._closed.wait(INTERVAL_SECONDS):
            frame, words = self._outside()
            now = time.monotonic()
            if frame is None or frame is not seen:
                if said:
                    self._say("")
                seen, since, said = frame, now, False
            elif not said and now - since >= PATIENCE_SECONDS - INTERVAL_SECONDS:
                self._say(words)
                said = True
            elif said and (verdict := within(ANSWER_SECONDS, lambda: read_text(self.store, _VERDICT))):
                # The main thread is in torch's own code, and will raise that the other rank has gone.
                say(f"error: {verdict}")
                return

    def _say(self, words: str) -> None:
        with contextlib.suppress(Exception):
            self.store.set(f"{_OUTSIDE}{self.rank}", words)

    def _outside(self) -> tuple[FrameType | None, str]:
        """Return the frame of torch.distributed that the user's code is in, and the call in words; None if in none."""
        innermost = frame = sys._current_frames().get(self._main or 0)
        name = ""
        while frame is not None and frame.f_globals.get("__name__", "").startswith("torch.distributed"):
            name = frame.f_code.co_name if not frame.f_code.co_name.startswith(("wrapper", "_")) else name
            frame = frame.f_back
        if frame is innermost or frame is None or frame.f_globals.get("__name__", "").startswith("zerocli."):
            return None, ""
        return innermost, f"is in torch.distributed.{name}() of {frame.f_code.co_filename}:{frame.f_lineno}"


class Waiting:
    """One wait for the other ranks in a call of an engine, after PATIENCE_SECONDS; at its end what this rank has said
    is taken back.
    """

    def __init__(self, ranks: Sequence[int], words: str) -> None:
        self._ranks, self._words, self._suspected = ranks, words, False

    def __enter__(self) -> Waiting:
        return self

    def look(self) -> str:
        """Return what each rank does, in words, if no rank can go on, found twice in a row; else nothing."""
        found = within(ANSWER_SECONDS, self._ask) or {}
        again, self._suspected = self._suspected, bool(found)
        if not found or not again:
            return ""
        facts = ", ".join(f"rank {rank} {what}" for rank, what in found.items())
        verdict = f"the ranks wait for each other in different calls: {facts}"
        assert Monitor._running is not None
        store = Monitor._running.store
        within(ANSWER_SECONDS, lambda: store.set(_VERDICT, verdict))
        time.sleep(1.5 * INTERVAL_SECONDS)  # the others' threads say it too, before this rank ends and theirs with it
        return verdict

    def _ask(self) -> dict[int, str]:
        monitor = Monitor._running
        if monitor is None or len(self._ranks) > MOST_RANKS:
            return {}
        monitor.store.set(f"{_WAITS}{monitor.rank}", self._words)
        said = {monitor.rank: self._words}
        outside = False
        for rank in self._ranks:
            if rank != monitor.rank:
                words = read_text(monitor.store, f"{_OUTSIDE}{rank}")
                outside = outside or bool(words)
                said[rank] = words or read_text(monitor.store, f"{_WAITS}{rank}")
        return dict(sorted(said.items())) if outside and all(said.values()) else {}

    def __exit__(self, *_: object) -> None:
        monitor = Monitor._running
        if monitor is not None:
            within(ANSWER_SECONDS, lambda: monitor.store.set(f"{_WAITS}{monitor.rank}", ""))


def ended_ranks() -> str:
    """Return which ranks have ended, in words; nothing if that is not known."""
    monitor = Monitor._running
    if monitor is None or not dist.is_initialized():
        return ""
    others = [rank for rank in range(min(dist.get_world_size(), MOST_RANKS)) if rank != monitor.rank]

    def ask() -> list[str]:
        said = [(rank, read_text(monitor.store, f"{_ENDED}{rank}")) for rank in others]
        return [f"rank {rank} {words}" for rank, words in said if words]

    found = within(ANSWER_SECONDS, ask)
    if found:
        return ", ".join(found)
    return f"rank {others[0]} is gone" if len(others) == 1 else ""
