"""Users' own optimizers: what they count, read, branch on and keep, their groups, hooks and states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import optimizer as torchs

from zoo.blocks import Stack
from zoo.case import EXACT, Expected, case, refused
from zoo.rules import (
    Anchored,
    BareLookahead,
    ByIdentity,
    Cautious,
    Centralized,
    Convolutions,
    CountsInGroup,
    CountsInItself,
    CountsOnClass,
    DecaysAll,
    Doubles,
    FirstGroupsRate,
    Foreach,
    GlobalNorm,
    History,
    InNumpy,
    KeepsObjects,
    Large,
    Lars,
    Late,
    LateInTensor,
    Lookahead,
    Marked,
    NeedsClosure,
    Neighbours,
    Noisy,
    NoRate,
    NotInState,
    Own,
    PeriodicMean,
    PythonRandom,
    RareClipping,
    RemovesItsGradient,
    ScheduleFree,
    Shared,
    SignMomentum,
    TwoKinds,
    WeightNorm,
)

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv in self.convs:
            x = x + conv(x).tanh()
        return self.head(x.mean((2, 3))).square().mean()


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 1500), nn.Linear(1500, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.down(self.up(x).tanh()), x[:, :4])


class Skipping(nn.Module):
    """Uses one of its branches in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.head(self.branches[which](x).tanh()).square().mean()


def tokens(run, step):
    return (run.tokens(step, 4, 8),)


def pictures(run, step):
    return (run.randn(step, 3, 4, 5, 5),)


def rows(run, step):
    return (run.randn(step, 5, 16),)


def branches(run, step):
    return (run.randn(step, 5, 6), step % 3)


Make = Callable[[nn.Module], torch.optim.Optimizer]


def given(run, make: Make, model: Callable[[], nn.Module], **more: Any):
    """Return a trainer with an instance that was made on the model's parameters, and the instance."""
    built = run.build(model)
    rule = make(built)
    sharded = {"optimizer": rule, "lr": None, "weight_decay": None}  # the instance has its own
    trainer = run.shard(built, **more, **(sharded if run.sharded else {"plain_optimizer": lambda masters, s: rule}))
    return trainer, rule


def entered(
    name: str,
    make: Make,
    model: Callable[[], nn.Module] = Stack,
    batch: Callable[[Any, int], Any] = tokens,
    steps: int = 4,
    expected: Expected = EXACT,
    **more: Any,
) -> None:
    """Enter a case that trains with an instance."""

    @case(f"optim-{name}", below3=expected, at3=expected)
    def program(run: Any) -> None:
        trainer, _ = given(run, make, model, **more)
        run.train(trainer, steps, batch)


