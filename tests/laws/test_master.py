"""Laws of the split master: no bit of the fp32 master is lost, and how it is kept changes no number of training."""

from __future__ import annotations

import pytest
import torch
from deep import WIDTH, Deep
from ranks import run_cases, run_ranks
from toy_tiers import NVME
from toys import Uneven, uneven_batch

import zerocli
from zerocli.engine.units.master import join, narrow, split

EXTREMES = [0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000]


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = uneven_batch(step, slice(0, 12))
    return x.bfloat16(), y.bfloat16()


def _samples() -> torch.Tensor:
    """Return random bit patterns, all ties of random patterns, and extreme values of both signs, without NaN."""
    generator = torch.Generator().manual_seed(7)
    bits = torch.randint(-(2**31), 2**31, (1 << 20,), generator=generator)
    ties = (bits & ~0xFFFF) | 0x8000
    ends = torch.tensor(EXTREMES)
    values = torch.cat([bits, ties, ends, ends - 2**31]).to(torch.int32).view(torch.float32)
    return values[~values.isnan()]


def test_splitting_loses_no_bit():
    master = _samples()
    parameters, remainder = split(master)
    assert torch.equal(join(parameters, remainder).view(torch.int32), master.view(torch.int32))
    assert torch.equal(narrow(master, torch.bfloat16).view(torch.int16), parameters.view(torch.int16))


def test_the_parameter_is_the_nearest_bf16_and_ties_go_away_from_zero():
    master = _samples()
    master = master[master.abs() < 1e38]
    parameters, even = split(master)[0].double(), master.bfloat16().double()
    exact = master.double()
    assert ((parameters - exact).abs() <= (even - exact).abs()).all()
    other = parameters != even
    assert other.any() and (parameters[other].abs() > exact[other].abs()).all()
    assert ((parameters - exact).abs() == (even - exact).abs())[other].all()


def test_nan_stays_nan():
    for bits in (0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001):
        nan = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
        parameters, remainder = split(nan)
        assert parameters.isnan().all() and join(parameters, remainder).isnan().all()


def _trained(settings: dict) -> tuple[list[float], dict, dict, dict[str, int]]:
    torch.manual_seed(0)
    model = Uneven()
    engine = zerocli.shard(model, lr=0.01, weight_decay=0.1, precision="bf16", clip=1.0, **settings)
    losses = []
    for step in range(3):
        for micro in range(engine.settings.accumulate):
            loss = model(*_batch(step * 2 + micro))
            engine.backward(loss)
            losses.append(loss.item())
        engine.step()
    return losses, engine.state_dict(), engine.optimizer_state_dict()["state"], engine.memory()


def _both(settings: dict):
    return [_trained({**settings, "master": master}) for master in ("split", "fp32")]


