"""Choice of the update rule: by name, class, instance, or a user's own rule."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerocli.engine.optimizer.copies import HOOKS, Source, holds_tensors, is_torchs
from zerocli.engine.optimizer.optim import Arrays, At, FlatOptimizer, FusedAdam, FusedSGD, Group, Row, WholeRule
from zerocli.engine.optimizer.proof import SYNTHETIC, TOGETHER, Specimen, Verdict, specimens
from zerocli.engine.optimizer.torchrule import Template, WholeOptimizer, make_torch_rule
from zerocli.engine.optimizer.verdict import check_flat_rule, decide, refuse_replaced_step
from zerocli.engine.optimizer.whole_rule import PersistentOptimizer
from zerocli.errors import Refused, RefusedValue, WrongValue, closest

OptimizerChoice = str | type[torch.optim.Optimizer] | torch.optim.Optimizer | FlatOptimizer
"""Accepted values of `optimizer`."""

_IGNORED = {"foreach", "fused"}
"""Options of torch's classes that only select a kernel and do not change results."""
_TAKEN = {
    "adamw": ("betas", "eps", "amsgrad", "maximize"),
    "adam": ("betas", "eps", "amsgrad", "maximize", "decoupled_weight_decay"),
    "sgd": ("momentum", "nesterov", "dampening", "maximize"),
}
_AFFORDABLE = 1 << 21
"""Elements of all parameters together that a trial may have."""
_FUSED = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adam", torch.optim.SGD: "sgd"}
_MUON = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn", "eps")


