"""Ranks of one start of a job meet in a store that may have what the ranks of earlier starts wrote."""

from __future__ import annotations

import secrets
import time
from concurrent.futures import Future, ThreadPoolExecutor
from socket import gethostname

import pytest
import torch.distributed as dist

from zerocli.errors import UserError
from zerocli.ranks import attempts
from zerocli.ranks.attempts import ToldToStop, join_attempt

WORDS = "ended in its start: no such file"


@pytest.fixture(autouse=True)
def environ(monkeypatch):
    for name, value in {"MASTER_ADDR": "a", "MASTER_PORT": "7", "TORCHELASTIC_RUN_ID": "job"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(attempts, "NOTE_SECONDS", 0.05)
    monkeypatch.setattr(attempts, "TOLD_SECONDS", 0.0)


def start(store: dist.Store, *ranks: int, world: int, seconds: float = 60, lasts: bool = True) -> list[Future]:
    """Start some ranks of a job in the order given; each returns what it reads of rank 0's attempt."""

    def join(rank: int) -> str:
        found = join_attempt(store.clone(), rank, world, seconds, lasts)
        if rank == 0:
            found.set("said", secrets.token_hex(8))
        return found.get("said").decode()

    pool = ThreadPoolExecutor(len(ranks))
    return [pool.submit(join, rank) for rank in ranks]


def impatient(attempt: dist.Store, key: str, deadline: float, told, wait=attempts._get) -> bytes | None:
    """Wait for all ranks until rank 1 has come, for all else as usual."""
    if key != attempts.ALL_HERE:
        return wait(attempt, key, deadline, told)
    while attempt.add("here", 0) < 2:
        time.sleep(0.01)
    return None


def results(futures: list[Future]) -> set[str]:
    return {future.result(600) for future in futures}


def test_ranks_that_come_before_rank_0_do_not_take_the_attempt_before(store, monkeypatch):
    """After a whole attempt, after one that a rank never reached, and after one of another size."""
    first = results(start(store, 0, 1, world=2))
    again = start(store, 1, world=2)  # its place is taken
    assert not again[0].done() or again[0].result()
    second = results(again + start(store, 0, world=2))
    with monkeypatch.context() as patch:
        patch.setattr(attempts, "_get", impatient)
        for future in start(store, 0, 1, world=3):  # rank 2 never came
            with pytest.raises(UserError, match=r"rank 2 did not arrive within 60 s"):
                future.result(600)
    early = start(store, 2, 1, world=3)
    third = results(early + start(store, 0, world=3))
    smaller = start(store, 1, world=2)
    fourth = results(smaller + start(store, 0, world=2))
    assert len(first) == len(second) == len(third) == len(fourth) == 1
    assert len(first | second | third | fourth) == 4


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)


def test_a_rank_0_that_ended_before_it_said_anything_is_passed_over(store):
    store.add("zerocli/attempts", 1)
    early = start(store, 1, world=2)
    assert len(results(early + start(store, 0, world=2))) == 1


def test_a_rank_that_waits_in_an_attempt_without_its_rank_0_goes_on_with_the_next(store):
    """The old rank 0 ended after all but one had come: the late one completes nothing."""
    attempt = dist.PrefixStore("attempt-1", dist.PrefixStore("zerocli", store))
    store.add("zerocli/attempts", 1)
    attempt.set("begun", '{"job": "job", "world": 2, "host": "h", "process": 1}')
    attempt.add("taken/0", 1), attempt.add("here", 1)
    early = start(store, 1, world=2)
    with pytest.raises(TimeoutError):
        early[0].result(0.3)
    assert len(results(early + start(store, 0, world=2))) == 1


@pytest.mark.parametrize("told", [0, 1])
def test_a_rank_that_is_told_to_stop_before_all_have_come_ends_those_that_are_there(store, told):
    def word_to(rank: int) -> str:
        return "SIGTERM" if rank == told and store.add("zerocli/attempt-1/here", 0) == 2 else ""

    with ThreadPoolExecutor(2) as pool:
        others = [
            pool.submit(join_attempt, store.clone(), rank, 3, 60, True, lambda rank=rank: word_to(rank))
            for rank in range(2)
        ]
    for future in others:
        with pytest.raises(ToldToStop, match=rf"rank {told} was told to stop \(SIGTERM\) before all ranks had come"):
            future.result()
    assert len(results(start(store, 0, 1, 2, world=3))) == 1  # the next start


def test_a_rank_that_is_told_to_stop_when_all_have_come_goes_on(store):
    def told() -> str:
        store.set("outcome", attempts.COMPLETE)  # by rank 0, which this rank has not heard of yet
        return "SIGTERM"

    assert attempts._arrive(store, 1, 2, 60.0, time.monotonic() + 60, told)


@pytest.mark.parametrize("failed", [0, 1])
def test_a_rank_that_fails_before_it_comes_ends_those_that_wait_for_it(store, monkeypatch, failed):
    """As on a node that lacks the config: torchrun tells the other nodes nothing."""
    for name, value in {"RANK": failed, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(attempts, "_came", False)
    if failed == 0:
        store.add("zerocli/attempts", 0)
        attempts.tell_failure("no such file")
        assert store.get("zerocli/attempt-1/outcome") == f"rank 0 on node {gethostname()} {WORDS}".encode()
        return
    (waiting,) = start(store, 0, world=2)
    store.get("zerocli/attempt-1/begun")
    monkeypatch.setattr(attempts, "_came", False)
    attempts.tell_failure("no such file")
    with pytest.raises(UserError, match=f"rank 1 on node {gethostname()} {WORDS}"):
        waiting.result(600)


@pytest.mark.parametrize("lasts", [True, False])
def test_rank_0_reads_why_a_rank_has_failed_that_was_quicker(store, monkeypatch, lasts):
    begun = attempts._next_begun

    def slow(*given):
        found = begun(*given)
        ours = {"job": "job", "world": 2}
        attempts._tell(dist.PrefixStore("zerocli", store), 1, ours, f"rank 1 on node b {WORDS}", time.monotonic() + 60)
        return found

    monkeypatch.setattr(attempts, "_next_begun", slow)
    with pytest.raises(UserError, match=f"rank 1 on node b {WORDS}"):
        join_attempt(store, 0, 2, 5, lasts=lasts)


def test_a_rank_of_another_job_ends_and_the_job_whose_store_it_is_goes_on(store, monkeypatch):
    first = start(store, 0, world=2)
    store.get("zerocli/attempt-1/begun")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "other")
    with pytest.raises(UserError, match=r"rank 1 on node .* at a, port 7 belongs to another job: 2 ranks, rank 0 is"):
        join_attempt(store, 1, 2, 60, lasts=True)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert len(results(first + start(store, 1, world=2))) == 1  # its place is still free
    with pytest.raises(UserError, match="has a rank 1 already, of another job or of this one"):
        join_attempt(store, 1, 2, 60, lasts=False)


def test_a_rank_0_that_never_comes_is_not_waited_for_long(store, capfd):
    with pytest.raises(UserError, match="rank 0 did not arrive within 0 s"):
        join_attempt(store, 1, 2, 0.1, lasts=True)
    results(start(store, 0, 1, world=2))
    with pytest.raises(UserError, match="has a rank 1 already"):
        join_attempt(store, 1, 2, 0.1, lasts=True)
    assert "rank 0 is process" in capfd.readouterr().err  # the wait was noted
