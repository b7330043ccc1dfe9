"""Law: an optimizer that is drawn at random trains as in plain torch or is refused, and a slice is never updated alone
by a rule that is not elementwise."""

from __future__ import annotations

import random

import pytest
import torch
from lengths import LONG
from torch import nn

import zerocli
from zerocli.engine.optimizer.copies import Source
from zerocli.engine.optimizer.proof import ELEMENTWISE, ONE_BY_ONE, SYNTHETIC, TOGETHER, Specimen
from zerocli.engine.optimizer.verdict import decide

RULES, STEPS = 40 if LONG else 20, 6
ELEMENTS = ("sign", "momentum", "average", "count", "cube", "root")
"""Terms that keep to the elements."""
OTHERS = (
    *("tensor mean", "tensor norm", "roll", "cumsum", "late mean", "dim", "numel", "attribute"),
    *("count in self", "count in group", "global norm", "python norm", "late global norm", "without gradient"),
)
"""Terms that do not."""


class Drawn(torch.optim.Optimizer):
    """The sum of a few terms, each of which computes a part of the update."""

    def __init__(self, params, lr=0.02, terms=(), after=3):
        super().__init__(params, {"lr": lr})
        self.terms, self.after, self.calls = terms, after, 0

    @torch.no_grad()
    def step(self, closure=None):
        rows = [(p, g) for g in self.param_groups for p in g["params"]]
        if "count in self" in self.terms:
            self.calls += 1
        if "count in group" in self.terms:
            for group in self.param_groups:
                group["calls"] = group.get("calls", 0) + 1
        norm = torch.stack([p.grad.norm() for p, _ in rows if p.grad is not None]).norm() if self.joins else None
        total = sum(p.grad.norm().item() for p, _ in rows if p.grad is not None) if "python norm" in self.terms else 1.0
        for p, group in rows:
            if "without gradient" in self.terms:
                p.mul_(0.999)
            if p.grad is not None:
                for term in self.terms:
                    p.sub_(self.part(term, p, p.grad, self.state[p], group, norm, total), alpha=group["lr"])

    @property
    def joins(self):
        return "global norm" in self.terms or "late global norm" in self.terms

    def part(self, term, p, grad, state, group, norm, total):
        if term in ("momentum", "average"):
            kept = state.setdefault(term, torch.zeros_like(p))
            kept.mul_(0.9).add_(grad) if term == "momentum" else kept.lerp_(grad, 0.3)
            return kept
        if term in ("count", "late mean", "late global norm"):
            state[term] = state.get(term, 0) + 1
        return {
            "sign": lambda: grad.sign(),
            "cube": lambda: grad**3 + p * 0.1,
            "root": lambda: grad / (grad.abs().sqrt() + 1e-3),
            "count": lambda: grad / state["count"],
            "tensor mean": lambda: grad - grad.mean(),
            "tensor norm": lambda: grad / (grad.norm() + 0.1),
            "roll": lambda: grad.flatten().roll(1).view_as(grad),
            "cumsum": lambda: grad.cumsum(-1),
            "late mean": lambda: grad - grad.mean() if state[term] > self.after else grad,
            "late global norm": lambda: grad / (norm + 1) if state[term] > self.after else grad,
            "dim": lambda: grad * p.dim(),
            "numel": lambda: grad * 0.1 if p.numel() > 20 else grad,
            "attribute": lambda: grad * getattr(p, "weight_of_it", 1.0),
            "count in self": lambda: grad / self.calls,
            "count in group": lambda: grad / group["calls"],
            "global norm": lambda: grad / (norm + 1),
            "python norm": lambda: grad / (total + 1),
            "without gradient": lambda: grad,
        }[term]()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.table = nn.Parameter(torch.randn(2, 3, 5) * 0.3)
        self.layers[1].bias.weight_of_it = 0.3  # type: ignore[assignment]

    def forward(self, x: torch.Tensor, used: bool) -> torch.Tensor:
        for layer in self.layers if used else self.layers[:1]:
            x = torch.tanh(layer(x))
        return (x @ self.table.flatten(0, 1).T).square().mean()


