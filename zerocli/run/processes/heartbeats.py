"""Heartbeats: the status of each rank, for others that are stuck or have lost a rank.

A rank whose heartbeats continue is alive, one that has begun fewer collectives has not arrived, and one that exited
cleanly has published the reason.

[Note: heartbeats of many ranks] A rank writes its heartbeat to a slot of its host, which is memory. Of the ranks of a
host the first that is alive publishes all of the slots as one record in the ranks' store: one message per host and
interval. Of ranks that ask at the same time one reads the records, and publishes what it found in few words; the others
read that. So no rank sends or reads more in a larger job, and a rank whose host's first rank is gone is still heard.
A slot has its rank's process too: that a rank of this host is gone is seen without a message.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import torch.distributed as dist

from zerocli.ranks.store import read_all, read_text
from zerocli.ranks.words import by_words, named, ranks_of, runs, said_of
from zerocli.ranks.worker import within
from zerocli.run.processes import shared_slots

T = TypeVar("T")
PATIENCE_SECONDS = 2.0
"""How long to wait for an answer from the ranks' store, which may be gone too."""
FOUND_TRIES = 8
"""How often a rank looks for what another has found, within PATIENCE_SECONDS."""
GONE_SECONDS = 0.3
"""How long a process takes to end after its connections have."""
MISSED = 1.5
"""Intervals without a heartbeat after which the next rank of a host publishes its record."""
MOST_WORDS = 200
"""Characters of a status."""
MOST_PLACES = 64
"""Ranks whose nodes are looked up for a message."""


@dataclass(frozen=True)
class Heartbeat:
    """The last status of a rank."""

    time: float
    """The host's own clock; others only check whether it advances."""
    idle: float
    """Seconds since it last began or finished anything that others could wait for."""
    counts: dict[str, int] = field(default_factory=dict)
    """Number of collectives that it has begun, by axis."""
    doing: str = ""
    alone: str = ""
    """Work that it does without other ranks, and that its own watchdog monitors."""
    ended: str = ""
    """Why it ended; set in its last heartbeat."""
    by_loss: bool = False
    """Whether it ended because it had lost another rank."""


Heard = tuple[dict[int, Heartbeat], set[int]]
"""The heartbeats of ranks, and which of them are silent."""


