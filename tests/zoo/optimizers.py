"""Users' own optimizers: what they count, read, branch on and keep, their groups, hooks and states."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import optimizer as torchs

from zoo.blocks import Stack
from zoo.case import EXACT, Expected, case, refused

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW


class Own(torch.optim.Optimizer):
    """Base of the rules below: `update` changes one parameter."""

    def __init__(self, params: Iterable[Any], lr: float = 0.05, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})
        self.setup()

    def setup(self) -> None:
        pass

    def before(self) -> None:
        pass

    @torch.no_grad()
    def step(self, closure=None):
        self.before()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)

    def update(self, p, grad, state, group):
        raise NotImplementedError


class CountsInItself(Own):
    def setup(self):
        self.count = 0

    def before(self):
        self.count += 1

    def update(self, p, grad, state, group):
        p.sub_(grad, alpha=group["lr"] / self.count)


class CountsInGroup(Own):
    def before(self):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1

    def update(self, p, grad, state, group):
        p.sub_(grad, alpha=group["lr"] / group["k"])


class CountsOnClass(Own):
    calls = 0

    def before(self):
        CountsOnClass.calls = min(CountsOnClass.calls + 1, 1000)
        self.now = CountsOnClass.calls

    def update(self, p, grad, state, group):
        p.sub_(grad, alpha=group["lr"])


class Convolutions(Own):
    """Another rule for tensors of four dimensions."""

    def update(self, p, grad, state, group):
        if p.dim() == 4:
            grad = grad - grad.mean((1, 2, 3), keepdim=True)
        p.sub_(grad, alpha=group["lr"])


class Large(Own):
    """Another rule for large tensors: mean gradients are taken away."""

    def update(self, p, grad, state, group):
        if p.numel() >= 20_000:
            grad = grad - grad.mean()
        p.sub_(grad, alpha=group["lr"])


class Marked(Own):
    """A learning rate of its own for parameters with an attribute."""

    def update(self, p, grad, state, group):
        p.sub_(grad, alpha=group["lr"] * getattr(p, "scale", 1.0))


class GlobalNorm(Own):
    def before(self):
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.norm = torch.stack([grad.norm() for grad in grads]).norm()

    def update(self, p, grad, state, group):
        p.sub_(grad / (self.norm + 1e-3), alpha=group["lr"])


class RareClipping(Own):
    """Clips by a global norm that small gradients never reach; reads it into Python."""

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = sum(p.grad.square().sum().item() for p in params)
        factor = min(1.0, group_limit(self) / (math.sqrt(total) + 1e-12))
        for p in params:
            p.sub_(p.grad * factor, alpha=0.05)


def group_limit(optimizer: Own) -> float:
    return optimizer.param_groups[0]["limit"]


class Late(Own):
    """Elementwise for two steps, then not."""

    def update(self, p, grad, state, group):
        state["step"] = state.get("step", 0) + 1
        if state["step"] > group["after"]:
            grad = grad - grad.mean()
        p.sub_(grad, alpha=group["lr"])


class LateInTensor(Own):
    """As `Late`, with the count in a tensor and at one step alone."""

    def update(self, p, grad, state, group):
        if not state:
            state["n"] = torch.zeros(())
        state["n"] += 1
        if state["n"].item() == 5:
            p.sub_(grad.mean())
        p.sub_(grad, alpha=group["lr"])


class ScheduleFree(Own):
    """Averages of the iterates, as in "The Road Less Scheduled"; `eval` swaps the weights."""

    def update(self, p, grad, state, group):
        if "z" not in state:
            state["z"], state["k"] = p.clone(), 0
        state["k"] += 1
        c = 1 / state["k"]
        z = state["z"]
        p.lerp_(z, c)
        p.sub_(grad, alpha=group["lr"] * 0.9 * (1 - c))
        z.sub_(grad, alpha=group["lr"])

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], 1 - 1 / 0.9)


class Neighbours(Own):
    def update(self, p, grad, state, group):
        p.sub_(grad + 0.1 * grad.flatten().roll(1).view_as(grad), alpha=group["lr"])


class Lars(Own):
    """Scales each tensor's gradient by norms, read into Python."""

    def update(self, p, grad, state, group):
        ratio = p.norm().item() / (grad.norm().item() + 1e-3)
        p.sub_(grad, alpha=group["lr"] * min(ratio, 10.0))


class SignMomentum(Own):
    """Truly elementwise, with a number in its states."""

    def update(self, p, grad, state, group):
        if not state:
            state["m"], state["n"] = torch.zeros_like(p), 0
        state["n"] += 1
        state["m"].lerp_(grad, 0.1)
        p.sub_(torch.tanh(state["m"] * 30), alpha=group["lr"] / math.sqrt(state["n"]))


class TwoKinds(Own):
    """Other states for matrices than for vectors."""

    def update(self, p, grad, state, group):
        if p.dim() >= 2:
            m = state.setdefault("rows", torch.zeros_like(p[:, :1]))
            m.lerp_(grad.square().mean(1, keepdim=True), 0.2)
            p.sub_(grad / (m.sqrt() + 1e-3), alpha=0.1 * group["lr"])
        else:
            m = state.setdefault("velocity", torch.zeros_like(p))
            m.mul_(0.9).add_(grad)
            p.sub_(m, alpha=group["lr"])