class MuonWithAdamW(WholeRule):
    """Muon for matrices, AdamW for all other parameters, as one rule.

    Matrices are the 2-D parameters outside nn.Embedding, or the 2-D ones that `matrices`, a function of name and
    parameter, selects. Both share the learning rate, so Muon's is adjusted to match AdamW's (`adjust_lr_fn`).
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        options = dict(options)
        self._chooses: Callable[[str, nn.Parameter], bool] | None = options.pop("matrices", None)
        adam = dict(options.pop("adamw", {}))
        unknown = sorted(set(options) - set(_MUON))
        if unknown:
            raise _not_taken("muon", unknown[0], (*_MUON, "matrices, adamw"))
        template = Template.of(torch.optim.Muon, {"adjust_lr_fn": "match_rms_adamw", **options})
        muon = make_torch_rule(template)
        assert isinstance(muon, WholeOptimizer)
        self._muon, self._adam = muon, FusedAdam(True, **adam)
        self.state_names = (*self._muon.state_names, *self._adam.state_names)
        self.defaults = {"rule": "adamw"}

    def options_of(self, kind: str) -> Mapping[str, Any]:
        """Return the hyperparameters of the groups of one kind: muon or adamw."""
        return {"rule": kind, **(self._muon if kind == "muon" else self._adam).defaults}

    def options_in(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {name: group[name] for name in self.options_of(group["rule"])}

    def kinds(self, model: nn.Module) -> Callable[[str, nn.Parameter], str]:
        """Return a function that maps a parameter to its rule: muon or adamw."""
        tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
        chooses = self._chooses or (lambda name, parameter: id(parameter) not in tables)
        return lambda name, parameter: "muon" if parameter.dim() == 2 and chooses(name, parameter) else "adamw"

    def is_whole(self, group: Group) -> bool:
        return bool(group.options["rule"] == "muon")

    def operations(self, shape: Sequence[int]) -> float:
        short, long = sorted(shape)  # each Newton-Schulz step has three products
        return float(self._muon.defaults["ns_steps"] * (4 * short * short * long + 2 * short**3))

    def update(self, master: Tensor, grad: Tensor, scale: Tensor | None, states: Arrays, group: Group, at: At) -> None:
        self._adam.update(master, grad, scale, states, group, at)

    def update_whole(self, row: Row) -> None:
        group = row.group
        if self.is_whole(group):
            own = {key: row.states[key] for key in self._muon.state_names}
            options = {key: value for key, value in group.options.items() if key != "rule"}
            group = Group(group.lr, group.weight_decay, options)
            self._muon.update_whole(Row(row.name, row.master, row.grad, own, group, row.at))
            return
        assert row.grad is not None
        flat = {key: row.states[key].view(-1) for key in self._adam.state_names}
        self._adam.update(row.master.view(-1), row.grad.view(-1), None, flat, group, row.at)


def _not_taken(name: str, option: str, taken: Sequence[str]) -> WrongValue:
    fact = f"optimizer {name} takes no {option!r}; it takes {', '.join(taken)}"
    return WrongValue(fact, hint=f"the same without optimizer.options.{option}")


def make_optimizer(choice: OptimizerChoice, options: Mapping[str, Any]) -> FlatOptimizer:
    """Return the update rule for a name, a class or an instance, or raise ValueError."""
    options = {key: value for key, value in options.items() if key not in _IGNORED}
    if isinstance(choice, FlatOptimizer | torch.optim.Optimizer) and options:
        raise ValueError(f"the optimizer is made already: give {', '.join(options)} to {type(choice).__name__} itself")
    if isinstance(choice, FlatOptimizer):
        return choice
    if isinstance(choice, torch.optim.Optimizer):
        return _of_instance(choice)
    if isinstance(choice, str):
        if choice.lower() == "muon":
            return MuonWithAdamW(options)
        return _of_class(_named(choice), choice, options)
    if isinstance(choice, type) and issubclass(choice, FlatOptimizer):
        return choice(**options)
    if not callable(choice):
        raise RefusedValue(
            f"optimizer {choice!r} is no name, class or instance of an optimizer: make its class a subclass of "
            "torch.optim.Optimizer"
        )
    return _of_class(choice, getattr(choice, "__name__", str(choice)), options)


def keywords_of(choice: OptimizerChoice) -> frozenset[str]:
    """Return the arguments that an optimizer takes; empty if that is not known, or it is made already."""
    if isinstance(choice, str) and choice.lower() == "muon":
        return frozenset((*_MUON, "matrices", "adamw"))
    kind = _named(choice) if isinstance(choice, str) else choice
    if not callable(kind) or isinstance(kind, FlatOptimizer | torch.optim.Optimizer):
        return frozenset()
    try:
        taken = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    return frozenset() if any(each.kind is each.VAR_KEYWORD for each in taken) else frozenset(e.name for e in taken)


def _named(name: str) -> type[torch.optim.Optimizer]:
    kinds = {
        kind.lower(): value
        for kind, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    if name.lower() not in kinds:
        meant = closest(str(name), kinds)
        question = f"; did you mean {meant}?" if meant else ""
        inside = [kind for kind in kinds if kind in name.lower()]
        hint = f"--set optimizer.name={max(inside, key=len, default='adamw')}"
        raise WrongValue(f"optimizer {name!r} is not one of {', '.join(sorted(kinds))}{question}", hint)
    return kinds[name.lower()]


def _of_class(kind: Callable[..., torch.optim.Optimizer], name: str, options: Mapping[str, Any]) -> FlatOptimizer:
    fused = _FUSED.get(kind) if is_torchs(kind) else None  # type: ignore[call-overload]
    for option in options:
        if fused is not None and option not in _TAKEN[fused] and option not in ("capturable", "differentiable"):
            raise _not_taken(name, option, _TAKEN[fused])
    given = {key: value for key, value in options.items() if key not in ("capturable", "differentiable")}
    if fused == "sgd" and not given.get("dampening"):
        return FusedSGD(**{key: value for key, value in given.items() if key != "dampening"})
    if fused in ("adamw", "adam"):
        decoupled = given.pop("decoupled_weight_decay", fused == "adamw")
        return FusedAdam(decoupled, **given)
    template = Template.of(kind, given)
    if is_torchs(template.kind):
        return make_torch_rule(template)
    source = Source(kind, given, kind=template.kind)
    try:
        return _proved(source, SYNTHETIC, template)
    except Refused as error:  # it may accept the model's parameters yet: see `prove`
        return PersistentOptimizer(source, Verdict(TOGETHER, str(error)), template)


def _proved(source: Source, members: Sequence[Specimen], template: Template) -> FlatOptimizer:
    """Return the rule of a user's optimizer, in a way that a trial has proved to be exact, or raise Refused."""
    verdict, rule = decide(source, members)
    if rule is None:
        return PersistentOptimizer(source, verdict, template)
    rule.proved(verdict, source, ((m.group, m.small) for m in members))
    return rule


