"""A run that is stuck ends by itself, and says what was stuck and who had not arrived."""

from __future__ import annotations

import functools
import re
import shutil
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from lengths import LONG
from ranks import run_ranks
from runs import STUCK, Death, Ended, train
from saved_engines import engine_of

import zerocli
from tiers.transfer import WAITED_FOR, Transfer
from zerocli.config import ModelConfig
from zerocli.engine.comm import Collectives
from zerocli.files import pread
from zerocli.models import build
from zerocli.ranks.startup import STARTUP, Progress
from zerocli.run.processes.heartbeats import Heartbeat
from zerocli.run.processes.watchdog import Axis, Watchdog

SETS = ("zero.stage=3", "train.watchdog=6")
STAGES = {"write": 1, "commit": 0} | ({"sync": 1} if LONG else {})
"""Where a save gets stuck, and on which rank."""
STUCK_COLLECTIVES = {
    "gather": (Death((1,), 7, "gather", 0), r"all_gather of parameters of \S+.* rank 1 had not arrived \(after coll"),
    "norm": (Death((1,), 2, "optimizer", 0), r"engine.step\(\) has been stuck.* rank 1 had not arrived"),
    "stopped": (Death((1,), 3, "forward", signal.SIGSTOP), r"rank 1 does not answer"),
}
if LONG:
    STUCK_COLLECTIVES["reduce"] = (
        Death((1,), 5, "reduce", 0),
        r"reduce_scatter of gradients of \S+.* rank 1 had not arrived",
    )
STUCK_SAVES = {stage: Death((rank,), 1, f"checkpoint {stage}", 0) for stage, rank in STAGES.items()}
SILENT = r"has been stuck for \d+ s: rank 1 does not answer"
LATE = r"rank 1 (ended \({0} has been stuck|had not arrived \(in {0})"
STARTS = {
    "opening, stopped": rf"opening the process group {SILENT} \(it was in (opening the process|comparing)",
    "building": LATE.format("building the model"),
    "building, stopped": SILENT.replace(":", ".*:"),
    "reading": LATE.format("reading the checkpoint of step 2"),
    "reading, stopped": f"loading the checkpoint of step 2 {SILENT}",
}
"""Where in its start rank 1 stands still or is stopped, and what rank 0 says of it."""
QUICK = ("building", "reading")
STUCK_STARTS = {
    name: (Death((1,), 1, f"start {name.partition(',')[0]}", signal.SIGSTOP if "stopped" in name else 0), fact)
    for name, fact in STARTS.items()
    if LONG or name in QUICK
}
ABSENT = Death((1,), 1, "checkpoint write", signal.SIGSTOP)


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[str, Ended]:
    """How each run ended that something got stuck in; side by side, as what they do is to wait."""
    folder = tmp_path_factory.mktemp("runs")
    runs = {name: (death, "checkpoint.every=0", [0]) for name, (death, _) in STUCK_COLLECTIVES.items()}
    runs |= {name: (death, "checkpoint.every=2", death.ranks) for name, death in STUCK_SAVES.items()}
    runs["absent"] = (ABSENT, "checkpoint.async=false", [0])
    for name, (death, _) in STUCK_STARTS.items():
        runs[name] = (death, "checkpoint.every=2", [0] if death.signal else None)
    loads = [name for name in STUCK_STARTS if name.startswith("reading")]
    assert train(folder / loads[0], *SETS, "train.watchdog=30", "train.steps=2").codes == [0, 0]
    for name in loads[1:]:
        shutil.copytree(folder / loads[0], folder / name)
    with ThreadPoolExecutor(len(runs)) as threads:
        futures = {
            name: threads.submit(train, folder / name, *SETS, also, death=death, awaited=awaited, resume=name in loads)
            for name, (death, also, awaited) in runs.items()
        }
        return {name: future.result() for name, future in futures.items()}


