"""Recomputed blocks whose state is in containers, objects, classes, functions or generators, or out of reach.

And those that change state and change it back, or hold objects that raise when they are looked at.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn
from torch.func import functional_call, grad

from zoo.blocks import WIDTH, Block, Regressor, pairs
from zoo.case import EXACT, Expected, case, either, refused, trained


def _reached(
    name: str,
    start: Callable[[Any, Any], None],
    factor: Callable[[Any, Any], Any],
    how: Any = True,
    expected: Expected = EXACT,
    steps: int = 3,
) -> None:
    """Enter blocks that divide their input by `factor(block, x)`; `start(block, run)` makes what it counts with."""

    @case(f"recompute-state-{name}", below3=expected, at3=expected)
    def program(run):
        class Counting(Block):
            def __init__(self):
                super().__init__()
                start(self, run)

            def forward(self, x):
                return super().forward(x / factor(self, x))

        def make():
            model = Regressor(0)
            model.blocks = nn.ModuleList(Counting() for _ in range(2))
            return model

        run.train(run.shard(make, recompute=how), steps, pairs)


def _set(**values: Callable[[], Any]) -> Callable[[Any, Any], None]:
    return lambda block, run: block.__dict__.update({key: make() for key, make in values.items()})


def _bumped(holder: Any, key: Any) -> Any:
    holder[key] += 1
    return holder[key]


def _appended(holder: list[Any], value: Any = 1) -> int:
    holder.append(value)
    return len(holder)


class Inner:
    def __init__(self):
        self.count, self.more = 0, {"calls": [0]}


class Outer:
    def __init__(self):
        self.inner = Inner()

    def __call__(self, x):
        self.inner.count += 1
        return self.inner.count + _bumped(self.inner.more["calls"], 0)


@dataclasses.dataclass(slots=True)
class Slotted:
    count: int = 0
    mean: Any = None

    def note(self, x):
        self.count += 1
        self.mean = x.detach().mean() if self.mean is None else self.mean * 0.5
        return self.count + self.mean.abs()


class Meter:
    """Counts on the class; no module's code names the count itself."""

    total = 0

    @classmethod
    def bump(cls):
        cls.total += 1
        return cls.total


HELD: dict[str, Any] = {"deep": {}, "count": 0}


def _helper() -> int:
    HELD["count"] += 1
    return HELD["count"]


def _remember(block: Any, x: Any, calls: list[int] = []) -> int:  # noqa: B006
    return _appended(calls)


def _attributed() -> int:
    _attributed.count += 1  # type: ignore[attr-defined]
    return _attributed.count  # type: ignore[attr-defined]


