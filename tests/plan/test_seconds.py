"""Laws of the step's estimate: what is executed and moved, by arithmetic; and beside what one H200 took."""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from zerocli.cli import main as cli
from zerocli.config import ModelConfig
from zerocli.plan.blocks.inputs import shape_of
from zerocli.plan.memory.quick import quick_plan
from zerocli.plan.memory.replayable_shape import replayable_shape
from zerocli.plan.setup import Setup
from zerocli.plan.time import host_times, network, seconds
from zerocli.plan.time.compute import computed, num_chunks
from zerocli.plan.time.hardware import HOST, PRESETS, Hardware, HostTimes, this_machine
from zerocli.plan.time.host_times import measure_host
from zerocli.plan.time.seconds import DISK, LINK, Estimate, Phase, estimate

MODEL = ModelConfig(layers=24, hidden=2048, heads=16, vocab=50304, tie=False)
LARGE = dataclasses.replace(MODEL, layers=32, hidden=2560, heads=20)
ALONE: dict[str, Any] = {"stage": 3, "ranks": 1, "batch": 16, "seq": 1024, "recompute": True, "update": "stream"}
NODE = PRESETS["h200"]
MACHINE = dataclasses.replace(NODE, pcie=55.0, disk=4.05, adam=2.5)
MANY_CORES = dataclasses.replace(MACHINE, adam=4.5)
QUICK_HOST = dataclasses.replace(
    MACHINE, products=701, hbm=4989, host_block=1.37e-3, host_whole=1.83e-3, host_selective=2.83e-3
)
"""The machine that was measured: its link, its disk (reading and writing at once), its sixteen cores beside a GPU."""


def timed(model: ModelConfig = MODEL, hardware: Hardware = NODE, **setup: Any) -> Estimate:
    asked = Setup(**(ALONE | setup))
    shape = shape_of(model, asked.seq)
    plan = quick_plan(replayable_shape(shape), asked)  # seconds do not depend on the device's peak
    return estimate(plan, computed(shape, asked, hardware.host), hardware)


LLAMA = ModelConfig(family="llama", layers=16, hidden=2048, heads=32, vocab=50304, tie=False)
EIGHT = dataclasses.replace(LLAMA, layers=32, hidden=4096, kv_heads=8, vocab=128256, mlp_hidden=14336)
SHORT = {"recompute": False, "batch": 8, "seq": 2048}
FLAT = ModelConfig(family="llama", layers=2, hidden=3072, heads=24, kv_heads=6, vocab=50304, tie=False)
DEEP = ModelConfig(family="llama", layers=40, hidden=1024, heads=8, vocab=50308, tie=False)
DEEPER = ModelConfig(family="llama", layers=40, hidden=1280, heads=20, kv_heads=5, vocab=128256)
MUON = {"optimizer": "muon"}


@pytest.mark.parametrize(
    ("model", "hardware", "setup", "seconds"),
    [
        (MODEL, NODE, {}, 0.304),
        (MODEL, NODE, {"compiled": True}, 0.2945),
        (LARGE, NODE, {"recompute": False}, 0.471),
        (LARGE, NODE, {}, 0.558),
        (LLAMA, NODE, SHORT, 0.1895),
        (LLAMA, NODE, SHORT | {"compiled": True}, 0.187),
        (EIGHT, NODE, {"batch": 2, "seq": 4096}, 0.8705),
        (LARGE, MACHINE, {"offload": "optimizer=hbm:16GiB+cpu"}, 0.662),
        (LARGE, MACHINE, {"offload": "optimizer=hbm:20GiB+cpu", "recompute": 16}, 0.530),
        (LARGE, MACHINE, {"offload": "cpu"}, 1.23),
        (LARGE, MANY_CORES, {"offload": "cpu", "update": "both"}, 0.904),
        (LARGE, MACHINE, {"offload": "optimizer=cpu,grads=cpu"}, 1.100),
        (LARGE, MACHINE, {"offload": "params=hbm:3GiB+cpu,grads=cpu,optimizer=cpu,activations=cpu"}, 1.320),
        (MODEL, MACHINE, {"offload": "optimizer=nvme", "master": "fp32"}, 9.95),
        (FLAT, QUICK_HOST, MUON | {"batch": 32, "recompute": "selective"}, 0.1912),
        (DEEPER, QUICK_HOST, MUON | {"recompute": "selective", "compiled": True}, 0.3228),
        (DEEP, QUICK_HOST, MUON | {"batch": 8, "seq": 4096, "offload": "optimizer=cpu"}, 0.8849),
    ],
)
def test_an_estimate_is_near_what_was_measured(model, hardware, setup, seconds):
    """On one H200; docs/performance.md has the measurements. Disks of one machine differ more from day to day."""
    near = 0.15 if "nvme" in setup.get("offload", "") else 0.08
    assert timed(model, hardware, **setup).seconds == pytest.approx(seconds, rel=near)


