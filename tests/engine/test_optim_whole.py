"""Rules that need whole matrices: exact at every stage, placement and world size."""

from __future__ import annotations

import pytest
import torch
from lengths import LONG
from plain_loop import STEPS, fresh, plain
from ranks import run_ranks
from torch import nn
from toys import split, uneven_batch

import zerocli

SHAPES = [(0, ""), (1, ""), (2, ""), (3, ""), (3, "cpu"), (3, "nvme"), (2, "grads=cpu,optimizer=nvme")]
SOME = SHAPES if LONG else SHAPES[::3]


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return [
        torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for p in model.parameters() if p.dim() < 2], lr=1e-2, weight_decay=0.0),
    ]


class Both(torch.optim.Optimizer):
    """Two optimizers behind one `step`, as people write it."""

    def __init__(self, optimizers):
        self.optimizers = optimizers

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()


RULES = {
    "muon": ({"weight_decay": 0.1}, lambda model: Both(muon_and_adamw(model))),
    "adafactor": ({"d": 1.1}, lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2, d=1.1)),
}


def run(engine: zerocli.Engine, start: int = 1, steps: int = STEPS) -> None:
    rank, world = engine.collectives.rank, engine.collectives.world
    for step in range(start, steps + 1):
        engine.backward(engine(*uneven_batch(step, split(rank, world))))
        engine.step()


def numbers(engine: zerocli.Engine) -> dict:
    return {name: value.tolist() for name, value in engine.state_dict().items()}


def make(name: str, stage: int, offload: str, folder: str) -> zerocli.Engine:
    return zerocli.shard(
        fresh(), name, lr=1e-2, stage=stage, offload=offload, nvme_path=(folder,), bucket_nbytes=4096, **RULES[name][0]
    )


def _each_shape(name: str, folder: str):
    found = {}
    for shape in SOME:
        engine = make(name, *shape, folder)
        run(engine)
        found[shape] = numbers(engine)
        engine.close()
    return found


@pytest.mark.longer
@pytest.mark.parametrize("name", ["muon", pytest.param("adafactor", marks=pytest.mark.long)])
def test_whole_matrix_rules_equal_torchs(tmp_path, name):
    model = fresh()
    expected = plain(model, RULES[name][1](model))
    for found in run_ranks(2, _each_shape, name, str(tmp_path)):
        for key, value in expected.items():
            # Muon computes in bf16 within: a gradient's last bit shows in the third digit of its update.
            atol = 1e-3 if name == "muon" else 2e-6
            assert torch.allclose(torch.tensor(found[0, ""][key]), value, rtol=1e-4, atol=atol), key
        for shape in SOME:
            assert found[shape] == found[0, ""], shape  # to the bit


def test_muons_first_update_is_torchs():
    model, twin = fresh(), fresh()
    engine = zerocli.shard(model, "muon", lr=1e-2, weight_decay=0.1)
    run(engine, steps=1)
    expected = plain(twin, Both(muon_and_adamw(twin)), steps=1)
    for name, value in engine.state_dict().items():
        assert torch.allclose(value, expected[name], rtol=1e-6, atol=1e-7), name


def _saved(folder: str):
    from zerocli.checkpoint import Saver

    found = {}
    for name in RULES:
        engine = make(name, 2, "", folder)
        run(engine, steps=3)
        saver = Saver(engine, f"{folder}/{name}", asynchronous=False)
        saver.save(3)
        saver.close()
        states = engine.state_dict(), engine.optimizer_state_dict()
        run(engine, 4)
        found[name] = numbers(engine), states
    return found


def _resumed(folder: str, states: dict, shapes: list):
    from zerocli.checkpoint import Folder, load

    found = {}
    for name in RULES:
        for stage, offload in shapes:
            engine = make(name, stage, offload, folder)
            load(engine, Folder(f"{folder}/{name}").of(3))
            run(engine, 4)
            found[name, "file", stage] = numbers(engine)
            engine.close()
            engine = make(name, stage, offload, folder)
            engine.load_state_dict(states[name][0])
            engine.load_optimizer_state_dict(states[name][1])
            run(engine, 4)
            found[name, "dict", stage] = numbers(engine)
            engine.close()
    return found


