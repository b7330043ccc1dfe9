"""A user's own optimizer object, which makes its steps on whole parameters: one after another, or all at once.

The object is made once and keeps everything that it keeps in plain torch: attributes, groups, counts. Its parameters
are stand-ins with the user's attributes, which have values, gradients and states for the time of a step. Between steps,
states in the shape of a parameter are partitioned as the stage says, and the others stay in the object.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from zerocli.engine.optimizer.copies import HOOKS, METHODS, Source, substitute
from zerocli.engine.optimizer.optim import History, Row, WholeRule
from zerocli.engine.optimizer.outside import PRIVATE, Outside, frozen, without_hooks
from zerocli.engine.optimizer.proof import TOGETHER, Verdict
from zerocli.engine.optimizer.torchrule import Template
from zerocli.errors import Refused
from zerocli.ranks.encoding import decode, encode

KEPT = "optimizer object"
"""Under this name a saved state has what the object keeps other than arrays; see `PersistentOptimizer.own_tensors`."""
_SKIPPED = ("param_groups", "state", "defaults", *PRIVATE, *HOOKS, *METHODS)
_MARK = "\0"
"""Begins the name of a parameter in what is saved; twice before the name, its id."""


class Elsewhere:
    """Stands for a state that the engine holds between steps."""

    def __repr__(self) -> str:
        return "a state that the engine holds"


ELSEWHERE = Elsewhere()


class HeldStates(defaultdict[Any, Any]):
    """The `state` of an optimizer between steps: any access is refused, for the engine holds the states."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise Refused(
            "the states of this optimizer are held by the engine, and partitioned: read them with "
            "engine.optimizer_state_dict(). A method of the optimizer that uses them outside of step() cannot run"
        )

    __getitem__ = __missing__ = __contains__ = __iter__ = __delitem__ = __setitem__ = _refuse
    get = items = keys = values = pop = setdefault = _refuse


