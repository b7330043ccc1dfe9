"""Laws of `engine.move`: it changes no number, holds one piece more at most, and leaves nothing behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lengths import LONG
from ranks import run_cases
from small_gpt import make, train_step
from toy_tiers import NVME

from offload.record import Record
from zerocli.engine.events import Events
from zerocli.errors import Refused
from zerocli.layout.recompute import Recompute

STREAM = {"staging_nbytes": 96000, "read_ahead_nbytes": 48000}
PATHS = {
    3: (
        "cpu",
        "params=nvme,optimizer=nvme",
        "params=nvme,grads=nvme,optimizer=cpu",
        "params=hbm:60KB+cpu,optimizer=hbm:60KB+cpu:90KB+nvme,grads=hbm:30KB+cpu",
        "",
    ),
    2: ("cpu", "optimizer=hbm:60KB+nvme,grads=cpu", "optimizer=cpu", ""),
    1: ("optimizer=cpu", "optimizer=hbm:60KB+nvme", ""),
    0: ("activations=cpu", ""),
}
"""Placements that a run moves through, by stage; it begins without offload, and ends there."""


def _trained(settings: dict[str, Any], path: tuple[str, ...]) -> tuple[list[float], dict, dict]:
    """Train a step at each placement of the path in turn; return the losses, parameters and optimizer states."""
    engine = make(layers=3, **STREAM | settings)
    losses = train_step(engine, 0)
    for step, placement in enumerate(path, 1):
        if placement is not None:
            assert engine.move(placement) == []
            tiers = {flat.spec.tiers[kind] for flat in engine.flats() for kind in flat.spec.tiers}
            assert tiers <= {"hbm", *engine.placement.tiers}
        losses += train_step(engine, step)
    state, states = engine.state_dict(), engine.optimizer_state_dict()
    engine.close()
    return losses, state, states


def alike(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(alike(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(alike, found, expected))
    return found == expected


CASES = [
    (2, {"stage": 3, "defer_update": True}),
    pytest.param(2, {"stage": 2, "precision": "bf16", "defer_update": True}, marks=pytest.mark.long),
    pytest.param(2, {"stage": 3, "update": "stream", "defer_update": True}, marks=pytest.mark.long),
    pytest.param(2, {"stage": 3, "precision": "bf16", "accumulate": 2, "verify": True}, marks=pytest.mark.long),
    pytest.param(2, {"stage": 3, "precision": "bf16", "master": "fp32"}, marks=pytest.mark.long),
    pytest.param(2, {"stage": 3, "optimizer": "NAdam"}, marks=pytest.mark.long),
    pytest.param(2, {"stage": 3, "optimizer": "muon"}, marks=pytest.mark.long),
    pytest.param(2, {"stage": 3, "frozen": True, "base": "int8"}, marks=pytest.mark.long),
    pytest.param(2, {"stage": 2, "accumulate": 2, "update": "stream"}, marks=pytest.mark.long),
    pytest.param(2, {"stage": 1, "precision": "bf16", "defer_update": True}, marks=pytest.mark.long),
    pytest.param(2, {"stage": 0, "recompute": True}, marks=pytest.mark.long),
    pytest.param(3, {"stage": 3, "defer_update": True}, marks=pytest.mark.long),
    pytest.param(4, {"stage": 3, "shard_ranks": 2}, marks=pytest.mark.long),
    pytest.param(4, {"stage": 3, "shard_ranks": 2, "shard_states": "all"}, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("world", "settings"), CASES)
def test_moving_between_steps_changes_no_number(tmp_path, world, settings):
    path = PATHS[settings["stage"]] if LONG else PATHS[settings["stage"]][-2:]
    common = {"nvme_path": (str(tmp_path),), **settings}
    stays, moves = run_cases(world, _trained, [(common, (None,) * len(path)), (common, path)])
    assert alike(moves, stays)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.long)])
def test_one_rank_moves_whole_parameters_away_and_back(tmp_path, precision):
    """They are resident on the device of one rank, and gathered from any other tier."""
    common = {"stage": 3, "nvme_path": (str(tmp_path),), "precision": precision, "defer_update": True}
    path = PATHS[3] if LONG else ("params=hbm:60KB+cpu,optimizer=cpu", "")
    assert alike(_trained(common, path), _trained(common, (None,) * len(path)))


def test_what_is_recomputed_changes_between_steps_too():
    def trained(*changes: Recompute | None) -> list[float]:
        engine = make(stage=3)
        losses = train_step(engine, 0)
        for step, recompute in enumerate(changes, 1):
            if recompute is not None:
                engine.move("activations=cpu" if recompute.selective else "", recompute)
            losses += train_step(engine, step)
            if recompute is not None:
                tier = "dram" if recompute.selective else "hbm"
                assert engine.activations.stack.nbytes().keys() == ({tier} if recompute else set())
        engine.close()
        return losses

    changes = (Recompute(2), Recompute(1, 2), Recompute())
    assert trained(*changes) == trained(*(None for _ in changes))


class Seen(Events):
    """Notes what tiers hold whenever a piece has moved, before the next one does."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.most: dict[str, int] = {}
        self.num_moves = 0

    @contextlib.contextmanager
    def move(self, unit: Any) -> Iterator[None]:
        yield
        self.num_moves += 1
        for name, nbytes in held(self.engine).items():
            self.most[name] = max(self.most.get(name, 0), nbytes)