@pytest.mark.long
def test_their_states_resume_at_any_stage_placement_and_world(tmp_path):
    saved = run_ranks(2, _saved, str(tmp_path))[0]
    states = {name: value[1] for name, value in saved.items()}
    assert "row_var" in states["adafactor"][1]["state"]["large"]
    for (name, how, stage), found in run_ranks(2, _resumed, str(tmp_path), states, [(3, "cpu"), (0, "")])[1].items():
        assert found == saved[name][0], (name, how, stage)
    for (name, how, _), found in _resumed(str(tmp_path), states, [(2, "")]).items():
        for key, value in saved[name][0].items():
            atol = 1e-3 if name == "muon" else 2e-6
            assert torch.allclose(torch.tensor(found[key]), torch.tensor(value), rtol=1e-4, atol=atol), (name, how, key)


def test_muon_leaves_embeddings_to_adamw_and_says_which_groups_are_whose():
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    engine = zerocli.shard(model, "muon", lr=1e-3, matrices=lambda name, p: name == "1.weight", adamw={"eps": 1e-6})
    rules = {group["name"]: group["rule"] for group in engine.optimizer.param_groups}
    assert rules == {"default, adamw": "adamw", "default, muon": "muon", "default, adamw, no weight decay": "adamw"}
    by_default = zerocli.shard(nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 6)), "muon", lr=1e-3)
    chosen = [g["params"] for g in by_default.optimizer.param_groups if g["rule"] == "muon"]
    assert [tuple(p.shape) for p in chosen[0]] == [(6, 6)]


def test_what_whole_matrix_rules_cannot_do_is_refused():
    with pytest.raises(ValueError, match='optimizer="muon"'):
        zerocli.shard(fresh(), torch.optim.Muon, lr=1e-3)
    with pytest.raises(ValueError, match="takes no 'beta'"):
        zerocli.shard(fresh(), "muon", lr=1e-3, beta=0.9)


def test_parameters_without_a_gradient_keep_their_whole_matrix_states():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
            return getattr(self, which)(x).square().mean()

    model, twin = Two(), Two()
    engine = zerocli.shard(model, "adafactor", lr=1e-2, stage=3)
    optimizer = torch.optim.Adafactor(twin.parameters(), lr=1e-2)
    for step, which in enumerate("aababb"):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        engine.backward(model(x, which))
        engine.step()
        optimizer.zero_grad()
        twin(x, which).backward()
        optimizer.step()
    for name, value in engine.state_dict().items():
        assert torch.allclose(value, twin.state_dict()[name], atol=1e-6), name


class Clipped(torch.optim.Optimizer):
    """A rule for whole parameters with a state that begins empty."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                    p.sub_(mean / (1 + mean.norm()), alpha=group["lr"])


def test_a_users_rule_resumes_where_the_first_parameter_is_frozen(tmp_path):
    from zerocli.checkpoint import Folder, Saver, load

    def engine():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        model[0].requires_grad_(False)
        return model, zerocli.shard(model, Clipped)

    def step(model, sharded):
        sharded.backward(model(torch.ones(2, 4)).square().mean())
        sharded.step()
        return sharded.state_dict()["1.weight"]

    model, first = engine()
    step(model, first)
    saver = Saver(first, tmp_path, asynchronous=False)
    saver.save(1)
    saver.close()
    states = first.state_dict(), first.optimizer_state_dict()
    expected = step(model, first)
    model, again = engine()
    load(again, Folder(tmp_path).of(1))
    assert torch.equal(step(model, again), expected)
    model, again = engine()
    again.load_state_dict(states[0])
    again.load_optimizer_state_dict(states[1])
    assert torch.equal(step(model, again), expected)