class PersistentOptimizer(WholeRule):
    """A user's optimizer on whole parameters; see the module."""

    def __init__(self, source: Source, verdict: Verdict, template: Template) -> None:
        self.name, self.verdict, self.template = source.name, verdict, template
        self.state_names, self.defaults = verdict.arrays, template.defaults
        self.together = verdict.way == TOGETHER
        self.object: torch.optim.Optimizer
        self._source = source
        self._outside: Outside | None = None
        self._stand_ins: dict[str, nn.Parameter] = {}
        self._real: dict[str, nn.Parameter] = {}
        self._states: dict[Any, Any] = {}

    # -- taking over -----------------------------------------------------------------------------------------------

    def adopt(
        self, parameters: Mapping[str, nn.Parameter], group_of: Mapping[str, int], device: torch.device
    ) -> torch.optim.Optimizer:
        """Give the object stand-ins for its parameters, and return it; an instance stays the same object."""
        self._real = {name: parameters[name] for name in group_of}
        fill = torch.full((1,), float("nan"), device=device)
        for name, p in self._real.items():
            placeholder = fill.expand(p.shape) if p.dim() else fill[0]
            made = nn.Parameter(placeholder, p.requires_grad)
            vars(made).update({key: value for key, value in vars(p).items() if not key.startswith("_zerocli")})
            self._stand_ins[name] = made
        if self._source.instance is not None:
            self.object = self._source.instance
            substitute(self.object, {id(p): self._stand_ins[name] for name, p in self._real.items()})
        else:
            rows = [(group_of[name], None, p) for name, p in self._stand_ins.items()]
            self.object = self._source.make(rows)
            self._refuse_values()
        self._placeholders = {name: p.data for name, p in self._stand_ins.items()}
        self._states = dict(self.object.state)
        self._names = {id(p): name for name, p in self._stand_ins.items()}
        self._attributes = {key: frozen(value) for key, value in vars(self.object).items()}
        self._outside = Outside(self.object, self._source)
        self._show_real()
        return self.object

    def look(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Give all parameters to the object at once from now on if it may no longer treat them one by one."""
        if self._outside is not None and not self.together:
            self.together = bool(self._outside.changed(groups))

    def _refuse_values(self) -> None:
        for state in self.object.state.values():
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor) and value.is_floating_point() and bool(value.isnan().any()):
                    raise Refused(
                        f"the optimizer {self.name} makes its state {key!r} from the parameters' values when it is "
                        "constructed: construct it on the model's parameters, and give shard the instance"
                    )

    def _show_real(self) -> None:
        """Between steps the object shows the model's own parameters."""
        for group in self.object.param_groups:
            group["params"] = [self._real[self._names[id(p)]] for p in group["params"]]
        self.object.state = HeldStates(dict)

    @contextlib.contextmanager
    def _running(self, only: str | None = None) -> Iterator[None]:
        """Give the object its stand-ins and states for the time of a call."""
        mine = {id(p): self._stand_ins[name] for name, p in self._real.items()}
        shown = [group["params"] for group in self.object.param_groups]
        for group, params in zip(self.object.param_groups, shown, strict=True):
            group["params"] = [mine[id(p)] for p in params]
            if only is not None:
                group["params"] = [p for p in group["params"] if p is self._stand_ins[only]]
        self.object.state = state = defaultdict(dict, self._states)
        try:
            with torch.enable_grad(), without_hooks(self.object):
                yield
        finally:
            if self.object.state is not state:  # a rule may replace it
                state = self.object.state
            self._states = dict(state)
            for group, params in zip(self.object.param_groups, shown, strict=True):
                group["params"] = params
            self.object.state = HeldStates(dict)

    # -- steps -----------------------------------------------------------------------------------------------------

    def options_in(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {}  # the object reads its groups itself

    def update_whole(self, row: Row) -> None:
        self._step([row], only=row.name)

    def update_rows(self, rows: Sequence[Row]) -> None:
        if self.together:
            self._step(rows)
        else:
            super().update_rows(rows)

    def _step(self, rows: Sequence[Row], only: str | None = None) -> None:
        """Make a step of all parameters, or of one; the memory in `rows` is updated in place."""
        for row in rows:
            self._hand_in(row)
        try:
            with self._running(only):
                type(self.object).step(self.object)  # the object's own name leads to the engine
        finally:
            for row in rows:
                self._take_back(row)

    def _hand_in(self, row: Row) -> None:
        stand_in, real = self._stand_ins[row.name], self._real[row.name]
        vars(stand_in).update({key: value for key, value in vars(real).items() if not key.startswith("_zerocli")})
        stand_in.requires_grad_(real.requires_grad)
        stand_in.data, stand_in.grad = row.master, row.grad
        state = self._states.get(stand_in, {})
        for key, value in state.items() if isinstance(state, dict) else ():
            if value is ELSEWHERE:
                state[key] = row.states[key]

    def _take_back(self, row: Row) -> None:
        stand_in = self._stand_ins[row.name]
        if stand_in.data_ptr() != row.master.data_ptr():
            row.master.copy_(stand_in.detach())
        stand_in.data, stand_in.grad = self._placeholders[row.name], None
        state = self._states.get(stand_in, {})
        for key, value in state.items() if isinstance(state, dict) else ():
            if key in row.states and isinstance(value, torch.Tensor):
                if value.shape != row.master.shape or value.dtype != torch.float32:
                    raise Refused(
                        f"the optimizer {self.name} changed its state {key!r} of {row.name} to {tuple(value.shape)}, "
                        f"{value.dtype}: the trial had fp32 values in the shape of the parameter"
                    )
                if value.data_ptr() != row.states[key].data_ptr():
                    row.states[key].copy_(value.detach())
                state[key] = ELSEWHERE

    # -- saving ----------------------------------------------------------------------------------------------------

    def own_tensors(self) -> dict[str, torch.Tensor]:
        """Return what the object keeps, as bytes."""
        states: dict[str, tuple[list[str], dict[str, Any]]] = {}
        for key, state in self._states.items():
            rows = dict(state) if isinstance(state, dict) else {}
            held = [k for k, v in rows.items() if v is ELSEWHERE]
            title = self._names.get(id(key), "") or f"other {key}"
            states[title] = (held, {k: v for k, v in rows.items() if v is not ELSEWHERE})
        groups = [
            {k: v for k, v in group.items() if k not in ("params", "param_names") and _loadable(v)}
            for group in self.object.param_groups
        ]
        return {KEPT: self.packed(states, groups, self._own())}

    def _own(self) -> dict[str, Any]:
        """Return the object's attributes that steps, or the user, have changed since it was taken over."""
        now = {key: value for key, value in vars(self.object).items() if key not in _SKIPPED}
        known = [key.removeprefix("self.") for key in self.verdict.changed]
        return {k: v for k, v in now.items() if k in known or frozen(v) != self._attributes.get(k)}

    def packed(
        self,
        states: Mapping[str, tuple[list[str], dict[str, Any]]],
        groups: Sequence[Mapping[str, Any]] = (),
        own: Mapping[str, Any] = MappingProxyType({}),
    ) -> torch.Tensor:
        """Return states (names of those in arrays, and the others), groups and attributes as bytes."""
        named = {id(p): f"{_MARK}{name}" for name, p in self._stand_ins.items()}
        whole = {"states": dict(states), "groups": list(groups), "own": dict(own)}
        for title, part in [*whole.items(), *((f"self.{key}", value) for key, value in own.items())][::-1]:
            if not _loadable(_marked(part, named)):
                raise Refused(
                    f"the optimizer {self.name} keeps {title}, which cannot be saved: it may keep numbers, strings and "
                    "tensors, and lists and dicts of them"
                )
        return torch.frombuffer(bytearray(encode(_marked(whole, named))), dtype=torch.uint8)

    def load(self, name: str, history: int, group: int, saved: History) -> None:
        if KEPT not in saved.tensors:
            return
        packed = saved.tensors[KEPT].cpu().numpy().tobytes()
        found = _unmarked(decode(packed, next(iter(self._placeholders.values())).device), self._stand_ins)
        for title, (held, rest) in found["states"].items():
            key = self._stand_ins.get(title, title.removeprefix("other "))
            self._states[key] = {**dict.fromkeys(held, ELSEWHERE), **rest}
        for own, values in zip(self.object.param_groups, found["groups"], strict=False):
            own.update(values)
        vars(self.object).update(found["own"])

    def forget(self) -> None:
        self._states = {}


def _marked(value: Any, names: Mapping[int, str]) -> Any:
    """Return containers with parameters, and their ids, replaced by names."""
    if isinstance(value, nn.Parameter) and id(value) in names:
        return names[id(value)]
    if type(value) is int and value in names:
        return f"{_MARK}{names[value]}"
    if isinstance(value, dict):
        made = {_marked(k, names): _marked(v, names) for k, v in value.items()}
        return made if type(value) in (dict, defaultdict) else type(value)(made)
    if type(value) in (list, tuple, set):
        return type(value)(_marked(each, names) for each in value)
    return value


def _unmarked(value: Any, parameters: Mapping[str, nn.Parameter]) -> Any:
    """Undo `_marked`, with the parameters of these names."""
    if isinstance(value, str) and value.startswith(_MARK):
        found = parameters[value.lstrip(_MARK)]
        return id(found) if value.startswith(2 * _MARK) else found
    if isinstance(value, dict):
        made = {_unmarked(k, parameters): _unmarked(v, parameters) for k, v in value.items()}
        return made if type(value) is dict else type(value)(made)
    if type(value) in (list, tuple, set):
        return type(value)(_unmarked(each, parameters) for each in value)
    return value


def _loadable(value: Any) -> bool:
    """Whether a value can be saved and loaded again without running code."""
    try:
        encode(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True
