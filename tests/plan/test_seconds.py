"""Laws of the step's estimate: what is executed and moved, by arithmetic; and beside what one H200 took."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from zerocli.cli import main as cli
from zerocli.config import ModelConfig
from zerocli.layout.recompute import Recompute
from zerocli.plan.build import plan_model
from zerocli.plan.hardware import PRESETS, Hardware, this_machine
from zerocli.plan.inputs import shape_of
from zerocli.plan.seconds import Estimate, estimate
from zerocli.plan.setup import Setup

MODEL = ModelConfig(layers=24, hidden=2048, heads=16, vocab=50304, tie=False)
LARGE = dataclasses.replace(MODEL, layers=32, hidden=2560, heads=20)
ALONE: dict[str, Any] = {"stage": 3, "ranks": 1, "batch": 16, "seq": 1024, "recompute": True}
NODE = PRESETS["h200"]
MACHINE = dataclasses.replace(NODE, pcie=55.0, disk=4.05, adam=2.5)
"""The machine that was measured: its link, its disk (reading and writing at once), its sixteen cores beside a GPU."""


def timed(model: ModelConfig = MODEL, hardware: Hardware = NODE, **setup: Any) -> Estimate:
    asked = Setup(**(ALONE | setup))
    shape = shape_of(model, asked.seq)
    return estimate(plan_model(shape, asked), shape, hardware)


@pytest.mark.parametrize(
    ("model", "hardware", "setup", "seconds"),
    [
        (MODEL, NODE, {"stage": 0}, 0.317),
        (MODEL, NODE, {}, 0.317),
        (LARGE, NODE, {}, 0.618),
        (LARGE, NODE, {"offload": "activations=cpu"}, 0.618),
        (LARGE, NODE, {"offload": "cpu", "master": "fp32"}, 1.331),
        (LARGE, MACHINE, {"offload": "cpu", "master": "fp32"}, 1.331),
        (LARGE, MACHINE, {"offload": "cpu", "update": "cpu", "master": "fp32"}, 1.96),
        (MODEL, MACHINE, {"offload": "optimizer=nvme", "master": "fp32"}, 9.95),
    ],
)
def test_an_estimate_is_within_a_quarter_of_what_was_measured(model, hardware, setup, seconds):
    """docs/performance.md has the measurements, docs/accuracy.md this table."""
    assert timed(model, hardware, **setup).seconds == pytest.approx(seconds, rel=0.25)


def test_compute_is_every_operation_that_is_executed():
    rate = NODE.tflops * 1e12 * NODE.efficiency
    tokens, hidden = 16 * 1024, 2048
    block = 12 * hidden**2 + 13 * hidden  # matrices, biases and norms
    blocks, head = 24 * block + 2 * hidden, 50304 * hidden
    attention = 24 * 2 * 1024 * hidden
    forward = (2 * blocks + attention) * tokens
    for recompute, passes in ((False, 3), ("selective", 3), (6, 3.25), (Recompute(6, 18), 3.25), (True, 4)):
        expected = (passes * forward + 6 * head * tokens) / rate
        assert timed(recompute=recompute).parts["compute"] == pytest.approx(expected, rel=1e-6)
    # A table that is only looked up costs nothing; one that is also the head costs what a head does.
    assert timed(dataclasses.replace(MODEL, tie=True)).parts["compute"] == pytest.approx(expected, rel=1e-6)


def test_what_crosses_the_link_is_counted_in_its_direction():
    """States each way and gradients up for the update, parameters down once and up twice, gradients down.

    A split master is 2 of 10 bytes of states, and needs the parameters too.
    """
    numel = plan_model(shape_of(LARGE, 1024), Setup(**ALONE)).numel
    rate = NODE.pcie * 1e9
    both = 2 * NODE.both_ways * rate
    backward = max(2 * numel / rate, (2 + 2) * numel / both)
    for master, states, fetched in (("fp32", 12, 0), ("split", 10, 2)):
        up, down = states + 2 + 2 + fetched, states + 2
        update = max(up * numel / rate, (up + down) * numel / both)
        parts = timed(LARGE, offload="cpu", master=master).parts
        assert parts["pcie"] == pytest.approx(update + backward, rel=1e-3)
    # Updated by the CPU, states stay: gradients go down, parameters up twice.
    stays = timed(LARGE, offload="cpu", update="cpu").parts["pcie"]
    assert stays == pytest.approx((2 * numel / rate) + backward, rel=1e-3)


def test_a_disk_reads_and_writes_all_states_in_a_step():
    numel = plan_model(shape_of(MODEL, 1024), Setup(**ALONE)).numel
    for master, states, fetched in (("fp32", 24, 0), ("split", 20, 2)):
        parts = timed(offload="optimizer=nvme", master=master).parts
        assert parts["nvme"] == pytest.approx(states * numel / (NODE.disk * 1e9), rel=1e-3)
        # Parameters too: written once, read twice, less what is still in host memory at each of the two turns.
        everything = {"offload": "params=nvme,grads=cpu,optimizer=nvme", "read_ahead_nbytes": 1 << 20}
        more = timed(**everything, master=master).parts["nvme"]
        assert more == pytest.approx((states + 6 + fetched) * numel / (NODE.disk * 1e9), rel=2e-3)


def test_only_the_first_forward_hides_the_update():
    """With four micro-steps the update waits for one forward of the four; the others come after it."""
    once, four = (timed(LARGE, offload="optimizer=cpu", accumulate=n) for n in (1, 4))
    assert four.parts["compute"] == pytest.approx(4 * once.parts["compute"])
    assert four.seconds - once.seconds >= 3 * once.parts["compute"] * 0.99


def test_what_stays_on_the_device_is_never_slower_than_what_leaves_it():
    for model in (MODEL, LARGE):
        for ranks in (1, 8, 64):
            here, offloaded = (timed(model, ranks=ranks, offload=offload) for offload in ("", "optimizer=cpu"))
            assert here.seconds <= offloaded.seconds <= timed(model, ranks=ranks, offload="nvme").seconds


def test_more_ranks_wait_for_their_links():
    eight = timed(ranks=8)
    assert eight.parts["collectives"] > 0 == timed().parts["collectives"]
    slower = dataclasses.replace(NODE, links=NODE.links / 100)
    assert timed(hardware=slower, ranks=8).bound == "collectives"
    assert timed(ranks=2, tp=2).parts["tensor parallel"] > 0


def test_measured_rates_take_the_place_of_a_presets():
    facts = {
        "gpus": [{"name": "NVIDIA H200", "memory": 150 * 10**9}] * 4,
        "memory": {"available": 10**12},
        "disks": {"/scratch": {"free": 5 * 10**11}},
    }
    measured = {
        "dram_hbm": {"result": {"up": 55.0, "down": 54.0, "both": 92.0}},
        "/scratch": {"result": {"read": 3.9, "write": 3.7, "both": 4.05}},
        "broken": "?",
    }
    here = this_machine(facts, measured)
    assert here is not None and (here.gpus, here.tflops, here.nvme_space) == (4, NODE.tflops, 5 * 10**11)
    assert (here.pcie, here.both_ways, here.disk) == (54.0, pytest.approx(92 / 108), 4.05)
    older = this_machine(facts, {"/scratch": {"result": {"read": 3.9, "write": 3.7}}})
    assert older is not None and (older.disk, older.pcie) == (3.7, NODE.pcie)
    assert this_machine({"gpus": []}, {}) is None


def test_rates_can_be_stated(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ["fit", "gpt2-124m", "--ranks", "1", "--stage", "3", "--offload", "optimizer=nvme", "--hardware", "h200"]
    found = []
    for rate in ("12", "6"):
        assert cli.run([*words, "--json", "--set", f"hardware.disk={rate}"]) == 0
        found.append(json.loads(capsys.readouterr().out)["candidates"][0]["step"]["parts"]["nvme"])
    assert found[1] == pytest.approx(2 * found[0])
    for text, said in (("disk=fast", "not a number"), ("disk=0", "above 0"), ("disk=nan", "above 0"), ("dsk=1", "dsk")):
        assert cli.run([*words, "--set", f"hardware.{text}"]) == 2
        err = capsys.readouterr().err
        assert said in err and err.startswith("error: ") and "Traceback" not in err
