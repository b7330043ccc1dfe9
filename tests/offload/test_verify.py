"""Laws of verified transfers: what a tier gives back is what it was given, or the step that reads it raises."""

from __future__ import annotations

import functools
import pickle
import random
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from bit_flips import KINDS, NAMES, block_of, flip
from deep import WIDTH, Deep
from lengths import LONG
from ranks import run_ranks
from runs import Death, losses, train
from toy_tiers import SMALL_DISK
from toys import train_uneven

import offload.verify
import zerocli
from offload.checksum import COLUMNS, checksums
from offload.mover import Mover, StagedStore
from offload.store import Store
from offload.verify import Corrupted, Verifier
from tiers.base import Block
from tiers.errors import TierFull
from tiers.registry import open_tier
from zerocli.checkpoint.loader import load
from zerocli.checkpoint.saver import Saver
from zerocli.engine.engine import Engine

DISK = {"tier_options": {"nvme": SMALL_DISK | {"verify": False}}}
"""Without checksums of the tier's own."""


def swap_in(block: Block, memory: torch.Tensor) -> None:
    block.tier.write(block, memory).synchronize()


def bytes_of(block: Block) -> torch.Tensor:
    memory = torch.empty(block.nbytes, dtype=torch.uint8)
    block.tier.read(block, memory).synchronize()
    return memory


class Training:
    """Three steps of a small model with one kind of its states away; `meddle` is called at each point of each step."""

    def __init__(self, folder: Path | str, kind: str, tier: str, meddle=lambda *_: None, **settings) -> None:
        torch.manual_seed(0)
        self.model = Deep(4)
        settings = (
            {"update": "stream", "staging_nbytes": 200000, "read_ahead_nbytes": 200000, "nvme_path": (str(folder),)}
            | DISK
            | settings
        )
        self.engine = zerocli.shard(self.model, lr=1e-2, stage=3, offload=f"{kind}={tier}", **settings)
        self.at = (0, "")
        self._meddle = meddle

    def run(self) -> dict[str, torch.Tensor]:
        engine = self.engine
        for step in range(1, 4):
            self.at = (step, "forward")
            torch.manual_seed(step)
            loss = self.model(torch.randn(4, WIDTH))
            self._meddle(engine, *self.at)
            self.at = (step, "backward")
            engine.backward(loss)
            self._meddle(engine, *self.at)
            self.at = (step, "step")
            engine.step()
            engine.synchronize()
            self._meddle(engine, *self.at)
        return engine.state_dict()


@functools.cache
def undisturbed(update: str, precision: str) -> dict[str, torch.Tensor]:
    """What all placements train to."""
    return Training(".", "optimizer", "cpu", update=update, precision=precision, verify=True).run()