class Heartbeats:
    """The heartbeats of all ranks that hold a part of one model; `ranks` are global.

    A rank says one every `interval` seconds. `host` is the name of this host, for tests.
    """

    def __init__(self, rank: int, ranks: Sequence[int], store: Any, interval: float = 1.0, host: str = "") -> None:
        self.rank, self.ranks, self._interval = rank, tuple(ranks), interval
        self._job, self._store = store, dist.PrefixStore("zerocli-beats", store)
        self._host = host or shared_slots.host_name()
        self._slots: shared_slots.SharedSlots | None = None
        self._slot = 0
        self._process = shared_slots.process_of("self")
        self._last: Heartbeat | None = None
        self.gone = False
        """Whether the store is gone; it is not queried again, as torch logs long warnings each time."""

    # -- saying ----------------------------------------------------------------------------------------------------

    def say(self, beat: Heartbeat) -> None:
        """Write a heartbeat, and publish the host's record if that is up to this rank; do nothing if the store is gone.

        Last words are published at once.
        """
        with contextlib.suppress(Exception):
            if self._slots is None:
                self._reach(self._join)
            beat = replace(beat, doing=beat.doing[:MOST_WORDS], alone=beat.alone[:MOST_WORDS])
            self._last = beat
            self._write(beat)
            here = self._read_beats()
            if beat.ended or self.rank == self._publisher(here, beat.time):
                record = json.dumps({rank: asdict(each) for rank, each in here.items()})
                self._reach(lambda: self._store.set(f"record/{self._host}", record))

    def _write(self, beat: Heartbeat) -> None:
        assert self._slots is not None
        self._slots.write(self._slot, json.dumps([self.rank, asdict(beat), self._process]))

    def leave(self) -> None:
        """Say that this rank is through: it is not lost when its process ends."""
        self._process = None
        if self._last is not None:
            self._write(self._last)

    def _join(self) -> None:
        self._host, self._slots, self._slot = shared_slots.join(self._store, self._host)
        if self._slot == 0:
            self._store.set(f"record/{self._host}", "{}")
            self._store.set(f"host/{self._store.add('hosts', 1) - 1}", self._host)

    def _read_beats(self) -> dict[int, Heartbeat]:
        return {rank: beat for rank, beat, _ in self._read_records()}

    def _read_records(self) -> Iterator[tuple[int, Heartbeat, shared_slots.Process | None]]:
        for text in self._slots.read() if self._slots is not None else ():
            with contextlib.suppress(ValueError, TypeError):
                rank, beat, process = json.loads(text)
                yield int(rank), Heartbeat(**beat), process and tuple(process)

    def gone_here(self) -> dict[int, Heartbeat]:
        """Return the ranks of this host whose processes ended before they were through; sends no message."""
        here = [(rank, beat, process) for rank, beat, process in self._read_records() if process]
        return {rank: beat for rank, beat, process in here if shared_slots.process_of(str(process[0])) != process}

    def _publisher(self, here: Mapping[int, Heartbeat], now: float) -> int:
        """Return the first rank of this host that is alive."""
        late = now - MISSED * self._interval
        return min((rank for rank, beat in here.items() if beat.time >= late and not beat.ended), default=self.rank)

    # -- asking ----------------------------------------------------------------------------------------------------

    def ask(self) -> dict[int, Heartbeat] | None:
        """Return each rank's last heartbeat, None if the store does not answer."""

        def ask() -> list[bytes]:
            hosts = read_all(self._store, [f"host/{number}" for number in range(self._store.add("hosts", 0))])
            return read_all(self._store, [f"record/{host.decode()}" for host in hosts])

        records = within(PATIENCE_SECONDS, lambda: self._reach(ask))
        if records is None:
            return None
        found: dict[int, Heartbeat] = {}
        for record in records:
            found |= {int(rank): Heartbeat(**beat) for rank, beat in json.loads(record).items()}
        return found

    def _reach(self, act: Callable[[], T]) -> T:
        """Return the result of `act` on the store; a failed connection, but not a slow one, marks the store as gone."""
        if self.gone:
            raise ConnectionError("the store is gone")
        try:
            return act()
        except Exception:
            self.gone = True
            raise

    def ask_twice(self, pause: Callable[[], object]) -> Heard | None:
        """Return the others' current heartbeats, and the ranks that said nothing new during the second of two pauses.

        One of the ranks that ask at the same time reads them all; the others take what it found.
        """
        turn = within(PATIENCE_SECONDS, lambda: self._reach(self._take_turn))
        if turn is None:
            return None
        number, asker = turn
        heard = self._found(number, pause) if asker != self.rank else None
        if heard is None and (heard := self._read_twice(pause)) is not None:
            text = found_text(*heard)
            within(PATIENCE_SECONDS, lambda: self._reach(lambda: self._publish_found(number, text)))
        if heard is None:
            return None
        said, silent = heard
        return {rank: beat for rank, beat in said.items() if rank != self.rank}, silent - {self.rank}

    def _take_turn(self) -> tuple[int, int]:
        """Return the number of the question that is open now, and the rank that answers it."""
        number = self._store.add("asked", 0)
        return number, int(self._store.compare_set(f"asker/{number}", "", str(self.rank)))

    def _publish_found(self, number: int, text: str) -> None:
        self._store.set(f"found/{number}", text)
        self._store.add("asked", 1)

    def _found(self, number: int, pause: Callable[[], object]) -> Heard | None:
        """Return what the rank that answers a question has found; None if it does not come."""
        pause()
        pause()
        key = f"found/{number}"
        for _ in range(FOUND_TRIES):  # it began a moment earlier or later, and its two questions take a while
            if text := within(PATIENCE_SECONDS, lambda: self._reach(lambda: read_text(self._store, key))):
                return read_found(text)
            time.sleep(PATIENCE_SECONDS / FOUND_TRIES)
        return None

    def _read_twice(self, pause: Callable[[], object]) -> Heard | None:
        pause()  # what a rank said last may not have been published before
        before = self.ask()
        if before is not None:
            pause()
        now = self.ask()
        if before is None or now is None:
            return None
        others = [rank for rank in self.ranks if rank != self.rank]
        silent = {r for r in others if r not in now or (r in before and before[r].time == now[r].time)}
        return {rank: now[rank] for rank in self.ranks if rank in now}, silent

    def claim_report(self) -> bool:
        """Return whether this rank reports a loss: the first that asks, or the first of its host without a store."""
        key, mine = "reporter", str(self.rank)
        first = within(PATIENCE_SECONDS, lambda: self._reach(lambda: self._store.compare_set(key, "", mine).decode()))
        if first not in (mine, None):
            return False
        # In the slots too, as the store may be gone when the next rank asks.
        return self._slots is None or self._slots.claim() or first == mine

    def places(self, ranks: Sequence[int]) -> str:
        """Return on which nodes ranks are, in words, from what they have said of themselves at the start."""

        def ask() -> dict[int, str]:
            keys = {rank: info_key(rank) for rank in ranks[:MOST_PLACES]}
            there = {rank: key for rank, key in keys.items() if self._job.check([key])}
            infos = read_all(self._job, list(there.values()))
            return {rank: json.loads(info)["host"] for rank, info in zip(there, infos, strict=True)}

        hosts = by_words(within(PATIENCE_SECONDS, lambda: self._reach(ask)) or {})
        return "".join(
            f"; {named(there)} {'is' if len(there) == 1 else 'are'} on node {host}" for host, there in hosts.items()
        )


