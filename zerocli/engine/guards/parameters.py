"""Parameters of a sharded model: reading a released parameter or a missing gradient raises an error with its name.

The objects stay the user's own parameters; only their class changes, to one of two subclasses of their own class that
are made at run time. Neither costs time during compute: the first computes as the user's class does, and no operation
uses the other.
"""

from __future__ import annotations

import functools
import sys
import traceback
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from zerocli.errors import Refused

_DATA: Any = torch._C.TensorBase.data
_GRAD: Any = torch._C.TensorBase.grad
_SHARDING = "_zerocli_sharding"
_ALIASED = "_zerocli_aliased"

READABLE = frozenset(
    "shape dtype device layout requires_grad is_leaf grad_fn grad ndim names itemsize nbytes _version _backward_hooks "
    "_post_accumulate_grad_hooks is_cuda is_cpu is_meta is_sparse is_quantized is_mkldnn is_xpu is_mps is_nested "
    "output_nr _grad_fn retains_grad grad_dtype".split()
)
"""Attributes that work on a released parameter: everything but values."""
CALLABLE = frozenset(
    "numel nelement size dim ndimension stride element_size is_floating_point is_complex is_contiguous requires_grad_ "
    "register_hook register_post_accumulate_grad_hook storage_offset __len__ is_signed is_inference zeros_like "
    "ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full new_tensor "
    "_has_compatible_shallow_copy_type".split()
)


class Gradients:
    """What an engine's parameters share: whether it holds gradients that `step` has not used yet, which `p.grad` does
    not show."""

    def __init__(self) -> None:
        self.pending = False
        self.in_backward = False
        self.data_read = False
        """Whether `p.data` of some parameter was read since the ranks last compared values: edits may have followed."""
        self.deferred = False
        """Whether updates may still be under way after `step`."""


class Sharding:
    """A parameter's link to its engine, and the state in which its values were last known."""

    __slots__ = ("address", "aliases", "gradients", "handed_out", "name", "version")

    def __init__(self, name: str, gradients: Gradients) -> None:
        self.name, self.gradients = name, gradients
        self.handed_out = False
        """Whether `p.data` was read; edits through it do not change the version counter."""
        self.version = 0
        """torch's version counter when the values were last known."""
        self.address = 0
        """Address of the values at that time."""
        self.aliases: list[weakref.ref[torch.Tensor]] = []
        """Tensors on the values that were handed out, if updates are deferred."""

    def hand_out(self) -> None:
        """Note that the user has a tensor on the values, through which they may be edited."""
        self.handed_out = self.gradients.data_read = True

    def follow(self, alias: torch.Tensor) -> None:
        """Remember a tensor on the values that the user gets: its use is refused while an update is under way."""
        if self.gradients.deferred:
            self.aliases = [each for each in self.aliases if each() is not None] + [weakref.ref(alias)]

    def await_update(self, pending: bool) -> None:
        """Refuse reads of the tensors that were handed out while an update is `pending`; else allow them again."""
        for alias in [each() for each in self.aliases]:
            if alias is None:
                continue
            if pending and not isinstance(alias, Awaited):
                alias.__dict__[_ALIASED] = self.name
                alias.__class__ = derived(Awaited, type(alias))
            elif not pending and isinstance(alias, Awaited):
                alias.__class__ = alias._zerocli_class


class WithoutValues:
    """Mixin of the class of a tensor whose values cannot be read: functions that read them are refused."""

    _title: str
    _has_memory = False
    """Whether its address may be asked for."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if reads_no_values(func) or (cls._has_memory and getattr(func, "__name__", "") == "data_ptr"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return cls._refuse(func, args, kwargs or {})

    @classmethod
    def _refuse(cls, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def __repr__(self) -> str:
        mine = cast(torch.Tensor, self)
        return f"{self._title}({name_of(mine)}, shape={tuple(mine.shape)}, dtype={mine.dtype})"


class Guarded:
    """Mixin of a parameter's classes: refuses access to gradients between backward and step."""

    _zerocli_class: type
    """The parameter's original class."""

    @property
    def grad(self) -> torch.Tensor | None:
        sharding: Sharding | None = self.__dict__.get(_SHARDING)
        found: torch.Tensor | None = _GRAD.__get__(self)
        if sharding is None:  # a result that the user's own subclass has given its class
            return found
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
            memo[id(self)] = _plain(self, cast(nn.Parameter, self).detach().clone())
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self, cast(nn.Parameter, self).detach()).__reduce_ex__(protocol)


