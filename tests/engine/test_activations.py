"""Laws of activation checkpoints: where they rest changes no number, and what is on the device is the arithmetic."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from lengths import LONG
from ranks import run_cases, run_ranks
from small_gpt import BATCH, CHECKPOINT, HIDDEN, LAYERS, SEQ, make, train
from torch import nn
from toy_tiers import NVME

import zerocli
from tiers.errors import TierFull
from tiers.registry import register
from zerocli.engine.units.divide import recomputed_units

WAYS: list[dict[str, Any]] = [
    {"recompute": True},
    {"offload": "activations=hbm"},
    {"offload": "activations=cpu"},
    {"offload": "activations=nvme"},
    {"offload": f"activations=hbm:{CHECKPOINT}B+cpu:{2 * CHECKPOINT}B+nvme"},
]
PARTIAL = [{"recompute": count} for count in (0, 1, LAYERS - 1, LAYERS)]
PARTIAL.append({"recompute": 2, "offload": "activations=cpu"})


def _losses(settings: dict) -> list[float]:
    engine = make(**settings)
    losses = train(engine)
    engine.close()
    return losses


def _every_way(settings: dict, ways: list[dict]) -> list[list[float]]:
    return [_losses(settings | way) for way in ({}, *ways)]


EVERY = [pytest.param(stage, WAYS + PARTIAL, marks=pytest.mark.long, id=f"{stage}-every") for stage in range(4)]


@pytest.mark.parametrize(("stage", "all_ways"), [pytest.param(3, [WAYS[0], WAYS[4], PARTIAL[1]], id="3-some"), *EVERY])
def test_checkpoints_never_change_a_loss(tmp_path, stage, all_ways):
    cases = [({"accumulate": 2}, all_ways)]
    if stage == 3 and LONG:
        cases += [({"precision": "bf16"}, all_ways[:2])]
    for variant, ways in cases:
        common = {"stage": stage, "nvme_path": (str(tmp_path),), **variant}
        for kept, *others in run_ranks(2, _every_way, common, ways):
            for way, losses in zip(ways, others, strict=True):
                assert losses == kept, way
    assert not list(tmp_path.iterdir())


def test_checkpoints_go_together_with_model_states_elsewhere(tmp_path):
    text = "params=nvme,grads=cpu,optimizer=cpu,activations=cpu"
    away = {"offload": text, "nvme_path": (str(tmp_path),), "update": "stream"}
    kept, moved = run_cases(2, _losses, [({},), (away,)])
    assert moved == kept


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [4, 8, pytest.param(16, marks=pytest.mark.long)])
def test_bytes_on_the_device_are_the_arithmetic(tmp_path, layers):
    for way in WAYS[:2]:
        engine = make(layers, **way)
        train(engine, 2)
        assert engine.memory()["activations"] == layers * BATCH * SEQ * HIDDEN * 4
        assert engine.activations.peak_nbytes == layers * BATCH * SEQ * HIDDEN * 4
    for way in WAYS[2:4]:
        # A tier's thread may let go of a buffer a moment after the transfer is over: the best of three tries counts.
        peaks = []
        for _ in range(3):
            engine = make(layers, nvme_path=(str(tmp_path),), **way)
            train(engine, 2)
            peaks.append(engine.activations.peak_nbytes)
            if peaks[-1] <= 2 * CHECKPOINT:
                break
            engine.close()
        assert min(peaks) <= 2 * CHECKPOINT
        assert engine.memory()["activations"] == 0
        assert engine.activations.nbytes == 0  # nothing stays behind a step
        engine.tiers.traffic.clear()
        train(engine, 1)
        # Each is written once; the last two are still there when backward begins, and the others come back once.
        written, read = layers * CHECKPOINT, (layers - 2) * CHECKPOINT
        assert engine.tiers.traffic["activations written"] == written
        assert engine.tiers.traffic["activations read"] == read
        engine.close()


def test_buffers_do_not_grow_with_layers():
    sizes = set()
    for layers in (4, 8, 16):
        engine = make(layers, offload="cpu", recompute=True, update="stream", staging_nbytes=1 << 20)
        train(engine, 2)
        sizes.add((engine.memory()["buffers"], engine.memory()["gathered"]))
    assert len(sizes) == 1


def test_arenas_are_allocated_once_and_follow_the_longest_batch():
    engine = make(offload="activations=cpu", dropout=0.0, hidden=2 * HIDDEN)  # half a checkpoint is a page
    tier = engine.tiers.open("dram", "activations")
    seen = []
    for seq in (8, SEQ, 8, SEQ):
        train(engine, 2, seq)
        seen.append(tier.used)
    assert seen == [LAYERS * CHECKPOINT, *[LAYERS * 2 * CHECKPOINT] * 3]


# -- where there is no room --------------------------------------------------------------------------------------------


def test_a_full_tier_spills_to_the_next(tmp_path):
    kept = train(make())
    room = {"dram": {"capacity": 2 * CHECKPOINT}, **NVME["tier_options"]}
    engine = make(offload="activations=cpu+nvme", nvme_path=(str(tmp_path),), tier_options=room)
    assert train(engine) == kept
    assert engine.activations.stack.nbytes() == {"dram": 2 * CHECKPOINT, "nvme": 2 * CHECKPOINT}
    assert "dram has room for 2 of 4" in engine.activations.notes[0]
    engine.close()


@pytest.mark.parametrize(
    ("text", "options"),
    [(f"activations=cpu:{2 * CHECKPOINT}B", {}), ("activations=cpu", {"dram": {"capacity": 2 * CHECKPOINT}})],
    ids=["budget", "room"],
)
def test_no_room_is_one_clear_error(text, options):
    engine = make(offload=text, tier_options=options)
    with pytest.raises(TierFull, match=r"dram is full: 16 KiB needed, 8 KiB free"):
        train(engine)


# -- delays and errors -------------------------------------------------------------------------------------------------


def _tardy(settings: dict) -> list[float]:
    register("tardy", "toy_tiers:Tardy")
    return _losses({"tier_options": {"tardy": {"pin": False}}, **settings})


def test_slow_transfers_in_any_order_change_no_number():
    kept = run_ranks(2, _losses, {})
    assert run_ranks(2, _tardy, {"offload": "activations=tardy"}) == kept


@pytest.mark.longer
def test_an_error_while_recomputing_unwinds_and_training_goes_on(tmp_path):
    for way in [*WAYS, {"recompute": "selective"}][:: 1 if LONG else 2]:
        reference, engine = train(make(dropout=0.0), 4), make(dropout=0.0, nvme_path=(str(tmp_path),), **way)
        losses = train(engine, 1)
        norm = engine.model.blocks[1].norm1
        calls, good = [], norm.forward

        def fails(x: torch.Tensor, good=good, calls=calls) -> torch.Tensor:
            calls.append(1)
            if len(calls) == 2:  # in backward
                raise ArithmeticError("in the middle")
            return good(x)

        norm.forward = fails
        torch.manual_seed(7)
        tokens = torch.randint(0, 64, (BATCH, SEQ + 1))
        with pytest.raises(ArithmeticError, match="in the middle"):
            engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
        norm.forward = good
        for step in range(1, 4):
            torch.manual_seed(100 * step)
            tokens = torch.randint(0, 64, (BATCH, SEQ + 1))
            loss = engine(tokens[:, :-1], tokens[:, 1:])
            engine.backward(loss)
            losses.append(loss.item())
            engine.step()
        assert losses == reference, way
        assert len(engine.activations._order) <= LAYERS and not any(s.taken for s in engine.activations.stack._slots)
        engine.close()


# -- any module --------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A block that takes its input in a dict, or as an object of its own, with something shared beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, box: Any, *, scale: torch.Tensor) -> Any:
        x = box["x"] if isinstance(box, dict) else box.x
        y = x + self.two(torch.relu(self.one(x).t()).t()) * scale
        return {"x": y} if isinstance(box, dict) else type(box)(y)


class Box:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class OddNet(nn.Module):
    def __init__(self, boxed: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Odd() for _ in range(3))
        self.boxed = boxed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).t().contiguous().t()  # dense, but not in the usual order
        box: Any = Box(x) if self.boxed else {"x": x}
        for block in self.blocks:
            box = block(box, scale=torch.ones(1))
        return (box.x if self.boxed else box["x"]).square().mean()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("boxed", [False, True])
def test_any_module_can_be_checkpointed(stage, boxed):
    results = []
    for way in ({}, {"recompute": True}, {"offload": "activations=cpu"}):
        torch.manual_seed(0)
        engine = zerocli.shard(OddNet(boxed), stage=stage, **way)
        losses = []
        for step in range(3):
            torch.manual_seed(step)
            loss = engine(torch.randn(6, 8))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        results.append(losses)
        if way and boxed:
            shared = "its input is no tensor" in " ".join(engine.activations.notes)
            assert shared or engine.activations.peak_nbytes == 0  # the scale alone is kept, by reference
        elif way:
            assert 0 < engine.activations.peak_nbytes <= 3 * 6 * 8 * 4
    assert results[0] == results[1] == results[2]


def test_units_can_be_chosen():
    kept = train(make(dropout=0.0))
    first = make(dropout=0.0, offload="activations=hbm", recompute=FirstOnly())
    assert train(first) == kept
    assert first.memory()["activations"] == CHECKPOINT
    with pytest.raises(ValueError, match="no unit of the model matches recompute="):
        make(recompute=nn.Conv2d)


def test_a_number_recomputes_the_first_blocks():
    for count, first in ((0, []), (1, [0]), (LAYERS - 1, range(LAYERS - 1)), (LAYERS, range(LAYERS))):
        engine = make(dropout=0.0, recompute=count)
        assert recomputed_units(engine.units, count) == {engine.units[1 + block]: False for block in first}
        train(engine)
        assert engine.memory()["activations"] == count * CHECKPOINT
    for bad in (-1, LAYERS + 1):
        with pytest.raises(ValueError, match=f"recompute={bad}: the model has {LAYERS} repeated blocks"):
            make(recompute=bad)
    with pytest.raises(ValueError, match="recompute='auto': pass True, False, 'selective', a number of blocks"):
        make(recompute="auto")


class FirstOnly:
    """Chooses the first module it is asked about."""

    def __init__(self) -> None:
        self.first: nn.Module | None = None

    def __call__(self, module: nn.Module) -> bool:
        self.first = self.first or module
        return module is self.first


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.mul_(2))


def test_a_block_that_changes_its_input_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(InPlace(), InPlace()))
    engine = zerocli.shard(model, stage=2, units=InPlace, offload="activations=cpu")
    with pytest.raises(RuntimeError, match=r"1\.0 changes its input in place"):
        engine(torch.randn(2, 4))


class Twice(nn.Module):
    """A block that is given the same tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, again: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + again


class TwiceNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 4), nn.ModuleList(Twice() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, x)
        return x.square().mean()


def test_one_tensor_may_come_in_twice():
    def run(**way: Any) -> list[float]:
        torch.manual_seed(0)
        engine = zerocli.shard(TwiceNet(), stage=3, **way)
        norms = []
        for step in range(3):
            torch.manual_seed(step)
            engine.backward(engine(torch.randn(3, 4)))
            norms.append(engine.step().grad_norm.item())
        return norms

    assert run() == run(recompute=True) == run(offload="activations=cpu")


def test_two_forwards_before_a_backward_keep_their_own_checkpoints():
    def run(**way: Any) -> list[float]:
        engine = make(dropout=0.0, **way)
        norms = []
        for step in range(3):
            torch.manual_seed(step)
            a, b = (torch.randint(0, 64, (BATCH, SEQ + 1)) for _ in range(2))
            loss = engine(a[:, :-1], a[:, 1:]) + engine(b[:, :-1], b[:, 1:])
            engine.backward(loss)
            norms.append(engine.step().grad_norm.item())
        return norms

    assert run() == run(recompute=True) == run(offload="activations=cpu")


class Crossing(nn.Module):
    """An encoder's block, and blocks of a decoder that all take its output."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.other = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.own(x) * self.other(memory))

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(HIDDEN, HIDDEN)
        self.blocks = nn.ModuleList(Crossing.Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.encoder(x)
        for block in self.blocks:
            x = block(x, memory)
        return x.square().mean()


@pytest.mark.parametrize("way", [{}, *WAYS[:4]], ids=["kept", "recomputed", "hbm", "cpu", "nvme"])
def test_an_input_of_several_blocks_is_kept_once(tmp_path, way):
    """Their own inputs, the first of which is no result of a computation, and one that all have."""
    results = []
    for settings in ({}, way):
        torch.manual_seed(0)
        model = Crossing()
        common = {"stage": 3, "units": list(model.blocks), "nvme_path": (str(tmp_path),), **NVME}
        engine = zerocli.shard(model, **common | settings)
        losses = []
        for step in range(3):
            torch.manual_seed(step)
            engine.tiers.traffic.clear()
            loss = engine(torch.randn(BATCH, SEQ, HIDDEN))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        results.append((losses, {name: value.tolist() for name, value in engine.state_dict().items()}))
        used, traffic = engine.memory()["activations"], engine.tiers.traffic
        engine.close()
    assert results[0] == results[1]
    if way in WAYS[2:4]:
        assert used == 0 and traffic["activations written"] == LAYERS * CHECKPOINT
        assert traffic["activations read"] <= LAYERS * CHECKPOINT
    elif way:
        assert used == LAYERS * CHECKPOINT


def test_random_placements_change_nothing():
    dice = random.Random(3)
    kept = train(make(6))
    for _ in range(2):
        first, second = dice.randrange(4), dice.randrange(4)
        text = f"activations=hbm:{first * CHECKPOINT}B+dram:{second * CHECKPOINT}B+cpu"
        assert train(make(6, offload=text)) == kept, text
