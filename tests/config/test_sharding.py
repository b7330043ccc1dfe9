"""Law: one description. Engine and plan read the same values of a config, and have the same defaults."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_configs import configs
from torch import nn

import zerocli
from zerocli.cli import main as cli
from zerocli.config import Config, Sharding, arguments_of, load, read_placement, sharding_of
from zerocli.engine import api
from zerocli.engine.api import settings_of
from zerocli.engine.settings import Keywords, Settings
from zerocli.errors import UserError
from zerocli.plan.setup import Setup, setup_of
from zerocli.run import engines

some = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SHARED = {each.name for each in dataclasses.fields(Sharding)}
TEXTS = ["", "cpu", "nvme", "params=cpu,optimizer=hbm:1GiB+nvme", "activations=cpu"]

# Where a user's own loop begins otherwise than a config, and why.
OWN_LOOP = {
    "stage": 3,  # `shard` is called to have everything partitioned
    "precision": "fp32",  # a user's model computes in what it is written in, until asked otherwise
    "clip": None,  # the same of gradients
}


@st.composite
def trainable(draw) -> Config:
    """Configs of random values, with an optimizer there is, and as many micro-steps as they say."""
    config = draw(configs())
    optimizer = dataclasses.replace(config.optimizer, name=draw(st.sampled_from(["adamw", "sgd"])), options={})
    placement = read_placement(draw(st.sampled_from(TEXTS)))
    return dataclasses.replace(
        config,
        optimizer=optimizer,
        offload=dataclasses.replace(config.offload, placement=placement),
        train=dataclasses.replace(config.train, global_batch=0),
    )


class Caught(Exception):
    """The settings that an engine was asked for."""


def raise_settings(model: nn.Module, asked: Settings) -> Any:
    raise Caught(asked)


def engine_settings(monkeypatch: pytest.MonkeyPatch, config: Config) -> Settings:
    """Return the settings of the engine that a run of this config trains with."""
    monkeypatch.setattr(engines, "Engine", raise_settings)
    with pytest.raises(Caught) as caught:
        engines.make_engine(config, nn.Linear(2, 2))
    return caught.value.args[0]


@some
@given(config=trainable(), device=st.sampled_from(["cuda", "cpu"]))
def test_engine_and_plan_read_the_same_values(monkeypatch, config, device):
    engine, plan = engine_settings(monkeypatch, config), setup_of(config, device=device)
    auto = {"cuda": "bf16", "cpu": "fp32"}[device]  # a plan has no device to ask, and decides by its kind
    assert plan.precision == (engine.precision if engine.precision != "auto" else auto)
    assert engine.shared() == plan.shared() | {"precision": engine.precision} == sharding_of(config).shared()
    assert engine.offload is plan.offload is config.offload.placement
    assert engine.seed == config.train.seed and engine.compile == config.model.compile


def test_every_key_that_engine_and_plan_read_arrives_there(monkeypatch):
    """Each field of the description, changed in a config, is changed in both."""
    changed = sharding_of(
        Config(
            train=dataclasses.replace(Config.train, precision="fp16", accumulate=3, clip=0.5),
            optimizer=dataclasses.replace(Config.optimizer, name="sgd", momentum=0.25, master="fp32"),
            zero=dataclasses.replace(Config.zero, stage=3, bucket=7, buffers=3, reduce="fp32"),
            activations=dataclasses.replace(Config.activations, policy="recompute", partition=False),
            offload=dataclasses.replace(
                Config.offload,
                placement=read_placement("cpu"),
                update="cpu",
                nvme_path=("/a",),
                staging=8,
                read_ahead=9,
                verify=True,
            ),
            parallel=dataclasses.replace(Config.parallel, tp=2, shard_ranks=4, shard_states="all"),
            lora=dataclasses.replace(Config.lora, base="nf4"),
        )
    )
    default = sharding_of(Config())
    assert {name for name in SHARED if getattr(changed, name) == getattr(default, name)} == set()


@pytest.mark.parametrize("folders", ["/a", Path("/a"), ["/a"], (Path("/a"),)], ids=repr)
def test_one_folder_of_disks_is_one_folder(folders):
    assert Settings(nvme_path=folders).nvme_path == Setup(nvme_path=folders).nvme_path == ("/a",)


def test_config_engine_and_plan_have_one_set_of_defaults():
    config, described = sharding_of(Config()), Sharding()
    assert config == dataclasses.replace(described, options=arguments_of(Config().optimizer))
    assert Setup().shared() == described.shared() | {"precision": "bf16"}  # of `auto`, on a GPU
    own = Settings().shared()
    assert own == described.shared() | OWN_LOOP | {"stage": described.stage}
    assert inspect.signature(api.shard).parameters["stage"].default == OWN_LOOP["stage"]
    assert inspect.signature(zerocli.shard).parameters["stage"].default is None  # the same, unless it is chosen
    for function in (api.shard, zerocli.shard):
        assert inspect.signature(function).parameters["optimizer"].default == described.optimizer
    setup = setup_of(Config())
    assert dataclasses.replace(setup, options={}, runtime={}) == Setup()


def test_every_keyword_of_shard_is_typed_and_shown():
    fields = {field.name for field in dataclasses.fields(Settings)} - {"optimizer", "lr", "stage"}
    options = {"betas", "eps", "amsgrad", "maximize", "momentum", "nesterov"}
    assert set(Keywords.__annotations__) == fields | options
    shown = inspect.signature(zerocli.shard).parameters
    assert fields < set(shown) and shown["accumulate"].default == Settings.accumulate


@pytest.mark.parametrize(
    "keyword, optimizer, meant",
    [("offlaod", "adamw", "offload"), ("acumulate", torch.optim.RMSprop, "accumulate"), ("exemple", "muon", "example")],
)
def test_a_misspelled_keyword_of_shard_is_answered_with_the_right_one(keyword, optimizer, meant):
    with pytest.raises(ValueError, match=f"shard takes no '{keyword}'; did you mean {meant}?"):
        zerocli.shard(nn.Linear(2, 2), optimizer=optimizer, **{keyword: 1})


def test_arguments_of_the_optimizer_are_not_taken_for_misspelled_ones():
    assert settings_of(torch.optim.Adagrad, None, 0, {"lr_decay": 0.1}).options == {"lr_decay": 0.1}
    assert settings_of(lambda params, **given: None, None, 0, {"clipp": 1}).options == {"clipp": 1}


def test_no_field_is_written_twice():
    for kind, widened in ((Settings, {"optimizer", "recompute", "tp", "precision", "clip"}), (Setup, set())):
        assert SHARED & set(kind.__annotations__) == widened, kind


def test_the_description_needs_no_torch():
    program = "import sys, zerocli.config.sharding, zerocli.plan.setup; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_trainer_and_plan_divide_a_global_batch_by_one_rule():
    """Both give the same micro-steps, or refuse with the same words."""
    for ranks, tp, batch, total in itertools.product((1, 2, 6), (1, 2), (1, 4), (0, 4, 6, 48)):
        if ranks % tp:
            continue
        flags = {"parallel.ranks": ranks, "parallel.tp": tp, "train.batch": batch, "train.accumulate": 3}
        config = load("tiny", [f"train.global_batch={total}"], flags)
        found = []
        for divide in (lambda c, n: engines.resolve(c, n).train, lambda c, n: setup_of(c, ranks=n)):
            try:
                found.append(divide(config, ranks).accumulate)
            except UserError as error:
                found.append((str(error), error.hint))
        each = batch * ranks // tp
        exact = 3 if total == 0 else total // each if total % each == 0 else None
        assert found[0] == found[1] and (found[0] == exact if exact else "is not a multiple of" in found[0][0])


def test_a_plan_of_a_batch_that_cannot_be_divided_is_refused(capsys):
    for command in (["fit", "tiny", "--ranks", "4"], ["profile", "tiny", "--ranks", "4", "--dry-run"]):
        assert cli.run([*command, "--batch", "2", "--set", "train.global_batch=12"]) == 2
        assert "global batch 12 is not a multiple of batch 2 x 4 ranks = 8" in capsys.readouterr().err
