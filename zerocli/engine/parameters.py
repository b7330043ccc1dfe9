"""Parameters of a sharded model: reading a released parameter or a missing gradient raises an error with its name.

The objects stay the user's own `nn.Parameter`s; only their class changes, to one of two subclasses. Neither costs time
during compute: `__torch_function__` is disabled for one, and no operation uses the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zerocli.errors import Refused

_DATA: Any = torch._C.TensorBase.data
_GRAD: Any = torch._C.TensorBase.grad
_SHARDING = "_zerocli_sharding"

_READABLE = frozenset(
    "shape dtype device layout requires_grad is_leaf grad_fn grad ndim names itemsize nbytes _version _backward_hooks "
    "_post_accumulate_grad_hooks is_cuda is_cpu is_meta is_sparse is_quantized is_mkldnn is_xpu is_mps is_nested "
    "output_nr _grad_fn retains_grad grad_dtype".split()
)
"""Attributes that work on a released parameter: everything but values."""
_CALLABLE = frozenset(
    "numel nelement size dim ndimension stride element_size is_floating_point is_complex is_contiguous requires_grad_ "
    "register_hook register_post_accumulate_grad_hook storage_offset __len__ is_signed is_inference zeros_like "
    "ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full new_tensor".split()
)


class Gradients:
    """Whether an engine holds gradients that `step` has not used yet; `p.grad` does not show them."""

    def __init__(self) -> None:
        self.pending = False
        self.in_backward = False


class Sharding:
    """A parameter's link to its engine, and the state in which its values were last known."""

    __slots__ = ("address", "gradients", "handed_out", "name", "version")

    def __init__(self, name: str, gradients: Gradients) -> None:
        self.name, self.gradients = name, gradients
        self.handed_out = False
        """Whether `p.data` was read; edits through it do not change the version counter."""
        self.version = 0
        """torch's version counter when the values were last known."""
        self.address = 0
        """Address of the values at that time."""