@pytest.mark.longer
@pytest.mark.parametrize("where", list(STUCK_STARTS))
def test_a_stuck_start_names_its_stage_and_the_rank(ended, where):
    """Before the first collective, while the engine is built, and while a checkpoint is read."""
    run, (death, fact) = ended[where], STUCK_STARTS[where]
    assert run.codes == [1, STUCK if death.signal else 1], run
    # One of them reports it, and a rank that is stuck by itself in any case.
    assert re.search(fact, run.said[0]) or (not death.signal and "error" not in run.said[0]), run.said[0]
    assert ("step 2 is saved" if where.startswith("reading") else "no checkpoint was written") in "".join(run.said)
    assert "try: " in "".join(run.said) and "Traceback" not in "".join(run.said)
    if not death.signal:
        assert re.search(r"^error: .* has been stuck for \d+ s on rank 1; ", run.said[1], re.M), run.said[1]


@pytest.mark.longer
@pytest.mark.parametrize("where", list(STUCK_COLLECTIVES))
def test_a_stuck_collective_names_its_unit_its_piece_and_the_missing_rank(ended, where):
    run, fact = ended[where], STUCK_COLLECTIVES[where][1]
    assert run.codes == [1, STUCK], run.said
    assert re.search(fact, run.said[0]) and "stuck for" in run.said[0], run.said[0]


@pytest.mark.longer
@pytest.mark.parametrize("where", list(STUCK_SAVES))
def test_a_stuck_save_names_its_step_its_stage_and_the_rank(ended, where):
    """A disk that no longer answers: the thread that writes stands still."""
    run, rank = ended[where], STAGES[where]
    fact = rf"checkpoint of step 2, {where}, has been stuck for \d+ s on rank {rank}; no checkpoint was written"
    assert run.codes[rank] == 1, run
    assert re.search(fact, run.said[rank]), run.said[rank]
    assert "Traceback" not in "".join(run.said)


def test_a_save_that_waits_for_a_rank_names_it_and_the_stage(ended):
    """With saves in the foreground nothing else would notice: training has no collective open."""
    run = ended["absent"]
    assert run.codes == [1, STUCK], run
    assert re.search(r"checkpoint of step 2, commit, has been stuck for \d+ s: rank 1 does not answer", run.said[0])


def test_what_comes_through_in_a_start_counts_however_little(tmp_path):
    """Reading a large checkpoint is slow, and no stuck disk: every part of a read moves; so does a transfer."""
    said: list[str] = []
    dog, ago = Watchdog(60.0, end=said.append), time.monotonic() - 100
    (tmp_path / "file").write_bytes(bytes(100))
    with STARTUP.by_itself("reading the checkpoint of step 2"), (tmp_path / "file").open("rb") as file:
        assert dog._stuck_alone() == ""
        STARTUP.moved = ago
        assert dog._stuck_alone() == "reading the checkpoint of step 2 has been stuck for 100 s"
        pread(file.fileno(), 50, 0, moved=STARTUP.move)
        assert dog._stuck_alone() == "" and STARTUP.moved > ago
        STARTUP.moved = ago
        WAITED_FOR[0] = (Transfer(1), time.monotonic())
        assert dog._stuck_alone() == ""
        del WAITED_FOR[0]
        with STARTUP.waiting("an exchange of control values"):  # that is for the others to say
            STARTUP.moved = ago
            assert dog._stuck_alone() == ""
    assert dog._stuck_alone() == "" and not said


def test_a_stuck_transfer_names_its_unit_and_its_piece():
    _, engine = engine_of({"stage": 3, "offload": "cpu"})
    said, told = [], threading.Event()

    def end(text: str) -> None:
        said.append(text)
        told.set()

    flat = next(flat for flat in engine.flats() if flat.unit.name == "blocks.1")
    future: Future = Future()
    dog = Watchdog(0.2, end=end)
    dog.attach(engine)
    with dog:
        assert flat.record is not None
        transfer = flat.record.store._track(Transfer(4096, future=future, tier="nvme"), 0, 1)
        waiter = threading.Thread(target=transfer.synchronize)
        waiter.start()
        assert told.wait(600)
        future.set_result(None)
        waiter.join()
    assert "a transfer of the optimizer states of blocks.1 (4096 bytes, nvme) has been stuck for" in said[0]
    engine.close()