def test_what_cpus_update_beside_a_busy_link_is_measured():
    rows = [dataclasses.replace(MACHINE, adam=6.4, adam_beside=beside) for beside in (0.0, 0.8 * 6.4, 3.7)]
    guessed, same, slower = (timed(LARGE, row, offload="cpu", update="both").seconds for row in rows)
    assert guessed == same and slower > 1.05 * same


def test_products_are_those_that_are_executed():
    """Forward once, backward twice, recomputation once more but for a block's last product; the loss is in forward."""
    tokens, hidden = 16 * 1024, 2048
    block, head = 2 * 12 * hidden**2 * tokens, 6 * 50304 * hidden * tokens
    last = 2 * 4 * hidden**2 * tokens
    for recompute, again in ((False, 0), (6, 6), (True, 24), ("selective", 0)):
        asked = Setup(**(ALONE | {"recompute": recompute}))
        work = computed(shape_of(MODEL, 1024), asked)
        assert work.forward.products == pytest.approx(24 * block + head)
        assert work.backward.products == pytest.approx(2 * 24 * block)
        assert work.again.products == pytest.approx(again * (block - last))
        assert (work.again.moved > 0) == bool(recompute)


def test_experts_that_a_token_does_not_visit_cost_nothing():
    shape = dataclasses.replace(shape_of(MODEL, 1024), experts=8, experts_per_token=2, expert_hidden=8192)
    dense = computed(shape_of(MODEL, 1024), Setup(**ALONE)).forward.products
    router = 2 * 24 * 8 * 2048 * 16 * 1024
    visits = 2 * 24 * 8 * 2048**2 * 16 * 1024  # of two experts as wide as the dense MLP, one is more than it has
    assert computed(shape, Setup(**ALONE)).forward.products == pytest.approx(dense + router + visits)


def test_mfu_counts_the_models_own_operations():
    plain, again = timed(recompute=False), timed()
    assert plain.mfu * plain.seconds == pytest.approx(again.mfu * again.seconds)
    assert 0.3 < again.mfu < plain.mfu < 0.7


def test_phases_add_up_to_the_step():
    for setup in ({}, {"offload": "optimizer=cpu"}, {"offload": "nvme"}, {"ranks": 8}, {"accumulate": 3}):
        found = timed(LARGE, MACHINE, **setup)
        assert sum(found.phases.values()) == pytest.approx(found.seconds) and min(found.phases.values()) >= 0


def test_small_blocks_are_bound_by_the_host():
    narrow = dataclasses.replace(MODEL, hidden=256, heads=4)
    assert timed(narrow, batch=1, seq=128).bound == "host"


def test_a_slower_host_slows_what_it_bounds():
    narrow = {"model": dataclasses.replace(MODEL, hidden=256, heads=4), "batch": 1, "seq": 128}
    slow = dataclasses.replace(NODE, host_block=2 * NODE.host_block)
    again = dataclasses.replace(NODE, host_whole=2 * NODE.host_whole)
    kept, recomputed = timed(**narrow, recompute=False).seconds, timed(**narrow).seconds
    assert timed(**narrow, hardware=slow, recompute=False).seconds == pytest.approx(2 * kept)
    assert timed(**narrow, hardware=again, recompute=False).seconds == kept
    assert timed(**narrow, hardware=again).seconds == pytest.approx(2 * recomputed - kept)
    assert timed(hardware=slow).seconds == pytest.approx(timed().seconds, rel=0.03)  # the device bounds wide blocks