class DecaysAll(Own):
    """Changes parameters that have no gradient as well."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99)
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])


class Anchored(Own):
    """Keeps the values that parameters had when it was made."""

    def setup(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["anchor"] = p.detach().clone()

    def update(self, p, grad, state, group):
        p.sub_(grad + 0.1 * (p - state["anchor"]), alpha=group["lr"])


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer; every second step pulls the weights to slow ones, kept in lists."""

    def __init__(self, base):
        self.base, self.k = base, 0
        self.param_groups, self.defaults = base.param_groups, base.defaults
        self.slow = [[p.detach().clone() for p in group["params"]] for group in base.param_groups]
        super().__init__(base.param_groups, base.defaults)
        self.param_groups = base.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.k += 1
        if self.k % 2 == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for p, old in zip(group["params"], slow, strict=True):
                    old.lerp_(p, 0.5)
                    p.copy_(old)


class Centralized(AdamW):
    """A subclass of torch's class with another step."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() > 1:
                    p.grad.sub_(p.grad.mean(1, keepdim=True))
        return super().step()


class ByIdentity(Own):
    """Knows its parameters by their identity."""

    def setup(self):
        ids = [id(p) for group in self.param_groups for p in group["params"]]
        self.scales = {number: 1.0 + at % 3 for at, number in enumerate(ids)}

    def update(self, p, grad, state, group):
        p.sub_(grad, alpha=group["lr"] * self.scales.get(id(p), 0.0))


class Noisy(Own):
    def update(self, p, grad, state, group):
        p.sub_(grad + 0.01 * torch.randn_like(grad), alpha=group["lr"])


class NeedsClosure(Own):
    """Wants the loss again, as LBFGS and SAM do."""

    def step(self, closure):
        closure()


class NotInState(Own):
    """Keeps its momentum on itself, by parameter."""

    def setup(self):
        self.momenta: dict[Any, torch.Tensor] = {}

    def update(self, p, grad, state, group):
        m = self.momenta[p] = self.momenta.get(p, torch.zeros_like(p)) * 0.9 + grad
        p.sub_(m, alpha=group["lr"])


class Foreach(Own):
    """Written with operations on lists; elementwise."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p]["m"] = torch.zeros_like(p)
            if params:
                momenta = [self.state[p]["m"] for p in params]
                torch._foreach_mul_(momenta, 0.9)
                torch._foreach_add_(momenta, [p.grad for p in params])
                torch._foreach_add_(params, momenta, alpha=-group["lr"])


class History(Own):
    """Keeps a list of earlier gradients."""

    def update(self, p, grad, state, group):
        past = state.setdefault("past", [])
        past.append(grad.clone())
        del past[:-2]
        p.sub_(sum(past) / len(past), alpha=group["lr"])


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
entered("lookahead", lambda model: Lookahead(SGD(model.parameters(), lr=0.05, momentum=0.9)), steps=5)
entered("subclass-of-adamw", over(Centralized, lr=1e-2))
entered("knows-parameters-by-identity", over(ByIdentity))
entered("momentum-on-itself", over(NotInState), steps=5)
entered("list-of-gradients", over(History), steps=5)
entered("draws-random-numbers", over(Noisy), expected=refused("Noisy", "random"))


@case("optim-needs-a-closure")
def needs_a_closure(run: Any) -> None:
    model = run.build(Stack)
    run.refused(lambda: run.shard(model, optimizer=NeedsClosure(model.parameters()), lr=None, weight_decay=None), "step() alone")
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


# -- groups ------------------------------------------------------------------------------------------------------------

entered("sgd-momentum-per-group", split(SGD, {"momentum": 0.9}, {}, lr=0.05), steps=5)
entered("sgd-second-group-has-momentum", split(SGD, {}, {"momentum": 0.9, "nesterov": True}, lr=0.05), steps=5)
entered("sgd-dampening-per-group", split(SGD, {"momentum": 0.5}, {"momentum": 0.9, "dampening": 0.3}, lr=0.05), steps=5)
entered("sgd-maximize-per-group", split(SGD, {"weight_decay": 0.1}, {"maximize": True}, lr=0.02), steps=4)
entered("adam-decay-per-group", split(torch.optim.Adam, {"decoupled_weight_decay": True}, {}, lr=1e-2, weight_decay=0.2, eps=1e-5))
entered("adam-betas-per-group", split(AdamW, {"betas": (0.5, 0.9)}, {"eps": 1e-3, "amsgrad": True}, lr=1e-2, eps=1e-5), steps=5)
entered("rmsprop-groups", split(torch.optim.RMSprop, {"momentum": 0.9}, {"centered": True}, lr=1e-2), steps=5)
entered("rmsprop-plain-beside-momentum", split(torch.optim.RMSprop, {}, {"momentum": 0.9, "centered": True}, lr=1e-2), steps=5)
entered("adagrad-starts-per-group", split(torch.optim.Adagrad, {"lr": 0.1}, {"lr_decay": 0.3}, lr=0.05, initial_accumulator_value=0.2))
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


for _kind in (CountsInItself, CountsInGroup, SignMomentum, TwoKinds, History, ScheduleFree, Late, NotInState, ByIdentity):
    _options = {"after": 4} if _kind is Late else {}
    resumed(_kind.__name__.lower(), over(_kind, **_options))
resumed("rmsprop-groups", split(torch.optim.RMSprop, {"momentum": 0.9}, {"centered": True}, lr=1e-2))
resumed("with-missing-gradients", over(CountsInItself), Skipping, branches)


class KeepsObjects(Own):
    def setup(self):
        self.seen = []

    def before(self):
        self.seen.append(object())

    def update(self, p, grad, state, group):
        p.sub_(grad, alpha=group["lr"] / len(self.seen))


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