def held(engine: Any) -> dict[str, int]:
    """Return the bytes of model states on each tier."""
    found = {"hbm": sum(engine.memory()[kind] for kind in ("parameters", "gradients", "optimizer_states"))}
    for tier in engine.tiers.opened():
        found[tier.name] = found.get(tier.name, 0) + tier.used
    return found


def test_a_move_holds_one_piece_more_than_the_placement_before_or_after(tmp_path):
    seen = Seen()
    engine = seen.engine = make(events=seen, nvme_path=(str(tmp_path),), read_ahead_nbytes=0, **NVME)
    train_step(engine, 0)
    piece = max(max(flat.spec.pieces(engine.sizing).values()) for flat in engine.flats()) + 4096
    for step, text in enumerate(("params=cpu,optimizer=hbm:90KB+nvme", "optimizer=cpu", ""), 1):
        before, seen.most, seen.num_moves = held(engine), {}, 0
        engine.move(text)
        fresh = make(offload=text, nvme_path=(str(tmp_path),), read_ahead_nbytes=0, **NVME)
        assert held(fresh) == held(engine)
        fresh.close()
        after = held(engine)
        assert seen.num_moves > 0
        for tier in seen.most:
            assert seen.most[tier] <= max(before.get(tier, 0), after.get(tier, 0)) + piece, (text, tier)
        train_step(engine, step)
    assert held(engine).keys() == {"hbm"} and engine.tiers.footprint() == {}
    engine.close()


def test_what_has_no_room_stays_where_it_is(tmp_path):
    options = {"dram": {"capacity": 200_000}}
    engine, plain = make(tier_options=options), make()
    assert train_step(engine, 0) == train_step(plain, 0)
    refused = engine.move("optimizer=cpu")
    assert refused and all("stay on hbm" in line for line in refused)
    assert 0 < held(engine)["dram"] <= 200_000
    assert [train_step(engine, step) for step in (1, 2)] == [train_step(plain, step) for step in (1, 2)]
    for each in (engine, plain):
        each.close()


def _trained_with_one_rank_full(stage: int, full: bool) -> tuple[list[float], list[str], list[dict[str, str]]]:
    import torch.distributed as dist

    room = 150_000 if full and dist.get_rank() == 0 else 10_000_000
    engine = make(layers=3, stage=stage, tier_options={"dram": {"capacity": room}})
    losses = train_step(engine, 0)
    refused = engine.move("optimizer=cpu")
    losses += [loss for step in (1, 2) for loss in train_step(engine, step)]
    tiers = [dict(flat.spec.tiers) for flat in engine.flats()]
    engine.close()
    return losses, refused, tiers


def test_what_one_rank_has_no_room_for_stays_where_it_is_on_all():
    """Else ranks gather the updated parameters in different orders."""
    there, full = run_cases(2, _trained_with_one_rank_full, [(2, False), (2, True)])
    for (losses, refused, _), (as_usual, none, _) in zip(full, there, strict=True):
        assert losses == as_usual and refused and not none
    assert full[0][2] == full[1][2]
    assert all(line.endswith("stay on hbm: another rank has no room for them") for line in full[1][1])


def test_what_could_not_be_filled_takes_no_room(monkeypatch):
    def fill(self: Any, values: Any) -> None:
        raise torch.OutOfMemoryError("the device is full")

    engine = make(layers=2)
    expected = train_step(engine, 0)
    with monkeypatch.context() as patched:
        patched.setattr(Record, "fill", fill)
        assert len(engine.move("optimizer=cpu")) == len(list(engine.trainable()))
    assert held(engine).keys() == {"hbm"}
    engine.close()
    assert expected == train_step(make(layers=2), 0)


@pytest.mark.parametrize("settings", [{}, {"recompute": True}], ids=str)
def test_a_loss_from_before_a_move_is_refused(settings):
    """Its graph has saved where parameters were, or inputs of recomputed blocks."""
    engine = make(layers=2, **settings)
    tokens = torch.zeros((2, 8), dtype=torch.long)
    loss = engine(tokens, tokens)
    engine.move("params=cpu,optimizer=cpu")
    with pytest.raises(Refused, match="moved: run forward again"):
        engine.backward(loss)
    train_step(engine, 1)
    engine.close()


def test_gradients_do_not_move_before_their_step():
    engine = make(layers=2)
    tokens = torch.zeros((2, 8), dtype=torch.long)
    engine.backward(engine(tokens, tokens))
    with pytest.raises(Refused, match="after step"):
        engine.move("optimizer=cpu")
    engine.step()
    assert engine.move("optimizer=cpu") == []
    engine.close()


def _moved_as_the_ranks_say(differ: bool) -> str:
    import torch.distributed as dist

    engine = make(layers=2)
    train_step(engine, 0)
    try:
        engine.move("optimizer=cpu" if dist.get_rank() == 0 or not differ else "optimizer=hbm:9KB+cpu")
    except Refused as error:
        return str(error)
    return ""


def test_ranks_move_together_or_not_at_all():
    same, differ = run_cases(2, _moved_as_the_ranks_say, [(False,), (True,)])
    assert same == ["", ""]
    assert all("do not make the same calls" in each for each in differ)
