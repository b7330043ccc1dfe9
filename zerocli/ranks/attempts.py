"""The ranks of one start of a job find each other in their store, which may have what earlier ones wrote.

[Note: attempts] torchrun's store outlives a restart. What torchrun tells its ranks does not tell one start from the
next: each agent counts restarts by itself, and counts none for nodes that leave or join. So rank 0 takes the next
number from the store, and everything that this attempt writes has that number in its key. A rank that comes before rank
0 finds the number of the attempt before. That one has another number of ranks, or this rank's place in it is taken, or
it has ended, or it never completes: only its own rank 0 could complete it, and the next rank 0 says that it is over.
The rank then takes the next number.

A rank that is told to stop before all have come says so in the store and ends, and the others that are there with it.

Ranks with another version of zerocli or torch come here too, so the keys and the form of what is exchanged must not
change.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from zerocli.console import say
from zerocli.errors import FAILURE, ShownElsewhere, UserError
from zerocli.layout.sizes import count_of
from zerocli.ranks.words import STOPPED, named, stopped
from zerocli.ranks.worker import job_name

BEGUN, ALL_HERE, OUTCOME = "begun", "all-here", "outcome"
COMPLETE, OVER = "complete", "over"
FAILED = "ended in its start"
NOTE_SECONDS = 10.0
"""How long a rank waits for the next attempt before it says why."""
POLL_SECONDS, POLLS_PER_SECOND = 0.2, 4096
"""How often a rank looks for a value, and how often all of them may."""
TOLD_SECONDS = 2.0
"""How long the others have to read why rank 0 ends: their store may end with it."""
TELL_SECONDS = 20.0
"""How long a rank that fails before it has come looks for the others."""

_came = False
"""Whether this rank has come to the others, which then see how it ends."""


def tell_failure(message: str) -> None:
    """Tell the ranks that wait for this one that it has ended, with a message, before it came to them.

    The launcher of a machine ends the other ranks there; those on other machines would wait for long.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if _came or dist.is_initialized() or any(name not in os.environ for name in names):
        return
    rank, world, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if rank == 0 and not agent:
        return  # the store would be this rank's
    text = f"rank {rank} on node {socket.gethostname()} {FAILED}: {message}"
    deadline, host = time.monotonic() + TELL_SECONDS, os.environ["MASTER_ADDR"]
    with contextlib.suppress(RuntimeError, OSError):
        while not answers(host, port, 1.0):
            if time.monotonic() > deadline:
                return
            time.sleep(POLL_SECONDS)
        patience = datetime.timedelta(seconds=TELL_SECONDS)
        store = dist.TCPStore(host, port, world, is_master=False, timeout=patience, wait_for_workers=False)
        _tell(dist.PrefixStore("zerocli", store), rank, _mine(world), text, deadline)


def _tell(store: dist.Store, rank: int, mine: Mapping[str, Any], text: str, deadline: float) -> None:
    if rank == 0:
        _attempt(store, store.add("attempts", 1)).set(BEGUN, json.dumps({**mine, **_this_process()}))
    while time.monotonic() < deadline:
        attempt = _attempt(store, max(1, store.add("attempts", 0)))
        if attempt.check([BEGUN]):
            begun = json.loads(attempt.get(BEGUN))
            if any(begun[key] != mine[key] for key in mine):
                return
            outcome = attempt.compare_set(OUTCOME, "", text).decode()
            attempt.set(ALL_HERE, "")
            if FAILED in outcome:
                return
        time.sleep(POLL_SECONDS)  # it is of an earlier start


