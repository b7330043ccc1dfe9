"""Update rules of torch.optim, and of users' own optimizers that are elementwise, run on flat shards.

A rule of torch.optim is first tried on a small tensor. If its result does not depend on the shape or on where the
tensor is split, it is elementwise and runs on flat chunks like the fused kernels (`TorchOptimizer`). Otherwise, as for
Muon and Adafactor, it runs on whole parameters (`WholeOptimizer`). Other classes are proved first: see verdict.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocli.engine.optimizer.copies import HOOKS, Source, construct
from zerocli.engine.optimizer.dataflow import Dataflow
from zerocli.engine.optimizer.optim import Arrays, At, FlatOptimizer, Group, History, Row, WholeRule
from zerocli.engine.optimizer.outside import Outside, random_restored, without_hooks
from zerocli.engine.optimizer.proof import Verdict, is_number
from zerocli.errors import Refused, RefusedValue

State = dict[str, Any]
_OWN = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group", "state", "param_groups", *HOOKS)
"""Attributes of an optimizer instance that a copy of it does not share."""
_FLAT, _MATRIX = (6,), (2, 3)


class Template:
    """An optimizer that can be run on any one tensor at a time, with hyperparameters and states from outside."""

    def __init__(self, prototype: torch.optim.Optimizer) -> None:
        self.kind = type(prototype)
        self.name = self.kind.__name__
        self.prototype = prototype
        """Its attributes are read in each run: a user may change them."""
        self.groups = [
            {key: value for key, value in group.items() if key not in ("params", "param_names", "name")}
            for group in prototype.param_groups
        ]
        """Options by group; a class has one group for all."""
        self.group = self.groups[0]
        self.defaults = {
            key: value for key, value in prototype.defaults.items() if key not in ("lr", "weight_decay", "foreach")
        }
        self.decays = "weight_decay" in prototype.defaults
        # In a parameter without dimensions a state of its shape looks like a number.
        samples: list[Any] = [
            max(group["params"], key=lambda p: p.dim() > 0 and p.numel() > 0, default=None)
            for group in prototype.param_groups
        ]
        self._initial = [
            {name: self._start(name, value, sample) for name, value in prototype.state.get(sample, {}).items()}
            for sample in samples
        ]

    def _at(self, group: Group) -> int:
        return group.index if group.index < len(self.groups) else 0

    @classmethod
    def of(cls, kind: Callable[..., torch.optim.Optimizer], options: Mapping[str, Any]) -> Template:
        """Return the template of a class; raise ValueError where it cannot be made."""
        name, refused = getattr(kind, "__name__", str(kind)), ""
        for shape in (_MATRIX, _FLAT):
            try:
                return cls(construct(kind, [torch.zeros(shape, requires_grad=True)], 0.1, options))
            except (TypeError, ValueError, RuntimeError) as error:
                refused = str(error)
        raise RefusedValue(f"optimizer {name} cannot be made: {refused}")

    def _start(self, name: str, value: Any, sample: torch.Tensor) -> Callable[[torch.Tensor], Any]:
        """Return a function that creates a state that exists before the first step, for a parameter of any shape."""
        if not isinstance(value, torch.Tensor) or name == "step" or not (value.dim() or value.shape == sample.shape):
            return lambda like: value.clone() if isinstance(value, torch.Tensor) else value
        if value.shape == sample.shape and (value == value.flatten()[0]).all():
            number = value.flatten()[0].item()
            return lambda like: torch.full_like(like, number)

        def cannot(like: torch.Tensor) -> Any:
            raise ValueError(f"optimizer {self.name} starts with a state {name} that cannot be sharded")

        return cannot

    def run(self, master: torch.Tensor, grad: torch.Tensor, state: State | None, group: Group) -> State:
        """Update `master` in place with the given states (None before the first step); return the new states."""
        parameter = master.detach().requires_grad_()
        parameter.grad = grad
        one = object.__new__(self.kind)
        vars(one).update({name: {} for name in HOOKS})
        vars(one).update({key: value for key, value in vars(self.prototype).items() if key not in _OWN})
        decay = {"weight_decay": group.weight_decay} if self.decays else {}
        own = self.groups[self._at(group)]
        fixed: State = {name: False for name in ("foreach", "fused") if name in own}
        one.param_groups = [{**own, **group.options, **fixed, **decay, "lr": group.lr, "params": [parameter]}]
        one.state = defaultdict(dict)
        initial = self._initial[self._at(group)]
        start = {name: make(master) for name, make in initial.items()} if state is None else state
        if start:
            one.state[parameter] = start
        with torch.enable_grad(), without_hooks(one):
            one.step()
        if parameter.data_ptr() != master.data_ptr():
            master.copy_(parameter.detach())
        return dict(one.state[parameter])

    def try_on(self, start: torch.Tensor, grads: torch.Tensor, at: int = 0) -> tuple[torch.Tensor, State]:
        """Return the result of a few steps from `start` with the options of a group, and the states after them."""
        master, state = start.clone(), None
        group = Group(0.1, 0.1, {}, at)
        for grad in grads:
            state = self.run(master, grad.clone(), state, group)
        return master, state or {}


def probe(template: Template, at: int = 0) -> tuple[bool, dict[tuple[int, ...], State]]:
    """Return whether a group's rule is elementwise, and its states for a vector and a matrix, if it accepts them."""
    generator = torch.Generator().manual_seed(0)
    start, grads = torch.randn(6, generator=generator), torch.randn(3, 6, generator=generator)
    found: dict[tuple[int, ...], State] = {}
    results, refused = [], ""
    for shape in (_FLAT, _MATRIX):
        try:
            value, found[shape] = template.try_on(start.view(shape), grads.view(-1, *shape), at)
            results.append(value.flatten())
        except (TypeError, ValueError, RuntimeError, AssertionError, IndexError, NotImplementedError) as error:
            refused = str(error)
    if template.kind is torch.optim.Muon:  # it checks shapes only in its constructor, which is not called again here
        found.pop(_FLAT, None)
        return False, found
    if not found:
        raise RefusedValue(f"optimizer {template.name} cannot run on parameters one at a time: {refused}")
    if len(results) < 2:
        return False, found
    cut = [template.try_on(start[part], grads[:, part], at)[0] for part in (slice(0, 2), slice(2, 6))]
    return all(torch.equal(value, torch.cat(cut)) for value in results), found


