"""Laws of the residual-state layer: placement changes no number, device memory is bounded, bytes are the arithmetic."""

from __future__ import annotations

import os
import resource

import pytest
import torch
from deep import BLOCK_NUMEL, WIDTH, Deep
from lengths import LONG
from ranks import run_cases, run_ranks
from toy_tiers import NVME
from toys import train_uneven

import zerocli
from zerocli.cli import main as cli
from zerocli.engine.build import DoesNotFit

STREAM = {"update": "stream", "staging_nbytes": 48000, "read_ahead_nbytes": 48000}
PLACEMENTS = {
    3: [
        "cpu",
        "nvme",
        "params=cpu",
        "grads=cpu",
        "optimizer=cpu",
        "params=nvme,optimizer=nvme,grads=nvme",
        "params=hbm:2KB+cpu,optimizer=hbm:6KB+cpu:6KB+nvme,grads=hbm:2KB+cpu",
    ],
    2: ["cpu", "nvme", "optimizer=cpu:9KB+nvme,grads=cpu"],
    1: ["cpu", "optimizer=nvme"],
}


def _train(settings: dict):
    return train_uneven(**settings)


def losses(world: int, *cases: dict) -> list[list[float]]:
    """Return the first rank's losses with the settings of each case."""
    if world == 1:
        return [train_uneven(**settings) for settings in cases]
    return [results[0] for results in run_cases(world, _train, [(settings,) for settings in cases])]


CASES = [
    pytest.param(1, 3, "stream", marks=pytest.mark.long),
    pytest.param(2, 3, "stream", marks=pytest.mark.long),
    pytest.param(2, 2, "stream", marks=pytest.mark.long),
    (2, 3, "cpu"),
    pytest.param(2, 1, "cpu", marks=pytest.mark.long),
]
HALF = {"precision": "bf16", "accumulate": 3}


@pytest.mark.longer
@pytest.mark.parametrize(("world", "stage", "update"), CASES)
def test_placement_never_changes_a_loss(tmp_path, world, stage, update):
    common = {"stage": stage, "nvme_path": (str(tmp_path),), **NVME, "update": update, "staging_nbytes": 96000}
    common["read_ahead_nbytes"] = 96000
    some = [{"accumulate": 3}, {"precision": "bf16"}] if (world, stage, update) == (2, 3, "stream") else []
    for variant in ({}, HALF, *some) if LONG else ({} if stage == 2 else HALF,):
        steps = 20 if (stage, update) == (3, "stream") and not variant else 8 if LONG else 4
        placements = PLACEMENTS[stage][:2] if variant or update == "cpu" else PLACEMENTS[stage]
        away = [{"offload": placement, "steps": steps, **common, **variant} for placement in placements]
        reference, *found = losses(world, {"stage": stage, "steps": steps, **variant}, *away)
        for placement, got in zip(placements, found, strict=True):
            assert got == reference, (placement, variant)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["sgd", pytest.param("NAdam", marks=pytest.mark.long)])
def test_every_optimizer_can_be_offloaded(name):
    settings = {"stage": 3, "optimizer": name, "steps": 4}
    away = [{"offload": "cpu", "update": update, "staging_nbytes": 48000, **settings} for update in ("cpu", "stream")]
    plain, *found = losses(2, settings, *away)
    assert found == [plain, plain]


def test_recomputation_and_offload_go_together():
    settings = {"stage": 3, "steps": 4}
    plain, away = run_cases(2, _train, [(settings,), ({**settings, "recompute": True, "offload": "cpu", **STREAM},)])
    assert away == plain


# -- delays and disorder -----------------------------------------------------------------------------------------------


def _tardy(settings: dict):
    from tiers.registry import register

    register("tardy", "toy_tiers:Tardy")
    return train_uneven(steps=3, **settings)


def test_slow_transfers_that_finish_in_any_order_change_no_number():
    for stage, text in ((3, "params=tardy,optimizer=tardy,grads=tardy"), (2, "optimizer=tardy,grads=tardy")):
        plain = run_ranks(2, _train, {"stage": stage, "steps": 3, "accumulate": 2})
        late = {"stage": stage, "offload": text, "accumulate": 2, "tier_options": {"tardy": {"pin": False}}, **STREAM}
        assert run_ranks(2, _tardy, late) == plain


# -- memory and bytes --------------------------------------------------------------------------------------------------


def _bounded(layers: int, text: str) -> tuple[dict, dict, int]:
    torch.manual_seed(0)
    model = Deep(layers)
    engine = zerocli.shard(model, stage=3, precision="bf16", clip=1.0, offload=text, **STREAM)
    for _ in range(3):
        engine.tiers.traffic.clear()
        engine.backward(model(torch.randn(4, WIDTH)))
        engine.step()
    padded = sum(flat.layout.total for flat in engine.flats())
    return engine.memory(), dict(engine.tiers.traffic), padded


def test_device_memory_does_not_grow_with_layers():
    results = [ranks[0] for ranks in run_cases(2, _bounded, [(layers, "cpu") for layers in (4, 8)])]
    for held, _, _ in results:
        assert held["parameters"] == held["gradients"] == held["optimizer_states"] == 0
        gathered = 2 * (2 * BLOCK_NUMEL + (WIDTH + 1) * WIDTH + 3 * 128)
        buckets = 2 * 2 * (BLOCK_NUMEL + 128)
        scratch = 3 * 4 * (1 << 16)  # an update chunk's gradient, master and its bits
        assert held["gathered"] <= gathered
        assert held["buffers"] <= buckets + STREAM["staging_nbytes"] + scratch
    assert len({(held["gathered"], held["buffers"]) for held, _, _ in results}) == 1