def info_key(rank: int) -> str:
    """Return the key of a rank's `RankInfo`."""
    return f"nodes/card/{rank}"


def found_text(said: Mapping[int, Heartbeat], silent: Iterable[int]) -> str:
    """Return heartbeats as JSON; ranks with the same status, for the same number of seconds, are written once."""
    alike: dict[str, list[int]] = {}
    for rank, beat in said.items():
        status = asdict(replace(beat, time=0.0, idle=float(round(beat.idle))))
        alike.setdefault(json.dumps(status, sort_keys=True), []).append(rank)
    rows = [[json.loads(status), runs(ranks)] for status, ranks in alike.items()]
    return json.dumps({"said": rows, "silent": runs(silent)})


def read_found(text: str) -> Heard:
    """Return what `found_text` wrote."""
    body = json.loads(text)
    said = {rank: Heartbeat(**status) for status, where in body["said"] for rank in ranks_of(where)}
    return said, set(ranks_of(body["silent"]))


def lost_ranks(beats: Heartbeats, pause: Callable[[], object]) -> str:
    """Return which ranks are gone, in words; ranks that ended because they too lost a rank are not named."""
    deadline = time.monotonic() + GONE_SECONDS
    while not (here := lost_here(beats)) and time.monotonic() < deadline:
        time.sleep(GONE_SECONDS / 10)
    if here:
        return here
    heard = beats.ask_twice(pause)
    if here := lost_here(beats):  # a process with a GPU ends slowly
        return here
    if heard is None:
        return no_store()
    said, silent = heard
    ended = {rank: beat for rank, beat in said.items() if beat.ended}
    causes = {rank: f"ended ({beat.ended})" for rank, beat in ended.items() if not beat.by_loss}
    gone = {rank: said.get(rank) for rank in sorted(silent - ended.keys())}
    if not causes and not gone:
        return "all ranks still answer: the link between them broke"
    return "; ".join(filter(None, (said_of(causes), silent_words(gone)))) + beats.places(sorted({*causes, *gone}))


def lost_here(beats: Heartbeats, by_loss: bool = False) -> str:
    """Return which ranks of this host are gone, in words; with `by_loss` also those that ended for another's loss."""
    gone = {rank: beat for rank, beat in beats.gone_here().items() if by_loss or not beat.by_loss}
    if not gone:
        return ""
    ended = {rank: f"ended ({beat.ended})" for rank, beat in gone.items() if beat.ended}
    silent = silent_words({rank: beat for rank, beat in gone.items() if not beat.ended}, ("is gone", "are gone"))
    where = f"{named(gone)} {'is' if len(gone) == 1 else 'are'} on node {socket.gethostname()}"
    return "; ".join(filter(None, (said_of(ended), silent, where)))


def silent_words(
    beats: Mapping[int, Heartbeat | None], says: tuple[str, str] = ("does not answer", "do not answer")
) -> str:
    """Return the words that ranks do not answer, and what the last heartbeat of each said it was doing."""
    found = by_words({rank: beat.doing if beat is not None else "" for rank, beat in beats.items()})
    lines = []
    for doing, ranks in found.items():
        does, it = (says[0], "it was") if len(ranks) == 1 else (says[1], "they were")
        lines.append(f"{named(ranks)} {does}" + (f" ({it} {doing})" if doing else ""))
    return "; ".join(lines)


def no_store() -> str:
    """Return why the others' heartbeats cannot be read, in words."""
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeper = "torchrun on the host of rank 0" if agents else "rank 0"
    return f"{keeper}, which keeps the store that ranks speak through, does not answer"
