"""`engine.optimizer`: the engine's optimizer as a torch.optim.Optimizer, for learning-rate schedulers and user code."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from zerocli.engine.groups import Arranged
from zerocli.engine.optim import FlatOptimizer, Group


class Steps(Protocol):
    """The engine's methods behind those of its optimizer."""

    def step(self) -> Any: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...
    def optimizer_state_dict(self) -> dict[str, Any]: ...
    def load_optimizer_state_dict(self, saved: Mapping[str, Any]) -> None: ...


class ShardedOptimizer(torch.optim.Optimizer):
    """Exposes the hyperparameters for reading and writing; `step` and `zero_grad` are the engine's.

    Changes to `param_groups` (lr, weight_decay, betas, ...), by hand or by a scheduler, take effect in the next step.
    `state_dict()` returns the engine's optimizer states, whole and by parameter name. If `optimizer` is an instance,
    its groups become these ones, and its methods those of this object.
    """

    def __init__(
        self,
        engine: Steps,
        rule: FlatOptimizer,
        optimizer: Any,
        lr: float | Callable[[int], float] | None,
        arranged: Arranged,
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        self._engine, self._rule = engine, rule
        self._schedule: Callable[[int], float] | None = lr if callable(lr) else None
        self._factors = arranged.factors
        self._last: tuple[Group, ...] = ()
        members: list[list[nn.Parameter]] = [[] for _ in arranged.groups]
        for name, at in arranged.group_of.items():
            members[at].append(parameters[name])
        if isinstance(optimizer, torch.optim.Optimizer):
            # The user's own groups, so that schedulers made for the instance keep working.
            for group, params in zip(optimizer.param_groups, members, strict=True):
                group["params"] = params
            super().__init__([{"params": params} for params in members], optimizer.defaults)
            self.param_groups = optimizer.param_groups
            self._replace_methods(optimizer)
        else:
            groups = [{**group, "params": params} for group, params in zip(arranged.groups, members, strict=True)]
            defaults = {key: value for key, value in arranged.groups[0].items() if key != "name"}
            super().__init__(groups, defaults)
        self._shown = [group["lr"] for group in self.param_groups]

    def _replace_methods(self, instance: torch.optim.Optimizer) -> None:
        """Forward the methods of the user's instance to this one: its parameters no longer hold gradients."""
        for name in ("step", "zero_grad", "state_dict", "load_state_dict"):
            target = getattr(self, name)

            def forward(_: Any, *args: Any, _target: Callable[..., Any] = target, **kwargs: Any) -> Any:
                return _target(*args, **kwargs)

            if hasattr(getattr(instance, name), "_wrapped_by_lr_sched"):
                forward._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
            setattr(instance, name, types.MethodType(forward, instance))

    def hyperparameters(self, step: int) -> tuple[Group, ...]:
        """Return each group's hyperparameters for a step; if lr is a function, update `param_groups` to its value."""
        if self._schedule is not None:
            if [group["lr"] for group in self.param_groups] != self._shown:
                raise RuntimeError(
                    "the learning rate is a function of the step, lr=..., and something else has set it as well: "
                    "give shard a number as lr to use a scheduler"
                )
            self.show(step)
        now = tuple(
            Group(float(group["lr"]), float(group.get("weight_decay", 0.0)), self._rule.options_in(group), at)
            for at, group in enumerate(self.param_groups)
        )
        if now != self._last:
            for group in now:
                self._rule.check(group)
            self._last = now
        return self._last

    def show(self, step: int) -> None:
        """Set the groups' lr to its value at `step`, if lr is a function."""
        if self._schedule is not None:
            base = self._schedule(max(1, step))
            for group, factor in zip(self.param_groups, self._factors, strict=True):
                group["lr"] = base * factor
            self._shown = [group["lr"] for group in self.param_groups]

    @property
    def base_lr(self) -> float:
        """The learning rate to report: without group factors if lr is a function, else the first group's."""
        return self._shown[0] / (self._factors[0] or 1.0) if self._schedule else float(self.param_groups[0]["lr"])

    # -- torch's interface -----------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do `engine.step()`."""
        if closure is not None:
            raise ValueError("step() takes no closure: call engine.backward(loss) before it")
        return self._engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do `engine.zero_grad(set_to_none)`."""
        self._engine.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "_shown" in vars(self):
            raise RuntimeError("parameters are in groups from the start: give shard groups=[zerocli.ParamGroup(...)]")
        # Unwrapped: torch's wrapper loads the compiler, which takes a second per rank.
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return `engine.optimizer_state_dict()`. Collective."""
        return self._engine.optimizer_state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do `engine.load_optimizer_state_dict(state_dict)`."""
        self._engine.load_optimizer_state_dict(state_dict)

    # -- saving hyperparameters ------------------------------------------------------------------------------------

    def saved_groups(self) -> list[dict[str, Any]]:
        """Return the groups' plain hyperparameters, without parameters."""
        return [
            {key: value for key, value in ((key, _plain(value)) for key, value in group.items()) if _is_plain(value)}
            for group in self.param_groups
        ]

    def load_groups(self, saved: list[dict[str, Any]] | None, steps: int) -> None:
        """Load saved hyperparameters, as torch does, if the groups are the same; an lr function takes precedence."""
        if saved is not None and self._schedule is None and len(saved) == len(self.param_groups):
            names = [group.get("name") for group in self.param_groups]
            if [group.get("name") for group in saved] == names:
                for group, values in zip(self.param_groups, saved, strict=True):
                    group.update({k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
        self.show(steps)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, int | float | None) for item in value)
    return isinstance(value, int | float | str | None)