class Whole(Guarded):
    """A parameter with values; it records reads of `data`, because edits may follow."""

    @property
    def data(self) -> torch.Tensor:
        sharding: Sharding = self.__dict__[_SHARDING]
        sharding.hand_out()
        found: torch.Tensor = _DATA.__get__(self)
        sharding.follow(found)
        return found

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        sharding, mine = self.__dict__[_SHARDING], _DATA.__get__(self)
        sharding.hand_out()
        if _same_memory(mine, value):  # p.data *= 0.9, or a conversion that changes nothing
            return
        if (mine.shape, mine.dtype, mine.device) != (value.shape, value.dtype, value.device):
            raise Refused(
                f"{sharding.name} lies in the engine's memory as {describe(mine)}, and was to become "
                f"{describe(value)}: {_INSTEAD}"
            )
        # Copied into the engine's memory by the step or at the end of `gathered(write=True)`: see Flat.restore_moved.
        _DATA.__set__(self, value.detach())

    def detach(self) -> torch.Tensor:
        if sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            name = self.__dict__[_SHARDING].name
            if how := _rewritten_by():
                raise Refused(_replaces(name, how))
            raise Refused(
                f"nn.Parameter({name}) would be a second parameter in the engine's memory: use the parameter itself, "
                "or nn.Parameter(p.detach().clone()) for one with values of its own"
            )
        found = torch.Tensor.detach(cast(torch.Tensor, self))
        self.__dict__[_SHARDING].follow(found)
        return found


class Released(WithoutValues, Guarded):
    """A parameter that currently has no values: each rank holds a slice of it, on the device or offloaded."""

    _title = "ReleasedParameter"

    @property
    def data(self) -> torch.Tensor:
        raise Refused(no_values(name_of(self)))

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if cast(Any, value) is not self:  # `model.to(...)` that changes nothing assigns a parameter to itself
            raise Refused(no_values(name_of(self)))

    def as_subclass(self, cls: type) -> Any:
        raise Refused(no_values(name_of(self)))

    @classmethod
    def _refuse(cls, func: Any, args: Any, kwargs: Any) -> Any:
        if getattr(func, "__name__", "") in _CONVERSIONS and isinstance(args[0], Released):
            return _converted(func, *args, **kwargs)
        raise Refused(no_values(name_of(first((args, kwargs), Released))))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        raise Refused(
            f"{name_of(self)} cannot be copied: this rank has a part of it only. "
            "engine.unsharded_model() gives an independent whole copy of the model; zerocli.EMA(engine) keeps an "
            "average of its weights"
        )


class Pending(WithoutValues, Guarded):
    """A parameter whose update is under way: its values are the last step's until its module is used."""

    _title, _has_memory = "PendingParameter", True

    @classmethod
    def _refuse(cls, func: Any, args: Any, kwargs: Any) -> Any:
        raise Refused(
            f"{name_of(first((args, kwargs), Pending))} is read before its update is done, because of "
            "defer_update=True: call engine.synchronize() first, or read it through engine.gathered or state_dict"
        )


class Awaited(WithoutValues):
    """Mixin of the class of a tensor on a pending parameter's values, such as `p.data` or one of a state dict."""

    _zerocli_class: type
    _title, _has_memory = "AwaitedTensor", True

    @classmethod
    def _refuse(cls, func: Any, args: Any, kwargs: Any) -> Any:
        raise Refused(
            f"a tensor on the memory of {name_of(first((args, kwargs), Awaited))} (p.data, p.detach() or one of "
            "model.state_dict()) is used before its update is done, because of defer_update=True: call "
            "engine.synchronize() first, or keep a copy (.clone())"
        )