def prove(
    rule: FlatOptimizer,
    choice: OptimizerChoice,
    options: Mapping[str, Any],
    named: Sequence[tuple[str, nn.Parameter]],
    groups: Sequence[Mapping[str, Any]],
    group_of: Mapping[str, int],
) -> tuple[FlatOptimizer, str]:
    """Return the rule that is exact for these parameters, and what to print of it; raise Refused if none is.

    zerocli's own rules and those of torch.optim need no proof.
    """
    if isinstance(choice, FlatOptimizer) or (isinstance(choice, type) and issubclass(choice, FlatOptimizer)):
        if not type(rule).__module__.startswith("zerocli."):
            check_flat_rule(rule)
        return rule, ""
    verdict: Verdict | None = getattr(rule, "verdict", None)
    if verdict is None:
        return rule, ""
    if not isinstance(choice, torch.optim.Optimizer):
        assert callable(choice)
        options = {key: value for key, value in options.items() if key not in _IGNORED}
        members = specimens(named, group_of)
        if members:
            template: Template = rule.template  # type: ignore[attr-defined]
            rule = _proved(Source(choice, options, groups, template.kind), members, template)
    return rule, f"optimizer {rule.template.name} {rule.verdict}"  # type: ignore[attr-defined]


def _of_instance(instance: torch.optim.Optimizer) -> FlatOptimizer:
    """Return the rule of an optimizer that was made for the model's parameters and has not stepped yet."""
    refuse_replaced_step(instance)
    _complete(instance)
    known = is_torchs(type(instance))
    for state in instance.state.values():
        if ("step" not in state and known) or float(state.get("step", 0)):
            raise RefusedValue(
                f"this {type(instance).__name__} has made steps already: shard the model first, then load its states "
                "with engine.load_optimizer_state_dict"
            )
    groups, kind = instance.param_groups, type(instance)
    if not known:
        every = [(at, p) for at, group in enumerate(groups) for p in group["params"]]
        names = {id(p): str(number) for number, (_, p) in enumerate(every)}
        members = specimens([(names[id(p)], p) for _, p in every], {names[id(p)]: at for at, p in every})
        source, template = Source(instance, {}), Template(instance)
        if holds_tensors(instance):  # which may belong to parameters by their places in a list: none is left out
            if sum(p.numel() for _, p in every) > _AFFORDABLE:
                return PersistentOptimizer(source, Verdict(TOGETHER, "it keeps tensors on itself"), template)
            members = [Specimen(tuple(p.shape), at, p, p.requires_grad, whole=True) for at, p in every]
        return _proved(source, members, template)
    if kind in (torch.optim.AdamW, torch.optim.Adam):
        decoupled = {bool(group.get("decoupled_weight_decay", kind is torch.optim.AdamW)) for group in groups}
        if len(decoupled) == 1:
            one = groups[0]
            amsgrad = any(group["amsgrad"] for group in groups)
            return FusedAdam(decoupled.pop(), one["betas"], one["eps"], amsgrad, one["maximize"])
    if kind is torch.optim.SGD and not any(group["dampening"] for group in groups):
        momentum = max(group["momentum"] for group in groups)
        return FusedSGD(momentum, any(g["nesterov"] for g in groups), groups[0]["maximize"])
    return make_torch_rule(Template(instance))


def _complete(instance: torch.optim.Optimizer) -> None:
    """Give an instance whose __init__ did not call torch's, as wrappers of another optimizer do, what torch's sets."""
    if missing := [name for name in ("param_groups", "state") if name not in vars(instance)]:
        raise RefusedValue(
            f"the optimizer {type(instance).__name__} has no attribute {missing[0]} of its own, where the engine must "
            "put its parameters and states: call super().__init__(params, defaults) in its __init__"
        )
    for name in HOOKS:
        vars(instance).setdefault(name, OrderedDict())
    vars(instance).setdefault("defaults", {})


def unsuitable(rule: FlatOptimizer, named: Sequence[tuple[str, nn.Parameter]]) -> str:
    """Return why a rule cannot update some of these parameters; empty if it can."""
    if not isinstance(rule, WholeOptimizer) or rule.template.kind is not torch.optim.Muon:
        return ""
    odd = [name for name, parameter in named if parameter.requires_grad and parameter.dim() != 2]
    if not odd:
        return ""
    return (
        f"{rule.template.name} takes 2-D parameters only, and {odd[0]} is none ({len(odd)} such parameters); "
        'optimizer="muon" combines it with AdamW for those'
    )
