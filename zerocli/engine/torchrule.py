"""Update rules of torch.optim, and of other torch.optim.Optimizer subclasses, run on flat shards.

A rule is first tried on a small tensor. If its result does not depend on the shape or on where the tensor is split, it
is elementwise and runs on flat chunks like the fused kernels (`TorchOptimizer`). Otherwise, as for Muon and Adafactor,
it runs on whole parameters (`WholeOptimizer`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zerocli.engine.optim import At, FlatOptimizer, Group

State = dict[str, Any]
_OWN = ("step", "zero_grad", "state_dict", "load_state_dict", "state", "param_groups")
"""Attributes of an optimizer instance that a copy of it does not share."""
_FLAT, _MATRIX = (6,), (2, 3)


class Template:
    """An optimizer that can be run on any one tensor at a time, with hyperparameters and states from outside."""

    def __init__(self, prototype: torch.optim.Optimizer) -> None:
        self.kind = type(prototype)
        self.name = self.kind.__name__
        self._attributes = {key: value for key, value in vars(prototype).items() if key not in _OWN}
        first = prototype.param_groups[0]
        self.group = {key: value for key, value in first.items() if key not in ("params", "param_names")}
        self.defaults = {
            key: value for key, value in prototype.defaults.items() if key not in ("lr", "weight_decay", "foreach")
        }
        self.decays = "weight_decay" in prototype.defaults
        sample = first["params"][0]
        self._initial = {name: self._start(name, value, sample) for name, value in prototype.state[sample].items()}

    @classmethod
    def of(cls, kind: Callable[..., torch.optim.Optimizer], options: Mapping[str, Any]) -> Template:
        """Return the template of a class; raise ValueError where it cannot be made."""
        name, refused = getattr(kind, "__name__", str(kind)), ""
        for shape in (_MATRIX, _FLAT):
            try:
                return cls(kind([torch.zeros(shape, requires_grad=True)], lr=0.1, **options))
            except (TypeError, ValueError, RuntimeError) as error:
                refused = str(error)
        raise ValueError(f"optimizer {name} cannot be made: {refused}")

    def _start(self, name: str, value: Any, sample: torch.Tensor) -> Callable[[torch.Tensor], Any]:
        """Return a function that creates a state that exists before the first step, for a parameter of any shape."""
        if isinstance(value, torch.Tensor) and value.dim():
            if value.shape != sample.shape or not (value == value.flatten()[0]).all():
                raise ValueError(f"optimizer {self.name} starts with a state {name} that cannot be sharded")
            number = value.flatten()[0].item()
            return lambda like: torch.full_like(like, number)
        return lambda like: value.clone() if isinstance(value, torch.Tensor) else value

    def run(self, master: torch.Tensor, grad: torch.Tensor, state: State | None, group: Group) -> State:
        """Update `master` in place with the given states (None before the first step); return the new states."""
        parameter = master.detach().requires_grad_()
        parameter.grad = grad
        one = object.__new__(self.kind)
        vars(one).update(self._attributes)
        decay = {"weight_decay": group.weight_decay} if self.decays else {}
        fixed = {"foreach": False} if "foreach" in self.group else {}
        one.param_groups = [{**self.group, **group.options, **fixed, **decay, "lr": group.lr, "params": [parameter]}]
        one.state = defaultdict(dict)
        start = {name: make(master) for name, make in self._initial.items()} if state is None else state
        if start:
            one.state[parameter] = start
        with torch.enable_grad():
            one.step()
        if parameter.data_ptr() != master.data_ptr():
            master.copy_(parameter.detach())
        return dict(one.state[parameter])

    def try_on(self, start: torch.Tensor, grads: torch.Tensor) -> tuple[torch.Tensor, State]:
        """Return the result of a few steps from `start`, and the states after them."""
        master, state = start.clone(), None
        group = Group(0.1, 0.1, {})
        for grad in grads:
            state = self.run(master, grad.clone(), state, group)
        return master, state or {}


def probe(template: Template) -> tuple[bool, dict[tuple[int, ...], State]]:
    """Return whether the rule is elementwise, and its states for a vector and a matrix, if it accepts them."""
    generator = torch.Generator().manual_seed(0)
    start, grads = torch.randn(6, generator=generator), torch.randn(3, 6, generator=generator)
    found: dict[tuple[int, ...], State] = {}
    results, refused = [], ""
    for shape in (_FLAT, _MATRIX):
        try:
            value, found[shape] = template.try_on(start.view(shape), grads.view(-1, *shape))
            results.append(value.flatten())
        except (TypeError, ValueError, RuntimeError, AssertionError, IndexError, NotImplementedError) as error:
            refused = str(error)
    if template.kind is torch.optim.Muon:  # it checks shapes only in its constructor, which is not called again here
        found.pop(_FLAT, None)
        return False, found
    if not found:
        raise ValueError(f"optimizer {template.name} cannot run on parameters one at a time: {refused}")
    if len(results) < 2:
        return False, found
    cut = [template.try_on(start[part], grads[:, part])[0] for part in (slice(0, 2), slice(2, 6))]
    return all(torch.equal(value, torch.cat(cut)) for value in results), found


def make_torch_rule(template: Template) -> FlatOptimizer:
    """Return the rule that runs a torch optimizer on flat memory, or on whole parameters if it needs them."""
    elementwise, found = probe(template)
    same = [{k for k, v in s.items() if isinstance(v, torch.Tensor) and v.shape == shape} for shape, s in found.items()]
    arrays = tuple(name for name in next(iter(found.values())) if all(name in names for names in same))
    if elementwise:
        others = {name: value for name, value in found[_FLAT].items() if name not in arrays}
        odd = [n for n, v in others.items() if v is not None and not _is_number(v)]
        if not odd:
            return TorchOptimizer(template, arrays, others)
    return WholeOptimizer(template, arrays, {name: value for state in found.values() for name, value in state.items()})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _number(value: Any) -> float:
    return float(value.item()) if isinstance(value, torch.Tensor) else float(value)


def _typed(like: Any, value: float) -> Any:
    """Return a number as the same type of scalar as `like`."""
    if isinstance(like, int | float):
        return type(like)(value)
    return torch.tensor(value, dtype=like.dtype if isinstance(like, torch.Tensor) else torch.float32)


class TorchOptimizer(FlatOptimizer):
    """Any elementwise torch optimizer; its states are kept in flat arrays."""

    def __init__(self, template: Template, arrays: Sequence[str], scalars: State) -> None:
        self.template, self.state_names, self.defaults = template, tuple(arrays), template.defaults
        self._like = scalars
        """An example of each scalar, for its type."""
        self.has_scalars = bool(scalars)
        self._scalars: dict[tuple[int, int], dict[int, State]] = {}
        """By history and group, then by count. Scalars (such as `step`) are the same for every chunk of a step: those
        after this step and those after the one before."""

    def update(
        self,
        master: torch.Tensor,
        grad: torch.Tensor,
        scale: torch.Tensor | None,
        states: Mapping[str, torch.Tensor],
        group: Group,
        at: At,
    ) -> None:
        if at.skip.item():  # the only optimizer path that syncs with the device: torch's rules cannot skip a step
            return
        if scale is not None:
            grad.div_(scale)
        count = int(at.count.item())
        known = self._scalars.setdefault((at.history, group.index), {})
        state = None
        if count > 1:
            state = {
                **states,
                **{n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in known[count - 1].items()},
            }
        after = self.template.run(master, grad, state, group)
        for name, array in states.items():
            if after.get(name) is not None and after[name] is not array:
                array.copy_(after[name])
        for old in [key for key in known if key < count - 1]:
            del known[old]
        known[count] = {name: value for name, value in after.items() if name not in states}

    def advance(self, group: Group, at: At) -> None:
        """Compute the step's scalars, even on a rank that holds no element of these parameters: it may save them."""
        one = torch.zeros(1)
        self.update(one, one.clone(), None, {name: one.clone() for name in self.state_names}, group, at)

    def split(self, old: int, new: int) -> None:
        for (history, group), known in list(self._scalars.items()):
            if history == old:
                self._scalars[new, group] = dict(known)

    def numbers(self, name: str, history: int, group: int) -> dict[str, float]:
        known = self._scalars.get((history, group))
        newest = known[max(known)] if known else {}
        return {key: _number(value) for key, value in newest.items() if value is not None}

    def load(self, name, history, group, count, numbers, tensors):  # type: ignore[no-untyped-def]
        if count:
            self._scalars[history, group] = {
                count: {key: _typed(self._like.get(key), value) for key, value in numbers.items()}
            }

    def forget(self) -> None:
        self._scalars = {}


