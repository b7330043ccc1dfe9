"""Parameter groups, torch's schedulers, and optimizers given as a class, an instance or a rule of one's own."""

from __future__ import annotations

import functools

import pytest
import torch
from lengths import LONG, spread
from plain_loop import STEPS, fresh, plain
from ranks import run_ranks
from torch import nn
from torch.optim import lr_scheduler
from toys import split, uneven_batch

import zerocli
from zerocli import ParamGroup

STAGES = ((0, ""), (2, ""), (3, ""), (3, "cpu"))


def sharded(engine: zerocli.Engine, scheduler=None, start: int = 1, steps: int = STEPS) -> dict:
    """The same loop with the engine's optimizer."""
    rank, world = engine.collectives.rank, engine.collectives.world
    for step in range(start, steps + 1):
        engine.optimizer.zero_grad()
        engine.backward(engine(*uneven_batch(step, split(rank, world))))
        engine.optimizer.step()
        if scheduler is not None:
            scheduler.step(*([float(step > 2)] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
    return {name: value.tolist() for name, value in engine.state_dict().items()}


def same(found: dict, expected: dict) -> None:
    for name, value in expected.items():
        assert torch.allclose(torch.tensor(found[name]), value, rtol=1e-4, atol=2e-6), name


# -- groups --------------------------------------------------------------------------------------------------------


def grouped() -> list[ParamGroup]:
    return [
        ParamGroup(r"^last\.", lr_factor=0.1, weight_decay=0.3),
        ParamGroup(lambda name, p: name.startswith("blocks.1"), lr_factor=2.0),
        ParamGroup("^scale$|norm", frozen=True),
        ParamGroup("blocks", weight_decay=0.0),
    ]


def _grouped():
    found = []
    for stage, offload in STAGES:
        engine = zerocli.shard(
            fresh(), lr=1e-2, weight_decay=0.1, stage=stage, offload=offload, groups=grouped(), bucket_nbytes=4096
        )
        found.append(sharded(engine))
        engine.close()
    return found


def test_groups_train_as_torchs_groups_do():
    model = fresh()
    rows = []
    for name, p in model.named_parameters():
        decay = 0.1 if p.dim() >= 2 else 0.0
        if name.startswith("last."):
            rows.append({"params": [p], "lr": 1e-3, "weight_decay": 0.3})
        elif name.startswith("blocks.1"):
            rows.append({"params": [p], "lr": 2e-2, "weight_decay": decay})
        elif name == "scale" or "norm" in name:
            p.requires_grad_(False)
        else:
            rows.append({"params": [p], "weight_decay": 0.0 if "blocks" in name else decay})
    expected = plain(model, torch.optim.AdamW(rows, lr=1e-2))
    found = run_ranks(2, _grouped)[0]
    assert all(other == found[0] for other in found[1:])
    same(found[0], expected)


def test_a_group_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match="'bloks'"):
        zerocli.shard(fresh(), groups=[ParamGroup("bloks")])


def chosen(row: int) -> list[tuple[int, str]]:
    """Return the stages and placements of a row: all in the long set, else one by turns."""
    return spread(row, STAGES)[0 if LONG else 1 :]


# -- schedulers ----------------------------------------------------------------------------------------------------

SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=2e-2, total_steps=10),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.3, patience=0),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.8)], [3]
    ),
}

if not LONG:
    SCHEDULERS = dict(list(SCHEDULERS.items())[::2])


def _scheduled():
    found = {}
    for row, (name, make) in enumerate(SCHEDULERS.items()):
        kind = "sgd" if name == "lambda" else "adamw"
        for stage, offload in chosen(row):
            options = {"momentum": 0.9} if kind == "sgd" else {}
            engine = zerocli.shard(fresh(), kind, lr=1e-2, stage=stage, offload=offload, **options)
            found[name, stage, offload] = sharded(engine, make(engine.optimizer))
            engine.close()
    return found


@pytest.mark.longer
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_torchs_schedulers_work():
    found = run_ranks(2, _scheduled)[0]
    for name, make in SCHEDULERS.items():
        model = fresh()
        if name == "lambda":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        first, *others = (case for case in found if case[0] == name)
        same(found[first], plain(model, optimizer, make(optimizer)))
        for case in others:
            assert found[case] == found[first], case


