"""The laws of offload where copies really run beside compute."""

from __future__ import annotations

import itertools

import pytest
import torch
from gpu_stack import Stack, run_without_waiting, train_stack
from ranks import run_ranks

import zerocli
from tiers.events import NOTHING
from zerocli.engine.events import Events
from zerocli.engine.optimizer import update_place

pytestmark = pytest.mark.gpu
DTYPES = (torch.bfloat16, torch.float32)
STREAM = {"update": "stream", "staging_nbytes": 8 << 20, "read_ahead_nbytes": 8 << 20}
BOTH = {**STREAM, "update": "both"}


@pytest.fixture(autouse=True)
def rates(monkeypatch):
    """Both devices equally fast: the share must not depend on what else the machine does."""
    monkeypatch.setattr(update_place, "measure_both", lambda *args: (3e-10, 3e-10))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_placement_never_changes_a_loss_on_a_gpu(tmp_path, precision):
    common = {"precision": precision}
    away = {**common, **STREAM, "nvme_path": (str(tmp_path),)}
    for accumulate in (1, 2):
        reference = train_stack(3, {**common, "accumulate": accumulate})
        for text in (
            "cpu",
            "nvme",
            "optimizer=cpu",
            "params=cpu,grads=cpu",
            "params=hbm:4MB+cpu,optimizer=hbm:30MB+cpu",
        ):
            got = train_stack(3, {**away, "offload": text, "accumulate": accumulate})
            assert got == reference, (text, accumulate)
    for stage in (1, 2):
        assert train_stack(stage, {**away, "offload": "cpu"}) == train_stack(stage, common)


@pytest.mark.parametrize("settings", [{}, {"master": "fp32"}, {"accumulate": 2}, {"precision": "fp16"}], ids=str)
def test_which_device_updates_a_parameter_changes_no_bit(settings):
    """Both at once, with what the CPU changes in host memory or copied from the device."""
    settings = {"precision": "bf16", **settings}
    reference = train_stack(3, settings)
    for text in ("cpu", "optimizer=cpu", "optimizer=cpu,grads=cpu", "params=hbm:4MB+cpu,optimizer=hbm:30MB+cpu"):
        assert train_stack(3, {**settings, **BOTH, "offload": text}) == reference, text
    for stage, text in ((1, "optimizer=cpu"), (2, "cpu")):
        settings["defer_update"] = stage == 1
        assert train_stack(stage, {**settings, **BOTH, "offload": text}) == train_stack(stage, settings), stage


def test_both_devices_agree_on_their_parts_while_parameters_are_frozen():
    def freezing():
        step = itertools.count()

        def freeze(model, tokens):
            model.blocks[0].requires_grad_(next(step) % 3 > 0)

        return freeze

    reference = train_stack(3, {"precision": "bf16"}, after_step=freezing())
    for text in ("cpu", "optimizer=cpu"):
        settings = {"precision": "bf16", "defer_update": text == "cpu", **BOTH, "offload": text}
        assert train_stack(3, settings, after_step=freezing()) == reference, text


@pytest.mark.parametrize("text", ["cpu", "optimizer=cpu"])
def test_both_devices_take_a_part(text):
    model = Stack().cuda()
    engine = zerocli.shard(model, stage=3, precision="bf16", offload=text, **BOTH)
    assert 0 < engine.update.share < 1, engine.update
    for _ in range(3):
        engine.backward(model(torch.randint(0, 97, (8, 32), device="cuda")))
        engine.step()
    chunks = [chunk for flat in engine.trainable() for chunk in engine.updater._chunks_of(flat)]
    assert {chunk.on_cpu for chunk in chunks if chunk.parts} == {True, False}
    engine.synchronize()
    kept = sum(spec.nbytes for spec in engine.specs() if spec.category == "buffers")
    assert sum(t.nbytes for category, _, t in engine.holdings() if category == "buffers") <= kept * 1.01
    engine.close()


def test_an_automatic_update_gives_the_bits_of_a_streamed_one(monkeypatch):
    monkeypatch.setattr(update_place, "LEAST_NUMEL", 0)
    for precision in ("bf16", "fp32"):
        settings = {"precision": precision, "offload": "cpu"}
        auto = train_stack(3, {**settings, **STREAM, "update": "auto"})
        assert auto == train_stack(3, {**settings, **STREAM})


def test_two_ranks_offload_on_one_gpu():
    reference = run_ranks(2, train_stack, 3, {"precision": "bf16"})
    for seed in (None, 1, 2):
        settings = {"precision": "bf16", "offload": "cpu", "recompute": seed == 2, **(BOTH if seed == 1 else STREAM)}
        assert run_ranks(2, train_stack, 3, settings, seed) == reference


