"""The slowest rank is named in the metrics with what takes it long, and one that stays slow is one warning."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from runs import losses, train
from torch import nn

import zerocli
from tiers.nvme import NvmeTier
from zerocli.data.batches import Batches
from zerocli.engine.comm import Collectives, Issued
from zerocli.engine.events import EXCHANGE, Events
from zerocli.profile import runs, table
from zerocli.profile.spread import spread
from zerocli.run import steps
from zerocli.run.output import stragglers
from zerocli.run.output.metrics import Recorder
from zerocli.run.output.stragglers import LONG_STEPS, Stragglers, slowest

TIMES, RECENT = 6, 10
"""An injected delay takes so many times the longest of a rank's last micro-steps: no machine is too busy to see it."""


class Slow:
    """Delays what a rank does by a multiple of its longest recent micro-step; the first one makes buffers."""

    def __init__(self) -> None:
        self.seconds, self.step = [], steps.micro_step

    def micro_step(self, *given: object) -> torch.Tensor:
        began = time.perf_counter()
        found = self.step(*given)
        self.seconds.append(time.perf_counter() - began)
        return found

    def wait(self) -> None:
        time.sleep(TIMES * max(self.seconds[1:][-RECENT:], default=0.0))


def slow_compute(rank: int, folder: str) -> str:
    socket.gethostname = lambda: "ab"[rank]
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    stragglers.LONG_STEPS = 10
    slow = Slow()

    def delayed(*given: object) -> torch.Tensor:
        slow.wait()
        return slow.micro_step(*given)

    if rank == 1:
        steps.micro_step = delayed
    return folder


def slow_data(rank: int, folder: str) -> str:
    slow, read = Slow(), Batches.batch

    def delayed(*given: object) -> object:
        slow.wait()
        return read(*given)

    if rank == 1:
        steps.micro_step, Batches.batch = slow.micro_step, delayed
    return folder


def slow_disk(rank: int, folder: str) -> str:
    slow, move = Slow(), NvmeTier._move_piece

    async def delayed(*given: object) -> None:
        early = slow.seconds[1:RECENT]  # later ones wait for these reads
        writes = given[-1]
        await asyncio.sleep(TIMES * max(early) if len(slow.seconds) > RECENT and not writes else 0.0)
        await move(*given)

    if rank == 1:
        steps.micro_step, NvmeTier._move_piece = slow.micro_step, delayed
    return folder


def named(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["slowest"] for line in lines if "slowest" in line]


def is_named(folder: Path, cause: str, before: Callable[[int, str], str], *sets: str) -> bool:
    """Whether rank 1 is named for the cause: in one run of three, as other work may hold up rank 0 for all of one."""
    for attempt in range(3):
        run = folder / f"run{attempt}"
        assert train(run, "train.steps=24", "checkpoint.every=0", *sets, before=before).codes == [0, 0]
        if (1, cause) in {(each["rank"], each["cause"]) for each in named(run)}:
            return True
    return False


def test_a_rank_whose_compute_is_slow_is_named_and_warned_of_once(tmp_path):
    sets = ("train.steps=24", "checkpoint.every=0", "zero.stage=3")
    ended = train(tmp_path / "run", *sets, before=slow_compute)
    assert ended.codes == [0, 0], ended.said
    found = named(tmp_path / "run")
    assert [each["steps"] for each in found] == [[2, 11], [12, 21]]
    assert (1, "b", "compute") in {(each["rank"], each["node"], each["cause"]) for each in found}
    assert all(each["fastest"] == each["median"] < each["seconds"] for each in found)
    assert len(re.findall(r"warning: rank 1 on node b has been slow for \d+ steps", ended.said[0])) == 1
    assert "most of that in compute" in ended.said[0] and "has been slow" not in ended.said[1]
    shown = table.render(runs.read(str(tmp_path / "run")))
    assert re.search(r"  rank 1 on b +slowest in [12] of 2, \d+% over the median, most of it in compute", shown)


@pytest.mark.parametrize("stage", [2, pytest.param(0, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)])
def test_a_rank_that_waits_for_its_data_is_named(tmp_path, stage):
    assert is_named(tmp_path, "data", slow_data, f"zero.stage={stage}")


@pytest.mark.long
def test_a_rank_whose_disk_is_slow_in_the_update_is_named(tmp_path):
    places = ("offload.placement=optimizer=nvme", f"offload.nvme_path=['{tmp_path}']")
    assert is_named(tmp_path, "transfers", slow_disk, *places)


@pytest.mark.long
def test_naming_the_slowest_changes_no_number(tmp_path):
    sets = ("train.steps=25", "checkpoint.every=0")
    assert train(tmp_path / "plain", *sets).codes == train(tmp_path / "slow", *sets, before=slow_data).codes == [0, 0]
    assert losses(tmp_path / "plain") == losses(tmp_path / "slow")


# -- what is compared --------------------------------------------------------------------------------------------------


