"""A run that is stuck ends by itself, and says what was stuck and who had not arrived."""

from __future__ import annotations

import re
import signal
import threading
from concurrent.futures import Future

import pytest
from runs import STUCK, Death, train
from test_checkpoint import engine_of

from tiers.transfer import Transfer
from zerocli.watchdog import Watchdog

SETS = ("zero.stage=3", "train.watchdog=3", "checkpoint.every=0")


@pytest.mark.parametrize(
    ("death", "fact"),
    [
        (Death((1,), 7, "gather", 0), r"all_gather of parameters of \S+.* rank 1 had not arrived \(after collective"),
        (Death((1,), 5, "reduce", 0), r"reduce_scatter of gradients of \S+.* rank 1 had not arrived"),
        (Death((1,), 2, "optimizer", 0), r"all_reduce of control values.* rank 1 had not arrived"),
        (Death((1,), 3, "forward", signal.SIGSTOP), r"rank 1 does not answer"),
    ],
    ids=["gather", "reduce", "norm", "stopped"],
)
def test_a_stuck_collective_names_its_unit_its_piece_and_the_missing_rank(tmp_path, death, fact):
    ended = train(tmp_path / "run", *SETS, death=death, grace=0.5)
    assert ended.codes == [1, STUCK], ended.said
    assert re.search(fact, ended.said[0]) and "stuck for" in ended.said[0], ended.said[0]


def test_a_stuck_transfer_names_its_unit_and_its_piece():
    _, engine = engine_of({"stage": 3, "offload": "cpu"})
    said, told = [], threading.Event()

    def end(text: str) -> None:
        said.append(text)
        told.set()

    flat = next(flat for flat in engine.flats() if flat.unit.name == "blocks.1")
    future: Future = Future()
    with Watchdog(engine, 0.2, end):
        assert flat.record is not None
        transfer = flat.record.store._track(Transfer(4096, future=future, tier="nvme"))
        waiter = threading.Thread(target=transfer.synchronize)
        waiter.start()
        assert told.wait(20)
        future.set_result(None)
        waiter.join()
    assert "a transfer of the optimizer states of blocks.1 (4096 bytes, nvme) has been stuck for" in said[0]
    engine.close()


def test_a_run_that_goes_on_hears_nothing_of_it(tmp_path):
    ended = train(tmp_path / "run", *SETS, "train.watchdog=30")
    assert ended.codes == [0, 0] and "stuck" not in ended.said[0] + ended.said[1]