def _equal(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        if isinstance(value, dict):
            _equal(value, right[name])
        else:
            assert torch.equal(value, right[name]), name


SOME = [
    {"stage": 3, "accumulate": 2, "offload": "params=cpu", "optimizer": "sgd", "momentum": 0.9},
    {"stage": 3, "offload": "params=hbm:2KB+cpu,optimizer=hbm:6KB+cpu", "update": "stream"},
]
MORE = [
    {"stage": 0},
    {"stage": 2, "offload": "cpu", "update": "cpu"},
    {"stage": 1, "accumulate": 2},
    {"stage": 3},
    {"stage": 2, "offload": "optimizer=cpu", "update": "stream"},
    {"stage": 3, "offload": "cpu", "update": "stream"},
    {"stage": 3, "offload": "params=nvme,optimizer=nvme,grads=cpu", "accumulate": 2, "reduce": "fp32"},
    {"stage": 3, "offload": "params=nvme", "optimizer": "sgd"},
    {"stage": 2, "optimizer": "muon"},
]


@pytest.mark.parametrize("cases", [SOME, pytest.param(MORE, marks=pytest.mark.long)], ids=["some", "more"])
def test_a_split_master_trains_bit_for_bit_as_a_whole_one(tmp_path, cases):
    common = {**NVME, "nvme_path": (str(tmp_path),), "staging_nbytes": 9000}
    for case, ranks in zip(cases, run_cases(2, _both, [({**case, **common},) for case in cases]), strict=True):
        for (losses, state, optimizer, in_parts), (losses2, state2, optimizer2, whole) in ranks:
            assert losses == losses2, case
            _equal(state, state2)
            _equal(optimizer, optimizer2)
            assert in_parts["optimizer_states"] <= whole["optimizer_states"], case


def _numel_held(stage: int) -> tuple[int, dict[str, int]]:
    model = Deep(3)
    engine = zerocli.shard(model, stage=stage, precision="bf16")
    engine.backward(model(torch.randn(4, WIDTH)))
    engine.step()
    return sum(flat.held.numel for flat in engine.flats()), engine.memory()


def test_states_take_ten_bytes_per_parameter():
    stages = (0, 1, 3)
    for stage, ranks in zip(stages, run_cases(2, _numel_held, [(stage,) for stage in stages]), strict=True):
        for numel, memory in ranks:
            assert memory["optimizer_states"] == (2 + 4 + 4) * numel, stage


def _resumed(saved: str, loaded: str, stage: int) -> tuple[list[float], list[float]]:
    def make(master: str) -> tuple:
        torch.manual_seed(0)
        model = Uneven()
        return model, zerocli.shard(model, lr=0.01, precision="bf16", stage=stage, master=master)

    def steps(model, engine, first: int) -> list[float]:
        losses = []
        for step in range(first, first + 3):
            loss = model(*_batch(step))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    model, engine = make(saved)
    steps(model, engine, 0)
    state, optimizer = engine.state_dict(), engine.optimizer_state_dict()
    expected = steps(model, engine, 3)
    model, engine = make(loaded)
    engine.load_state_dict(state)
    engine.load_optimizer_state_dict(optimizer)
    return steps(model, engine, 3), expected


@pytest.mark.long
def test_states_are_read_both_ways():
    cases = [(*way, stage) for way in (("split", "fp32"), ("fp32", "split")) for stage in (0, 3)]
    for case, ranks in zip(cases, run_cases(2, _resumed, cases), strict=True):
        for got, expected in ranks:
            assert got == expected, case


@pytest.mark.parametrize("stage", [0, 2])
def test_an_edited_parameter_is_its_own_master(stage):
    """The bits that an edit replaced are gone: what the parameter shows is what is trained from and saved."""
    torch.manual_seed(0)
    model = Uneven()
    engine = zerocli.shard(model, lr=0.01, precision="bf16", stage=stage)
    engine.backward(model(*_batch(0)))
    engine.step()
    name, parameter = next(iter(model.named_parameters()))
    others = {key: value for key, value in engine.state_dict().items() if key != name}
    with torch.no_grad():
        parameter.mul_(0.5)
    state = engine.state_dict()
    assert torch.equal(state[name], parameter.detach().float())
    _equal({key: state[key] for key in others}, others)


def test_gathered_writes_keep_the_masters_of_other_elements():
    for before, after in run_ranks(2, _write_one):
        assert after[0, 0] == 2.0
        after[0, 0] = before[0, 0]
        assert torch.equal(before, after) and not torch.equal(before, before.bfloat16().float())


def _write_one() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = Uneven()
    engine = zerocli.shard(model, lr=0.01, precision="bf16", stage=3)
    engine.backward(model(*_batch(0)))
    engine.step()
    name, parameter = next((n, p) for n, p in model.named_parameters() if p.dim() == 2)
    before = engine.state_dict()[name]
    with engine.gathered(name, write=True), torch.no_grad():
        parameter[0, 0] = 2.0
    return before, engine.state_dict()[name]


def test_an_unknown_master_is_refused():
    with pytest.raises(ValueError, match="master 'half' is not one of split, fp32"):
        zerocli.shard(Uneven(), precision="bf16", master="half")
