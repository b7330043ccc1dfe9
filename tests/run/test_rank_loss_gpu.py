"""NCCL's loss of a rank: whoever remains ends, soon and with words; none waits for torch's own limits."""

from __future__ import annotations

import re
import signal

import pytest
import torch
from runs import STUCK, Death, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL between two ranks needs two GPUs"),
]
SETS = ("zero.stage=3", "train.watchdog=20", "checkpoint.every=0")


OTHERS = ("start building", "reduce", "optimizer")


@pytest.mark.parametrize("where", ["gather", *(pytest.param(each, marks=pytest.mark.long) for each in OTHERS)])
def test_a_killed_rank_ends_the_others(tmp_path, where):
    """NCCL may end the process that is left itself, by SIGABRT: what counts is that it ends."""
    ended = train(tmp_path / "run", *SETS, death=Death((1,), 1, where))
    assert ended.codes[1] == -signal.SIGKILL and ended.codes[0] not in (0, STUCK), ended
    if ended.codes[0] == 1:
        assert re.search(r"another rank was lost|has been stuck", ended.said[0]), ended.said[0]


@pytest.mark.parametrize(
    "where", ["gather", *(pytest.param(each, marks=pytest.mark.long) for each in ("start opening", "start building"))]
)
def test_a_stopped_rank_is_named(tmp_path, where):
    ended = train(tmp_path / "run", *SETS, death=Death((1,), 1, where, signal.SIGSTOP), awaited=[0])
    assert ended.codes == [1, STUCK], ended
    assert re.search(r"has been stuck for \d+ s.*: rank 1 does not answer", ended.said[0]), ended.said[0]