def differs(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return any(not torch.equal(one[name], other[name]) for name in one)


BEFORE = {"params": (1, "step"), "optimizer": (1, "step"), "grads": (2, "backward"), "activations": (3, "forward")}
"""When the bit flips: between a write and the next read, after a block's first calls, whose values are compared."""
READ = {"params": (2, "forward"), "optimizer": (2, "step"), "grads": (2, "step"), "activations": (3, "backward")}
SOME = {"params": "cpu", "grads": "nvme", "optimizer": "nvme", "activations": "cpu"}
CASES = [
    pytest.param(kind, tier, "stream", "fp32", marks=[] if SOME[kind] == tier else pytest.mark.long)
    for kind in KINDS
    for tier in ("cpu", "nvme")
]
CASES += [
    pytest.param("optimizer", "cpu", "cpu", "bf16", marks=pytest.mark.long),
    pytest.param("params=cpu,optimizer", "cpu", "cpu", "bf16"),
]


@pytest.mark.parametrize(("kind", "tier", "update", "precision"), CASES)
def test_a_flipped_bit_is_found_in_the_step_that_reads_it(tmp_path, kind, tier, update, precision):
    flipped = kind.split("=")[0]

    def meddle(engine: Engine, *at) -> None:
        if at == BEFORE[flipped]:
            flip(block_of(engine, flipped), at=4 * 70 + (2 if precision == "fp32" or flipped == "optimizer" else 0))

    about = {"update": update, "precision": precision}
    training = Training(tmp_path, kind, tier, meddle, verify=True, **about)
    with pytest.raises(zerocli.Corrupted, match=f"the {NAMES[flipped]} of blocks.1 .* are not what was written"):
        training.run()
    assert training.at == READ[flipped]
    with pytest.raises(zerocli.Corrupted):
        training.engine.state_dict()  # for good: nothing of it is saved
    # Without verification the same bit goes through, and what is trained is something else.
    assert differs(undisturbed(update, precision), Training(tmp_path, kind, tier, meddle, **about).run())


@pytest.mark.parametrize(
    ("kind", "tier"),
    [
        ("params", "nvme"),
        ("optimizer", "cpu"),
        pytest.param("params", "cpu", marks=pytest.mark.long),
        pytest.param("optimizer", "nvme", marks=pytest.mark.long),
    ],
)
def test_a_stale_block_and_one_of_another_piece_are_found(tmp_path, kind, tier):
    kept = {}

    def stale(engine: Engine, *at) -> None:
        if at == (1, "step"):
            kept["old"] = bytes_of(block_of(engine, kind))
        if at == (2, "step"):
            swap_in(block_of(engine, kind), kept["old"])

    def misplaced(engine: Engine, *at) -> None:
        if at == (2, "step"):
            swap_in(block_of(engine, kind, 2), bytes_of(block_of(engine, kind, 3)))

    for meddle in (stale, misplaced):
        training = Training(tmp_path, kind, tier, meddle, verify=True)
        with pytest.raises(zerocli.Corrupted, match=f"{NAMES[kind]} of blocks.1"):
            training.run()
        assert training.at == (3, READ[kind][1])
        Training(tmp_path, kind, tier, meddle).run()


def test_gradients_are_found_between_two_passes_of_a_step():
    model = Deep(3)
    engine = zerocli.shard(model, stage=2, offload="grads=cpu", accumulate=2, verify=True)
    engine.backward(model(torch.randn(4, WIDTH)))
    flip(block_of(engine, "grads"), 1000)
    with pytest.raises(zerocli.Corrupted, match="gradients of blocks.1"):
        engine.backward(model(torch.randn(4, WIDTH)))


def test_a_copy_that_was_read_ahead_is_compared_with_what_was_written(tmp_path):
    def meddle(engine: Engine, *at) -> None:
        if at == (2, "step"):
            copy = engine.mover._copies[engine.units[2].flats[0].param_store]
            flip(copy.block, 282)

    training = Training(tmp_path, "params", "nvme", meddle, verify=True)
    with pytest.raises(zerocli.Corrupted, match="parameters of blocks.1"):
        training.run()
    assert training.at == (3, "forward")


def _with_and_without(folder: str) -> list[tuple[list[float], list[float]]]:
    found = []
    disk = {"nvme_path": (folder,), **DISK}
    spill = "params=hbm:2KB+cpu,optimizer=hbm:6KB+cpu:6KB+nvme,grads=hbm:2KB+cpu,activations=cpu"
    cases = [
        (0, "activations=cpu", {}),
        (1, "optimizer=nvme", {"update": "stream"}),
        (2, "cpu", {"update": "cpu", "precision": "bf16", "accumulate": 3}),
        (3, "nvme", {"update": "stream", "precision": "bf16", "accumulate": 2}),
        (3, "cpu", {"update": "cpu", "precision": "bf16"}),
        (3, spill, {"update": "stream"}),
        (3, "cpu", {"optimizer": "muon", "lr": 1e-3}),
    ]
    for stage, placement, more in cases if LONG else cases[3:6:2]:
        about = {
            "stage": stage,
            "offload": placement,
            "staging_nbytes": 96000,
            "read_ahead_nbytes": 96000,
            "steps": 3,
            **disk,
            **more,
        }
        found.append((train_uneven(**about), train_uneven(**about, verify=True)))
    return found


@pytest.mark.longer
def test_verification_changes_no_number(tmp_path):
    for rank in run_ranks(2, _with_and_without, str(tmp_path)):
        for plain, verified in rank:
            assert plain == verified


def test_a_corrupt_piece_is_not_saved(tmp_path):
    training = Training(tmp_path, "optimizer", "cpu", verify=True)
    trained = training.run()
    engine = training.engine
    saver = Saver(engine, tmp_path / "checkpoints")
    saver.save(4)
    saver.wait()
    assert saver.saved == 4 and saver.failure is None
    flip(block_of(engine, "optimizer"), 282)
    saver.save(5)
    saver.wait()
    assert saver.saved == 4 and "optimizer states of blocks.1" in (saver.failure or "")
    engine.backward(training.model(torch.randn(4, WIDTH)))
    with pytest.raises(zerocli.Corrupted):
        engine.step()
    with pytest.raises(zerocli.Corrupted):
        saver.save(6)
    saver.close()
    assert [found.step for found in saver.folder.committed()] == [4]
    for kind in ("optimizer", "params"):  # and what was saved loads, in pieces that begin anywhere, with no false alarm
        again = Training(tmp_path, kind, "cpu", verify=True)
        load(again.engine, saver.folder.of(4))
        assert not differs(trained, again.engine.state_dict())


def corrupt_own_states() -> None:
    """Flip a bit of this rank's states, called by a probe of the engine's events."""
    frame = sys._getframe()
    while not isinstance(frame.f_locals.get("self"), Engine):
        frame = frame.f_back
    flip(block_of(frame.f_locals["self"], "optimizer"), 282)


def test_a_run_ends_on_all_ranks_with_the_piece_and_what_is_saved(tmp_path):
    """Rank 1 reads corrupt states in the update of step 4: step 2 is saved, and no line is of a step after 3."""
    sets = ("zero.stage=2", "offload.placement=optimizer=cpu", "offload.verify=true", "model.layers=3")
    sets += ("checkpoint.async=false",)
    run = train(tmp_path / "run", *sets, death=Death((1,), 4, "optimizer", act=corrupt_own_states))
    assert run.codes == [1, 1], run.said
    assert "the optimizer states of blocks.1 (" in run.said[1] and "are not what was written" in run.said[1]
    assert f"step 2 is saved\ntry: zerocli train --resume --run-dir {tmp_path / 'run'}" in run.said[1].replace(
        "the same launch, with train", "zerocli train"
    )
    # A line is written one step late; the update of step 4 runs beside the next forward.
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3]