def make_torch_rule(template: Template) -> FlatOptimizer:
    """Return the rule that runs an optimizer of torch.optim on flat memory, or on whole parameters if it needs them.

    Groups may differ in what they keep, as RMSprop's do with and without momentum: a state has memory if one keeps it.
    """
    probed = [probe(template, at) for at in range(len(template.groups))]
    examples: State = {}
    arrays: dict[str, bool] = {}
    for _, found in probed:
        for shape, state in found.items():
            for name, value in state.items():
                if value is not None:
                    shaped = isinstance(value, torch.Tensor) and value.shape == shape
                    arrays[name] = arrays.get(name, True) and shaped
                    examples[name] = value
    names = tuple(name for name, shaped in arrays.items() if shaped)
    others = {name: value for name, value in examples.items() if name not in names}
    if all(elementwise for elementwise, _ in probed) and all(is_number(value) for value in others.values()):
        return TorchOptimizer(template, names, others)
    return WholeOptimizer(template, names, examples)


def _number(value: Any) -> float:
    return float(value.item()) if isinstance(value, torch.Tensor) else float(value)


def _typed(like: Any, value: float) -> Any:
    """Return a number as the same type of scalar as `like`."""
    if isinstance(like, int | float):
        return type(like)(value)
    return torch.tensor(value, dtype=like.dtype if isinstance(like, torch.Tensor) else torch.float32)


def _keep(after: State, states: Arrays) -> State:
    """Copy an optimizer's states after a step into the memory of `states`; return those that have none there."""
    for name, array in states.items():
        if after.get(name) is not None and after[name] is not array:
            array.copy_(after[name])
    return {name: value for name, value in after.items() if name not in states}