def stuck_in_tensor_parallelism() -> list[str]:
    """On rank 0: what its watchdog says while rank 1 does not come to each of the axis' collectives."""
    config = ModelConfig(family="gpt2", vocab=32, layers=1, hidden=8, heads=2)
    engine = zerocli.shard(build(config, 4, "meta"), stage=1, tp=2)
    axis, store, said = engine.tensor_parallel, dist.distributed_c10d._get_default_store(), []
    agree = functools.partial(axis.agree_, what="replicated gradients")
    for number, act in enumerate((axis.max_, agree, axis.sum_)):
        told = threading.Event()

        def end(text: str, number: int = number, told: threading.Event = told) -> None:
            said.append(text)
            store.set(f"told{number}", "1")
            told.set()

        dog = Watchdog(0.4, end=end)
        dog.connect(dist.get_rank(), dist.get_world_size())
        dog.attach(engine)
        with dog:
            if axis.rank == 1:
                store.wait([f"told{number}"])
            act(torch.ones(2))
            assert axis.rank == 1 or told.wait(600)
            dist.barrier()
    engine.close()
    return said


@pytest.mark.long
def test_all_collectives_of_tensor_parallelism_are_watched():
    said, nothing = run_ranks(2, stuck_in_tensor_parallelism)
    names = ["all_reduce of the logits' maxima", "broadcast of replicated gradients", "all_reduce of activations"]
    assert [text.partition(" has been stuck")[0] for text in said] == names and nothing == []
    assert all("rank 1 had not arrived" in text for text in said)


def test_whoever_moves_is_waited_for():
    """A slow disk is not a stuck one: the update of a rank waits for its save, and all other ranks for that update."""
    data = Axis("data", Collectives(None, torch.device("cpu")), (0, 1))
    saves = Axis("saves", Progress(), (0, 1))
    after = {"time": 1.0, "counts": {"data": 6, "saves": 2}, "doing": "after collective 6"}
    writing = after | {"alone": "checkpoint of step 2, write", "doing": "in checkpoint of step 2, write"}
    assert data.absent({1: Heartbeat(idle=10, **after)}, set(), 7, 600) == ""
    assert (
        data.absent({1: Heartbeat(idle=590, **after)}, set(), 7, 600) == "rank 1 had not arrived (after collective 6)"
    )
    assert data.absent({1: Heartbeat(idle=10, **writing)}, set(), 7, 600) == ""
    assert "had not arrived (in checkpoint" in data.absent({1: Heartbeat(idle=590, **writing)}, set(), 7, 600)
    assert data.absent({1: Heartbeat(idle=10, **writing)}, {1}, 7, 600).startswith(
        "rank 1 does not answer (it was in ch"
    )
    # It came to the commit, and commits alone: it holds the others up, and is no broken link.
    assert saves.absent({1: Heartbeat(idle=10, **writing)}, set(), 2, 600) == ""
    assert "rank 1 had not arrived (in checkpoint" in saves.absent({1: Heartbeat(idle=590, **writing)}, set(), 2, 600)
    assert "the link" in saves.absent({1: Heartbeat(idle=590, **after)}, set(), 2, 600)
    assert saves.absent({1: Heartbeat(idle=10, **after)}, set(), 2, 600) == ""  # it has only just come


def test_a_run_that_goes_on_hears_nothing_of_it(tmp_path):
    ended = train(tmp_path / "run", *SETS, "train.watchdog=30", "checkpoint.every=0")
    assert ended.codes == [0, 0] and "stuck" not in ended.said[0] + ended.said[1]
