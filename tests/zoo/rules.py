"""Optimizers as users write them, elementwise and not."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch


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


class BareLookahead(torch.optim.Optimizer):
    """The same as it is often written: without torch's __init__, with states of its own beside the inner ones."""

    def __init__(self, base):
        self.base, self.param_groups, self.state = base, base.param_groups, defaultdict(dict)
        for group in self.param_groups:
            group["counter"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        for group in self.param_groups:
            group["counter"] += 1
            for p in group["params"] if group["counter"] % 2 == 0 else ():
                slow = self.state[p].setdefault("slow", p.detach().clone())
                slow.lerp_(p, 0.5)
                p.copy_(slow)

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)


class Centralized(torch.optim.AdamW):
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


class WeightNorm(Own):
    """Reads the values of all parameters, also of those without a gradient."""

    def before(self):
        self.total = torch.stack([p.norm() for g in self.param_groups for p in g["params"]]).norm()

    def update(self, p, grad, state, group):
        p.sub_(grad / self.total, alpha=group["lr"])


class FirstGroupsRate(Own):
    """Uses the learning rate of the first group for all."""

    def update(self, p, grad, state, group):
        p.sub_(grad, alpha=self.param_groups[0]["lr"])


class NoRate(torch.optim.Optimizer):
    """Has no learning rate at all."""

    def __init__(self, params, share=0.02):
        super().__init__(params, {"share": share})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign() * group["share"])


class Doubles(Own):
    """Keeps its average in another precision."""

    def update(self, p, grad, state, group):
        if not state:
            state["m"] = torch.zeros_like(p, dtype=torch.float64)
        state["m"].lerp_(grad.double(), 0.1)
        p.sub_(state["m"].to(p.dtype), alpha=group["lr"])


class InNumpy(Own):
    """Computes in numpy, where no operation of torch is seen."""

    def update(self, p, grad, state, group):
        values = grad.numpy()
        p.copy_(torch.from_numpy(p.numpy() - group["lr"] * (values - values.mean())))


class PythonRandom(Own):
    def update(self, p, grad, state, group):
        p.sub_(grad, alpha=group["lr"] * random.random())


class Shared(Own):
    """One count, a tensor, that all states share."""

    def setup(self):
        self.n = torch.zeros(())

    def before(self):
        self.n += 1

    def update(self, p, grad, state, group):
        state["step"] = self.n
        p.sub_(grad / state["step"], alpha=group["lr"])


class Cautious(Own):
    """Masks the update where it disagrees with the gradient and rescales it: a mean per tensor, without Python."""

    def update(self, p, grad, state, group):
        m = state.setdefault("m", torch.zeros_like(p))
        m.lerp_(grad, 0.1)
        mask = (m * grad > 0).to(grad.dtype)
        p.sub_(m * mask / mask.mean().clamp_(min=1e-3), alpha=group["lr"])


class RemovesItsGradient(Own):
    """Works on `p.data`, replaces it, and changes its gradient."""

    def update(self, p, grad, state, group):
        p.grad.mul_(0.5)
        p.data = p.data - group["lr"] * p.grad.data
        p.grad = None


class PeriodicMean(Own):
    """Once in 3 steps of the group, all weights move to their tensor's mean a little."""

    def update(self, p, grad, state, group):
        state["t"] = state.get("t", 0) + 1
        p.sub_(grad, alpha=group["lr"])
        if state["t"] % 3 == 0:
            p.lerp_(p.mean().expand_as(p), 0.1)


class KeepsObjects(Own):
    def setup(self):
        self.seen = []

    def before(self):
        self.seen.append(object())

    def update(self, p, grad, state, group):
        p.sub_(grad, alpha=group["lr"] / len(self.seen))
