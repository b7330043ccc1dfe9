"""Adapters of matrices that a module packs into one tensor, as those of experts are.

They have no layer to call: while their module runs, it sees in place of the tensor its sum with what the adapters add,
as with peft.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zerocli.config import LoraConfig
from zerocli.config.lora import factor_of, rank_of
from zerocli.errors import UserError
from zerocli.models.adapters import Adapter, Adapters, adapters_of

_WRAPPERS = "@"
"""In the name of an adapter of a packed tensor: between the tensor's name and the number of tensors with adapters that
follow it in its module. In peft each of these wraps the module once more."""


def tensor_of(part: str) -> str:
    """Return the packed tensor that an adapter is of, by the adapter's name in its module; empty of a layer's."""
    name, found, _ = part.partition(_WRAPPERS)
    return name if found else ""


def module_in_peft(path: str, part: str) -> str:
    """Return peft's name of the module that has a packed tensor's adapter."""
    return path + ".base_layer" * int(part.partition(_WRAPPERS)[2])


def add_packed(packed: Tensor, a: Tensor, b: Tensor, factor: float, transposed: bool) -> Tensor:
    """Return packed matrices with what their adapters add.

    `a` is (count x rank, inputs) and `b` (outputs, rank x count), in peft's order of elements.
    """
    low = a.reshape(len(packed), -1, a.shape[1])
    high = b.reshape(len(b), -1, len(packed)).permute(2, 0, 1)
    left, right = (low.mT, high.mT) if transposed else (high, low)
    return torch.baddbmm(packed, left.to(packed.dtype), right.to(packed.dtype), alpha=factor)


def is_transposed(module: nn.Module) -> bool:
    """Return whether the packed matrices of a module are (inputs, outputs), as it says itself in transformers."""
    return bool(getattr(module, "is_transposed", False))


def _replace(module: Any, args: Any) -> None:
    """Let a module read its packed tensors with what the adapters add; a forward pre-hook."""
    module.lora.ran = True
    for part, adapter in module.lora.named_children():
        name = tensor_of(part)
        made = add_packed(module._parameters[name], adapter.a, adapter.b, adapter.factor, is_transposed(module))
        module.__dict__[name] = made  # an attribute of the instance comes before its parameters, which stay registered


def _restore(module: Any, args: Any, output: Any) -> None:
    """Let a module read its own tensors again; a forward hook that is called after an exception too."""
    for part in module.lora.widths:
        module.__dict__.pop(tensor_of(part), None)


def packed_modules(model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield each module that packs several matrices into one tensor, and the names of such tensors in it."""
    for path, module in model.named_modules():
        if not type(module).__module__.startswith("torch.nn."):  # a convolution's weight has three dimensions too
            names = [n for n, p in module.named_parameters(recurse=False) if p.dim() == 3 and min(p.shape) > 1]
            if names and path:
                yield path, names


def refuse_tensors(module: nn.Module, path: str, names: list[str], asked: LoraConfig) -> None:
    """Raise UserError if these packed tensors of a module cannot have such adapters."""
    if names and hasattr(module, "lora"):
        raise UserError(f"lora: {path} has an attribute `lora` already")
    for name in names:
        count, *sides = module.get_parameter(name).shape
        if asked.dora or asked.dropout:
            raise UserError(
                f"lora: {path}.{name} packs {count} matrices, whose adapters are added to them before they are used: "
                "dora and dropout need a layer for each",
                hint="--set lora.dora=false --set lora.dropout=0, or other targets",
            )
        rank = rank_of(asked, f"{path}.{name}")
        if rank > min(sides):
            raise UserError(
                f"lora: rank {rank} is above the smaller side of {path}.{name}, {count} matrices of "
                f"{sides[0]} x {sides[1]}: an adapter would have more parameters than its matrix",
                hint=f"--lora {min(sides)} at most, or other targets",
            )


def give_to_tensors(module: nn.Module, path: str, names: list[str], asked: LoraConfig) -> None:
    """Give these packed tensors of a module adapters; those of all matrices of a tensor are one, as in peft."""
    adapters = Adapters({}, dropout=0.0)
    for at, name in enumerate(names):
        packed = module.get_parameter(name)
        count, outputs, inputs = (packed.mT if is_transposed(module) else packed).shape
        like = {"dtype": torch.float32 if asked.dtype == "fp32" else packed.dtype, "device": packed.device}
        part = f"{name}{_WRAPPERS}{len(names) - 1 - at}"
        known = count * rank_of(asked, f"{path}.{name}"), factor_of(asked, f"{path}.{name}")
        adapters.widths[part] = outputs
        adapters.add_module(part, Adapter(inputs, outputs, *known, like))
    module.lora = adapters
    module.register_forward_pre_hook(_replace)
    module.register_forward_hook(_restore, always_call=True)


def unadapted(model: nn.Module) -> list[str]:
    """Return the names of the packed tensors that have no adapter."""
    adapted = {f"{path}.{tensor_of(part)}" for path, _, part, _ in adapters_of(model)}
    packed = (f"{path}.{name}" for path, names in packed_modules(model) for name in names)
    return [name for name in packed if name not in adapted]