def rows(*own: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor([[rank, *seconds] for rank, seconds in enumerate(own)], dtype=torch.float64)


def test_the_slowest_rank_is_compared_with_the_lower_median():
    found = slowest(rows((1.0, 0.1, 0, 0), (1.0, 0.5, 0, 0), (1.1, 0.1, 0, 0), (1.2, 0.1, 0, 0)))
    assert found == {"rank": 1, "cause": "data", "seconds": 1.5, "median": pytest.approx(1.2), "fastest": 1.1}
    assert slowest(rows((1.0, 0, 0, 0))) is None  # of one rank none is slow


def waits(own: float) -> dict[str, float]:
    """The waits of a rank in a step of 1.5 seconds, of which it works `own`."""
    return {"collectives": 1.5 - own, "data": 0.0, "transfers": 0.0, "optimizer": 0.0}


@pytest.mark.parametrize(
    ("own", "others", "warns"),
    [
        (1.0, (1.0, 1.25), True),
        (1.0, (1.0, 1.15), False),
        (0.1, (0.1, 0.13), False),  # too little of the step
        (1.0, (1.25, 1.25), False),  # as slow as the median
    ],
)
def test_only_what_is_slow_for_long_is_a_warning(own, others, warns):
    said, exchanges = watch(4 * LONG_STEPS, own, lambda step: others)
    assert len(said) == warns
    assert exchanges == 4 * LONG_STEPS // 10  # one per interval


def watch(num_steps: int, own: float, others: Callable[[int], tuple[float, ...]]) -> tuple[list[str], int]:
    """Return the warnings of a rank that works `own` in each step, beside others; and in how many steps it told."""
    said: list[str] = []
    exchanges, watched = 0, Stragglers(("a", "b", "c"), said.append)
    for step in range(1, num_steps + 1):
        watched.add(step, 1.5, waits(own))
        mine = watched.take()
        exchanges += bool(mine)
        rest = [[rank, each, 0.0, 0.0, 0.0] for rank, each in enumerate(others(step), 1)]
        watched.compare(torch.tensor([mine, *rest] if mine else [], dtype=torch.float64))
    return said, exchanges


def test_a_rank_that_is_slow_now_and_then_is_no_warning():
    assert watch(300, 1.0, lambda step: (1.0, 1.5) if step % 40 else (1.0, 1.0))[0] == []


def test_the_spread_of_a_run_is_read_from_its_lines():
    def line(rank: int, seconds: float, cause: str) -> dict:
        known = {"rank": rank, "node": "", "cause": cause}
        return {"slowest": known | {"seconds": seconds, "median": 1.0, "fastest": 0.5}}

    assert spread([{}, {"slowest": None}]) is None
    found = spread([line(3, 1.5, "data"), {}, line(3, 1.1, "data"), line(0, 1.0, "compute")])
    assert found["intervals"] == 3 and found["slowest"] == pytest.approx(1.2) and found["fastest"] == 0.5
    assert [(each["rank"], each["intervals"], each["over"]) for each in found["ranks"]] == [
        (3, 2, pytest.approx(0.3)),
        (0, 1, 0.0),
    ]
    shown = "\n".join(table._spread(found))
    assert "0.5000 s fastest, 1.0000 s median, 1.2000 s slowest (mean of 3 intervals" in shown
    assert "rank 3                slowest in 2 of 3, 30% over the median, most of it in data" in shown
    assert list(table._spread(None)) == []


class Exchanges(Events):
    """Notes the collectives of the exchange after each step."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.inside = False

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.inside = name == EXCHANGE
        yield
        self.inside = False

    def collective(self, axis: Collectives, issued: Issued) -> contextlib.AbstractContextManager[None]:
        if self.inside:
            self.kinds.append(issued.kind)
        return contextlib.nullcontext()


def record_steps(number: int) -> tuple[list[list[str]], list[float], bool]:
    """Return the kinds of each step's exchanges, its recorded losses, and whether the run is to stop."""
    torch.manual_seed(0)
    model, events = nn.Linear(3, 1), Exchanges()
    engine = zerocli.shard(model, stage=1, lr=0.0, events=events)
    rank, kinds, lines = engine.collectives.rank, [], []
    recorder = Recorder(engine, 1, lambda: 0.0, lambda: rank == 1, Stragglers([], print), tuple)
    for _ in range(number):
        loss = model(torch.full((1, 3), rank + 1.0)).sum()
        engine.backward(loss)
        result = engine.step()
        events.kinds.clear()
        lines.append(recorder.record(result, loss.detach()))
        kinds.append(list(events.kinds))
    lines.append(recorder.flush())
    found = [line.loss for line in lines if line is not None]
    engine.close()
    mean = sum(model(torch.full((1, 3), at + 1.0)).item() for at in range(engine.collectives.world))
    assert found == [mean / engine.collectives.world] * number
    return kinds, found, recorder.stopping


def test_ranks_gather_what_they_measured_only_when_they_are_compared():
    """All other steps exchange as many bytes for any number of ranks."""
    for kinds, _, stopping in run_ranks(3, record_steps, stragglers.INTERVAL + 3):
        gathers = [step for step, kind in enumerate(kinds) if kind != ["all_reduce", "all_reduce"]]
        assert len(gathers) == 1 and kinds[gathers[0]] == ["all_reduce", "all_reduce", "all_gather"]
        assert stopping
