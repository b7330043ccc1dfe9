"""Adapters of linear layers: what they are, and how a layer is given its own.

An adapter is a child of its layer, which a forward hook of the layer adds to its output. So every parameter of the
model keeps its name and every layer its class.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerocli.config import LoraConfig
from zerocli.config.lora import factor_of, rank_of
from zerocli.errors import UserError

WHOLE = "all"
"""Name of the one adapter of a layer that is one matrix; those of fused layers are named by their parts."""


class Adapter(nn.Module):
    """Adds `factor x b(a(x))` to the output of a linear layer, or to a part of it; `b` is zero at first."""

    read_by_its_layer = True
    """Its layer reads its parameters without calling it, so it cannot be a unit by itself."""
    magnitude: nn.Parameter | None

    def __init__(
        self, inputs: int, outputs: int, rank: int, factor: float, like: dict[str, Any], dora: bool = False
    ) -> None:
        super().__init__()
        self.factor = factor
        self.a = nn.Parameter(torch.empty(rank, inputs, **like))
        self.b = nn.Parameter(torch.empty(outputs, rank, **like))
        self.register_parameter("magnitude", nn.Parameter(torch.empty(outputs, **like)) if dora else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.a.is_meta:
            return  # torch imports its compiler for a random fill of a meta tensor
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        nn.init.zeros_(self.b)
        if self.magnitude is not None:
            nn.init.ones_(self.magnitude)  # `set_magnitudes` writes the lengths of the base's rows

    def forward(self, x: Tensor) -> Tensor:
        """Return what is added, without the factor."""
        return F.linear(F.linear(x.to(self.a.dtype), self.a), self.b)


class Adapters(nn.Module):
    """The adapters of one layer: one, or one for each of the matrices that are fused in it."""

    def __init__(self, widths: Mapping[str, int], dropout: float) -> None:
        super().__init__()
        self.widths, self.dropout = dict(widths), dropout
        self.ran = False
        """Whether the layer was called: the adapters of one whose weight is only read would add nothing."""

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the layer's output `y` of `x` with what the adapters add.

        Whether there is one adapter or several, `x` is read once, and `y` is read and written once, by two products.
        """
        children: dict[str, Any] = dict(self.named_children())
        own = [children[name] for name in self.widths if name in children]
        x = x.to(own[0].a.dtype)
        if self.dropout and self.training:
            low = _joined([F.linear(self._dropped(x), each.a) for each in own], -1)
        else:
            low = F.linear(x, _joined([each.a for each in own], 0))
        factor = own[0].factor
        high = {n: each.b if each.factor == factor else each.b * (each.factor / factor) for n, each in children.items()}
        blocks = [high[name] if name in high else x.new_empty(size, 0) for name, size in self.widths.items()]
        b = blocks[0] if len(blocks) == 1 else torch.block_diag(*blocks)
        if low.dtype != y.dtype:
            return torch.add(y, F.linear(low, b).to(y.dtype), alpha=factor)
        rows = torch.addmm(y.reshape(-1, y.shape[-1]), low.reshape(-1, len(b.t())), b.t(), alpha=factor)
        return rows.view(y.shape)

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.dropout and self.training else x

    def rescale(self, layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Return the output of a layer whose rows have trained lengths (DoRA), as peft computes it."""
        weight, bias = matrix_of(layer), getattr(layer, "bias", None)
        children, made, at = dict(self.named_children()), [], 0
        for name, width in self.widths.items():
            rows, part = slice(at, at + width), y[..., at : at + width]
            at += width
            if name not in children:
                made.append(part)
                continue
            adapter: Any = children[name]
            dropped = self._dropped(x)
            plain = part if bias is None else part - bias[rows]
            if dropped is not x:
                plain = F.linear(dropped, weight[rows])
            turned = weight[rows].detach() + adapter.factor * (adapter.b @ adapter.a).detach().to(weight.dtype)
            length = turned.float().norm(dim=1).to(y.dtype)
            ratio = adapter.magnitude / length
            made.append((part + (ratio - 1) * plain + ratio * adapter.factor * adapter(dropped)).to(y.dtype))
        return made[0] if len(made) == 1 else torch.cat(made, -1)


def _add(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> Tensor:
    """Add a layer's adapters to its output; a forward hook."""
    adapters: Any = layer.lora
    adapters.ran = True
    x: Tensor = args[0] if args else kwargs["input"]
    if any(adapter.magnitude is not None for adapter in adapters.children()):
        made: Tensor = adapters.rescale(layer, x, y)
        return made
    added: Tensor = adapters.add(x, y)
    return added


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def matrix_of(layer: Any) -> Tensor:
    """Return a layer's matrix as (outputs, inputs); transformers' Conv1D keeps it transposed."""
    weight: Tensor = layer.weight
    return weight if isinstance(layer, nn.Linear) else weight.t()


def row_lengths(matrix: Tensor, widths: Mapping[str, int], part: str) -> Tensor:
    """Return the lengths of the rows of one of the matrices that are fused in a layer's."""
    names = list(widths)
    start = sum(widths[name] for name in names[: names.index(part)])
    found: Tensor = matrix[start : start + widths[part]].float().norm(dim=1)
    return found


def widths_of(layer: Any) -> dict[str, int]:
    """Return the outputs of each of the matrices that are fused in a layer, by name; of others, all outputs."""
    return dict(getattr(layer, "parts", None) or {WHOLE: matrix_of(layer).shape[0]})


def refuse_layer(layer: nn.Module, path: str, parts: Mapping[str, str], asked: LoraConfig) -> None:
    """Raise UserError if these parts of a layer, with peft's names, cannot have adapters of the rank that is asked."""
    if parts and hasattr(layer, "lora"):
        raise UserError(f"lora: {path} has an attribute `lora` already")
    inputs, widths = matrix_of(layer).shape[1], widths_of(layer)
    for part, name in parts.items():
        rank = rank_of(asked, name)
        if rank > min(inputs, widths[part]):
            raise UserError(
                f"lora: rank {rank} is above the smaller side of {path}, {widths[part]} x {inputs}: an adapter would "
                "have more parameters than the matrix",
                hint=f"--lora {min(inputs, widths[part])} at most, or other targets",
            )


def give(layer: nn.Module, parts: Mapping[str, str], asked: LoraConfig) -> None:
    """Give these parts of a layer, with peft's names, adapters."""
    widths, matrix = widths_of(layer), matrix_of(layer)
    adapters = Adapters(widths, asked.dropout)
    dtype = torch.float32 if asked.dtype == "fp32" else matrix.dtype
    for part, name in parts.items():
        inputs, outputs = matrix.shape[1], widths[part]
        like = {"dtype": dtype, "device": matrix.device}
        adapter = Adapter(inputs, outputs, rank_of(asked, name), factor_of(asked, name), like, asked.dora)
        if adapter.magnitude is not None and not matrix.is_meta:
            with torch.no_grad():
                adapter.magnitude.copy_(row_lengths(matrix, widths, part))
        adapters.add_module(part, adapter)
    layer.lora = adapters
    layer.register_forward_hook(_add, with_kwargs=True)


def has_adapters(model: nn.Module) -> bool:
    return any(isinstance(module, Adapters) for module in model.modules())


def adapters_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Adapter]]:
    """Yield (path of the layer, layer, part, adapter)."""
    for path, layer in model.named_modules():
        for part, adapter in layer.lora.named_children() if isinstance(getattr(layer, "lora", None), Adapters) else ():
            yield path, layer, part, adapter
