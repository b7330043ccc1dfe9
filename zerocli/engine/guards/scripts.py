"""TorchScript: its functions read tensors in C++, so released parameters are refused before they are called."""

from __future__ import annotations

import functools
from typing import Any

import torch

from zerocli.engine.guards.parameters import Released, first, name_of, no_values
from zerocli.errors import Refused


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
