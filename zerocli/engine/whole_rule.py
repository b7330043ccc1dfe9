"""A user's own optimizer object, which makes its steps on whole parameters: one after another, or all at once.

The object is made once and keeps everything that it keeps in plain torch: attributes, groups, counts. Its parameters are
stand-ins with the user's attributes. They have values, gradients and states in their own shapes for the time of a step.
Between steps, states in the shape of a parameter are partitioned as the stage says, and the others stay in the object.
"""

from __future__ import annotations

import contextlib
import io
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerocli.engine.copies import HOOKS, METHODS, Source, substitute
from zerocli.engine.optim import At, FlatOptimizer, Group
from zerocli.engine.proof import TOGETHER, Verdict, without_hooks
from zerocli.engine.torchrule import Template
from zerocli.errors import Refused

KEPT = "optimizer object"
"""Under this name a saved state has what the object keeps other than arrays; see `PersistentOptimizer.tensors`."""
_SKIPPED = ("param_groups", "state", "defaults", *HOOKS, *METHODS)


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


@dataclass(frozen=True)
class Row:
    """A parameter in a step: its whole values, its gradient if it has one, and the memory of its states."""

    name: str
    master: torch.Tensor
    grad: torch.Tensor | None
    states: Mapping[str, torch.Tensor]


class PersistentOptimizer(FlatOptimizer):
    """A user's optimizer on whole parameters; see the module."""

    whole = True

    def __init__(self, source: Source, verdict: Verdict, template: Template) -> None:
        self.name, self.verdict, self.template = source.name, verdict, template
        self.state_names, self.defaults = verdict.arrays, template.defaults
        self.together = verdict.way == TOGETHER
        """Whether all parameters are given to it at once."""
        self.object: torch.optim.Optimizer
        self._source = source
        self._stand_ins: dict[str, nn.Parameter] = {}
        self._real: dict[str, nn.Parameter] = {}
        self._states: dict[Any, Any] = {}
        self._beginning: bytes = b""

    # -- taking over -----------------------------------------------------------------------------------------------

    def adopt(
        self, parameters: Mapping[str, nn.Parameter], group_of: Mapping[str, int], device: torch.device
    ) -> torch.optim.Optimizer:
        """Give the object stand-ins for its parameters, and return it; an instance stays the same object."""
        self._real = {name: parameters[name] for name in group_of}
        fill = torch.full((1,), float("nan"), device=device)
        for name, p in self._real.items():
            hollow = fill.expand(p.shape) if p.dim() else fill[0]
            made = nn.Parameter(hollow, p.requires_grad)
            vars(made).update({key: value for key, value in vars(p).items() if not key.startswith("_zerocli")})
            self._stand_ins[name] = made
        if self._source.instance is not None:
            self.object = self._source.instance
            substitute(self.object, {id(p): self._stand_ins[name] for name, p in self._real.items()})
        else:
            rows = [(group_of[name], None, p) for name, p in self._stand_ins.items()]
            self.object = self._source.make(rows)
            self._refuse_values()
        self._hollow = {name: p.data for name, p in self._stand_ins.items()}
        self._states = dict(self.object.state)
        self._names = {id(p): name for name, p in self._stand_ins.items()}
        self._beginning = self._pack(strict=False)
        self._show_real()
        return self.object

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

    def update(self, master, grad, scale, states, group, at):  # type: ignore[no-untyped-def]
        raise AssertionError("this rule needs whole parameters")

    def options_in(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {}  # the object reads its groups itself

    def update_whole(
        self,
        name: str,
        master: torch.Tensor,
        grad: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        group: Group,
        at: At,
    ) -> None:
        self._call([Row(name, master, grad, states)], self._step, only=name)

    def update_all(self, rows: Sequence[Row]) -> None:
        """Make one step of all parameters; the memory in `rows` is updated in place."""
        self._call(rows, self._step)

    def _step(self) -> None:
        type(self.object).step(self.object)  # the object's own name leads to the engine

    def _call(self, rows: Sequence[Row], action: Callable[[], Any], only: str | None = None) -> None:
        for row in rows:
            self._hand_in(row)
        try:
            with self._running(only):
                action()
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
        stand_in.data, stand_in.grad = self._hollow[row.name], None
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

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Return what the object keeps, as bytes, with the first parameter."""
        if name != next(iter(self._real)):
            return {}
        return {KEPT: torch.frombuffer(bytearray(self._pack(strict=True)), dtype=torch.uint8)}

    def _pack(self, strict: bool) -> bytes:
        """Return everything that the object keeps other than arrays of states; if not `strict`, what can be saved."""
        states: dict[str, Any] = {}
        for key, state in self._states.items():
            if id(key) in self._names:
                rows = state.items() if isinstance(state, dict) else ()
                there = [k for k, v in rows if v is ELSEWHERE]
                states[self._names[id(key)]] = (there, {k: v for k, v in rows if v is not ELSEWHERE})
            else:
                states[f"other {key}"] = ([], state)
        groups = [
            {k: v for k, v in g.items() if k not in ("params", "param_names")} for g in self.object.param_groups
        ]
        own = {key: value for key, value in vars(self.object).items() if key not in _SKIPPED and not callable(value)}
        parts = {"states": states, "groups": groups}
        for title, part in parts.items():
            if strict and not _loadable(part):
                raise ValueError(f"optimizer {self.name} keeps {title} that are no tensors or numbers: cannot be saved")
        changes = [key.removeprefix("self.") for key in self.verdict.changed]
        lost = [key for key, value in own.items() if not _loadable(value)]
        if strict and (bad := [key for key in lost if key in changes]):
            raise ValueError(f"optimizer {self.name} keeps self.{bad[0]}, which cannot be saved: use numbers and tensors")
        kept = {key: value for key, value in own.items() if key not in lost}
        return _bytes({**{k: v for k, v in parts.items() if strict or _loadable(v)}, "own": kept})

    def load(self, name, history, group, count, numbers, tensors):  # type: ignore[no-untyped-def]
        if KEPT in tensors:
            self._unpack(bytes(tensors[KEPT].cpu().tolist()))

    def _unpack(self, packed: bytes) -> None:
        found = torch.load(io.BytesIO(packed), weights_only=True, map_location=self._place)
        by_name = {name: p for name, p in self._stand_ins.items()}
        if "states" in found:
            self._states = {}
            for name, (there, rest) in found["states"].items():
                state = {**dict.fromkeys(there, ELSEWHERE), **rest}
                self._states[by_name.get(name, name.removeprefix("other "))] = state
        for own, values in zip(self.object.param_groups, found.get("groups", ()), strict=False):
            own.update(values)
        vars(self.object).update(found["own"])

    def _place(self, storage: Any, location: str) -> Any:
        device = next(iter(self._hollow.values())).device
        return storage.to(device=device) if location != "cpu" and device.type != "cpu" else storage

    def forget(self) -> None:
        self._states = {}
        self._unpack(self._beginning)


def _bytes(value: Any) -> bytes:
    target = io.BytesIO()
    torch.save(value, target)
    return target.getvalue()


def _loadable(value: Any) -> bool:
    """Whether a value can be saved and loaded again without running code."""
    try:
        torch.load(io.BytesIO(_bytes(value)), weights_only=True)
    except Exception:
        return False
    return True