def halves(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    params = list(model.parameters())
    return params[::2], params[1::2]


def mark(model: nn.Module) -> nn.Module:
    for at, p in enumerate(model.parameters()):
        if at % 2:
            p.scale = 0.25  # type: ignore[attr-defined]
    return model


def over(kind: Any, **options: Any) -> Make:
    return lambda model: kind(model.parameters(), **options)


def split(kind: Any, first: dict[str, Any], second: dict[str, Any], **options: Any) -> Make:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        one, other = halves(model)
        return kind([{"params": one, **first}, {"params": other, **second}], **options)

    return make


# -- what a rule counts, reads and keeps -------------------------------------------------------------------------------

entered("counts-in-itself", over(CountsInItself))
entered("counts-in-its-group", over(CountsInGroup))
entered("counts-on-its-class", over(CountsOnClass))
entered("treats-convolutions-differently", over(Convolutions), Conv, pictures)
entered("treats-large-tensors-differently", over(Large), Wide, rows)
entered("reads-an-attribute", over(Marked), lambda: mark(Stack()))
entered("global-norm", over(GlobalNorm))
entered("clips-rarely-by-a-global-norm", over(RareClipping, limit=1e-3))
entered("branches-late", over(Late, after=2))
entered("branches-at-one-step", over(LateInTensor), steps=6)
entered("schedule-free", over(ScheduleFree), steps=5)
entered("mixes-neighbours", over(Neighbours))
entered("layerwise-norms-in-python", over(Lars))
entered("elementwise", over(SignMomentum), steps=5)
entered("elementwise-by-lists", over(Foreach))
entered("other-states-for-matrices", over(TwoKinds))
entered("changes-parameters-without-gradient", over(DecaysAll), Skipping, branches, steps=5)
entered("counts-with-missing-gradients", over(CountsInItself), Skipping, branches, steps=5)
entered("elementwise-with-missing-gradients", over(SignMomentum), Skipping, branches, steps=7)
entered("state-from-the-start", over(Anchored))


class ScalarFirst(Stack):
    """Its first parameter has no dimensions."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens):
        return super().forward(tokens) * self.scale


entered("starts-with-a-scalar", lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1), ScalarFirst)
entered("lookahead-without-init", lambda model: BareLookahead(AdamW(model.parameters(), lr=0.01, eps=1e-4)), steps=5)
entered("lookahead", lambda model: Lookahead(SGD(model.parameters(), lr=0.05, momentum=0.9)), steps=5)
entered("subclass-of-adamw", over(Centralized, lr=1e-2))
entered("knows-parameters-by-identity", over(ByIdentity))
entered("momentum-on-itself", over(NotInState), steps=5)
entered("list-of-gradients", over(History), steps=5)
entered("draws-random-numbers", over(Noisy), expected=refused("Noisy", "random"))


@case("optim-needs-a-closure")
def needs_a_closure(run: Any) -> None:
    model = run.build(Stack)
    run.refused(
        lambda: run.shard(model, optimizer=NeedsClosure(model.parameters()), lr=None, weight_decay=None), "step() alone"
    )
    run.refused(lambda: run.shard(model, optimizer=NeedsClosure, weight_decay=0.0), "NeedsClosure", "step() alone")


@case("optim-class-that-counts")
def class_that_counts(run: Any) -> None:
    """The class instead of an instance."""
    make = {"plain_optimizer": lambda masters, settings: CountsInItself(masters.values(), lr=0.1)}
    trainer = run.shard(Stack, optimizer=CountsInItself, lr=0.1, weight_decay=0.0, **({} if run.sharded else make))
    run.train(trainer, 4)


@case("optim-class-with-a-norm-per-group")
def class_with_groups(run: Any) -> None:
    make = {"plain_optimizer": lambda masters, settings: GlobalNorm(masters.values(), lr=0.1)}
    trainer = run.shard(Stack, optimizer=GlobalNorm, lr=0.1, weight_decay=0.0, **({} if run.sharded else make))
    run.train(trainer, 4)


@case("optim-changed-on-the-way")
def changed_on_the_way(run: Any) -> None:
    """An attribute of the optimizer and an option of a group are changed between steps."""

    class Scaled(Own):
        def setup(self):
            self.factor = 1.0

        def update(self, p, grad, state, group):
            p.sub_(grad, alpha=group["lr"] * self.factor * group["share"])

    trainer, rule = given(run, over(Scaled, share=1.0), Stack)
    run.train(trainer, 2)
    rule.factor = 0.1  # type: ignore[attr-defined]
    rule.param_groups[0]["share"] = 0.5
    run.train(trainer, 2)


@case("optim-bf16-counts", tolerance=5e-3)
def bf16(run: Any) -> None:
    """The optimizer sees fp32 values, also where the model computes in bf16."""
    trainer = run.shard(
        Stack,
        optimizer=CountsInItself,
        **{"lr": 0.1, "weight_decay": 0.0, "precision": "bf16"},
        **({} if run.sharded else {"plain_optimizer": lambda masters, s: CountsInItself(masters.values(), lr=0.1)}),
    )
    run.train(trainer, 4)


# -- drawn by a hostile tester -----------------------------------------------------------------------------------------


entered("reads-all-weights", over(WeightNorm), Skipping, branches, steps=5)
entered(
    "reads-frozen-weights",
    lambda model: (model.embed.requires_grad_(False), WeightNorm(model.parameters()))[1],
    expected=refused("WeightNorm", "frozen"),
)
entered("first-groups-rate", split(FirstGroupsRate, {}, {}, lr=0.05))
entered("no-learning-rate", over(NoRate))
entered("states-in-fp64", over(Doubles))
entered("computes-in-numpy", over(InNumpy))
entered("python-random", over(PythonRandom), expected=refused("PythonRandom", "random"))
entered("one-count-for-all", over(Shared))
entered("cautious", over(Cautious))
entered("replaces-data", over(RemovesItsGradient))
entered("periodic-mean", over(PeriodicMean), steps=7)
entered("named-parameters", lambda model: SignMomentum(model.named_parameters()))
entered("named-parameters-together", lambda model: CountsInItself(model.named_parameters()))


@case("optim-rate-of-one-group-changes")
def one_group_changes(run: Any) -> None:
    """Only the first group's rate is changed, and the rule uses it for all."""
    trainer, rule = given(run, split(FirstGroupsRate, {}, {}, lr=0.05), Stack)
    run.train(trainer, 2)
    rule.param_groups[0]["lr"] = 0.2
    run.train(trainer, 2)


@case("optim-made-by-a-function")
def made_by_a_function(run: Any) -> None:
    def make(params: Any, lr: float = 0.1) -> torch.optim.Optimizer:
        return CountsInGroup(params, lr=lr)

    plain = {"plain_optimizer": lambda masters, settings: make(masters.values(), 0.1)}
    run.train(run.shard(Stack, optimizer=make, lr=0.1, weight_decay=0.0, **({} if run.sharded else plain)), 4)


@case("optim-class-without-a-rate")
def class_without_rate(run: Any) -> None:
    plain = {"plain_optimizer": lambda masters, settings: NoRate(masters.values())}
    run.train(run.shard(Stack, optimizer=NoRate, weight_decay=0.0, **({} if run.sharded else plain)), 4)


@case("optim-class-with-values-from-the-start", below3=refused("instance"), at3=refused("instance"))
def class_with_values(run: Any) -> None:
    plain = {"plain_optimizer": lambda masters, settings: Anchored(masters.values())}
    run.train(run.shard(Stack, optimizer=Anchored, lr=0.05, weight_decay=0.0, **({} if run.sharded else plain)), 2)


@case("optim-step-of-torchs-class-replaced")
def replaced_on_class(run: Any) -> None:
    """torch's SGD with another step, as some libraries patch it."""
    kept = SGD.step

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad - p.grad.mean(), alpha=0.1)

    try:
        SGD.step = step  # type: ignore[method-assign]
        trainer, _ = given(run, over(SGD, lr=0.1), Stack)
        run.train(trainer, 3)
    finally:
        SGD.step = kept  # type: ignore[method-assign]