def test_delays_with_offload_change_no_number():
    reference = train_stack(3, {"precision": "bf16"})
    for seed in range(1, 5):
        for text, where in (("cpu", STREAM), ("cpu", BOTH), ("optimizer=cpu", BOTH)):
            assert train_stack(3, {"precision": "bf16", "offload": text, **where}, seed) == reference


def test_deferring_the_update_changes_no_number_on_a_gpu():
    """With delays on the streams: a forward that did not wait for its unit's update would compute with old values."""
    for stage, text in ((1, "optimizer=cpu"), (2, "cpu"), (3, "optimizer=hbm:10MB+cpu")):
        reference = train_stack(stage, {"precision": "bf16"})
        for seed in (None, 1, 2):
            settings = {"precision": "bf16", "offload": text, "defer_update": True, **(BOTH if seed == 2 else STREAM)}
            assert train_stack(stage, settings, seed) == reference


class SlowUpdates(Events):
    """Delays every chunk of an update by some milliseconds of its stream."""

    def __init__(self, milliseconds: int) -> None:
        self._cycles = 2_000_000 * milliseconds

    def update(self, unit):
        torch.cuda._sleep(self._cycles)
        return NOTHING


@pytest.mark.parametrize(
    "text", ["grads=cpu", "grads=cpu,optimizer=hbm:30MB+cpu", "optimizer=cpu", "params=cpu", "cpu"]
)
def test_a_slow_update_is_not_overtaken_by_the_next_chunks(text):
    """Chunks take turns in the update's slots: none may be overwritten while an update still reads it."""
    reference = train_stack(3, {"precision": "bf16"}, steps=3)
    for where in (STREAM, BOTH):
        settings = {"precision": "bf16", "offload": text, **where}
        assert train_stack(3, settings, steps=3, events=SlowUpdates(1)) == reference


def test_a_forward_on_another_stream_frees_no_gradient_that_an_update_still_reads():
    """After a forward on a stream of the user's own, memory that the main stream allocates is not such a gradient's."""
    side = torch.cuda.Stream()

    def evaluate(model, tokens):
        main, sizes = torch.cuda.current_stream(), [sum(p.numel() for p in b.parameters()) for b in model.blocks]
        side.wait_stream(main)
        with torch.cuda.stream(side), torch.no_grad():
            model(tokens)
        spoilt = [torch.full((size,), 1e4, dtype=dtype, device="cuda") for size in sizes for dtype in DTYPES]
        main.wait_stream(side)
        assert spoilt

    reference = train_stack(3, {"precision": "bf16"})
    settings = {"precision": "bf16", "offload": "optimizer=cpu", "defer_update": True, **STREAM}
    assert train_stack(3, settings, events=SlowUpdates(10), after_step=evaluate) == reference


@pytest.mark.parametrize("precision, rel", [("bf16", 2e-2), ("fp32", 1e-4)])
def test_the_cpu_update_agrees_to_rounding(tmp_path, precision, rel):
    """Also of fp32 parameters, which are their own master, while they stay on the device."""
    for optimizer in ("adamw", "adagrad"):
        common = {"precision": precision, "optimizer": optimizer}
        reference = train_stack(3, common)
        for text in ("cpu", "optimizer=cpu", "grads=nvme,optimizer=nvme"):
            got = train_stack(3, {**common, "offload": text, "update": "cpu", "nvme_path": (str(tmp_path),)})
            assert got == pytest.approx(reference, rel=rel), (optimizer, text)


def test_offloaded_steps_never_wait_for_the_device():
    run_without_waiting(offload="cpu", **STREAM)


@pytest.mark.parametrize("where", [STREAM, BOTH], ids=["stream", "both"])
@pytest.mark.parametrize("master", ["split", "fp32"])
def test_a_skipped_step_changes_no_offloaded_parameter(master, where):
    """Parameters pass through a slot, which has another chunk's before."""
    torch.manual_seed(3)
    model = Stack(layers=3).cuda()
    engine = zerocli.shard(model, lr=1e-2, stage=3, precision="bf16", master=master, offload="cpu", **where)
    tokens = torch.randint(0, 97, (4, 16), device="cuda")

    def step(factor: float) -> None:
        engine.backward(model(tokens) * factor)
        engine.step()

    step(1.0)
    before = engine.state_dict()
    step(float("inf"))
    after = engine.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    step(1.0)
    assert not all(torch.equal(before[name], value) for name, value in engine.state_dict().items())
    with engine.gathered():
        assert all(p.isfinite().all() for p in model.parameters())
    engine.close()