def test_an_error_of_a_tier_passes_from_rank_to_rank():
    for error in (Corrupted("these bytes", tier="dram", hint="again"), TierFull(tier="nvme", needed=2, available=1)):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error) and str(copy) == str(error)
        assert (copy.tier, copy.hint) == (error.tier, error.hint)


# -- the parts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staged", [False, True])
def test_any_mix_of_ranges_is_verified(monkeypatch, staged):
    """Writes and reads that begin and end anywhere raise nothing until a bit flips, and then each that covers it."""
    monkeypatch.setattr(offload.verify, "CELL_NBYTES", 64)
    dice, numel = random.Random(3), 300
    tier = open_tier("dram", capacity=1 << 20)
    mover = Mover(1 << 16, functools.cache(lambda nbytes: open_tier("dram", capacity=nbytes)))
    about = (tier, "parameters", numel, torch.int16, Counter())
    for trial in range(8):
        store = StagedStore(mover, *about, Verifier()) if staged else Store(*about, Verifier())
        plain = torch.zeros(numel, dtype=torch.int16)
        store.put(0, plain).synchronize()
        for _ in range(30):
            start, stop = sorted(dice.sample(range(numel + 1), 2))
            act = dice.choice(["put", "fetch", "peek", "local"])
            if act == "put":
                plain[start:stop] = torch.randint(-9999, 9999, (stop - start,), dtype=torch.int16)
                store.put(start, plain[start:stop].clone()).wait()
            elif act == "local" and not staged:
                part = store.local(start, stop)
                assert torch.equal(part, plain[start:stop])
                part += 1
                plain[start:stop] += 1
                store.changed(start, stop)
            else:
                target = torch.empty(stop - start, dtype=torch.int16)
                (store.peek if act == "peek" else store.fetch)(start, target).wait()
                assert torch.equal(target, plain[start:stop])
        at = dice.randrange(numel)
        store._mover.forget(store) if staged else None
        flip(store.block, 2 * at + trial % 2, trial % 8)
        first, last = dice.randint(0, at), dice.randint(at + 1, numel)
        read = store.peek if trial % 3 else store.fetch
        with pytest.raises(zerocli.Corrupted):
            read(first, torch.empty(last - first, dtype=torch.int16)).wait()
        store.free()


@pytest.mark.parametrize("nbytes", [1, 7, 8, 1000, 8 * COLUMNS, 3 * 8 * COLUMNS + 13])
def test_checksums_depend_on_every_bit_and_place_and_on_nothing_else(nbytes):
    data = torch.randint(0, 256, (3 * nbytes,), dtype=torch.uint8)
    cuts = [0, nbytes, 3 * nbytes]
    plain = checksums(data, cuts)
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), data])[3:]  # an address that is no multiple of a word
    assert torch.equal(checksums(shifted, cuts), plain)
    assert torch.equal(checksums(data[:nbytes], [0, nbytes]), plain[:1])
    for at in {0, nbytes // 2, nbytes - 1}:
        for bit in range(8):
            data[at] ^= 1 << bit
            assert (checksums(data, cuts) != plain).tolist() == [True, False]
            data[at] ^= 1 << bit
    pages = torch.randint(0, 256, (64 * 4096,), dtype=torch.uint8)
    swapped = pages.view(64, 4096)[torch.tensor([1, 0, *range(2, 64)])].flatten()
    assert checksums(pages, [0, pages.numel()]) != checksums(swapped, [0, pages.numel()])
