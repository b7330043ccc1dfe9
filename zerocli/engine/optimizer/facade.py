"""`engine.optimizer`: the engine's optimizer as a torch.optim.Optimizer, for learning-rate schedulers and user code."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerocli.engine.optimizer.copies import HOOKS, METHODS, SHARED_HOOKS
from zerocli.engine.optimizer.optim import Group
from zerocli.engine.optimizer.whole_rule import HeldStates, PersistentOptimizer
from zerocli.errors import Refused

if TYPE_CHECKING:
    from zerocli.engine.engine import Engine

_STATE_HOOKS = tuple(
    f"register_{which}_{when}_hook" for which in ("state_dict", "load_state_dict") for when in ("pre", "post")
)


class ShardedOptimizer(torch.optim.Optimizer):
    """Exposes the hyperparameters for reading and writing; `step` and `zero_grad` are the engine's.

    Changes to `param_groups` (lr, weight_decay, betas, ...), by hand or by a scheduler, take effect in the next step.
    `state_dict()` returns the engine's optimizer states, whole and by parameter name. If `optimizer` is an instance,
    its groups become these ones, and its methods those of this object.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._rule, arranged = engine, engine.rule, engine.arranged
        optimizer, lr = engine.settings.optimizer, engine.settings.lr
        parameters = dict(engine.model.named_parameters())
        self._schedule: Callable[[int], float] | None = lr if callable(lr) else None
        self._factors = arranged.factors
        self._instance: torch.optim.Optimizer | None = None
        members: list[list[nn.Parameter]] = [[] for _ in arranged.groups]
        for name, at in arranged.group_of.items():
            members[at].append(parameters[name])
        if isinstance(optimizer, torch.optim.Optimizer):
            # The user's own groups, so that schedulers made for the instance keep working.
            for group, params in zip(optimizer.param_groups, members, strict=True):
                group["params"] = params
            super().__init__([{"params": params} for params in members], optimizer.defaults)
            self.param_groups = optimizer.param_groups
            if any(vars(optimizer).get(name) for name in HOOKS[2:]):
                self._refuse_state_hook()
            self._replace_methods(optimizer)
            self._instance = optimizer
        else:
            groups = [{**group, "params": params} for group, params in zip(arranged.groups, members, strict=True)]
            defaults = {key: value for key, value in arranged.groups[0].items() if key != "name"}
            super().__init__(groups, defaults)
        self._shown: list[Any] = [group.get("lr") for group in self.param_groups]
        self._members = [id(p) for group in self.param_groups for p in group["params"]]
        self.state = HeldStates(dict)
        if isinstance(self._rule, PersistentOptimizer):
            made = self._rule.adopt(parameters, arranged.group_of, engine.device)
            for own, group in zip(made.param_groups, self.param_groups, strict=True):
                for key, value in group.items():
                    if key != "params":
                        own.setdefault(key, value)
            self.param_groups = made.param_groups  # of the object that makes the steps: changes to them reach it
        elif self._instance is not None:
            self._instance.state = HeldStates(dict)
        self._rule.look(self.param_groups)

    def _replace_methods(self, instance: torch.optim.Optimizer) -> None:
        """Forward the methods of the user's instance to this one: its parameters no longer hold gradients."""
        for name in (*METHODS, *_STATE_HOOKS):
            target = getattr(self, name)

            def forward(_: Any, *args: Any, _target: Callable[..., Any] = target, **kwargs: Any) -> Any:
                return _target(*args, **kwargs)

            if hasattr(getattr(instance, name), "_wrapped_by_lr_sched"):
                forward._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
            setattr(instance, name, types.MethodType(forward, instance))

    def run_hooks(self, when: str) -> None:
        """Run the step hooks of torch, of the user's instance and of this object, each once; `when` is pre or post."""
        first: torch.optim.Optimizer = self if self._instance is None else self._instance
        rows = [(first, hook) for hook in SHARED_HOOKS[when].values()]
        for owner in (self._instance, self):
            if owner is not None:
                rows += [(owner, hook) for hook in getattr(owner, f"_optimizer_step_{when}_hooks").values()]
        for owner, hook in rows:
            if hook(owner, (owner,), {}) is not None and when == "pre":
                raise Refused("a step hook returned other arguments for step(), which takes none: return None")

    def _refuse_changed_groups(self) -> None:
        """Raise Refused if parameters were added to or taken from the groups since the model was sharded."""
        moved = self._instance is not None and self._instance.param_groups is not self.param_groups
        if moved or [id(p) for group in self.param_groups for p in group["params"]] != self._members:
            raise Refused(
                "the optimizer's groups have other parameters than when the model was sharded, which would not be "
                "trained so: give shard the optimizer with all groups; freeze parameters with requires_grad_(False)"
            )

    def hyperparameters(self, step: int) -> tuple[Group, ...]:
        """Return each group's hyperparameters for a step; if lr is a function, update `param_groups` to its value."""
        self._refuse_changed_groups()
        self._rule.look(self.param_groups)
        if self._schedule is not None:
            if [group["lr"] for group in self.param_groups] != self._shown:
                raise Refused(
                    "the learning rate is a function of the step, lr=..., and something else has set it as well: "
                    "give shard a number as lr to use a scheduler"
                )
            self.show(step)
        now = tuple(
            Group(self._number(group, "lr"), self._number(group, "weight_decay"), self._rule.options_in(group), at)
            for at, group in enumerate(self.param_groups)
        )
        for group in now:
            self._rule.check(group)
        return now

    def _number(self, group: Mapping[str, Any], name: str) -> float:
        """Return a hyperparameter; an object that reads its groups itself may have any, or none."""
        value = group.get(name, 0.0)
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            if isinstance(self._rule, PersistentOptimizer):
                return 0.0
            raise Refused(f"the optimizer's {name} is {value!r}, and must be one number for each group") from None

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
        return (
            self._shown[0] / (self._factors[0] or 1.0) if self._schedule else self._number(self.param_groups[0], "lr")
        )

    # -- torch's interface -----------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None:
            raise ValueError("step() takes no closure: call engine.backward(loss) before it")
        return self._engine.step()

    step.hooked = True  # type: ignore[attr-defined]  # torch would wrap it, and run hooks that the engine runs itself

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._engine.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "_shown" in vars(self):
            raise Refused("parameters are in groups from the start: give shard groups=[zerocli.ParamGroup(...)]")
        # Unwrapped: torch's wrapper loads the compiler, which takes a second per rank.
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return `engine.optimizer_state_dict()`. Collective."""
        return self._engine.optimizer_state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._engine.load_optimizer_state_dict(state_dict)

    def _refuse_state_hook(self, *args: Any, **kwargs: Any) -> Any:
        raise Refused(
            "hooks on an optimizer's state_dict or load_state_dict are not run: states are by name here, and the same "
            "on every rank. Change the result of engine.optimizer_state_dict(), or what load_optimizer_state_dict is "
            "given"
        )

    register_state_dict_pre_hook = register_state_dict_post_hook = _refuse_state_hook
    register_load_state_dict_pre_hook = register_load_state_dict_post_hook = _refuse_state_hook

    # -- saving hyperparameters ------------------------------------------------------------------------------------

    def saved_groups(self) -> list[dict[str, Any]]:
        """Return the groups' plain hyperparameters, without parameters."""
        return [
            {key: plain for key, value in group.items() if _is_plain(plain := _plain(value))}
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