def test_a_host_that_takes_as_long_as_the_device_delays_it():
    """Measured on an H200: 0.194 and 0.213 s for models of which host and device each need 0.14 and 0.15 s alone."""
    plain = timed(recompute=False)
    device = plain.parts["compute"] + plain.parts["update"]
    pace = device / plain.parts["host"]
    even = timed(recompute=False, hardware=dataclasses.replace(NODE, host_block=pace * NODE.host_block))
    assert even.parts["host"] == pytest.approx(device)
    assert 1.1 < even.seconds / device < 1.3
    slow = timed(recompute=False, hardware=dataclasses.replace(NODE, host_block=10 * pace * NODE.host_block))
    assert slow.seconds == pytest.approx(10 * device, rel=0.05)


@pytest.mark.long
def test_the_host_is_measured_by_training(monkeypatch):
    for name, few in {"LAYERS": 2, "TURNS": 1, "STEPS": 2, "FAMILIES": {"llama": host_times.KINDS}}.items():
        monkeypatch.setattr(host_times, name, few)
    found = measure_host(torch.device("cpu"))
    assert set(found) == set(HOST) and 1e-5 < found["host_block"] < 1
    facts = {"gpus": [{"name": "NVIDIA H200", "memory": 1}], "memory": {"available": 1}, "disks": {}}
    compute = {
        "products": 700.0,
        "memory": 4e3,
        "adam": 0.3,
        "host_block": 3e-3,
        "host_whole": 4e-3,
        "host_selective": 0,
    }
    here = this_machine(facts, {"compute": {"result": compute}})
    assert here is not None and here.host == HostTimes(3e-3, 4e-3, HostTimes.selective)


def test_the_hosts_times_are_what_its_steps_consist_of():
    """Made-up times give steps, and these give the times again; no kind is a combination of others."""
    times = dict(zip(HOST, [2e-3, 1e-3, 3e-3, 4e-4, 5e-4, 6e-4, 7e-4, 8e-5, 9e-6], strict=True))
    counts = {kind: kind.counts(dataclasses.replace(MODEL, layers=4), "bf16") for kind in host_times.KINDS}
    took = {kind: sum(times[name] * number for name, number in each.items()) for kind, each in counts.items()}
    assert host_times.solve(counts, took) == pytest.approx(times)
    some = dict(list(counts.items())[:3])
    assert host_times.solve(some, took) == pytest.approx({name: times[name] for name in HOST[:3]})


def test_the_hosts_times_do_not_depend_on_its_pace_at_each_step(monkeypatch):
    """A host that is up to twice as slow from one kind of step to the next: times are those at its mean pace."""
    times = dict(zip(HOST, [2e-3, 1e-3, 3e-3, 4e-4, 5e-4, 6e-4, 7e-4, 8e-5, 9e-6], strict=True))
    model, rng = dataclasses.replace(MODEL, layers=4), random.Random(5)
    paces, loops = [], []

    def step(kind, tokens):
        if len(paces) % host_times.STEPS == 0:
            paces.append(rng.choice([1.0, 1.0, 2.0]))
        else:
            paces.append(paces[-1])
        return paces[-1] * sum(times[name] * number for name, number in kind.counts(model, "fp32").items())

    def loop():
        loops.append(paces[-1] * 1e-3)
        return loops[-1]

    engine = lambda config, kind, precision, device: types.SimpleNamespace(close=lambda: None, counts=kind.counts)  # noqa: E731
    made = {"_step": step, "loop_seconds": loop, "_engine": engine, "FAMILIES": {"gpt2": host_times.KINDS}}
    for name, value in (made | {"ModelConfig": lambda **fields: model}).items():
        monkeypatch.setattr(host_times, name, value)
    found = measure_host(torch.device("cpu"))
    mean = statistics.fmean(loops) / 1e-3
    assert 1.1 < mean < 1.6
    assert found == pytest.approx({name: seconds * mean for name, seconds in times.items()})


