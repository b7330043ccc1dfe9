"""Initial values and whole states: the same for every stage and world size, under the model's own names."""

from __future__ import annotations

import pytest
import torch
from ranks import run_cases, run_ranks
from torch import nn
from toys import Uneven, train_uneven, uneven_batch

import zerocli


def _initialised(stage: int, seed: int, meta: bool):
    torch.manual_seed(seed if not meta else 999)
    with torch.device("meta" if meta else "cpu"):
        model = nn.Sequential(*(nn.Linear(9, 9) for _ in range(3)), nn.BatchNorm1d(9), nn.MultiheadAttention(9, 3))
    engine = zerocli.shard(model, stage=stage, seed=seed)
    return {name: value.tolist() for name, value in engine.state_dict().items()}


@pytest.mark.parametrize(
    ("world", "stages"), [(2, (0, 3)), *(pytest.param(w, (s,), marks=pytest.mark.long) for w, s in ((3, 1), (4, 3)))]
)
def test_a_meta_model_starts_the_same_everywhere(world, stages):
    reference = _initialised(0, 5, True)
    assert reference == _initialised(3, 5, True) != _initialised(0, 6, True)
    for stage, results in zip(stages, run_cases(world, _initialised, [(s, 5, True) for s in stages]), strict=True):
        assert results == [reference] * world, stage


def _rank_seeded(stage: int):
    import torch.distributed as dist

    torch.manual_seed(dist.get_rank())
    engine = zerocli.shard(Uneven(), stage=stage)
    return {name: value.tolist() for name, value in engine.state_dict().items()}


def test_rank_zeros_values_win():
    torch.manual_seed(0)
    expected = {name: value.tolist() for name, value in Uneven().state_dict().items()}
    assert run_cases(2, _rank_seeded, [(0,), (3,)]) == [[expected, expected]] * 2


def _peak_while_sharding() -> tuple[int, int, int]:
    """Return the most elements alive at once while a meta model is sharded, the largest unit's, and the model's."""
    from torch.utils._python_dispatch import TorchDispatchMode

    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    alive: dict[int, int] = {}
    peak = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal peak
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.device.type == "cpu":
                import weakref

                storage = out.untyped_storage()
                key = storage.data_ptr()
                if key and key not in alive:
                    alive[key] = storage.nbytes() // 4
                    weakref.finalize(storage, alive.pop, key, None)
                    peak = max(peak, sum(alive.values()))
            return out

    with Watch():
        engine = zerocli.shard(model, stage=3)
    return peak, engine.units[1].flats[0].layout.total, engine.numel


def test_no_rank_ever_holds_the_whole_model():
    peak, unit, numel = run_ranks(4, _peak_while_sharding)[0]
    shards = 4 * numel // 4  # parameters, two Adam states and gradients, a quarter each
    assert unit * 12 >= numel
    assert peak <= shards + 2 * unit + 4096 < 2 * numel


def test_parameters_that_nobody_initialises_are_named():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(3, 3))

    with torch.device("meta"):
        model = Bare()
    with pytest.raises(ValueError, match="table"):
        zerocli.shard(model)


def _save(stage: int, steps: int):
    torch.manual_seed(7)
    model = Uneven()
    engine = zerocli.shard(model, stage=stage, lr=1e-2)
    for step in range(steps):
        engine.backward(model(*uneven_batch(step, slice(0, 24))))
        engine.step()
    return engine, model


def _states(stage: int, steps: int):
    engine, _ = _save(stage, steps)
    return engine.state_dict(), engine.optimizer_state_dict()


