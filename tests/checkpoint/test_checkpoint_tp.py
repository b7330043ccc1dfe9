"""A checkpoint does not know of tensor parallelism: saved at any degree, loaded at any other, bit for bit."""

from __future__ import annotations

import pytest
import torch
from exports import MODELS, config_of, expected, noisy, read_back
from ranks import run_ranks

from zerocli.checkpoint import Folder, Saver, load
from zerocli.checkpoint.imports import load_weights
from zerocli.checkpoint.manifest import read
from zerocli.cli import main as cli
from zerocli.config import to_dict
from zerocli.models import build
from zerocli.run import engines


def everything(engine):
    optimizer = engine.optimizer_state_dict()["state"]
    states = {f"{n}.{k}": v for n, each in optimizer.items() for k, v in each.items()}
    return engine.state_dict() | states


def make(sets, **settings):
    config = config_of([*sets, "model.vocab=62"])
    return config, engines.make_engine(config, **settings)


def step(engine, number: int) -> float:
    tokens = torch.randint(0, 62, (2, 17), generator=torch.Generator().manual_seed(number))
    torch.manual_seed(number)
    loss = engine(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    engine.backward(loss)
    engine.step()
    return loss.item()


def save(folder, sets, settings):
    config, engine = make(sets, **settings)
    noisy(engine)
    step(engine, 1)
    saver = Saver(engine, folder)
    before = everything(engine)
    saver.save(2, {"config": to_dict(config), "samples": 0})
    after = step(engine, 2)
    saver.close()
    assert saver.failure is None, saver.failure
    return before, after


def restore(folder, sets, settings):
    _, engine = make(sets, **settings)
    load(engine, Folder(folder).of(2))
    return everything(engine), step(engine, 2)


def start_from(path, sets, settings):
    config, engine = make(sets, **settings)
    load_weights(engine, path, config.model)
    return engine.state_dict()


@pytest.mark.long
def test_a_checkpoint_loads_bitwise_at_every_degree(tmp_path):
    """Both families are cut in their own ways; which ranks and stage a cut goes to is the same for both."""
    others = {
        "llama": [(4, {"stage": 3, "tp": 2}), (1, {"stage": 0})],
        "gpt2": [(2, {"stage": 1, "tp": 2}), (3, {"stage": 2})],
    }
    for name in ("llama", "gpt2"):
        run = tmp_path / name
        saved = run_ranks(4, save, str(run / "checkpoints"), MODELS[name], {"stage": 3, "tp": 2})
        before, after = saved[0]
        for world, settings in others[name]:
            for loaded, loss in run_ranks(world, restore, str(run / "checkpoints"), MODELS[name], settings):
                assert all(torch.equal(loaded[key], before[key]) for key in before), (name, world, settings)
                assert abs(loss - after) < 1e-4
                if settings == {"stage": 3, "tp": 2}:
                    assert loss == after
        assert cli.run(["export", str(run), str(run / "out")]) == 0
        config, _ = make(MODELS[name])
        found = read_back(run / "out")
        wanted = expected(before, config)
        assert found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)
        state = {k: v for k, v in before.items() if not k.endswith(("exp_avg", "exp_avg_sq"))}
        for world, settings in {"llama": [(2, {"stage": 3, "tp": 2})], "gpt2": [(4, {"stage": 2, "tp": 2})]}[name]:
            for loaded in run_ranks(world, start_from, str(run / "out"), MODELS[name], settings):
                assert all(torch.equal(loaded[key], state[key]) for key in state), (name, world)


@pytest.mark.long
def test_states_on_a_disk_go_on_at_another_degree(tmp_path):
    away = {"stage": 3, "tp": 2, "offload": "nvme", "nvme_path": (str(tmp_path),), "staging_nbytes": 48000}
    away["read_ahead_nbytes"] = 48000
    folder, sets = str(tmp_path / "checkpoints"), MODELS["llama"]
    before, after = run_ranks(2, save, folder, sets, away)[0]
    for world, settings in ((2, away), (2, {"stage": 2})):
        for loaded, loss in run_ranks(world, restore, folder, sets, settings):
            assert all(torch.equal(loaded[key], before[key]) for key in before), settings
            assert loss == after or settings != away


def test_a_checkpoint_of_split_layers_names_whole_parameters(tmp_path):
    run_ranks(2, save, str(tmp_path), MODELS["gpt2"], {"stage": 1, "tp": 2})
    shapes = {name: tensor.shape for name, tensor in read(Folder(tmp_path).of(2)).tensors.items()}
    config = config_of([*MODELS["gpt2"], "model.vocab=62"])
    for name, parameter in build(config.model, config.train.seq, "meta").named_parameters():
        assert shapes[f"parameters/{name}"] == tuple(parameter.shape)
        assert shapes[f"optimizer/exp_avg/{name}"] == tuple(parameter.shape)