def test_chunks_of_a_streamed_update_cost_the_host_time():
    """Less staging makes more chunks; each has five transfers if everything is offloaded, two for states alone."""
    narrow = {"model": dataclasses.replace(MODEL, hidden=512, heads=8), "batch": 1, "seq": 128, "offload": "cpu"}
    shape = shape_of(narrow["model"], 128)
    few, many = (num_chunks(shape.units, Setup(**ALONE, staging_nbytes=size << 20)) for size in (512, 64))
    for offload, transfers in (("optimizer=cpu", 2), ("optimizer=cpu,grads=cpu", 3), ("cpu", 5)):
        case = narrow | {"offload": offload}
        took = {size: timed(**case, staging_nbytes=size << 20) for size in (512, 64)}
        assert took[512].bound == took[64].bound == "host"
        more = (many - few) * (NODE.host_chunk + transfers * NODE.host_transfer)
        assert took[64].seconds - took[512].seconds == pytest.approx(more, rel=1e-4)


def test_collectives_between_nodes_use_every_adapter_of_a_node(monkeypatch):
    """Inside a node NVLink bounds them; between nodes 8 x 10 GB/s carry what the other nodes have. Without delays."""
    monkeypatch.setattr(network, "PROTOCOLS", (network.Protocol((0, 0, 0), (0, 0, 0), 1.0),))
    numel = shape_of(MODEL, 1024).numel
    one = timed(ranks=8).parts["collectives"]
    assert one == pytest.approx(3 * 2 * numel * 7 / 8 / (NODE.links * 1e9))
    slow = dataclasses.replace(NODE, network=10)
    four = timed(hardware=slow, ranks=32).parts["collectives"]
    assert four == pytest.approx(3 * 2 * numel * 3 / 4 / (8 * 10 * 1e9))
    # Groups of one node gather over NVLink, and each rank's adapter carries the sums of its slice, there and back.
    groups = timed(hardware=slow, ranks=32, shard_ranks=8).parts["collectives"]
    assert groups == pytest.approx(one + 2 * 2 * numel / 8 * 3 / 4 / (10 * 1e9))
    # Tensor parallelism over two nodes goes over the network too.
    split = {"hardware": slow, "ranks": 16, "tp": 16}
    inside, across = (timed(**split, ranks_per_node=n).parts["tensor parallel"] for n in (16, 8))
    assert across > inside > 0


def test_what_crosses_the_link_is_counted_in_its_direction():
    """States each way and gradients up for the update, parameters down once and up for backward, gradients down.

    A split master is 2 of 10 bytes of states, and needs the parameters too. What the device updates it also writes into
    the memory of the first gather.
    """
    numel = shape_of(LARGE, 1024).numel
    rate = NODE.pcie * 1e9 * LINK
    both = 2 * NODE.both_ways * rate
    backward = max(2 * numel / rate, (2 + 2) * numel / both)
    for master, states, fetched in (("fp32", 12, 0), ("split", 10, 2)):
        up, down = states + 2 + fetched, states + 2
        update = max(up * numel / rate, (up + down) * numel / both)
        parts = timed(LARGE, offload="cpu", master=master).parts
        assert parts["pcie"] == pytest.approx(update + backward, rel=1e-3)
    # Updated by the CPU, states stay: gradients go down, parameters up twice.
    stays = timed(LARGE, offload="cpu", update="cpu").parts["pcie"]
    assert stays == pytest.approx((2 * numel / rate) + backward, rel=1e-3)


def test_a_disk_reads_and_writes_all_states_in_a_step():
    numel = shape_of(MODEL, 1024).numel
    for master, states, fetched in (("fp32", 24, 0), ("split", 20, 2)):
        parts = timed(offload="optimizer=nvme", master=master).parts
        assert parts["nvme"] == pytest.approx(states * numel / (NODE.disk * 1e9 * DISK), rel=1e-3)
        # Parameters too: written once, read twice, less what is still in host memory at each of the two turns.
        everything = {"offload": "params=nvme,grads=cpu,optimizer=nvme", "read_ahead_nbytes": 1 << 20}
        more = timed(**everything, master=master).parts["nvme"]
        assert more == pytest.approx((states + 6 + fetched) * numel / (NODE.disk * 1e9 * DISK), rel=2e-3)


def test_only_the_first_forward_hides_the_update():
    """With four micro-steps the update waits for one forward of the four; the others come after it."""
    once, four = (timed(LARGE, offload="optimizer=cpu", accumulate=n) for n in (1, 4))
    assert four.parts["compute"] == pytest.approx(4 * once.parts["compute"], rel=0.01)
    assert four.seconds - once.seconds >= 3 * once.parts["compute"] * 0.99