def test_a_scheduler_goes_on_from_saved_states():
    def make(engine):
        return lr_scheduler.CosineAnnealingLR(engine.optimizer, 5)

    whole = zerocli.shard(fresh(), lr=1e-2)
    expected = sharded(whole, make(whole))
    first = zerocli.shard(fresh(), lr=1e-2)
    scheduler = make(first)
    sharded(first, scheduler, steps=3)
    second = zerocli.shard(fresh(), lr=5.0)
    resumed = make(second)
    second.load_state_dict(first.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    assert sharded(second, resumed, start=4) == expected


def test_a_function_of_the_step_is_shown_and_not_mixed_with_a_scheduler():
    engine = zerocli.shard(fresh(), lr=lambda step: 0.1 / step, groups=[ParamGroup("last", lr_factor=0.5)])
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.1, 0.1, 0.05, 0.05]
    sharded(engine, steps=2)
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.05, 0.05, 0.025, 0.025]
    engine.optimizer.param_groups[0]["lr"] = 1.0
    with pytest.raises(RuntimeError, match="function of the step"):
        sharded(engine, steps=1)


def test_what_has_no_memory_cannot_be_turned_on_later():
    for name, key, value in (("sgd", "momentum", 0.9), ("adamw", "amsgrad", True)):
        engine = zerocli.shard(fresh(), name, lr=1e-2)
        engine.optimizer.param_groups[0][key] = value
        with pytest.raises(ValueError, match=key):
            sharded(engine, steps=1)


def test_the_weight_decay_of_a_group_can_be_changed():
    model = nn.Linear(3, 3)
    engine = zerocli.shard(model, "sgd", lr=0.5)
    before = engine.state_dict()["weight"]
    engine.optimizer.param_groups[0]["weight_decay"] = 0.1
    engine.backward(engine(torch.zeros(1, 3)).sum())
    engine.step()
    assert torch.allclose(engine.state_dict()["weight"], before * 0.95)


# -- classes, instances and own rules ------------------------------------------------------------------------------


class Lion(torch.optim.Optimizer):
    """A user's own elementwise optimizer, with a plain number among its states."""

    def __init__(self, params, lr=1e-3, beta=0.9, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["calls"], state["average"] = 0, torch.zeros_like(p)
                state["calls"] += 1
                state["average"] = state["average"] * group["beta"] + p.grad * (1 - group["beta"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.tanh(state["average"] * 100), alpha=-group["lr"] / state["calls"])


class RowNorm(Lion):
    """A user's own rule that looks at whole rows of a matrix."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    seen = p.grad.square().mean(-1, keepdim=True)
                    state["rows"] = state["rows"] * group["beta"] + seen if "rows" in state else seen
                    p.sub_(p.grad / (state["rows"].sqrt() + 1e-3), alpha=group["lr"])


class Halving(zerocli.FlatOptimizer):
    """A rule of one's own on flat memory: the parameter goes against the mean of this gradient and half the last."""

    state_names = ("last",)
    defaults = {"share": 0.5}

    def update(self, master, grad, scale, states, group, at):
        if scale is not None:
            grad.div_(scale)
        master.sub_(grad + states["last"] * group.options["share"], alpha=group.lr * (1 - at.skip.item()))
        states["last"].copy_(torch.where(at.skip.bool(), states["last"], grad))


class HalvingInTorch(Lion):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            last = self.state[p].get("last", torch.zeros_like(p))
            p.sub_(p.grad + last * 0.5, alpha=self.param_groups[0]["lr"])
            self.state[p]["last"] = p.grad.clone()


OPTIMIZERS = {
    "class": (torch.optim.AdamW, {}, lambda ps: torch.optim.AdamW(ps, lr=1e-2)),
    "partial": (
        functools.partial(torch.optim.RMSprop, weight_decay=0.2, alpha=0.9),
        {},
        lambda ps: torch.optim.RMSprop(ps, lr=1e-2, weight_decay=0.2, alpha=0.9),
    ),
    "amsgrad": (
        torch.optim.Adam,
        {"amsgrad": True, "maximize": True},
        lambda ps: torch.optim.Adam(ps, lr=1e-2, amsgrad=True, maximize=True),
    ),
    "dampening": (
        "sgd",
        {"momentum": 0.9, "dampening": 0.3},
        lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, dampening=0.3),
    ),
    "maximize": (
        "sgd",
        {"momentum": 0.9, "nesterov": True, "maximize": True},
        lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True, maximize=True),
    ),
    "own class": (Lion, {"beta": 0.8}, lambda ps: Lion(ps, lr=1e-2, beta=0.8)),
    "own matrix class": (RowNorm, {}, lambda ps: RowNorm(ps, lr=1e-2)),
    "flat": (Halving(), {}, lambda ps: HalvingInTorch(ps, lr=1e-2)),
}

