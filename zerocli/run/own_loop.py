"""`zerocli.shard`, for a training loop of one's own; `offload="auto"` chooses as `--auto` does."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack

import torch
import torch.distributed as dist
from torch import nn

from offload.placement import Placement
from zerocli.config import AUTO
from zerocli.console import say
from zerocli.engine import api
from zerocli.engine.build import matches
from zerocli.engine.device import choose_device
from zerocli.engine.engine import Engine
from zerocli.engine.optimizer.optim import FusedAdam
from zerocli.engine.optimizer.rules import OptimizerChoice, make_optimizer
from zerocli.engine.precision import PRECISIONS, precision
from zerocli.engine.settings import Keywords, Settings
from zerocli.engine.units.divide import find_units
from zerocli.errors import Refused, UserError

if TYPE_CHECKING:
    from zerocli.plan.models.traced import Traced
    from zerocli.plan.setup import Setup

Example = Callable[[nn.Module], torch.Tensor]


def shard(
    model: nn.Module,
    optimizer: OptimizerChoice = "adamw",
    lr: float | Callable[[int], float] | None = None,
    stage: int | None = None,
    *,
    example: Example | None = None,
    memory: int = 0,
    **settings: Unpack[Keywords],
) -> Engine:
    """Shard `model` over the data-parallel ranks and return the engine that trains it.

    The model itself does not change: `model(batch)` and `engine(batch)` are the same. Further keywords are the fields
    of `engine.settings.Settings`, which describes each (precision, accumulate, clip, units, recompute, ...); what is
    not one of them goes to the optimizer (betas, eps, ...). Under torchrun the process group is opened if necessary.

    With `tp=N` groups of N neighbouring ranks split a built-in model's layers between them, before the rest is sharded
    over the others; those N must get the same batches and, where there is dropout, be seeded alike.

    With `offload="auto"` the stage (unless it is given; else 3), the placement and `recompute` (unless it is given) are
    the fastest that fit this machine as it is. `example(model)` runs the model on a batch as large as those of training
    and returns the loss; it is traced on tensors without memory, so its own tensors are best on the CPU. `memory` is
    how many bytes of its device each rank may take; 0: all that is free. The choice is printed as keywords.
    """
    given: dict[str, Any] = {**settings}
    if given.get("offload") == AUTO:
        given |= _choose(model, optimizer, stage, example, memory, given)
        stage = given.pop("stage")
    elif example is not None or memory:
        raise ValueError('example and memory are for offload="auto"')
    return api.shard(model, optimizer, lr, 3 if stage is None else stage, **given)


def _whole_signature() -> inspect.Signature:
    """Return the signature of `shard` with all its keywords, for help() and completion in a notebook."""
    named = inspect.signature(shard)
    *first, rest = named.parameters.values()
    fields = [f for f in dataclasses.fields(Settings) if f.name not in named.parameters]
    defaults = {f.name: {} if f.default is dataclasses.MISSING else f.default for f in fields}
    more = [rest.replace(name=n, kind=rest.KEYWORD_ONLY, default=d, annotation=rest.empty) for n, d in defaults.items()]
    return named.replace(parameters=[*first, *more, rest.replace(name="optimizer_arguments", annotation=rest.empty)])


shard.__signature__ = _whole_signature()  # type: ignore[attr-defined]


def _choose(
    model: nn.Module,
    optimizer: OptimizerChoice,
    stage: int | None,
    example: Example | None,
    memory: int,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Return the settings that are chosen, the same on all ranks. Collective."""
    from zerocli.plan.search import automatic
    from zerocli.run.automatic import least_of_all
    from zerocli.run.recompute import device_room, gather_values

    setup = _setup(model, optimizer, stage, settings)
    free = {"offload.placement"} | ({"zero.stage"} if stage is None else set())
    if setup.recompute == AUTO:
        free.add("activations.policy")
    traced = _trace(model, example, setup, settings)
    api.open_process_group(settings.get("device"))
    gather = functools.partial(gather_values, stage="agreeing on the machine")
    here = automatic.hardware_here(setup.nvme_path, setup, device_room(memory, setup))
    hardware = least_of_all(here, gather)
    try:
        choice = automatic.choose_setup(traced, setup, hardware, frozenset(free))
    except UserError as error:
        raise ValueError(str(error)) from error
    if fact := automatic.unfit(choice, automatic.keywords):
        raise Refused(fact)
    assert choice.best is not None
    if not dist.is_initialized() or dist.get_rank() == 0:
        for line in automatic.describe(choice, hardware, automatic.keywords):
            say(line)
    best = choice.best.setup
    chosen = {"stage": best.stage, "offload": str(best.offload), "recompute": best.recomputed.policy}
    chosen["update"] = best.update
    first: dict[str, Any] = gather(chosen)[0]
    return first