def every_micro_step(phases: Sequence[Phase], accumulate: int, waits: float, ahead: float) -> tuple[float, float]:
    """Return what `seconds._ends` does, by following every micro-step."""
    first, backward, forward = phases
    device, host, ends = 0.0, 0.0, []
    for each in (first, backward, *[forward, backward] * (accumulate - 1)):
        host = max(host, device - ahead) + each.parts["host"]
        device += seconds._together(each.seconds - each.tail + waits, max(0.0, host - device)) + each.tail
        waits = 0.0
        ends.append(device)
    return ends[0], ends[-1]


def drawn(drawing: random.Random) -> tuple[ModelConfig, Hardware, dict[str, Any]]:
    """Draw a model, a machine and a setup; the host and the device are each the slower one at times."""
    heads = drawing.choice([2, 8, 16])
    model = ModelConfig(layers=drawing.choice([2, 6, 24]), hidden=64 * heads, heads=heads, vocab=4096)
    block = 10 ** drawing.uniform(-5, -2)
    hardware = dataclasses.replace(MACHINE, host_block=block, host_whole=block)
    offload = drawing.choice(["", "optimizer=cpu", "cpu", "nvme", "optimizer=hbm:1MB+cpu:1MB+nvme", "activations=cpu"])
    recompute = True if "activations" in offload else drawing.choice([False, True, 1])
    ranks, batch, seq = drawing.choice([1, 4, 16]), drawing.choice([1, 8]), drawing.choice([128, 2048])
    return (
        model,
        hardware,
        {
            **{"ranks": ranks, "ranks_per_node": min(8, ranks), "batch": batch, "seq": seq},
            **{"offload": offload, "recompute": recompute, "accumulate": drawing.randint(1, 64)},
        },
    )


def test_micro_steps_alike_are_not_followed_one_by_one(monkeypatch):
    """A step takes as long as if all were; of very many, those that are not followed are right to a thousandth."""
    drawing, ends = random.Random(5), seconds._ends
    for number in range(36):
        model, hardware, setup = drawn(drawing)
        many = number % 6 == 0
        setup |= {"accumulate": 20_000} if many else {}
        monkeypatch.setattr(seconds, "_ends", ends)
        found = timed(model, hardware, **setup)
        monkeypatch.setattr(seconds, "_ends", every_micro_step)
        expected, near = timed(model, hardware, **setup), 1e-3 if many else 1e-9
        assert found.seconds == pytest.approx(expected.seconds, rel=near), (model, setup)
        assert found.phases == pytest.approx(expected.phases, rel=near), (model, setup)


def test_an_estimate_does_not_follow_a_million_micro_steps(monkeypatch):
    calls: list[float] = []
    together = seconds._together
    monkeypatch.setattr(seconds, "_together", lambda device, host: calls.append(host) or together(device, host))
    timed(accumulate=1_000_000)
    assert len(calls) <= 2 * seconds.MAX_FOLLOWED + 3


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
        "compute": {"result": {"products": 650.0, "memory": 4200.0, "adam": 5.0, "adam_beside": 3.7}},
        "/scratch": {"result": {"read": 3.9, "write": 3.7, "both": 4.05}},
        "broken": "?",
    }
    here = this_machine(facts, measured)
    assert here is not None and (here.gpus, here.tflops, here.nvme_space) == (4, NODE.tflops, 5 * 10**11)
    assert (here.pcie, here.both_ways, here.disk) == (54.0, pytest.approx(92 / 108), 4.05)
    assert (here.adam, here.adam_beside) == (5.0, 3.7)
    older = this_machine(facts, {"/scratch": {"result": {"read": 3.9, "write": 3.7}}})
    assert older is not None and (older.disk, older.pcie) == (3.7, NODE.pcie)
    assert here.source == "this machine, measured: link, compute, disk; other rates of h200"
    assert older.source == "this machine, measured: disk; other rates of h200"
    assert this_machine({"gpus": []}, {}) is None


def test_rates_can_be_stated(capsys, no_gpu):
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