class Clock(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("ticks", torch.zeros(()))

    def tick(self):
        self.ticks += 1
        return self.ticks


def _torch_generator(block, run):
    HELD["deep"]["generator"] = torch.Generator().manual_seed(run.rank)


def _start_counts(block, run):
    HELD["count"] = Meter.total = _attributed.count = 0  # type: ignore[attr-defined]
    _remember.__defaults__[0].clear()  # type: ignore[index]


def _tensors() -> tuple[list[torch.Tensor], tuple[torch.Tensor]]:
    return [torch.zeros(WIDTH)], (torch.zeros(WIDTH),)


def _moved(held: Any, x: torch.Tensor) -> torch.Tensor:
    held[0][0].add_(x.detach().mean(0))
    held[1][0].add_(1)
    return 1 + held[0][0].abs() + held[1][0]


_reached("list-in-dicts", _set(kept=lambda: {"a": {"n": []}}), lambda b, x: _appended(b.kept["a"]["n"]))
_reached("list-in-dicts-selective", _set(kept=lambda: {"a": [0]}), lambda b, x: _bumped(b.kept["a"], 0), "selective")
_reached("tensors-in-list-and-tuple", _set(kept=_tensors), lambda b, x: _moved(b.kept, x))
_reached("objects", _set(kept=Outer), lambda b, x: b.kept(x))
_reached("slots", _set(kept=Slotted), lambda b, x: b.kept.note(x))
_reached("class", _start_counts, lambda b, x: Meter.bump())
_reached("helper-function", _start_counts, lambda b, x: _helper())
_reached("function-attribute", _start_counts, lambda b, x: _attributed())
_reached("mutable-default", _start_counts, _remember)
_reached("partial", _set(kept=lambda: functools.partial(_appended, [])), lambda b, x: b.kept())
_reached("bound-method", _set(kept=lambda: Slotted().note), lambda b, x: b.kept(x))
_reached("numpy-array", _set(kept=lambda: numpy.zeros(1)), lambda b, x: float(_bumped(b.kept, 0)))
_reached("generator-in-dict", _torch_generator, lambda b, x: 1 + torch.rand(1, generator=HELD["deep"]["generator"]))
_reached("generator-in-list", _set(kept=lambda: [random.Random(2)]), lambda b, x: 1 + b.kept[0].random())
_reached("module-in-list", _set(kept=lambda: [Clock()]), lambda b, x: b.kept[0].tick())


# -- what cannot be put back -------------------------------------------------------------------------------------------

RECOMPUTED = refused("recompute")


def _late(block: Any, x: torch.Tensor) -> int:
    block.calls += 1
    return _appended(block.kept["a"]) if block.calls > 5 else 1


_reached("iterator", _set(kept=lambda: itertools.count(1)), lambda b, x: next(b.kept), expected=RECOMPUTED)
_reached("python-generator", _set(kept=lambda: (n for n in range(1, 99))), lambda b, x: next(b.kept), True, RECOMPUTED)
_reached("cycle", _set(kept=lambda: itertools.cycle([1, 3, 2, 5, 4])), lambda b, x: next(b.kept), True, RECOMPUTED)
_reached("list-that-grows-late", _set(kept=lambda: {"a": []}, calls=int), _late, True, RECOMPUTED, 6)


class Written(Block):
    """Only the output depends on what was written: autograd saves the same tensors in both runs."""

    def __init__(self):
        super().__init__()
        self.text = io.StringIO()

    def forward(self, x):
        self.text.write("a")
        return super().forward(x) / len(self.text.getvalue())


def _blocks(name: str, block: Callable[[], nn.Module], steps: int = 5, expected: Expected = EXACT) -> None:
    def make():
        model = Regressor(0)
        model.blocks = nn.ModuleList(block() for _ in range(2))
        return model

    trained(f"recompute-state-{name}", make, pairs, steps, {"recompute": True}, below3=expected, at3=expected)


_blocks("written-to-a-file", Written, expected=RECOMPUTED)


# -- torch ends a recomputation at the last tensor that backward needs -------------------------------------------------


class Busy(Block):
    """A flag, two stacks and a buffer are as before when the forward ends."""

    def __init__(self):
        super().__init__()
        self.busy, self.stack, self.held = False, [], {"stack": []}
        self.register_buffer("depth", torch.zeros(()))

    def forward(self, x):
        assert not self.busy
        self.busy = True
        self.stack.append(1)
        self.held["stack"].append(2)
        self.depth += 1
        y = super().forward(x) / (len(self.stack) + len(self.held["stack"]) + self.depth.clone())
        self.depth -= 1
        self.stack.pop()
        self.held["stack"].pop()
        self.busy = False
        return y


class Catching(Block):
    """Catches the exception by which torch ends a recomputation, and computes something else."""

    def forward(self, x):
        try:
            return super().forward(x)
        except Exception:
            return x + torch.tanh(self.down(self.up(x)))


_blocks("there-and-back", Busy)
_blocks("exceptions-caught", Catching)


# -- objects that cannot be searched -----------------------------------------------------------------------------------


class Raising:
    __slots__ = ("__weakref__", "count")

    def __init__(self):
        self.count = 0

    def __getattribute__(self, name):
        raise KeyError(name)

    def __eq__(self, other):
        raise KeyError("eq")

    __hash__ = None  # type: ignore[assignment]


class Linked:
    def __init__(self, value: int) -> None:
        self.value, self.next = value, None


def _odd_objects() -> dict[str, Any]:
    chain = None
    for value in range(600):
        link = Linked(value)
        link.next = chain
        chain = link
    variables: dict[str, Any] = {}
    exec("def of_text(): return 2", variables)
    raising = Raising()
    return {"chain": chain, "text": variables["of_text"], "list": [raising, Raising], "proxy": weakref.proxy(raising)}


_reached(
    "odd-objects",
    _set(kept=_odd_objects, calls=lambda: [0], gone=lambda: weakref.proxy(Linked(0))),
    lambda b, x: _bumped(b.calls, 0) * b.kept["text"](),
)


@case("recompute-state-swapped-by-functional-call", below3=RECOMPUTED, at3=refused("gathered"))
def swapped(run):
    """The recomputation would see the parameters that the module holds, as under torch's own checkpoint."""

    class Swapping(Regressor):
        def body(self, x):
            for block in self.blocks:
                x = functional_call(block, {"norm.bias": torch.tanh(block.norm.bias + 1)}, (x,))
            return x

    run.train(run.shard(lambda: Swapping(2), recompute=True), 1, pairs)


@case("recompute-state-under-torch-func", at3=either("torch.autograd.grad"))
def under_func(run):
    """torch.func allows no checkpoint: its transforms keep the activations."""
    trainer = run.shard(lambda: Regressor(2), recompute=True)
    model, (x, y) = trainer.model, pairs(run, 0)
    found = grad(lambda params: functional_call(model, params, (x, y)))(dict(model.named_parameters()))
    for name, value in found.items():
        run.log(name, value)
    run.train(trainer, 1, pairs)
