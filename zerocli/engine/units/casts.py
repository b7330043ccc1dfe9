"""Inputs and outputs of the model: containers stay the user's own, and tensors are cast only where they must be.

[Note: inputs under bf16 and fp16]
Plain torch raises an error where a layer with weights of fewer bits gets fp32 data. There, and only there, the engine
casts: just before layers of torch.nn that demand one dtype, and before a user's own layers with a matrix and no parts.
Timesteps, positions, labels and weights of samples keep their bits until such a layer. Elsewhere torch's own promotion
counts. `shard(..., cast_inputs=True)` casts all floating-point inputs when the model is called, as FSDP2 does.
"""

from __future__ import annotations

import dataclasses
import re
import traceback
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from zerocli.engine.recompute.compiled import cast, cast_arguments
from zerocli.engine.recompute.mutable_state import has_state

_STRICT = (
    nn.Linear,
    nn.Bilinear,
    nn.modules.conv._ConvNd,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.modules.batchnorm._NormBase,
    nn.PReLU,
)
"""Layers that raise an error for an input of another dtype than their weights."""

_MISMATCH = re.compile("same dtype|scalar type|Found dtype|expected dtype|mixed dtype|Type promoting|type .* should be")
_ATOMS = (int, float, str, bytes, bool, type(None), torch.dtype, torch.device)


class InputCasts:
    """Casts the inputs of a model's layers; its hooks are registered when the first floating-point input comes."""

    def __init__(self, model: nn.Module, compute: torch.dtype, everything: bool) -> None:
        self._model, self._compute, self._everything = model, compute, everything
        self._handles: list[Any] = []
        self.active = False

    def prepare(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments for an outermost call of the model: the caller's own, unless all are to be cast."""
        if self._everything:
            args, kwargs = tree_map(lambda value: cast(value, self._compute), (args, kwargs))
        elif not self.active and any(map(self._concerns, tree_leaves((args, kwargs)))):
            self.active = True
            for module in self._model.modules():
                if _demands(module, self._compute):
                    self._handles.append(module.register_forward_pre_hook(cast_arguments, with_kwargs=True))
        return args, kwargs

    def _concerns(self, leaf: Any) -> bool:
        if isinstance(leaf, torch.Tensor):
            return leaf.is_floating_point() and leaf.dtype != self._compute
        return not isinstance(leaf, _ATOMS)  # an object that may hold tensors

    def explain(self, error: BaseException) -> str:
        """Return what to do about torch's error if dtypes did not match; else an empty string."""
        if not isinstance(error, RuntimeError) or not _MISMATCH.search(str(error)):
            return ""
        norm = _failed_batch_norm(error)
        if name := next((name for name, module in self._model.named_modules() if module is norm), ""):
            return (
                f"{name} has weights in {self._compute} and running statistics in fp32, which this device does not "
                f"compute with: keep such layers in fp32, this one by shard(..., keep_fp32='^{re.escape(name)}[.]'). "
                f"torch says: {str(error)[:200]}"
            )
        if not self.active:
            return ""
        return (
            f"a floating-point input meets parameters of {self._compute} in an operation that wants one dtype: cast it "
            "there (x.to(self.weight.dtype)), or pass shard(..., cast_inputs=True), which casts all floating-point "
            f"inputs of the model. torch says: {str(error)[:200]}"
        )

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def _failed_batch_norm(error: BaseException) -> nn.Module | None:
    """Return the layer with running statistics in whose forward torch raised the error, if there is one."""
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
            found = module
    return found


def _demands(module: nn.Module, compute: torch.dtype) -> bool:
    own = [p for p in module.parameters() if p.is_floating_point()]
    if not own or any(p.dtype != compute for p in own):
        return False
    if isinstance(module, _STRICT):
        return True
    ours = type(module).__module__.startswith("torch.nn")
    return not ours and not any(True for _ in module.children()) and any(p.dim() >= 2 for p in own)


# -- outputs -----------------------------------------------------------------------------------------------------------


def change_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor], depth: int = 6) -> Any:
    """Apply `change` to each tensor in an output and return the output, the same object wherever that is possible.

    A tensor for which `change` returns another one is replaced inside lists, dictionaries and objects; a tuple that
    holds one is made anew.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if depth == 0 or isinstance(value, _ATOMS):
        return value
    if isinstance(value, tuple):
        items = [change_tensors(each, change, depth - 1) for each in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
    for key, old, put in _members(value):
        new = change_tensors(old, change, depth - 1)
        if new is not old and put is not None:
            put(value, key, new)
    return value


def _members(value: Any) -> Iterator[tuple[Any, Any, Callable[[Any, Any, Any], None] | None]]:
    """Yield (key, member, how to replace it) of a container or an object that holds other values."""
    if isinstance(value, MutableMapping):
        yield from [(key, each, type(value).__setitem__) for key, each in value.items()]
    elif isinstance(value, MutableSequence):
        yield from [(index, each, type(value).__setitem__) for index, each in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        frozen = type(value).__dataclass_params__.frozen  # type: ignore[attr-defined]
        put = object.__setattr__ if frozen else setattr
        yield from [(f.name, getattr(value, f.name, None), put) for f in dataclasses.fields(value)]
    elif has_state(value):
        yield from [(key, each, setattr) for key, each in list(value.__dict__.items())]