def answers(host: str, port: int, seconds: float) -> bool:
    """Return whether something listens on a port."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=seconds):
        return True
    return False


def _this_process() -> dict[str, Any]:
    return {"host": socket.gethostname(), "process": os.getpid()}


def _mine(world: int) -> dict[str, Any]:
    return {"job": job_name() or os.environ.get("SLURM_JOB_ID", ""), "world": world}


class ToldToStop(Exception):
    """A rank was told to stop before all ranks had come: there is nothing to save, and none of them need wait."""


def never() -> str:
    """Return why this rank is to stop: it is not."""
    return ""


def join_attempt(
    store: dist.Store, rank: int, world: int, seconds: float, lasts: bool, told: Callable[[], str] = never
) -> dist.Store:
    """Return this attempt's part of the store, once all ranks have come, within `seconds`.

    Raise UserError if they do not come, or if the store belongs to another job. `lasts` says whether the store may have
    keys of earlier attempts. `told` says by what this rank was told to stop; then ToldToStop is raised, on all ranks
    that are there, unless all have come.
    """
    global _came
    _came = True
    told()
    store, deadline = dist.PrefixStore("zerocli", store), time.monotonic() + seconds
    mine = _mine(world)
    number = store.add("attempts", int(rank == 0))
    if rank == 0:
        about = json.dumps(mine | _this_process())
        if number > 1:
            before = _attempt(store, number - 1)
            before.compare_set(BEGUN, "", about)  # if its rank 0 ended before it said so
            before.compare_set(OUTCOME, "", OVER)
        _attempt(store, number).set(BEGUN, about)
    number, problem = max(1, number), ""
    while True:
        attempt = _attempt(store, number)
        begun = json.loads(_next_begun(attempt, problem, seconds, deadline, rank, told))
        over = lasts and _is_over(attempt, rank)
        problem = _why_another(begun, mine, attempt, rank)
        if over and not problem:
            problem = f"the start before ended without rank {rank}"
        if not problem and _arrive(attempt, rank, world, seconds, deadline, told):
            return attempt
        if problem and (not lasts or begun["job"] != mine["job"]):
            raise _elsewhere(problem)
        number += 1


def _is_over(attempt: dist.Store, rank: int) -> bool:
    """Return whether an attempt has ended; if another rank has ended it, its rank 0 is still to read why."""
    return attempt.check([OUTCOME]) and (rank > 0 or attempt.get(OUTCOME) == OVER.encode())


def _attempt(store: dist.Store, number: int) -> dist.PrefixStore:
    return dist.PrefixStore(f"attempt-{number}", store)


def _next_begun(
    attempt: dist.Store, problem: str, seconds: float, deadline: float, rank: int, told: Callable[[], str]
) -> bytes:
    """Return what rank 0 has written of itself; `problem` is why this rank did not stay in the attempt before."""
    if problem and (found := _get(attempt, BEGUN, time.monotonic() + NOTE_SECONDS, told)) is not None:
        return found
    if problem and not told():
        say(f"note: {problem}; waiting for rank 0 to start again")
    found = _get(attempt, BEGUN, deadline, told)
    if found is None and told():
        raise ToldToStop(stopped(rank, told()))
    if found is None and problem:
        raise _elsewhere(problem)
    if found is None:
        raise UserError(f"rank 0 did not arrive within {seconds:.0f} s", hint="the log of rank 0", exit_code=FAILURE)
    return found


def _why_another(begun: Mapping[str, Any], mine: Mapping[str, Any], attempt: dist.Store, rank: int) -> str:
    """Take this rank's place in an attempt; return why it is not this rank's, in words, if it is not."""
    about = f"{count_of(begun['world'], 'rank')}, rank 0 is process {begun['process']} on node {begun['host']}"
    where = f"rank {rank} on node {socket.gethostname()}: the store at {os.environ['MASTER_ADDR']}, port "
    where += os.environ["MASTER_PORT"]
    if any(begun[key] != mine[key] for key in mine):
        return f"{where} belongs to another job: {about}"
    if attempt.add(f"taken/{rank}", 1) > 1:
        return f"{where} has a rank {rank} already, of another job or of this one: {about}"
    return ""


def _elsewhere(problem: str) -> UserError:
    hint = "another MASTER_PORT for one of the two; under torchrun another --rdzv-endpoint or --master-port"
    return UserError(problem, hint=hint, exit_code=FAILURE)


def _arrive(
    attempt: dist.Store, rank: int, world: int, seconds: float, deadline: float, told: Callable[[], str]
) -> bool:
    """Wait for all ranks; return False if this attempt's rank 0 has ended.

    Raise UserError if a rank does not come, and ToldToStop if one is to stop before all have come.
    """
    if _is_over(attempt, rank):
        return False
    if attempt.add("here", 1) == world:
        attempt.set(ALL_HERE, "")
    until = deadline + NOTE_SECONDS if rank else deadline  # rank 0 is to say it first
    found = _get(attempt, OUTCOME if rank else ALL_HERE, until, told)
    if found is None and (why := told()):
        outcome = attempt.compare_set(OUTCOME, "", stopped(rank, why)).decode()  # too late if it is complete
        attempt.set(ALL_HERE, "")  # for rank 0, which then reads the outcome
    elif rank:
        outcome = "rank 0 has not answered" if found is None else found.decode()
    elif found is not None:
        outcome = attempt.compare_set(OUTCOME, "", COMPLETE).decode()
    else:
        missing = [other for other in range(1, world) if not attempt.check([f"taken/{other}"])]
        outcome = f"{named(missing)} did not arrive within {seconds:.0f} s" if missing else "a rank did not arrive"
        attempt.set(OUTCOME, outcome)
        time.sleep(TOLD_SECONDS)
    if STOPPED in outcome:
        if rank == 0:
            time.sleep(min(TOLD_SECONDS, 3 * POLL_SECONDS))
        raise ToldToStop(outcome)
    if outcome not in (COMPLETE, OVER):
        kind = ShownElsewhere if rank and found is not None else UserError
        raise kind(outcome, hint="the logs of these ranks", exit_code=FAILURE)
    return outcome == COMPLETE


def _get(store: dist.Store, key: str, deadline: float, told: Callable[[], str] = never) -> bytes | None:
    """Return a value once it is there; None if it is not there in time, or this rank is told to stop.

    The store's own wait runs no Python, so no signal would be seen in it.
    """
    longest = max(POLL_SECONDS, int(os.environ.get("WORLD_SIZE", "1")) / POLLS_PER_SECOND)
    pause = longest / 100
    while not store.check([key]):
        if told() or time.monotonic() > deadline:
            return None
        time.sleep(pause)
        pause = min(longest, 1.5 * pause)
    found: bytes = store.get(key)
    return found