@pytest.mark.parametrize("world", [1, 2])
def test_bytes_moved_are_the_arithmetic(world):
    _, moved, padded = run_ranks(world, _bounded, 5, "cpu")[0]
    mine = padded // world
    assert moved == {
        "parameters read": 3 * 2 * mine,  # two gathers per step and the update, two bytes each
        "parameters written": 2 * mine,
        "gradients written": 2 * mine,
        "gradients read": 2 * mine,  # the update is streamed
        "optimizer read": 10 * mine,  # a remainder of two bytes, two moments
        "optimizer written": 10 * mine,
    }


def _marathon(folder: str, text: str, room: int):
    import zerocli.engine.engine

    real = zerocli.engine.engine.Mover
    zerocli.engine.engine.Mover = lambda budget, open_cache: real(room, open_cache)
    torch.manual_seed(0)
    model = Deep(3)
    engine = zerocli.shard(model, stage=3, offload=text, nvme_path=(folder,), update="stream", **NVME)
    seen = []
    for step in range(100):
        engine.backward(model(torch.randn(4, WIDTH)))
        engine.step()
        if step in (30, 99):
            tiers = engine.tiers.footprint()
            seen.append((len(os.listdir("/proc/self/fd")), tiers, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
    engine.close()
    return seen


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "text", "room"),
    [
        (1, "params=nvme,optimizer=nvme,grads=cpu", 1 << 20),
        (2, "params=nvme,optimizer=cpu,grads=cpu", 40000),  # for two of three blocks: copies come and go
    ],
    ids=["all on a disk", "copies come and go"],
)
def test_a_hundred_steps_leak_nothing(tmp_path, world, text, room):
    for early, late in run_ranks(world, _marathon, str(tmp_path), text, room):
        assert late[0] == early[0] and late[1] == early[1]
        assert late[2] - early[2] < 8 << 10  # KiB: what the allocator rounds
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_states_are_whole_wherever_they_lie(tmp_path):
    torch.manual_seed(0)
    plain, away = Deep(3), Deep(3)
    away.load_state_dict(plain.state_dict())
    one = zerocli.shard(plain, stage=3, precision="bf16")
    two = zerocli.shard(away, stage=3, precision="bf16", offload="nvme", nvme_path=(str(tmp_path),), **STREAM, **NVME)
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        for engine in (one, two):
            engine.backward(engine(x))
            engine.step()
    for name, value in one.state_dict().items():
        assert torch.equal(two.state_dict()[name], value)
    states = one.optimizer_state_dict()
    two.load_optimizer_state_dict(states)
    again = two.optimizer_state_dict()
    for name, arrays in states["state"].items():
        assert all(torch.equal(again["state"][name][key], array) for key, array in arrays.items())
    two.close()


# -- bad input and faults ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stage", "fact"),
    [
        ("cpuu", 3, "neither a policy"),
        ("params=cpu,optimiser=cpu", 3, "did you mean 'optimizer'"),
        ("params=dramm", 3, "did you mean 'dram'"),
        ("optimizer=hbm:ten+cpu", 3, "budget 'ten'"),
        ("optimizer=cpu:1KiB", 3, "no tier follows"),
        ("params=cpu", 2, "does not partition parameters"),
        ("cpu", 0, "stage 0 partitions nothing"),
        ("params=cpu,params=nvme", 3, "placed twice"),
    ],
)
def test_a_bad_placement_is_refused(text, stage, fact):
    with pytest.raises(ValueError, match=fact):
        zerocli.shard(Deep(2), stage=stage, offload=text)


def test_a_host_without_room_is_refused_before_anything_is_allocated(monkeypatch, tmp_path):
    from offload.tierset import TierSet

    room = {"dram": 320_000, "nvme": 10**12}
    monkeypatch.setattr(TierSet, "available", lambda self, name: room[name])
    with pytest.raises(DoesNotFit, match=r"dram: .* needed, .* there") as caught:
        zerocli.shard(Deep(4), stage=3, offload="cpu")
    assert caught.value.hint == "--offload params=cpu,grads=cpu,optimizer=nvme"
    assert zerocli.shard(Deep(4), stage=3, offload=caught.value.hint.split()[1], nvme_path=(str(tmp_path),), **NVME)


@pytest.mark.parametrize("text", [pytest.param("cpu", marks=pytest.mark.long), "nvme"])
def test_train_offloads(tmp_path, text):
    from commands import lines
    from runs import train

    swap = tmp_path / "swap"
    swap.mkdir()
    ended = train(tmp_path / "run", "zero.stage=3", f"offload.placement={text}", f"offload.nvme_path={swap}")
    assert ended.codes == [0, 0], ended.said
    row = lines(tmp_path / "run")[-1]
    assert row["peak"]["dram"] > 0 and (row["peak"]["nvme"] > 0) == (text == "nvme")
    assert not list(swap.iterdir())


@pytest.mark.parametrize(
    ("arguments", "code", "fact"),
    [
        (["--stage", "0", "--offload", "cpu"], 2, "partitions nothing"),
        (["--stage", "3", "--offload", "params=tape"], 2, "there is no tier 'tape'"),
        (
            ["--stage", "3", "--offload", "nvme", "--nvme-path", "missing"],
            2,
            "--nvme-path missing: there is no such folder",
        ),
    ],
)
def test_a_users_mistake_with_tiers(tmp_path, arguments, code, fact, monkeypatch, capfd):
    """No rank is started."""
    monkeypatch.chdir(tmp_path)
    found, said = cli.run(["train", *arguments, "--run-dir", "run"]), capfd.readouterr().err
    assert found == code and fact in said and "Traceback" not in said, said