class TorchOptimizer(FlatOptimizer):
    """Any elementwise torch optimizer; its states are kept in flat arrays."""

    def __init__(self, template: Template, arrays: Sequence[str], scalars: State) -> None:
        self.template, self.state_names, self.defaults = template, tuple(arrays), template.defaults
        self.verdict: Verdict | None = None
        """The proof that it may run on slices; None for rules of torch.optim."""
        self._outside: Outside | None = None
        self._shapes: set[tuple[int, tuple[int, ...]]] = set()
        """Group and reduced shape of the parameters that it was proved for."""
        self._like = scalars
        """An example of each scalar, for its type."""
        self.has_scalars = bool(scalars)
        self._scalars: dict[tuple[int, int], dict[int, State]] = {}
        """By history and group, then by count. Scalars (such as `step`) are the same for every chunk of a step: those
        after this step and those after the one before."""
        self._own = {key for group in template.groups for key in group} - {
            "lr",
            "weight_decay",
            "foreach",
            "initial_lr",
        }

    def options_in(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in group.items() if name in self._own or name in self.defaults}

    def proved(self, verdict: Verdict, source: Source, shapes: Iterable[tuple[int, tuple[int, ...]]]) -> None:
        """Say that a user's rule may run on slices, by a trial with such parameters."""
        self.verdict, self._shapes = verdict, set(shapes)
        if source.instance is not None:
            self.template.prototype = source.instance  # whose attributes count from now on
        self._outside = Outside(self.template.prototype, source)

    def look(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise Refused if the rule is no longer elementwise, because of something that the user has changed."""
        if self._outside is None or not (changed := self._outside.changed(groups)):
            return
        if why := self._not_elementwise(groups):
            raise Refused(
                f"the optimizer {self.template.name} runs on each rank's slice of the parameters, and since {changed} "
                f"has changed it {why}: set that before shard, which then runs it on whole parameters"
            )
        self._outside.accept()

    def _not_elementwise(self, groups: Sequence[Mapping[str, Any]]) -> str:
        """Return what speaks against running the rule on slices with these options; empty if nothing does."""
        for at, shape in sorted(self._shapes):
            group = Group(0.1, float(groups[at].get("weight_decay", 0.0)), self.options_in(groups[at]), at)
            master, state, flow = torch.linspace(-1.0, 1.0, math.prod(shape)).view(shape), None, Dataflow()
            flow.own(master, 0)
            for scale in (1.0, 1e-3):
                grad = torch.full(shape, scale)
                flow.own(grad, 0)
                with random_restored(), flow:
                    state = self.template.run(master, grad, state, group)
            if flow.draws:
                return f"draws random numbers ({flow.draws})"
            if flow.mixes or flow.decides:
                return f"calls {flow.mixes}" if flow.mixes else "reads values of tensors into Python"
        return ""

    def update(self, master: Tensor, grad: Tensor, scale: Tensor | None, states: Arrays, group: Group, at: At) -> None:
        count, skip = at.read()  # the host waits for the device: torch's rules cannot skip a step
        if skip:
            return
        if scale is not None:
            grad.div_(scale)
        known = self._scalars.setdefault((at.history, group.index), {})
        state = None
        if count > 1:
            state = {
                **states,
                **{n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in known[count - 1].items()},
            }
        after = self.template.run(master, grad, state, group)
        others = _keep(after, states)
        for old in [key for key in known if key < count - 1]:
            del known[old]
        known[count] = others

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

    def load(self, name: str, history: int, group: int, saved: History) -> None:
        if saved.count:
            typed = {key: _typed(self._like.get(key), value) for key, value in saved.numbers.items()}
            self._scalars[history, group] = {saved.count: typed}

    def forget(self) -> None:
        self._scalars = {}


class WholeOptimizer(WholeRule):
    """A torch optimizer that needs whole parameters: one by one, in their own shapes.

    Every rank gathers the parameters, gradients and states of a unit, computes the whole update and keeps its slice.
    This is exact at every stage and placement. All ranks compute the same, so it takes as long as on one rank.
    States of a parameter's shape are partitioned as the stage says. Others, such as Adafactor's rows and columns, are
    small, and every rank keeps all of them.
    """

    def __init__(self, template: Template, arrays: Sequence[str], examples: State) -> None:
        self.template, self.state_names, self.defaults = template, tuple(arrays), template.defaults
        self._like = examples
        self._kept: dict[str, State] = {}

    def update_whole(self, row: Row) -> None:
        state = None if row.at.read()[0] == 1 else {**row.states, **self._kept.get(row.name, {})}
        assert row.grad is not None
        after = self.template.run(row.master, row.grad, state, row.group)
        self._kept[row.name] = _keep(after, row.states)

    def numbers(self, name: str, history: int, group: int) -> dict[str, float]:
        return {key: _number(value) for key, value in self._kept.get(name, {}).items() if is_number(value)}

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        kept = self._kept.get(name, {})
        odd = [
            key for key, value in kept.items() if not is_number(value) and not isinstance(value, torch.Tensor | None)
        ]
        if odd:
            raise ValueError(
                f"optimizer {self.template.name} keeps a state {odd[0]} that is no tensor: it cannot be saved"
            )
        return {key: value for key, value in kept.items() if isinstance(value, torch.Tensor) and value.dim()}

    def load(self, name: str, history: int, group: int, saved: History) -> None:
        if saved.count:
            typed = {key: _typed(self._like.get(key), value) for key, value in saved.numbers.items()}
            self._kept[name] = {**typed, **saved.tensors}

    def forget(self) -> None:
        self._kept = {}