def drawn(draw: random.Random, number: int) -> tuple[str, ...]:
    terms = draw.sample(ELEMENTS, draw.randint(1, 2))
    if number % 3:
        terms += draw.sample(OTHERS, draw.randint(1, 2))
    return tuple(terms)


def batches():
    for step in range(STEPS):
        yield torch.randn(4, 5, generator=torch.Generator().manual_seed(step)), step != 2


def plain(terms: tuple[str, ...]) -> dict[str, torch.Tensor]:
    model = Net()
    rule = Drawn(model.parameters(), terms=terms)
    for x, used in batches():
        rule.zero_grad()
        model(x, used).backward()
        rule.step()
    return model.state_dict()


def sharded(terms: tuple[str, ...], as_class: bool) -> tuple[dict[str, torch.Tensor], str]:
    model = Net()
    how = {"optimizer": Drawn, "lr": 0.02, "weight_decay": 0.0, "terms": terms} if as_class else {}
    engine = zerocli.shard(model, **(how or {"optimizer": Drawn(model.parameters(), terms=terms)}), stage=3)
    for x, used in batches():
        engine.backward(model(x, used))
        engine.step()
    way = engine.rule.verdict.way
    found = engine.state_dict()
    engine.close()
    return found, way


@pytest.mark.longer
def test_drawn_rules_train_as_in_torch():
    draw = random.Random(31)
    ways: dict[str, int] = {}
    for number in range(RULES):
        terms = drawn(draw, number)
        expected = plain(terms)
        found, way = sharded(terms, as_class=number % 2 == 0)
        ways[way] = ways.get(way, 0) + 1
        assert way != ELEMENTWISE or set(terms) <= set(ELEMENTS), terms
        assert way == ELEMENTWISE or not set(terms) <= set(ELEMENTS), terms
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-6), (terms, way, name)
    assert min(ways.get(way, 0) for way in (ELEMENTWISE, ONE_BY_ONE, TOGETHER)) >= RULES // 8, ways


@pytest.mark.parametrize("after", [3, 77, 500, 1234])
@pytest.mark.parametrize("term", ["late mean", "late global norm"])
def test_a_late_branch_is_found(after, term):
    verdict, _ = decide(Source(Drawn, {"terms": ("sign", term), "after": after}), SYNTHETIC)
    assert verdict.way == (ONE_BY_ONE if term == "late mean" else TOGETHER), verdict


def test_a_rule_for_large_tensors_is_found_without_their_memory():
    class Large(Drawn):
        def part(self, term, p, grad, state, group, norm, total):
            return grad - grad.mean() if p.numel() > 10**9 else grad

    members = [Specimen((40_000, 50_000), 0), Specimen((7,), 0)]
    assert decide(Source(Large, {"terms": ("sign",)}), members)[0].way == ONE_BY_ONE
    assert decide(Source(Large, {"terms": ("sign",)}), members[1:])[0].way == ELEMENTWISE


def test_a_flat_rule_that_is_not_elementwise_is_refused():
    class Mean(zerocli.FlatOptimizer):
        state_names = ()

        def update(self, master, grad, scale, states, group, at):
            master.sub_(grad - grad.mean(), alpha=group.lr)

    class Counting(zerocli.FlatOptimizer):
        state_names, calls = (), 0

        def __init__(self):
            self.calls = 0

        def update(self, master, grad, scale, states, group, at):
            self.calls += 1
            master.sub_(grad, alpha=group.lr)

    for rule, words in ((Mean(), "mean"), (Counting(), "calls")):
        with pytest.raises(zerocli.Refused, match=words):
            zerocli.shard(nn.Linear(3, 3), rule, lr=0.1)