@case("optim-two-optimizers", below3=refused("lacks"), at3=refused("lacks"))
def two_optimizers(run: Any) -> None:
    """Two optimizers over the halves of one model: the engine has one."""
    run.train(given(run, lambda model: SGD(halves(model)[0], lr=0.1), Stack)[0], 1)


@case("optim-lbfgs", below3=refused("LBFGS"), at3=refused("LBFGS"))
def lbfgs(run: Any) -> None:
    model = run.build(Stack)
    if run.sharded:
        run.shard(model, optimizer=torch.optim.LBFGS(model.parameters()), lr=None, weight_decay=None)


@case("optim-together-in-bf16", tolerance=5e-3)
def together_in_bf16(run: Any) -> None:
    """All parameters at once, in one-by-one and in slices: computing in bf16, with fp32 masters."""
    for kind in (GlobalNorm, Lars, SignMomentum):
        run.train(
            run.shard(
                Stack,
                **{"optimizer": kind, "lr": 0.02, "weight_decay": 0.0, "precision": "bf16"},
                **({} if run.sharded else {"plain_optimizer": lambda masters, s, k=kind: k(masters.values(), lr=0.02)}),
            ),
            3,
        )


@case("optim-scheduled")
def scheduled(run: Any) -> None:
    """A scheduler of torch on the user's instance."""
    trainer, rule = given(run, over(CountsInItself, lr=0.1), Stack)
    schedule = torch.optim.lr_scheduler.ExponentialLR(rule, 0.7)
    for _ in range(3):
        run.train(trainer, 1)
        schedule.step()


@case("optim-clipped-and-accumulated")
def clipped(run: Any) -> None:
    trainer, _ = given(run, over(GlobalNorm), Stack, clip=0.05, accumulate=2)
    for step in range(3):
        for part in range(2):
            trainer.backward(trainer(*tokens(run, 2 * step + part)))
        trainer.step()


# -- groups ------------------------------------------------------------------------------------------------------------