if not LONG:
    OPTIMIZERS = {name: each for name, each in OPTIMIZERS.items() if name not in ("partial", "dampening", "own class")}


def _chosen():
    found = {}
    for row, (name, (optimizer, options, _)) in enumerate(OPTIMIZERS.items()):
        for stage, offload in chosen(row):
            engine = zerocli.shard(fresh(), optimizer, lr=1e-2, stage=stage, offload=offload, **options)
            found[name, stage, offload] = sharded(engine)
            engine.close()
    return found


@pytest.mark.longer
def test_classes_and_own_rules_train_as_in_torch():
    found = run_ranks(2, _chosen)[0]
    for name, (_, _, make) in OPTIMIZERS.items():
        model = fresh()
        first, *others = (case for case in found if case[0] == name)
        same(found[first], plain(model, make(model.parameters())))
        for case in others:
            assert found[case] == found[first], case


INSTANCES = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.05),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2, initial_accumulator_value=0.2),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.5),
    "Lion": lambda groups: Lion(groups, lr=1e-2),
}


def instance(model: nn.Module, name: str) -> torch.optim.Optimizer:
    groups = [
        {"params": list(model.blocks.parameters()), "lr": 3e-2, "weight_decay": 0.2},
        {"params": [p for n, p in model.named_parameters() if not n.startswith("blocks")]},
    ]
    if name == "AdamW":
        groups[0]["betas"] = (0.5, 0.9)
    return INSTANCES[name](groups)


def _instances():
    found = {}
    for row, name in enumerate(INSTANCES):
        for stage, offload in chosen(row):
            model = fresh()
            optimizer = instance(model, name)
            scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)  # made before the model is sharded
            engine = zerocli.shard(model, optimizer, stage=stage, offload=offload)
            rank, world = engine.collectives.rank, engine.collectives.world
            for step in range(1, STEPS + 1):
                optimizer.zero_grad()
                engine.backward(model(*uneven_batch(step, split(rank, world))))
                optimizer.step()
                scheduler.step()
            found[name, stage, offload] = {key: value.tolist() for key, value in engine.state_dict().items()}
            engine.close()
    return found


@pytest.mark.longer
def test_an_instance_is_taken_over_with_its_groups_and_scheduler():
    found = run_ranks(2, _instances)[0]
    for name in INSTANCES:
        model = fresh()
        optimizer = instance(model, name)
        first, *others = (case for case in found if case[0] == name)
        same(found[first], plain(model, optimizer, lr_scheduler.ExponentialLR(optimizer, 0.9)))
        for case in others:
            assert found[case] == found[first], case


def test_instances_that_cannot_be_taken_over_are_refused():
    model = fresh()
    with pytest.raises(ValueError, match="lacks scale"):
        zerocli.shard(model, torch.optim.AdamW(model.blocks.parameters()))
    with pytest.raises(ValueError, match="not the model's"):
        zerocli.shard(model, torch.optim.AdamW([*model.parameters(), torch.ones(1, requires_grad=True)]))
    with pytest.raises(ValueError, match="its own lr"):
        zerocli.shard(model, torch.optim.AdamW(model.parameters()), lr=1e-3)
    used = torch.optim.AdamW(model.parameters())
    model(*uneven_batch(1, slice(0, 24))).backward()
    used.step()
    with pytest.raises(ValueError, match="steps already"):
        zerocli.shard(model, used)
    with pytest.raises(ValueError, match="no weight decay"):
        zerocli.shard(fresh(), "rprop", weight_decay=0.1)
