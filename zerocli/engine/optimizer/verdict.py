"""The choice of how a user's optimizer is run, by proof: see proof.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerocli.engine.optimizer.copies import Source
from zerocli.engine.optimizer.dataflow import Dataflow, TracedCount
from zerocli.engine.optimizer.optim import At, FlatOptimizer, Group
from zerocli.engine.optimizer.outside import class_restored, random_restored
from zerocli.engine.optimizer.proof import (
    ELEMENTWISE,
    ONE_BY_ONE,
    TOGETHER,
    Reference,
    Specimen,
    Trial,
    Verdict,
    arrays_of,
    is_number,
    observe,
    one_by_one,
    same_bits,
)
from zerocli.engine.optimizer.torchrule import Template, TorchOptimizer
from zerocli.errors import Refused


def decide(source: Source, members: Sequence[Specimen]) -> tuple[Verdict, TorchOptimizer | None]:
    """Return how an optimizer may be run on parameters like these, and its rule if that is on slices.

    Raises Refused if no way is exact.
    """
    with class_restored(source.kind), random_restored() as drawn:
        reference = observe(source, members)
    flow = reference.flow
    flow.draws = flow.draws or "".join(drawn)
    with class_restored(source.kind):
        if flow.draws:
            raise Refused(
                f"the optimizer {source.name} draws random numbers ({flow.draws}): they differ between ranks, so that "
                "no way of running it gives the numbers of one process; draw them in the loss or leave them out"
            )
        frozen = any(not member.trains for member in members)
        if reference.touches_all and frozen:
            raise Refused(
                f"the optimizer {source.name} reads or changes parameters that have no gradient, and some of its "
                "parameters are frozen, which the engine does not give it: leave the frozen ones out of the optimizer"
            )
        arrays = arrays_of(reference)
        scalars = {name: _plain(v) for state in reference.states for name, v in state.items() if name not in arrays}
        common = _for_all(reference)
        single = common or (f"a parameter's update depends on others ({flow.joins})" if flow.joins else "")
        rule, why = None, single or _not_elementwise(reference, scalars)
        if not why:
            rule, why = _on_slices(reference, arrays, scalars)
        if rule is not None:
            return Verdict(ELEMENTWISE, "every operation of its step is elementwise", arrays), rule
        alone = single or one_by_one(reference)
        if alone:
            return Verdict(TOGETHER, alone, arrays, tuple(reference.changed)), None
        return Verdict(ONE_BY_ONE, why, arrays), None


def _for_all(reference: Reference) -> str:
    """Return why all parameters have to be given to the optimizer at once; empty if nothing observed says so."""
    if reference.needs_all:
        return "it fails if a parameter has no gradient"
    if reference.changed:
        return f"it changes {reference.changed[0]}, once per step for all parameters"
    if reference.touches_all:
        return "it reads or changes parameters that have no gradient"
    return ""


def _not_elementwise(reference: Reference, scalars: Mapping[str, Any]) -> str:
    flow = reference.flow
    if flow.mixes:
        return f"it calls {flow.mixes}, which is not elementwise"
    if flow.decides:
        return "it reads values of tensors into Python, which may decide what it does"
    if reference.asked:
        return f"it reads the parameters' own attribute {reference.asked[0]!r}"
    odd = [name for name, value in scalars.items() if value is not None and not is_number(value)]
    return f"its state {odd[0]!r} is neither a number nor in the shape of its parameter" if odd else ""


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, TracedCount) else value


def _on_slices(
    reference: Reference, arrays: tuple[str, ...], scalars: Mapping[str, Any]
) -> tuple[TorchOptimizer | None, str]:
    """Run the specimens as the engine would: flat, cut at odd places, a new object for each piece."""
    try:
        trial = Trial(reference.source, reference.members, reference.starts)
        template = Template(trial.optimizer)
        rule = TorchOptimizer(template, arrays, {k: v for k, v in scalars.items() if v is not None})
        masters, states = _run_slices(rule, trial.optimizer.param_groups, reference)
    except Exception as error:
        return None, f"it fails on a slice of a parameter ({type(error).__name__}: {error})"
    for master, own, value, wanted in zip(masters, states, reference.values, reference.states, strict=True):
        same = same_bits(master, value.flatten())
        kept = [n for n in arrays if wanted.get(n) is not None and not same_bits(own[n], wanted[n].flatten())]
        if not same or kept:
            return None, "slices of a parameter end in other values than the whole"
    rule.forget()
    return rule, ""


def _run_slices(
    rule: TorchOptimizer, param_groups: Sequence[Mapping[str, Any]], reference: Reference
) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    masters = [start.flatten().clone() for start in reference.starts]
    states = [{name: torch.zeros_like(master) for name in rule.state_names} for master in masters]
    groups = [
        Group(float(g["lr"]), float(g.get("weight_decay", 0.0)), rule.options_in(g), at)
        for at, g in enumerate(param_groups)
    ]
    counts = [0, 0]
    """Updates of the parameters that always have a gradient, and of those that miss one."""
    for grads in reference.grads():
        for history in (0, 1):
            counts[history] += any(grad is not None for grad in grads[history::2])
        for at, grad in enumerate(grads):
            if grad is not None:
                now = At(torch.tensor(float(counts[at % 2])), torch.zeros(()), at % 2)
                numel = grad.numel()
                cuts = sorted({0, 1, min(numel, numel // 3 + 1), numel})
                for start, stop in zip(cuts, cuts[1:], strict=False):
                    own = {name: array[start:stop] for name, array in states[at].items()}
                    piece = grad.flatten()[start:stop].clone()
                    rule.update(masters[at][start:stop], piece, None, own, groups[reference.members[at].group], now)
    return masters, states


def check_flat_rule(rule: FlatOptimizer) -> None:
    """Raise Refused unless a user's rule on flat memory gives the same bits however its memory is cut."""
    name = type(rule).__name__
    generator = torch.Generator().manual_seed(0)
    start, grads = torch.randn(41, generator=generator), torch.randn(4, 41, generator=generator)
    flow, results = Dataflow(), []
    before = {key: value for key, value in vars(rule).items() if isinstance(value, int | float)}
    for cuts in ([0, 41], [0, 1, 14, 40, 41]):
        master, states = start.clone(), {key: torch.zeros(41) for key in rule.state_names}
        for step, row in enumerate(grads):
            grad = row.clone()
            for low, high in zip(cuts, cuts[1:], strict=False):
                own = {key: array[low:high] for key, array in states.items()}
                at = At(torch.tensor(step + 1.0), torch.zeros(()))
                given = (master[low:high], grad[low:high], None, own, Group(0.1, 0.1, rule.defaults), at)
                with flow:
                    rule.update(*given)
        results.append(torch.cat([master, *states.values()]))
        rule.forget()
    changed = [key for key, value in before.items() if vars(rule).get(key) != value]
    why = ""
    if flow.draws:
        why = f"draws random numbers ({flow.draws})"
    elif flow.mixes:
        why = f"calls {flow.mixes}, which is not elementwise"
    elif changed:
        vars(rule).update(before)
        why = f"changes its own {changed[0]} in each call, and a step makes as many calls as there are pieces"
    elif not same_bits(*results):
        why = "gives other values if a parameter is cut into pieces"
    if why:
        raise Refused(
            f"the rule {name} {why}: a FlatOptimizer is called on pieces of parameters; make it a "
            "torch.optim.Optimizer, which may be run on whole parameters"
        )


def refuse_replaced_step(instance: torch.optim.Optimizer) -> None:
    """Raise Refused if the step of an instance is not its class's; a scheduler's wrapper counts as that."""
    step = vars(instance).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise Refused(
            f"the step of this {type(instance).__name__} was replaced on the object, and the engine runs the one of "
            "its class: put the new step into a subclass"
        )