def _resume(stage: int, model_state, optimizer_state, steps: int):
    torch.manual_seed(11)
    model = Uneven()
    engine = zerocli.shard(model, stage=stage, lr=1e-2)
    engine.load_state_dict(model_state)
    engine.load_optimizer_state_dict(optimizer_state)
    losses = []
    for step in range(3, 3 + steps):
        loss = model(*uneven_batch(step, slice(0, 24)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("world", "stage"), [(3, 2), *(pytest.param(2, s, marks=pytest.mark.long) for s in (3, 1))])
def test_states_load_at_any_stage_and_world(world, stage):
    model_state, optimizer_state = _states(0, 3)
    expected = _resume(0, model_state, optimizer_state, 4)
    names = set(Uneven().state_dict())
    saved = run_ranks(world, _states, stage, 3)
    assert set(saved[0][0]) == names
    for name in names:
        assert torch.allclose(saved[0][0][name], model_state[name], rtol=1e-4, atol=1e-6)
    assert _resume(0, *saved[-1], 4) == pytest.approx(expected, rel=1e-5)
    assert run_ranks(world, _resume, stage, model_state, optimizer_state, 4)[0] == pytest.approx(expected, rel=1e-5)


def test_a_state_dict_that_does_not_match_is_refused_by_name():
    engine, _ = _save(2, 1)
    state = engine.state_dict()
    state["unheard"] = state.pop("scale")
    with pytest.raises(ValueError, match=r"missing \['scale'\], unknown \['unheard'\]"):
        engine.load_state_dict(state)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.lm_head = nn.Linear(4, 5, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros(1))
        self.blocks[1].requires_grad_(False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x) + self.count


def _tied_state(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: value.clone() for name, value in Tied().state_dict().items()}


def _load_some(settings, state, strict):
    """Load into a model of seed 1; return what the call gave, the state after it, and the loss's own view of it."""
    torch.manual_seed(1)
    model = Tied()
    engine = zerocli.shard(model, lr=1e-2, **settings)
    given = engine.load_state_dict(state, strict=strict)
    loaded = engine.state_dict()
    with torch.no_grad():
        output = model(torch.arange(5)).float()
    engine.close()
    return given.missing_keys, given.unexpected_keys, loaded, output


LOADS = [dict(stage=s) for s in range(4)] + [dict(stage=3, offload="cpu"), dict(stage=2, precision="bf16")]


def _load_all(state, strict):
    return [_load_some(settings, state, strict) for settings in LOADS]


@pytest.mark.parametrize("lacks", ["lm_head.weight", "embed.weight", ""])
def test_a_tied_weight_needs_one_of_its_names(lacks):
    state = _tied_state(2)
    state["count"] += 3
    reference = Tied()
    reference.load_state_dict(state)
    expected = reference(torch.arange(5))
    state.pop(lacks, None)
    for settings, (missing, unexpected, _, output) in zip(LOADS, run_ranks(2, _load_all, state, True)[1], strict=True):
        assert missing == unexpected == []
        rough = 2e-2 if "precision" in settings else 1e-5
        torch.testing.assert_close(output, expected, rtol=rough, atol=rough)


def test_a_part_of_a_state_is_loaded_where_that_is_asked_for():
    state, before = _tied_state(2), _tied_state(1)
    for name in ("embed.weight", "lm_head.weight", "blocks.0.bias", "blocks.1.bias"):
        del state[name]
    state["unheard"] = torch.zeros(1)
    for settings, (missing, unexpected, loaded, _) in zip(LOADS, run_ranks(2, _load_all, state, False)[0], strict=True):
        assert sorted(missing) == ["blocks.0.bias", "blocks.1.bias", "embed.weight", "lm_head.weight"]
        assert unexpected == ["unheard"]
        for name, value in loaded.items():
            wanted = state.get(name, before[name])
            exact = "precision" not in settings or not name.startswith("blocks.1")  # frozen: kept in bf16
            torch.testing.assert_close(value.float(), wanted, rtol=0 if exact else 1e-2, atol=0 if exact else 1e-2)


def test_what_does_not_fit_is_refused_by_name_and_nothing_is_loaded():
    engine = zerocli.shard(Tied(), stage=2)
    before, state = engine.state_dict(), _tied_state(2)
    with pytest.raises(ValueError, match=r"missing \['embed.weight', 'lm_head.weight'\], unknown \[\]"):
        engine.load_state_dict({name: v for name, v in state.items() if "blocks" in name or name == "count"})
    with pytest.raises(ValueError, match="embed.weight and lm_head.weight are one tied weight"):
        engine.load_state_dict(state | {"lm_head.weight": state["embed.weight"] + 1}, strict=False)
    with pytest.raises(ValueError, match=r"blocks.0.bias \(3,\), not \(4,\)"):
        engine.load_state_dict(state | {"blocks.0.bias": torch.zeros(3)}, strict=False)
    after = engine.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_engine_and_the_model_are_the_same_call():
    engine, model = _save(3, 1)
    batch = uneven_batch(1, slice(0, 24))
    with torch.no_grad():
        assert engine(*batch).item() == model(*batch).item()
    assert train_uneven(steps=2, stage=3)[0] > 0