class WholeOptimizer(FlatOptimizer):
    """A torch optimizer that needs whole parameters: one by one, in their own shapes.

    Every rank gathers the parameters, gradients and states of a unit, computes the whole update and keeps its slice.
    This is exact at every stage and placement. All ranks compute the same, so it takes as long as on one rank.
    States of a parameter's shape are partitioned as the stage says. Others, such as Adafactor's rows and columns, are
    small, and every rank keeps all of them.
    """

    whole = True

    def __init__(self, template: Template, arrays: Sequence[str], examples: State) -> None:
        self.template, self.state_names, self.defaults = template, tuple(arrays), template.defaults
        self._like = examples
        self._kept: dict[str, State] = {}

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether the rule can update a parameter of this shape."""
        return self.template.kind is not torch.optim.Muon or len(shape) == 2

    def update(
        self,
        master: torch.Tensor,
        grad: torch.Tensor,
        scale: torch.Tensor | None,
        states: Mapping[str, torch.Tensor],
        group: Group,
        at: At,
    ) -> None:
        raise AssertionError("this rule needs whole parameters")

    def update_whole(
        self,
        name: str,
        master: torch.Tensor,
        grad: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        group: Group,
        at: At,
    ) -> None:
        state = None if int(at.count.item()) == 1 else {**states, **self._kept.get(name, {})}
        after = self.template.run(master, grad, state, group)
        for key, array in states.items():
            if after.get(key) is not None and after[key] is not array:
                array.copy_(after[key])
        self._kept[name] = {key: value for key, value in after.items() if key not in states}

    def numbers(self, name: str, history: int, group: int) -> dict[str, float]:
        return {key: _number(value) for key, value in self._kept.get(name, {}).items() if _is_number(value)}

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        kept = self._kept.get(name, {})
        odd = [
            key for key, value in kept.items() if not _is_number(value) and not isinstance(value, torch.Tensor | None)
        ]
        if odd:
            raise ValueError(
                f"optimizer {self.template.name} keeps a state {odd[0]} that is no tensor: it cannot be saved"
            )
        return {key: value for key, value in kept.items() if isinstance(value, torch.Tensor) and value.dim()}

    def load(self, name, history, group, count, numbers, tensors):  # type: ignore[no-untyped-def]
        if count:
            typed = {key: _typed(self._like.get(key), value) for key, value in numbers.items()}
            self._kept[name] = {**typed, **tensors}

    def forget(self) -> None:
        self._kept = {}