entered("sgd-momentum-per-group", split(SGD, {"momentum": 0.9}, {}, lr=0.05), steps=5)
entered("sgd-second-group-has-momentum", split(SGD, {}, {"momentum": 0.9, "nesterov": True}, lr=0.05), steps=5)
entered("sgd-dampening-per-group", split(SGD, {"momentum": 0.5}, {"momentum": 0.9, "dampening": 0.3}, lr=0.05), steps=5)
entered("sgd-maximize-per-group", split(SGD, {"weight_decay": 0.1}, {"maximize": True}, lr=0.02), steps=4)
entered(
    "adam-decay-per-group",
    split(torch.optim.Adam, {"decoupled_weight_decay": True}, {}, lr=1e-2, weight_decay=0.2, eps=1e-5),
)
entered(
    "adam-betas-per-group",
    split(AdamW, {"betas": (0.5, 0.9)}, {"eps": 1e-3, "amsgrad": True}, lr=1e-2, eps=1e-5),
    steps=5,
)
entered("rmsprop-groups", split(torch.optim.RMSprop, {"momentum": 0.9}, {"centered": True}, lr=1e-2), steps=5)
entered(
    "rmsprop-plain-beside-momentum",
    split(torch.optim.RMSprop, {}, {"momentum": 0.9, "centered": True}, lr=1e-2),
    steps=5,
)
entered(
    "adagrad-starts-per-group",
    split(torch.optim.Adagrad, {"lr": 0.1}, {"lr_decay": 0.3}, lr=0.05, initial_accumulator_value=0.2),
)
entered("adam-kernels-per-group", split(AdamW, {"foreach": True}, {"foreach": False}, lr=1e-2, eps=1e-5))
entered("lr-in-a-tensor", over(AdamW, lr=torch.tensor(1e-2), foreach=False, eps=1e-5))


def frozen_in_group(model: nn.Module) -> torch.optim.Optimizer:
    for p in list(model.parameters())[1::3]:
        p.requires_grad_(False)
    return SignMomentum(model.parameters())


entered("frozen-parameters-in-a-group", frozen_in_group)
entered(
    "decays-frozen-parameters",
    lambda model: (model.embed.requires_grad_(False), DecaysAll(model.parameters()))[1],
    expected=refused("DecaysAll", "frozen"),
)


def twice(model: nn.Module) -> torch.optim.Optimizer:
    rule = SGD(model.parameters(), lr=0.1)
    rule.param_groups.append({**rule.param_groups[0], "params": rule.param_groups[0]["params"][:1]})
    return rule


entered("parameter-in-two-groups", twice, expected=refused("twice"))


@case("optim-step-replaced-on-the-object", below3=refused("subclass"), at3=refused("subclass"))
def replaced_step(run: Any) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        rule = SGD(model.parameters(), lr=0.1)
        old = rule.step
        rule.step = lambda *a: (old(*a), old(*a))[0]  # type: ignore[method-assign]
        return rule

    given(run, make, Stack)


@case("optim-group-added-later")
def added_later(run: Any) -> None:
    """Groups that change after the model was sharded are refused, whichever way they are changed."""
    trainer, rule = given(run, over(SignMomentum), Stack)
    run.train(trainer, 1)
    new = {"params": [nn.Parameter(torch.zeros(2))]}
    if run.sharded:
        try:
            rule.add_param_group(new)
        except RuntimeError:
            pass
        else:
            raise AssertionError("the group was added")
        removed = rule.param_groups[0]["params"].pop()
        run.refused(lambda: (trainer.backward(trainer(*tokens(run, 1))), trainer.engine.step()), "groups")
        rule.param_groups[0]["params"].append(removed)
        trainer.engine.zero_grad()
    else:
        run.log("loss", trainer(*tokens(run, 1)))
    run.train(trainer, 2)


# -- hooks -------------------------------------------------------------------------------------------------------------


def hooked(run: Any, make: Make, how: str) -> None:
    """Step hooks run once per step: torch's for all optimizers, the instance's, and those of engine.optimizer."""
    trainer, rule = given(run, make, Stack)
    calls = {"pre": 0, "post": 0, "every": 0, "facade": 0}
    facade = trainer.engine.optimizer if run.sharded else rule

    def count(key: str) -> Callable[..., None]:
        return lambda *args: calls.__setitem__(key, calls[key] + 1)

    def slower(optimizer: Any, args: Any, kwargs: Any) -> None:
        calls["pre"] += 1
        optimizer.param_groups[0]["lr"] *= 0.5

    rule.register_step_pre_hook(slower)
    rule.register_step_post_hook(count("post"))
    facade.register_step_post_hook(count("facade"))
    handle = torchs.register_optimizer_step_pre_hook(count("every"))
    try:
        for step in range(4):
            trainer.backward(trainer(*tokens(run, step)))
            if not run.sharded or how == "engine":
                trainer.step()
            else:
                result = {"facade": facade, "instance": rule}[how].step()
                run.log("gradient norm", result.grad_norm)
    finally:
        handle.remove()
    for key, value in calls.items():
        run.log(key, value)


