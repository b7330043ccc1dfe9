"""What surrounds the steps of a run."""

from __future__ import annotations

import contextlib
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

import zerocli
from zerocli import config as configs
from zerocli.garbage import long_lived
from zerocli.plan.time.rates import slower_than_fp32
from zerocli.profile.lines import History
from zerocli.run import steps
from zerocli.run.output import report


class Node:
    """Something that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


def test_the_collector_passes_over_what_was_there_and_comes_back_to_it():
    node = Node()
    before = weakref.ref(node)
    with long_lived():
        del node
        within = weakref.ref(Node())
        gc.collect()
        assert before() is not None and within() is None
    gc.collect()
    assert before() is None and gc.get_freeze_count() == 0


def test_each_micro_step_of_each_rank_draws_its_own_random_numbers(monkeypatch):
    keys = []
    monkeypatch.setattr(steps, "micro_step", lambda engine, batch, key, weight: keys.append(key) or torch.zeros(()))
    config, data = configs.load("tiny"), SimpleNamespace(weight=lambda *where: 1.0)
    for rank in range(2):
        engine = SimpleNamespace(collectives=SimpleNamespace(rank=rank, world=2), device="cpu")
        loop = SimpleNamespace(_run=SimpleNamespace(engine=engine, config=config, batches=data))
        for step in range(1, 3):
            steps.Loop._micro_steps(loop, step, [(), ()])
    assert len(set(keys)) == len(keys) == 8


@pytest.mark.parametrize("num_steps", [1, 9, 10, 11, 1000])
def test_a_month_of_steps_stays_in_bounds_with_its_first_and_newest(monkeypatch, num_steps):
    monkeypatch.setattr(History, "KEPT", 5)
    history = History()
    for step in range(num_steps):
        history.append(step)
    assert history.num_steps == num_steps and len(history) <= 10
    assert history[0] == 0 and history[1:] == list(range(num_steps))[max(1, num_steps - len(history) + 1) :]
    assert len(history) >= min(num_steps, 6)


@pytest.mark.parametrize(
    ("slower", "said"), [(250.4, "as asked; a product takes this CPU 250 times as long as in fp32"), (1.2, "as asked")]
)
def test_a_precision_that_the_cpu_has_no_instructions_for_is_said_to_be_slow(monkeypatch, slower, said):
    monkeypatch.setattr(report, "slower_than_fp32", lambda dtype: slower)
    config = configs.load("tiny", ["train.precision=bf16"])
    with contextlib.closing(zerocli.shard(torch.nn.Linear(2, 2), precision="bf16")) as engine:
        assert f"precision bf16 ({said})" in report.opening(config, engine)


def test_the_time_of_a_product_is_measured_without_torchs_random_numbers():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    assert slower_than_fp32(torch.bfloat16) > 0
    assert torch.equal(torch.rand(1), expected)