_CONVERSIONS = frozenset("to float half bfloat16 double cpu cuda type contiguous".split())
_INSTEAD = (
    "the dtype is chosen by shard(..., precision=...), the device by shard(..., device=...); "
    "engine.unsharded_model(device, dtype) gives a converted copy; new values are copied into it by "
    "p.data.copy_(values)"
)


def reads_no_values(func: Any) -> bool:
    """Whether a function of tensors may be called on one without values, as `__torch_function__` gets it."""
    name = getattr(func, "__name__", "")
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    return attribute in READABLE if name in ("__get__", "__set__") else name in CALLABLE


def describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}".removeprefix("torch.")


def _same_memory(mine: torch.Tensor, other: torch.Tensor) -> bool:
    if type(other) not in (torch.Tensor, nn.Parameter) and not isinstance(other, Guarded):
        return False
    alike = mine.shape == other.shape and mine.stride() == other.stride() and mine.dtype == other.dtype
    return alike and mine.device == other.device and mine.data_ptr() == other.data_ptr()


def _converted(func: Any, parameter: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the released parameter itself if the conversion changes nothing; refuse another one."""
    probe = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    found = func(probe, *args, **kwargs)
    if found is probe:
        return parameter
    if isinstance(found, torch.Tensor) and (found.dtype, found.device) != (probe.dtype, probe.device):
        mine, wanted = describe(parameter), describe(found.expand(0))
        raise Refused(
            f"{name_of(parameter)} is kept by the engine as {mine}, and was to become "
            f"{wanted.partition(' of ')[0]} on {found.device}: {_INSTEAD}"
        )
    raise Refused(no_values(name_of(parameter)))


def no_values(name: str) -> str:
    """Return why a released parameter cannot be used, and the ways to its values."""
    if how := _rewritten_by():
        return _replaces(name, how)
    return (
        f"{name} has no values here: each rank holds a part of it, and it is whole only while its own module computes. "
        f"Read it inside `with engine.gathered({name!r})`, change it with write=True; a method that uses it is made "
        "known by engine.register_forward_method(module, name); whole weights are engine.state_dict()"
    )


def _replaces(name: str, how: str) -> str:
    return f"{name} is sharded, and {how} would replace it by a parameter that is not trained: apply it before shard"


_REWRITING = frozenset(
    "register_parametrization remove_parametrizations apply weight_norm remove_weight_norm spectral_norm "
    "remove_spectral_norm orthogonal remove".split()
)


def _rewritten_by() -> str:
    """Return the function of torch.nn.utils that is about to replace a parameter, if one calls."""
    found = ""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        folder, _, file = frame.f_code.co_filename.replace("\\", "/").rpartition("/")
        if folder.endswith("torch/nn/utils") and frame.f_code.co_name in _REWRITING:
            found = f"torch.nn.utils.{file.removesuffix('.py')}"
    return found


def first(values: Any, kind: type) -> Any:
    """Return the first tensor of a class in nested containers, or None."""
    if isinstance(values, kind):
        return values
    if isinstance(values, dict):
        values = list(values.values())
    found = (first(value, kind) for value in values) if isinstance(values, tuple | list) else ()
    return next((each for each in found if each is not None), None)


def name_of(tensor: Any) -> str:
    """Return the name that the model gives a sharded parameter, or the one whose values a tensor is on; "" of None."""
    return str(tensor.__dict__.get(_ALIASED) or tensor.__dict__[_SHARDING].name) if tensor is not None else ""


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter of a sharded model."""
    return isinstance(tensor, Guarded)


@functools.cache
def derived(mixin: type, original: type) -> type:
    """Return a subclass of a tensor class with the behaviour of `mixin`; its values keep the original class.

    The user's own `__torch_function__` runs as it did, but for a released parameter.
    """
    members: dict[str, Any] = {"__module__": original.__module__, "_zerocli_class": original}
    function = original.__torch_function__  # type: ignore[attr-defined]
    if not issubclass(mixin, WithoutValues) and function is not torch._C._disabled_torch_function_impl:

        def run(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            own = tuple(getattr(kind, "_zerocli_class", kind) for kind in types)
            return function(func, own, args, kwargs or {})

        members["__torch_function__"] = classmethod(run)
    return type(original.__name__, (mixin, original), members)


def _plain(parameter: Any, values: torch.Tensor) -> nn.Parameter:
    """Return a parameter of the user's own class with other values, and the attributes that the user gave it."""
    original = parameter._zerocli_class
    made = nn.Parameter(values, parameter.requires_grad)
    if original is not nn.Parameter:
        made.__class__ = original
    made.__dict__.update({key: value for key, value in parameter.__dict__.items() if key != _SHARDING})
    return made


def refuse_unsuitable(parameter: nn.Parameter, name: str) -> None:
    """Raise Refused for a parameter whose values are not one dense tensor of its own."""
    kind = type(parameter)
    if isinstance(parameter, Guarded):
        raise Refused(
            f"{name} is sharded by another engine already: close that engine before this shard, or put both models "
            "into one nn.Module and shard that"
        )
    if is_lazy(parameter):
        raise Refused(f"{name} is lazy and has no shape yet: run the model once on an example before shard")
    if any(each.__name__ == "DTensor" for each in kind.__mro__):
        raise Refused(
            f"{name} is a DTensor, distributed by fully_shard or parallelize_module already: shard the plain model"
        )
    own = kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    if not isinstance(parameter, FakeTensor) and (not own or parameter.layout != torch.strided):
        raise Refused(
            f"{name} is a {kind.__name__} of layout {parameter.layout}, which keeps its values in another way than in "
            "one dense tensor: replace it by a dense nn.Parameter before shard"
        )


def guard(parameter: nn.Parameter, name: str, gradients: Gradients) -> None:
    """Turn a parameter into a sharded model's; one without memory of its own (a fake one) keeps its class."""
    kind = type(parameter)
    if isinstance(parameter, FakeTensor):  # in a plan, which runs the model without memory
        return
    parameter.__dict__[_SHARDING] = Sharding(name, gradients)
    try:
        parameter.__class__ = derived(Whole, kind)
    except TypeError as error:
        raise Refused(
            f"{name} is a {kind.__name__}, a class of tensors that cannot be sharded ({error}): make it an "
            "nn.Parameter before shard"
        ) from error


def unguard(parameter: nn.Parameter) -> None:
    """Restore a parameter's original class."""
    if isinstance(parameter, Guarded):
        parameter.__class__ = parameter._zerocli_class
        del parameter.__dict__[_SHARDING]


def attach(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Give a parameter its values."""
    if isinstance(parameter, Guarded):
        original = parameter._zerocli_class
        parameter.__class__ = derived(Whole, original)
        if original is not nn.Parameter:  # it may have a __torch_function__ of its own
            with torch._C.DisableTorchFunctionSubclass():
                return _DATA.__set__(parameter, values)  # type: ignore[no-any-return]
    _DATA.__set__(parameter, values)


def release(parameter: nn.Parameter, placeholder: torch.Tensor) -> None:
    """Take a parameter's values away; `placeholder` has its shape and no memory of its own."""
    attach(parameter, placeholder)
    if isinstance(parameter, Guarded):
        parameter.__class__ = derived(Released, parameter._zerocli_class)


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


def may_be_edited(parameter: nn.Parameter, alias: torch.Tensor | None) -> None:
    """Record that the user has a tensor on a parameter's memory; edits through it do not change the version counter.

    With an `alias` that is no buffer of the model, its reads are refused while an update is under way.
    """
    sharding: Sharding | None = parameter.__dict__.get(_SHARDING)
    if sharding is not None:
        sharding.hand_out()
        if alias is not None:
            sharding.follow(alias)


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
    if isinstance(parameter, Whole if pending else Pending):
        parameter.__dict__[_SHARDING].await_update(pending)
        parameter.__class__ = derived(Pending if pending else Whole, parameter._zerocli_class)
