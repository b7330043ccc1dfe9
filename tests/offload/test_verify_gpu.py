"""The laws of verified transfers where comparisons are work of the device: no wait, no other number, no missed bit."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from bit_flips import KINDS, NAMES, block_of, flip
from gpu_stack import Stack, run_without_waiting, train_stack
from ranks import run_ranks

import zerocli
from offload.checksum import COLUMNS, checksums
from offload.verify import Verifier
from zerocli.checkpoint.saver import Saver

pytestmark = pytest.mark.gpu
STREAM = {"update": "stream", "staging_nbytes": 8 << 20, "read_ahead_nbytes": 8 << 20}


def test_verification_changes_no_number_on_a_gpu(tmp_path):
    away = {"precision": "bf16", "accumulate": 2, **STREAM, "nvme_path": (str(tmp_path),)}
    for more in (
        {"offload": "cpu"},
        {"offload": "nvme"},
        {"offload": "params=cpu,optimizer=hbm:30MB+cpu,activations=cpu"},
        {"offload": "cpu", "update": "cpu"},
    ):
        assert train_stack(3, {**away, **more, "verify": True}) == train_stack(3, {**away, **more}), more
    plain = run_ranks(2, train_stack, 3, {"offload": "cpu", **STREAM})
    assert run_ranks(2, train_stack, 3, {"offload": "cpu", "verify": True, **STREAM}) == plain


@pytest.mark.parametrize("seed", range(6))
def test_a_gpu_takes_the_checksums_of_a_cpu(seed):
    """Of cells of any length: equal ones, smaller and larger ones beside them, some that are no whole words."""
    dice = random.Random(seed)
    choices = [8, 4072, 8 * COLUMNS, 1 << 20, 8 * dice.randrange(1, 9999)]
    sizes = dice.choices(choices, k=dice.randint(1, 4))
    lengths = [size for size in sizes for _ in range(dice.randint(1, 5))] + [5] * (seed % 2)
    cuts = [0, *itertools.accumulate(lengths)]
    data = torch.randint(0, 256, (cuts[-1],), dtype=torch.uint8)
    assert torch.equal(checksums(data.cuda(), cuts).cpu(), checksums(data, cuts))


def test_the_first_difference_of_a_stream_is_kept():
    verifier = Verifier()
    written = torch.arange(3000, device="cuda")
    found = written.clone()
    verifier.flag(found, written, "one", "dram")
    assert verifier.collect().item() == 0
    found[2999] += 1
    verifier.flag(found, written, "two", "dram")
    verifier.flag(found, written, "three", "dram")
    verifier.flag(written, written, "four", "dram")
    with pytest.raises(zerocli.Corrupted, match="two"):
        verifier.refuse(int(verifier.collect().item()))


def test_delays_with_verification_change_no_number():
    settings = {"precision": "bf16", "offload": "cpu", **STREAM}
    reference = train_stack(3, settings)
    for seed in range(1, 4):
        assert train_stack(3, {**settings, "verify": True}, seed) == reference


def test_verified_steps_never_wait_for_the_device():
    run_without_waiting(offload="cpu", verify=True, **STREAM)


@pytest.mark.parametrize("tier", ["cpu", pytest.param("nvme", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_found_before_its_step_is_reported(tmp_path, kind, tier):
    """The step that reads it returns, as its results are on the device still; the next one raises at the latest."""
    torch.manual_seed(3)
    model = Stack().cuda()
    about = {"offload": f"{kind}={tier}", "nvme_path": (str(tmp_path),), **STREAM}
    engine = zerocli.shard(model, lr=1e-3, stage=3, verify=True, **about)
    tokens = torch.randint(0, 97, (8, 32), device="cuda")
    at = {"params": (1, "step"), "optimizer": (1, "step"), "grads": (2, "backward"), "activations": (2, "forward")}
    finished = []

    def meddle(step: int, point: str) -> None:
        if (step, point) == at[kind]:
            torch.cuda.synchronize()
            flip(block_of(engine, kind), 282)

    with pytest.raises(zerocli.Corrupted, match=f"{NAMES[kind]} of blocks.[01] .* are not what was written"):
        for step in range(1, 5):
            loss = model(tokens)
            meddle(step, "forward")
            engine.backward(loss)
            meddle(step, "backward")
            engine.step()
            finished.append(step)
            if step == 1:
                engine.synchronize()
                meddle(step, "step")
    assert finished[-1] <= 2
    with pytest.raises(zerocli.Corrupted):
        engine.state_dict()
    with pytest.raises(zerocli.Corrupted):
        Saver(engine, tmp_path / "checkpoints").save(3)


def test_a_save_compares_what_it_reads_while_training_goes_on(tmp_path):
    model = Stack().cuda()
    engine = zerocli.shard(model, lr=1e-3, stage=3, offload="cpu", verify=True, **STREAM)
    saver = Saver(engine, tmp_path)
    tokens = torch.randint(0, 97, (8, 32), device="cuda")
    for step in range(1, 5):
        engine.backward(model(tokens))
        engine.step()
        saver.save(step)
    saver.wait()
    assert saver.failure is None and saver.saved == 4
    flip(block_of(engine, "optimizer"), 282)
    saver.save(5)
    saver.wait()
    assert saver.saved == 4 and "optimizer states of blocks.1" in (saver.failure or "")
    saver.close()