def _setup(model: nn.Module, optimizer: OptimizerChoice, stage: int | None, settings: dict[str, Any]) -> Setup:
    """Return the setup that a plan is made for, without a placement."""
    from zerocli.plan.measure import update_arrays
    from zerocli.plan.setup import Setup
    from zerocli.run.recompute import ranks_here

    asked = api.settings_of(optimizer, None, 3 if stage is None else stage, settings | {"offload": Placement()})
    if asked.tp != 1 or asked.group is not None:
        raise ValueError('offload="auto" is for all ranks, data-parallel: with tp or a group, place the states by hand')
    device = choose_device(asked.device, model)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rule = make_optimizer(optimizer, asked.options)
    named = isinstance(optimizer, str)
    shared = asked.shared() | {"recompute": settings.get("recompute", AUTO)}
    shared |= {"precision": precision(asked.precision, device)[0].name}
    if not named:
        shared |= {"optimizer": "adamw" if isinstance(rule, FusedAdam) else type(rule).__name__, "options": {}}
    if not isinstance(shared["recompute"], bool | int | str) and not hasattr(shared["recompute"], "whole"):
        raise ValueError('offload="auto" cannot plan modules that are recomputed by choice: recompute=True, or none')
    world, local = ranks_here()
    arrays = None if named else (len(rule.state_names), update_arrays(rule))
    return Setup(**shared, ranks=world, ranks_per_node=local, device=device.type, arrays=arrays, batch=1)


def _trace(model: nn.Module, example: Example | None, setup: Setup, settings: dict[str, Any]) -> Traced:
    """Trace a copy of the model without memory; ValueError if that fails."""
    from zerocli.plan.models.traced import trace

    if example is None:
        raise ValueError(
            'offload="auto" needs example=lambda model: ..., which runs the model on a batch and returns the loss: '
            "without it, nothing is known of activations"
        )
    names = [name for name, module in find_units(model, settings.get("units")) if name]
    compute, kept = PRECISIONS[setup.precision].compute, settings.get("keep_fp32")

    def dtype_of(name: str, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype that the engine takes; beside others in the compute dtype, fp32 is kept in the trace too."""
        floats = parameter.dtype.is_floating_point and kept is not None
        return compute if floats and not matches(kept, name, parameter) else parameter.dtype

    def make() -> nn.Module:
        made = copy_on_meta(model, dtype_of)
        chosen = [made.get_submodule(name) for name in names]  # now: a trace leaves some of equal blocks out
        made.__dict__["unit_modules"] = lambda: chosen or None
        return made

    try:
        with torch.random.fork_rng(devices=()):
            return trace(type(model).__name__, make, setup, lambda made, _: example(made), resizable=False)
    except UserError as error:
        cause = error.__cause__ or error
        raise ValueError(
            f"the example could not be traced: {type(cause).__name__}: {cause}; its tensors belong on the CPU, and its "
            "code may ask no tensor for its value; or place by hand: stage=..., offload=..."
        ) from error


def copy_on_meta(model: nn.Module, dtype_of: Callable[[str, nn.Parameter], torch.dtype]) -> nn.Module:
    """Return a copy of a model whose parameters take no memory; its buffers are copied, as they may be tables."""
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        empty = torch.empty_like(parameter, device="meta", dtype=dtype_of(name, parameter))
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().cpu().clone()
    return copy.deepcopy(model, memo)
