"""Heartbeats of many ranks: few messages, whatever their number, and a lost rank or host is still named."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks

from zerocli.ranks.words import named
from zerocli.run.processes.heartbeats import Heartbeat, Heartbeats, found_text, lost_ranks, read_found
from zerocli.run.processes.shared_slots import SharedSlots
from zerocli.run.processes.watchdog import RANKS_PER_SECOND, interval_of


class Counted(dist.Store):
    """Counts what passes to another store, by the kind of message."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.counts, self.nbytes = dist.HashStore(), Counter[str](), 0

    def _count(self, kind: str, *values: bytes) -> None:
        self.counts[kind] += 1
        self.nbytes += sum(map(len, values))

    def set(self, key: str, value: Any) -> None:
        self._count("set", bytes(value, "utf8") if isinstance(value, str) else bytes(value))
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        found = self.inner.get(key)
        self._count("get", found)
        return found

    def add(self, key: str, value: int) -> int:
        self._count("add")
        return self.inner.add(key, value)

    def check(self, keys: list[str]) -> bool:
        self._count("check")
        return self.inner.check(keys)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self._count("compare_set")
        return self.inner.compare_set(key, expected, desired)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found = [self.inner.get(key) for key in keys]
        self._count("multi_get", *found)
        return found

    def has_extended_api(self) -> bool:
        return True


def beats_of(ranks: int, store: Any, near: int = 8, interval: float = 1.0) -> list[Heartbeats]:
    return [Heartbeats(rank, range(ranks), store, interval, host=f"host-{rank // near}") for rank in range(ranks)]


def beat(time: float, doing: str = "in forward", **others: Any) -> Heartbeat:
    return Heartbeat(time, 0.0, {"data": 3}, doing, **others)


def say_all(beats: list[Heartbeats], time: float, lost: tuple[int, ...] = ()) -> None:
    """Let all ranks but the lost ones say two heartbeats: the second publishes what others said after the first."""
    for now in (time, time + 1):
        for each in beats:
            if each.rank not in lost:
                each.say(beat(now))


def pauses(beats: list[Heartbeats], time: float, lost: tuple[int, ...] = ()) -> Callable[[], None]:
    """Return a pause in which all ranks but the lost ones say more."""
    times = itertools.count(time, 2.0)
    return lambda: say_all(beats, next(times), lost)


@pytest.mark.parametrize("goes", [0, 1, 3])
def test_one_rank_of_a_host_reports_a_loss_whenever_the_store_goes(goes):
    """Also if a rank finds the loss that comes before those that have reported it."""
    ranks = beats_of(3, dist.HashStore())
    for each in ranks:
        each.say(beat(1.0))
    claims = []
    for number, each in enumerate(reversed(ranks)):
        each.gone = number >= goes
        claims.append(each.claim_report())
    assert claims == [True, False, False]


