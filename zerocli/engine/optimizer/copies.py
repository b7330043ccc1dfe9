"""Optimizers over other parameters: a user's instance with each parameter replaced, or a new object of a class."""

from __future__ import annotations

import inspect
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from zerocli.errors import Refused

SHARED_HOOKS: dict[str, dict[int, Any]] = {"pre": _global_optimizer_pre_hooks, "post": _global_optimizer_post_hooks}
"""torch's step hooks of all optimizers."""
HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
METHODS = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")
"""Methods that the engine replaces on a user's instance, or that a scheduler wraps."""
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)

Swaps = Mapping[int, nn.Parameter | None]
"""Other parameters by the ids of the user's own; None: the parameter has no counterpart, and is left out."""


def is_torchs(kind: Any) -> bool:
    """Whether a class is one of torch.optim with the step that torch gave it."""
    if not isinstance(kind, type) or getattr(torch.optim, kind.__name__, None) is not kind:
        return False
    step: Any = getattr(kind, "step")  # noqa: B009 (mypy takes `kind` for None here)
    return str(inspect.unwrap(step).__module__).startswith("torch.")


def holds_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer keeps tensors, or another optimizer, outside of its own states and groups."""

    def holds(value: Any, depth: int) -> bool:
        if isinstance(value, torch.Tensor):
            return value.dim() > 0
        if depth and isinstance(value, _CONTAINERS):
            return any(holds(each, depth - 1) for each in (value.values() if isinstance(value, dict) else value))
        return isinstance(value, torch.optim.Optimizer)

    own = {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups", *HOOKS)}
    return any(holds(value, 4) for value in own.values())


def replaced(value: Any, swaps: Swaps, seen: dict[int, Any], where: str, fresh: bool) -> Any:
    """Return `value` with the user's parameters, and their ids, replaced; other objects are shared.

    With `fresh`, containers, tensors and inner optimizers are copied; otherwise they are changed where they are.
    Raises Refused if an object that cannot be copied holds a parameter.
    """
    if isinstance(value, nn.Parameter) and id(value) in swaps:
        return swaps[id(value)]
    if type(value) is int:
        other = swaps.get(value)
        return value if other is None else id(other)
    if isinstance(value, str | bytes | int | float | complex | None):
        return value
    if id(value) in seen:
        return seen[id(value)][0]
    if isinstance(value, torch.Tensor):
        copy = value.detach().to("cpu", copy=True).requires_grad_(value.requires_grad) if fresh else value
        seen[id(value)] = (copy, value)
        return copy
    if isinstance(value, torch.optim.Optimizer):
        return clone(value, swaps, seen, where) if fresh else _change(value, swaps, seen, where)
    if isinstance(value, _CONTAINERS):
        return _container(value, swaps, seen, where, fresh)
    _refuse_holder(value, swaps, where)
    return value


def _container(value: Any, swaps: Swaps, seen: dict[int, Any], where: str, fresh: bool) -> Any:
    if isinstance(value, dict):
        target: Any = value
        if fresh:
            target = defaultdict(value.default_factory) if isinstance(value, defaultdict) else type(value)()
        seen[id(value)] = (target, value)
        rows = [(replaced(k, swaps, seen, where, fresh), k, v) for k, v in value.items()]
        items = {k: replaced(v, swaps, seen, f"{where}[{old!r}]" if isinstance(old, str) else where, fresh)
                 for k, old, v in rows if not _left_out(old, swaps)}  # fmt: skip
        target.clear()
        target.update(items)
        return target
    members = [replaced(each, swaps, seen, where, fresh) for each in value if not _left_out(each, swaps)]
    if isinstance(value, list) and not fresh:
        value[:] = members
        return value
    if isinstance(value, tuple) and type(value) is not tuple:  # a named one
        return type(value)(*members)
    made = deque(members, value.maxlen) if isinstance(value, deque) else type(value)(members)
    seen[id(value)] = (made, value)
    return made


def _left_out(value: Any, swaps: Swaps) -> bool:
    if isinstance(value, nn.Parameter):
        return swaps.get(id(value), value) is None
    return type(value) is int and value in swaps and swaps[value] is None


def _refuse_holder(value: Any, swaps: Swaps, where: str) -> None:
    """Raise Refused if a function or another object refers to a parameter, a module or an optimizer."""
    inner: list[Any] = []
    if isinstance(value, types.FunctionType):
        inner = [content(cell) for cell in value.__closure__ or ()]
    elif isinstance(value, types.MethodType):
        inner = [value.__self__]
    elif isinstance(value, nn.Module):
        inner = [value]
    elif hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType):
        inner = list(vars(value).values())
    for each in inner:
        rows = each if isinstance(each, list | tuple) else each.values() if isinstance(each, dict) else [each]
        for one in rows:
            if isinstance(one, nn.Module | torch.optim.Optimizer) or (
                isinstance(one, nn.Parameter) and id(one) in swaps
            ):
                raise Refused(
                    f"the optimizer's {where} refers to the model's parameters through a {type(value).__name__}, which "
                    "would read values that the engine keeps elsewhere: give the optimizer lists or dicts of parameters"
                )


def content(cell: types.CellType) -> Any:
    """Return what a closure's cell holds; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def clone(optimizer: torch.optim.Optimizer, swaps: Swaps, seen: dict[int, Any], where: str = "") -> Any:
    """Return an independent copy of an optimizer over other parameters, without its hooks."""
    copy = object.__new__(type(optimizer))
    seen[id(optimizer)] = (copy, optimizer)
    for name, value in vars(optimizer).items():
        if name in HOOKS:
            vars(copy)[name] = OrderedDict()
        elif name in METHODS:
            continue
        elif isinstance(value, types.MethodType) and value.__self__ is optimizer:
            vars(copy)[name] = types.MethodType(value.__func__, copy)
        else:
            vars(copy)[name] = replaced(value, swaps, seen, f"{where or type(optimizer).__name__}.{name}", fresh=True)
    return copy