for _how in ("engine", "facade", "instance"):
    case(f"optim-hooks-by-{_how}")(lambda run, how=_how: hooked(run, over(SGD, lr=0.2), how))
    case(f"optim-hooks-of-own-rule-by-{_how}")(lambda run, how=_how: hooked(run, over(SignMomentum, lr=0.2), how))
case("optim-hooks-of-counting-rule")(lambda run: hooked(run, over(CountsInItself, lr=0.2), "instance"))


@case("optim-hook-on-gradients", below3=refused("kept by the engine"), at3=refused("kept by the engine"))
def gradient_hook(run: Any) -> None:
    trainer, rule = given(run, over(SGD, lr=0.2), Stack)

    def double(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(2)

    rule.register_step_pre_hook(double)
    run.train(trainer, 2)


@case("optim-hook-on-states")
def state_hook(run: Any) -> None:
    trainer, rule = given(run, over(SGD, lr=0.2), Stack)
    run.refused(lambda: rule.register_state_dict_post_hook(lambda o, s: None), "state_dict")
    if run.sharded:
        run.refused(lambda: trainer.engine.optimizer.register_load_state_dict_pre_hook(lambda o, s: None), "hooks")
    run.train(trainer, 2)


@case("optim-weights-swapped-by-a-method", below3=refused("held by the engine"), at3=refused("held by the engine"))
def swapped(run: Any) -> None:
    trainer, rule = given(run, over(ScheduleFree), Stack)
    run.train(trainer, 2)
    rule.eval()


# -- states ------------------------------------------------------------------------------------------------------------


def resumed(name: str, make: Make, model: Callable[[], nn.Module] = Stack, batch: Any = tokens) -> None:
    """Enter a case that goes on from saved states in another engine, and in plain torch without a break."""

    @case(f"optim-resumed-{name}")
    def program(run: Any) -> None:
        trainer, _ = given(run, make, model)
        run.train(trainer, 3, batch)
        if run.sharded:
            saved, states = trainer.engine.state_dict(), trainer.engine.optimizer_state_dict()
            trainer.engine.close()
            run.trainers.clear()
            trainer, _ = given(run, make, model)
            trainer.engine.load_state_dict(saved)
            trainer.engine.load_optimizer_state_dict(states)
        run.train(trainer, 3, batch)


for _kind in (
    CountsInItself,
    CountsInGroup,
    SignMomentum,
    TwoKinds,
    History,
    ScheduleFree,
    Late,
    NotInState,
    ByIdentity,
):
    _options = {"after": 4} if _kind is Late else {}
    resumed(_kind.__name__.lower(), over(_kind, **_options))
resumed("rmsprop-groups", split(torch.optim.RMSprop, {"momentum": 0.9}, {"centered": True}, lr=1e-2))
resumed("with-missing-gradients", over(CountsInItself), Skipping, branches)


@case("optim-what-cannot-be-saved")
def not_saved(run: Any) -> None:
    """Objects of any class are kept, but not saved."""
    trainer, _ = given(run, over(KeepsObjects), Stack)
    run.train(trainer, 2)
    run.refused(lambda: trainer.engine.optimizer_state_dict(), "KeepsObjects", "self.seen", "saved")


def from_torch(name: str, make: Make, model: Callable[[], nn.Module] = Stack) -> None:
    """Enter a case that loads the state dict of the optimizer of plain torch, with its weights."""

    @case(f"optim-torchs-states-{name}")
    def program(run: Any) -> None:
        twin = run.build(model)
        rule = make(twin)
        for step in range(3):
            rule.zero_grad()
            twin(run.tokens(step, 4, 8, same=True)).backward()
            rule.step()
        trainer, other = given(run, make, model)
        trainer.load({name: value.clone() for name, value in twin.state_dict().items()})
        other.load_state_dict(rule.state_dict())
        run.train(trainer, 3)


from_torch("adamw", over(AdamW, lr=1e-2, eps=1e-5))
from_torch("adam-groups", split(torch.optim.Adam, {"betas": (0.5, 0.9)}, {"lr": 3e-3}, lr=1e-2, eps=1e-5))
from_torch("sgd", over(SGD, lr=0.05, momentum=0.9))
from_torch("rmsprop", split(torch.optim.RMSprop, {"momentum": 0.9}, {"centered": True}, lr=1e-2))
from_torch("elementwise", over(SignMomentum))
from_torch("counts-in-its-group", over(CountsInGroup))
from_torch("list-of-gradients", over(History))