def test_a_host_sends_one_message_per_interval_whatever_its_ranks():
    """And a rank of a large job has longer intervals: what the store takes in a second is bounded."""
    for ranks in (8, 64, 256):
        store = Counted()
        beats = beats_of(ranks, store)
        say_all(beats, 1.0)
        store.counts.clear()
        for each in beats:
            each.say(beat(3.0))
        assert store.counts == {"set": ranks // 8}
    assert interval_of(600, 8) == 1.0 and interval_of(2, 8) == interval_of(2, 16384) == 0.1
    assert 16384 / interval_of(600, 16384) <= RANKS_PER_SECOND


def asked_at_once(ranks: int) -> tuple[Counter[str], int]:
    """Let two of so many ranks ask at the same time; return what the second one sends and reads after its turn."""
    store = Counted()
    beats = beats_of(ranks, store)
    say_all(beats, 1.0)
    assert [each._take_turn() for each in beats[:3]] == [(0, 0)] * 3
    store.counts.clear()
    first = iter([functools.partial(beats[0].ask_twice, pauses(beats, 3.0, (ranks - 1,)))])

    def meanwhile() -> None:
        for answer in first:
            answer()
            assert store.counts["multi_get"] == 4
            store.counts.clear()
            store.nbytes = 0

    heard = beats[1].ask_twice(meanwhile)
    assert heard is not None and heard[1] == {ranks - 1} and len(heard[0]) == ranks - 1
    return store.counts, store.nbytes


def test_of_ranks_that_ask_at_the_same_time_one_reads_them_all():
    (few, few_nbytes), (many, many_nbytes) = asked_at_once(16), asked_at_once(256)
    assert few == many == {"check": 1, "get": 1} and many_nbytes < 1.2 * few_nbytes


def test_a_host_is_heard_without_its_first_ranks():
    """The next one that is alive publishes its record: the loss of one rank is not taken for that of the host."""
    beats = beats_of(16, dist.HashStore())
    say_all(beats, 1.0)
    say_all(beats, 3.0, lost=(8, 9))
    said = lost_ranks(beats[0], pauses(beats, 5.0, lost=(8, 9)))
    assert said == "ranks 8 to 9 do not answer (they were in forward)"


def test_the_loss_of_many_ranks_is_one_line():
    beats = beats_of(64, dist.HashStore())
    say_all(beats, 1.0)
    lost = tuple(range(8, 24))
    said = lost_ranks(beats[0], pauses(beats, 3.0, lost))
    assert said == "ranks 8 to 23 do not answer (they were in forward)"
    assert named(range(0, 100, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 42 more"
    assert [named(each) for each in ([3], [3, 4, 5], [1, 3, 4])] == ["rank 3", "ranks 3 to 5", "ranks 1 and 3 to 4"]


def test_last_words_are_heard_at_once():
    beats = beats_of(4, dist.HashStore())
    say_all(beats, 1.0)
    beats[3].say(beat(2.0, ended="loss is nan at step 3"))
    assert lost_ranks(beats[1], pauses(beats, 3.0, lost=(3,))) == "rank 3 ended (loss is nan at step 3)"


def test_a_rank_that_was_to_answer_and_is_gone_holds_nobody_up(monkeypatch):
    monkeypatch.setattr("zerocli.run.processes.heartbeats.PATIENCE_SECONDS", 0.01)
    beats = beats_of(4, dist.HashStore())
    say_all(beats, 1.0)
    assert beats[2]._take_turn() == (0, 2)  # and it ends
    heard = beats[0].ask_twice(pauses(beats, 3.0, lost=(2,)))
    assert heard is not None and heard[1] == {2}
    assert beats[1]._take_turn()[0] > 0  # the next question is another's


def test_what_one_rank_found_is_short_and_the_same_for_all():
    said = {rank: dataclasses.replace(beat(float(rank)), idle=12.2) for rank in range(1000)}
    said[7] = beat(1.0, "in backward", alone="writing")
    text = found_text(said, {1, 2, 3})
    assert len(text) < 1000
    again, silent = read_found(text)
    assert silent == {1, 2, 3} and again.keys() == said.keys()
    assert again[7].alone == "writing" and again[8].idle == 12.0 and again[8].counts == {"data": 3}


def test_a_slot_that_is_being_written_costs_only_its_own_rank():
    beats = beats_of(2, dist.HashStore())
    say_all(beats, 1.0)
    slots = beats[0]._slots
    assert slots is not None
    slots.write(1, '[1, {"time": ')
    assert beats[0]._read_beats().keys() == {0}


def on_one_host() -> tuple[int, int, list[int]]:
    """Return the number of hosts that the store knows, this rank's slot, and whose heartbeats are in its slots."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    beats = Heartbeats(rank, range(dist.get_world_size()), store)
    beats.say(beat(1.0))
    dist.barrier()
    here = sorted(beats._read_beats())
    dist.barrier()
    return store.add("zerocli-beats/hosts", 0), beats._slot, here


def test_processes_of_one_host_share_their_slots():
    found = run_ranks(3, on_one_host)
    assert {hosts for hosts, _, _ in found} == {1} and {slot for _, slot, _ in found} == {0, 1, 2}
    assert [here for _, _, here in found] == [[0, 1, 2]] * 3


@pytest.mark.parametrize("where", ["", "1 2", "0 0 zerocli-slots-x", "99999999 3 zerocli-slots-x"])
def test_slots_that_cannot_be_reached_are_not_opened(where):
    assert SharedSlots.open(where) is None