def _change(optimizer: Any, swaps: Swaps, seen: dict[int, Any], where: str) -> Any:
    seen[id(optimizer)] = (optimizer, optimizer)
    for name, value in list(vars(optimizer).items()):
        if name in HOOKS or name in METHODS or isinstance(value, types.MethodType):
            continue
        changed = replaced(value, swaps, seen, f"{where or type(optimizer).__name__}.{name}", fresh=False)
        if changed is not value:
            vars(optimizer)[name] = changed
    return optimizer


def substitute(optimizer: torch.optim.Optimizer, swaps: Swaps) -> None:
    """Replace the parameters within a user's own object; inner optimizers too."""
    _change(optimizer, swaps, {}, "")


class Source:
    """Makes optimizers like the one that a user asked for, over other parameters."""

    def __init__(
        self,
        choice: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer],
        options: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]] = ({},),
        kind: type | None = None,
    ) -> None:
        self.instance = choice if isinstance(choice, torch.optim.Optimizer) else None
        self._choice, self._options = choice, dict(options)
        self.kind = kind or (type(choice) if self.instance is not None else choice)
        """Its class; `choice` may be a function that makes one."""
        self.name = getattr(self.kind, "__name__", str(choice))
        self.groups = self.instance.param_groups if self.instance is not None else groups
        """As `param_groups`; those of a class have lr and weight_decay only."""

    def make(self, chosen: Sequence[tuple[int, nn.Parameter | None, nn.Parameter]]) -> torch.optim.Optimizer:
        """Return an optimizer over new parameters: (group, the user's parameter or None, the new one) of each."""
        if self.instance is not None:
            swaps: dict[int, nn.Parameter | None] = {id(p): None for group in self.groups for p in group["params"]}
            swaps.update({id(old): new for _, old, new in chosen if old is not None})
            made: torch.optim.Optimizer = clone(self.instance, swaps, {})
            for at, group in enumerate(made.param_groups):
                group["params"] = [new for index, _, new in chosen if index == at]
            return made
        by_group: list[dict[str, Any]] = []
        for at, own in enumerate(self.groups):
            kept = {key: value for key, value in own.items() if key in ("lr", "weight_decay")}
            members = [new for index, _, new in chosen if index == at]
            if members:
                by_group.append({**kept, "params": members})
        assert callable(self._choice)
        return construct(self._choice, by_group, by_group[0].get("lr", 0.1), self._options)


def construct(choice: Any, params: Any, lr: float, options: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return an optimizer of a class, or of a function that makes one; some take no learning rate."""
    accepted = inspect.signature(choice).parameters
    takes = "lr" in accepted or any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepted.values())
    made: torch.optim.Optimizer = choice(params, **({"lr": lr} if takes else {}), **options)
    return made
