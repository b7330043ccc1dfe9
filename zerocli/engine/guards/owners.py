"""Where a sharded model holds its parameters: one that is replaced later would not be trained, and is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from zerocli.errors import Refused


class Owners:
    """Which module holds each parameter of the model, and which child, as it was when the model was sharded."""

    def __init__(self, model: nn.Module, names: Mapping[int, str]) -> None:
        self._model, self._names = model, names
        self._owners = [
            (module._parameters, key, parameter, names[id(parameter)])
            for module in model.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]
        """(dict of the owning module, key, parameter, name) of each parameter."""
        self._parts = [part for module in model.modules() for part in (module._parameters, module._modules)]
        self._contents = [_contents(part) for part in self._parts]

    def refuse_replaced(self) -> None:
        """Raise Refused if a parameter was added, removed or replaced since."""
        if [_contents(part) for part in self._parts] == self._contents:
            return
        for owner, key, parameter, name in self._owners:
            if not isinstance(owner, dict) or owner.get(key) is parameter:
                continue
            if now := [other for other, held in owner.items() if held is parameter]:
                raise Refused(
                    f"{name} was renamed to {now[0]} after shard, as prune, weight_norm and parametrize do: apply them "
                    "before shard, so that the engine knows the parameters that are there"
                )
            raise Refused(
                f"{name} is not the parameter that was sharded, and would not be trained: copy values into the old "
                f"one inside `with engine.gathered({name!r}, write=True)`, or change the model before shard"
            )
        known = set(self._names.values())
        for name, parameter in self._model.named_parameters():
            if name in known and self._names.get(id(parameter), name) != name:
                raise Refused(
                    f"{self._names[id(parameter)]} has become {name} since shard, as when two blocks change places: "
                    "states would be saved and loaded under wrong names. Change the model before shard"
                )
            if id(parameter) not in self._names and parameter.requires_grad:
                raise Refused(
                    f"{name} was added after shard and would not be trained: add it before shard, or freeze it with "
                    "requires_grad_(False)"
                )


def _contents(part: Any) -> list[int]:
    return [*map(id, part.values())]