class _Guarded(nn.Parameter):
    """Base of both classes: refuses access to gradients between backward and step."""

    @property
    def grad(self) -> torch.Tensor | None:
        sharding: Sharding = self.__dict__[_SHARDING]
        found: torch.Tensor | None = _GRAD.__get__(self)
        if found is None and (sharding.gradients.pending or sharding.gradients.in_backward):
            raise Refused(
                f"the gradient of {sharding.name} is kept by the engine, not in p.grad: read it with "
                f"engine.grad({sharding.name!r}), clip with shard(..., clip=...), drop it with engine.zero_grad()"
            )
        return found

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        sharding: Sharding = self.__dict__[_SHARDING]
        if value is not None or sharding.gradients.pending:
            raise Refused(
                f"a gradient assigned to {sharding.name} would be ignored, for the engine keeps gradients itself: "
                "change the loss, register a hook on the parameter, or drop all gradients with engine.zero_grad()"
            )
        _GRAD.__set__(self, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


class WholeParameter(_Guarded):
    """A parameter with values; it records reads of `data`, because edits may follow."""

    @property
    def data(self) -> torch.Tensor:
        self.__dict__[_SHARDING].handed_out = True
        found: torch.Tensor = _DATA.__get__(self)
        return found

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        name = self.__dict__[_SHARDING].name
        raise Refused(
            f"{name} lies in the engine's memory, so its data cannot be replaced: copy into it inside "
            f"`with engine.gathered({name!r}, write=True)`"
        )


class ReleasedParameter(_Guarded):
    """A parameter that currently has no values: each rank holds a slice of it, on the device or offloaded."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        allowed = attribute in _READABLE if name in ("__get__", "__set__") else name in _CALLABLE
        if allowed:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        released = _first((args, kwargs), ReleasedParameter)
        raise Refused(
            f"{released} has no values here: each rank holds a part of it, and it is whole only while its own module "
            f"computes. Read it inside `with engine.gathered({released!r})`, change it with write=True; a method that "
            "uses it is made known by engine.register_forward_method(module, name); whole weights are "
            "engine.state_dict()"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ReleasedParameter({name_of(self)}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        raise Refused(
            f"{name_of(self)} cannot be copied: this rank has a part of it only. engine.unsharded_model() gives an "
            "independent whole copy of the model; zerocli.EMA(engine) keeps an average of its weights"
        )


def _first(values: Any, kind: type[nn.Parameter]) -> str:
    """Return the name of the first parameter of a class in a call's arguments."""
    if isinstance(values, kind):
        return name_of(values)
    if isinstance(values, dict):
        values = values.values()
    if isinstance(values, tuple | list) or type(values).__name__ == "dict_values":
        for value in values:
            if found := _first(value, kind):
                return found
    return ""


class PendingParameter(_Guarded):
    """A parameter whose update is under way: its values are the last step's until its module is used."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if attribute in _READABLE if name in ("__get__", "__set__") else name in _CALLABLE or name == "data_ptr":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise Refused(
            f"{_first((args, kwargs), PendingParameter)} is read before its update is done, because of "
            "defer_update=True: call engine.synchronize() first, or read it through engine.gathered or state_dict"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PendingParameter({name_of(self)}, shape={tuple(self.shape)}, dtype={self.dtype})"


def name_of(parameter: torch.Tensor) -> str:
    """Return the name that the model gives a sharded parameter."""
    return str(parameter.__dict__[_SHARDING].name)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter of a sharded model."""
    return isinstance(tensor, _Guarded)


def guard(parameter: nn.Parameter, name: str, gradients: Gradients) -> None:
    """Turn a parameter into a sharded model's; other subclasses of nn.Parameter, also fake ones, keep their class."""
    if isinstance(parameter, _Guarded):
        raise Refused(f"{name} is sharded by another engine already: close that one, or shard another model")
    if type(parameter) is nn.Parameter:
        parameter.__dict__[_SHARDING] = Sharding(name, gradients)
        parameter.__class__ = WholeParameter


def unguard(parameter: nn.Parameter) -> None:
    """Restore a parameter's original class."""
    if isinstance(parameter, _Guarded):
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        del parameter.__dict__[_SHARDING]


def attach(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Give a parameter its values."""
    if isinstance(parameter, _Guarded):
        parameter.__class__ = WholeParameter
    _DATA.__set__(parameter, values)


def release(parameter: nn.Parameter, hollow: torch.Tensor) -> None:
    """Take a parameter's values away; `hollow` has its shape and no memory of its own."""
    attach(parameter, hollow)
    if isinstance(parameter, _Guarded):
        parameter.__class__ = ReleasedParameter


def take_grad(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient accumulated in a parameter, dense, and clear it."""
    found: torch.Tensor | None = _GRAD.__get__(parameter)
    if found is None:
        return None
    _GRAD.__set__(parameter, None)
    return found.to_dense() if found.layout != torch.strided else found


def has_grad(parameter: nn.Parameter) -> bool:
    """Whether autograd has accumulated a gradient in a parameter."""
    return _GRAD.__get__(parameter) is not None


def drop_grad(parameter: nn.Parameter) -> None:
    _GRAD.__set__(parameter, None)


def moved(parameter: nn.Parameter) -> bool:
    """Whether a parameter was moved to other memory since `note_values`, as RNN.flatten_parameters() does."""
    sharding: Sharding | None = parameter.__dict__.get(_SHARDING)
    return sharding is not None and parameter.data_ptr() != sharding.address


def edited_in_place(parameter: nn.Parameter) -> bool:
    """Whether a parameter's version counter has changed since `note_values`."""
    sharding: Sharding | None = parameter.__dict__.get(_SHARDING)
    return sharding is not None and parameter._version != sharding.version


def edited(parameter: nn.Parameter) -> bool:
    """Whether a parameter's values may have changed since `note_values`: in place, or through `p.data`."""
    sharding: Sharding | None = parameter.__dict__.get(_SHARDING)
    return sharding is not None and (sharding.handed_out or parameter._version != sharding.version)


def note_values(parameter: nn.Parameter, kept: bool = False) -> None:
    """Record a parameter's values as known; `kept` if they stay in this memory, where `p.data` may edit them."""
    sharding: Sharding | None = parameter.__dict__.get(_SHARDING)
    if sharding is not None:
        sharding.version, sharding.address = parameter._version, parameter.data_ptr()
        sharding.handed_out = sharding.handed_out and kept


def count_change(parameters: Sequence[nn.Parameter]) -> None:
    """Increment the version counters of whole parameters whose values the engine has changed.

    The values lie in a flat buffer, which has a counter of its own: autograd would accept graphs made before.
    """
    torch.autograd.graph.increment_version(parameters)
    for parameter in parameters:
        sharding: Sharding | None = parameter.__dict__.get(_SHARDING)
        if sharding is not None:
            sharding.version += 1  # a change that the user made before stays visible


def expect_update(parameter: nn.Parameter, pending: bool) -> None:
    """Refuse reads of a whole parameter while its update is pending; not `pending`: allow them again."""
    if isinstance(parameter, PendingParameter if not pending else WholeParameter):
        parameter.__class__ = PendingParameter if pending else WholeParameter


class Owners:
    """Which module holds each parameter of the model, as it was when the model was sharded."""

    def __init__(self, model: nn.Module, names: Mapping[int, str]) -> None:
        self._owners = [
            (module._parameters, key, parameter, names[id(parameter)])
            for module in model.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]
        """(dict of the owning module, key, parameter, name) of each parameter."""

    def refuse_replaced(self) -> None:
        """Raise Refused if a module's parameter was removed or replaced since."""
        for owner, key, parameter, name in self._owners:
            if owner.get(key) is not parameter:
                raise Refused(
                    f"{name} is not the parameter that was sharded, and would not be trained: copy values into the old "
                    f"one inside `with engine.gathered({name!r}, write=True)`, or shard the changed model anew"
                )
