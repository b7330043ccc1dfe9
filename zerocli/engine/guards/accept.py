"""What a model must be to be sharded: refused by name here, before anything is changed; and TorchScript's calls."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from zerocli.engine.guards.parameters import Released, first, name_of, no_values, refuse_unsuitable
from zerocli.errors import Refused

WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
"""torch's own data parallelism, by class name: it would average gradients a second time."""


def refuse_model(model: nn.Module) -> None:
    """Raise Refused for a model that cannot be sharded: without values, or distributed already."""
    for name, parameter in model.named_parameters():
        refuse_unsuitable(parameter, name)
    for path, module in model.named_modules():
        where = path or "the model"
        kinds = [kind.__name__ for kind in type(module).__mro__]
        if any(name in WRAPPERS for name in kinds) or len(getattr(module, "device_ids", None) or ()) > 1:
            raise Refused(
                f"{where} is wrapped in torch's {kinds[0]}, and zerocli averages gradients itself: pass the module "
                "inside it to shard"
            )
    for name, buffer in model.named_buffers():
        if nn.parameter.is_lazy(buffer):
            raise Refused(f"{name} has no shape yet, its module is lazy: run one forward of the model before shard")
    _refuse_hidden(model)


def _refuse_hidden(model: nn.Module) -> None:
    """Raise Refused if the model's own `parameters` or `named_parameters` show others than its modules hold."""
    held = {id(p): name for name, p in nn.Module.named_parameters(model)}
    if not held:
        raise Refused("the model has no parameters: there is nothing to shard or to train")
    named = (p for _, p in model.named_parameters())
    for method, shown in (("parameters", model.parameters()), ("named_parameters", named)):
        ids = {id(p) for p in shown}
        if hidden := [name for key, name in held.items() if key not in ids]:
            raise Refused(
                f"{type(model).__name__}.{method}() leaves out {', '.join(hidden[:4])}, and the engine shards all "
                "parameters: freeze those that are not to be trained by requires_grad_(False)"
            )
        if ids - held.keys():
            raise Refused(f"{type(model).__name__}.{method}() yields tensors that no module holds as parameters")


def refuse_scripts(units: Sequence[tuple[str, nn.Module]]) -> None:
    """Raise Refused if a unit whose parameters are partitioned is a TorchScript module: its call cannot be hooked."""
    for name, module in units:
        if isinstance(module, torch.jit.ScriptModule):
            raise Refused(
                f"{name} is a TorchScript module and a unit of its own, and its code reads parameters without asking "
                "the engine for them: shard the plain module, choose units= around it, or use stage=2"
            )


@functools.cache
def watch_scripts() -> None:
    """Refuse released parameters as arguments of TorchScript functions, which do not ask a tensor's class.

    A scripted module reads its own parameters in C++ too, so they are looked at before it is called.
    """
    jit: Any = torch.jit
    call, method = jit.ScriptFunction.__call__, jit.RecursiveScriptModule.__call__

    @functools.wraps(call)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (found := first((args, kwargs), Released)) is not None:
            raise Refused(no_values(name_of(found)))
        return call(self, *args, **kwargs)

    @functools.wraps(method)
    def checked_module(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (found := first((args, kwargs, list(self.parameters())), Released)) is not None:
            raise Refused(no_values(name_of(found)))
        return method(self, *args, **kwargs)

    jit.ScriptFunction.__call__ = checked
    jit.RecursiveScriptModule.__call__ = checked_module


def refuse_full_graphs(model: nn.Module, wrapped: Sequence[nn.Module], units: Sequence[nn.Module]) -> None:
    """Raise Refused if torch.compile was told to make one graph of a part of the model that contains units.

    `model` is what was passed to shard; `wrapped` are the modules whose calls go through the engine.
    """
    inner = {id(unit) for unit in units}
    ours = {id(module) for module in wrapped}
    for path, module in model.named_modules():
        if not _one_graph(module):
            continue
        inside = [m for m in module.modules() if m is not module and (id(m) in inner or id(m) in ours)]
        if inside or (module is model and id(module) in ours):
            raise Refused(
                f"torch.compile(fullgraph=True) of {path or 'the model'}: it contains sharded modules, and the engine "
                "gathers parameters between their graphs; leave fullgraph out, or compile with shard(..., compile=True)"
            )


def _one_graph(module: nn.Module) -> bool:
    """Whether torch.compile(module, fullgraph=True) or module.compile(fullgraph=True) made the module's call."""
    contexts = [module.__dict__.get("dynamo_ctx")]
    call = module.__dict__.get("_compiled_call_impl")
    contexts += [cell.cell_contents for cell in getattr(call, "__closure__", None) or ()]
    return any(getattr(context, "fullgraph", False) is True for context in contexts)
