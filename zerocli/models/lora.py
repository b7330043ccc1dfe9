"""LoRA: adapters of low rank beside the linear layers of a frozen model.

An adapter is a child of its layer, which a forward hook of the layer adds to its output. So every parameter of the
model keeps its name and every layer its class: weights are loaded and exported as without adapters. Matrices that a
module packs into one tensor, as those of experts are, have no layer to call: while their module runs, it sees in place
of the tensor its sum with what the adapters add, as with peft.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerocli.config import Config, LoraConfig, ModelConfig
from zerocli.config.lora import factor_of, fitting, matches, pattern_problem, rank_of
from zerocli.config.schema import ALL_LINEAR
from zerocli.errors import UserError, closest
from zerocli.models import hugging

Theirs = Mapping[str, tuple[str, ...]]
"""The names that layers have in Hugging Face's models: one for each matrix of a fused layer."""
WHOLE = "all"
"""Name of the one adapter of a layer that is one matrix; those of fused layers are named by their parts."""
PACKED = "@"
"""In the name of an adapter of a packed tensor: between the tensor's name and the number of tensors with adapters that
follow it in its module, by which peft names it."""


def lora(
    model: nn.Module,
    rank: int = 16,
    targets: str | Sequence[str] = ALL_LINEAR,
    *,
    alpha: float = 0.0,
    dropout: float = 0.0,
    rslora: bool = False,
    dora: bool = False,
    save_modules: Sequence[str] = (),
    dtype: str = "compute",
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
) -> nn.Module:
    """Freeze a model and give its linear layers adapters; returns the model. See `LoraConfig` for the arguments.

    Call it before `zerocli.shard`. Only the adapters, and the modules in `save_modules`, are trained.
    """
    named = (targets,) if isinstance(targets, str) else tuple(targets)
    if dora and any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("dora=True needs the lengths of the rows of the weights, and the model has no values (meta)")
    ranks, alphas = (tuple(f"{key}={n}" for key, n in (each or {}).items()) for each in (rank_pattern, alpha_pattern))
    kept = tuple(save_modules)
    try:
        adapt(model, LoraConfig(rank, named, alpha, ranks, alphas, dropout, rslora, dora, kept, dtype))
    except UserError as error:
        raise ValueError(str(error)) from None
    model.register_forward_hook(_warn_idle)
    return model


def _warn_idle(model: nn.Module, inputs: Any, output: Any) -> None:
    """Warn once, after the first forward of a model of the user's, of adapters that had no part in it."""
    for key in [key for key, hook in model._forward_hooks.items() if hook is _warn_idle]:
        del model._forward_hooks[key]
    if said := idle_note(model):
        warnings.warn(said, stacklevel=2)


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


class PackedAdapters(Adapters):
    """The adapters of the packed tensors of one module; those of all matrices of a tensor are one, as in peft."""

    def __init__(self, widths: Mapping[str, int], transposed: bool) -> None:
        super().__init__(widths, dropout=0.0)
        self.transposed = transposed
        """Whether the matrices are (inputs, outputs)."""

    def replace(self, module: nn.Module) -> None:
        """Let a module read its packed tensors with what the adapters add."""
        self.ran = True
        for part in self.widths:
            adapter: Any = getattr(self, part)
            name = part.partition(PACKED)[0]
            packed: Any = module._parameters[name]
            # An attribute of the instance comes before its parameters, which stay registered.
            module.__dict__[name] = add_packed(packed, adapter.a, adapter.b, adapter.factor, self.transposed)

    def restore(self, module: nn.Module) -> None:
        """Let a module read its own tensors again."""
        for part in self.widths:
            module.__dict__.pop(part.partition(PACKED)[0], None)


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
    """Add to the packed tensors of a module; a forward pre-hook."""
    module.lora.replace(module)


def _restore(module: Any, args: Any, output: Any) -> None:
    """Undo `_replace`; a forward hook that is called after an exception too."""
    module.lora.restore(module)


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


# -- adapting a model ----------------------------------------------------------------------------------------------


def adapt(model: nn.Module, asked: LoraConfig, theirs: Theirs | None = None) -> None:
    """Freeze a model and give the layers that are targets adapters; UserError if there are none.

    `theirs` are the names that layers have in Hugging Face's models, one for each matrix of a fused layer.
    """
    theirs = theirs or {}
    if has_adapters(model):
        raise UserError("the model has adapters already")
    _refuse_expressions(asked)
    layers, packed = dict(linear_layers(model)), dict(packed_modules(model))
    chosen = {path: _chosen(path, layer, asked.targets, theirs) for path, layer in layers.items()}
    # A name that linear layers have means them; packed tensors are named by what only they are called.
    others = tuple(each for each in asked.targets if not _finds(each, layers, theirs))
    inside = {
        path: [name for name in names if matches(others, f"{path}.{name}", path)] for path, names in packed.items()
    }
    named = [(path, f"{path}.{name}") for path, names in packed.items() for name in names]
    missing = [each for each in others if not any(matches((each,), name, path) for path, name in named)]
    if not any((*chosen.values(), *inside.values())) or (missing and not asked.start):  # peft's are of many families
        raise _no_target(missing, layers, theirs, named)
    kept = trained_whole(model, asked.save_modules, theirs)
    names = {path: {part: module_there(path, part, theirs) for part in parts} for path, parts in chosen.items()}
    adapted = [each for parts in names.values() for each in parts.values()]
    adapted += [f"{path}.{name}" for path, own in inside.items() for name in own]
    _refuse_patterns(asked, adapted)
    for path, parts in names.items():
        _refuse_layer(layers[path], path, parts, asked)
    for path, own in inside.items():
        _refuse_packed(model.get_submodule(path), path, own, asked)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in kept)
    for path, parts in names.items():
        if parts:
            _give(layers[path], parts, asked)
    for path, own in inside.items():
        if own:
            _give_packed(model.get_submodule(path), path, own, asked)


def adapted(model: nn.Module, config: Config) -> nn.Module:
    """Return a config's model with the adapters, or the frozen parameters, that the config asks for."""
    theirs = names_there(config.model)
    if config.lora.rank:
        adapt(model, config.lora, theirs)
    for pattern in config.train.freeze:
        frozen = [p for name, p in model.named_parameters() if _found(pattern, name, name_there(name, theirs))]
        if not frozen:
            shown = ", ".join(list(dict.fromkeys(name.rpartition(".")[0] for name, _ in model.named_parameters()))[:8])
            raise UserError(f"train.freeze: no parameter's name has {pattern!r} in it; there are {shown}, ...")
        for parameter in frozen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("train.freeze: nothing is left to train", hint="--lora 16 trains adapters beside it")
    return model


def _found(pattern: str, *names: str) -> bool:
    try:
        return any(re.search(pattern, name) for name in names)
    except re.error as error:
        raise UserError(f"train.freeze: {pattern!r} is not a regular expression: {error}") from None


def _refuse_expressions(asked: LoraConfig) -> None:
    for target in (*asked.targets, *asked.save_modules):
        try:
            re.compile(target)
        except re.error as error:
            raise UserError(f"lora: {target!r} is not a regular expression: {error}", hint="--lora 16:q_proj") from None


def _refuse_patterns(asked: LoraConfig, names: list[str]) -> None:
    """Raise UserError for a pattern that fits none of the layers with adapters, by peft's names; peft's own may."""
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = getattr(asked, key)
        if problem := pattern_problem(key, patterns):
            raise UserError(f"lora.{problem}")
        for each in patterns if not asked.start else ():
            if not any(fitting((each,), name) for name in names):
                ends = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
                raise UserError(f"lora.{key}: {each} fits no layer with adapters; there are {', '.join(ends[:20])}")


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers that may have adapters: linear ones, but neither the output layer nor one that is never called.

    torch's own attention reads the weights of its output layer, `NonDynamicallyQuantizableLinear`, without calling it.
    """
    output = getattr(model, "get_output_embeddings", lambda: None)()
    tied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for path, module in model.named_modules():
        linear = isinstance(module, nn.Linear) and not isinstance(
            module, nn.modules.linear.NonDynamicallyQuantizableLinear
        )
        if (linear or type(module).__name__ == "Conv1D") and module is not output:
            if id(module.weight) not in tied:
                yield path, module


def packed_modules(model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield each module that packs several matrices into one tensor, and the names of such tensors in it."""
    for path, module in model.named_modules():
        if not type(module).__module__.startswith("torch.nn."):  # a convolution's weight has three dimensions too
            names = [n for n, p in module.named_parameters(recurse=False) if p.dim() == 3 and min(p.shape) > 1]
            if names and path:
                yield path, names


def widths_of(layer: Any) -> dict[str, int]:
    """Return the outputs of each of the matrices that are fused in a layer, by name; of others, all outputs."""
    return dict(getattr(layer, "parts", None) or {WHOLE: matrix_of(layer).shape[0]})


def _finds(target: str, layers: Mapping[str, nn.Module], theirs: Theirs) -> bool:
    return any(_chosen(path, layer, (target,), theirs) for path, layer in layers.items())


def _chosen(path: str, layer: nn.Module, targets: tuple[str, ...], theirs: Theirs) -> list[str]:
    """Return the parts of a layer that are targets."""
    widths = widths_of(layer)
    names = theirs.get(path) or (path,) * len(widths)
    found = []
    for part, name in zip(widths, names, strict=True):
        own = path if part == WHOLE else f"{path.rpartition('.')[0]}.{part}"
        if matches(targets, name, own, path):
            found.append(part)
    return found


def _no_target(
    targets: Sequence[str],
    layers: Mapping[str, nn.Module],
    theirs: Mapping[str, Any],
    packed: Sequence[tuple[str, str]],
) -> UserError:
    names = [name for path in layers for name in theirs.get(path) or (path,)]
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    kinds += dict.fromkeys(".".join(name.split(".")[-2:]) for _, name in packed)
    if not kinds:
        return UserError("lora: the model has no linear layers that are called as modules")
    if not targets:
        return UserError(
            f"lora: the model has no linear layers beside packed tensors, {', '.join(kinds)}",
            hint=f"--lora 16:{kinds[0]}",
        )
    meant = closest(targets[0], kinds)
    return UserError(
        f"lora: no linear layer is called {', '.join(targets)}; there are {', '.join(kinds[:20])}",
        hint=f"--lora 16:{meant or kinds[0]}, or --lora 16 for all of them",
    )


def trained_whole(model: nn.Module, modules: Sequence[str], theirs: Theirs | None = None) -> set[str]:
    """Return the parameters of the modules that are trained whole beside adapters; UserError if one is not there."""
    found: set[str] = set()
    first = {each: name for name, others in tied_names(model).items() for each in others}
    for wanted in modules:
        here = {
            first.get(name, name)
            for name, _ in model.named_parameters(remove_duplicate=False)
            for module in ((theirs or {}).get(name.rpartition(".")[0], ()) or (name.rpartition(".")[0],))
            if re.search(rf"{re.escape(wanted)}(\.|$)", module)  # the end of a module's name, as in peft
        }
        if not here:
            paths = [path for path, module in model.named_modules() if next(module.parameters(), None) is not None]
            names = (name for path in paths for name in (theirs or {}).get(path, (path,)))
            known = dict.fromkeys(part for name in names for part in name.split(".")[-1:] if part)
            shown = [name for name in known if not name.isdigit()]
            raise UserError(
                f"lora.save_modules: there is no module {wanted}; there are {', '.join(shown[:20])}",
                hint=f"--set lora.save_modules={closest(wanted, shown) or 'lm_head'}",
            )
        for layer in sorted({name.rpartition(".")[0] for name in here}):
            if len(parts := (theirs or {}).get(layer, ())) > 1:
                ends = [part.rpartition(".")[2] for part in parts]
                raise UserError(
                    f"lora.save_modules: {wanted}: {', '.join(ends)} are one matrix here, which is not saved in parts",
                    hint="--set model.code=transformers, where each is a layer; or targets in place of save_modules",
                )
        found |= here
    return found


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Return the further names of parameters that have several, by their first."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: others for first, *others in names.values() if others}


def _refuse_layer(layer: nn.Module, path: str, parts: Mapping[str, str], asked: LoraConfig) -> None:
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


def _refuse_packed(module: nn.Module, path: str, names: list[str], asked: LoraConfig) -> None:
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


def _give_packed(module: nn.Module, path: str, names: list[str], asked: LoraConfig) -> None:
    transposed, found = is_transposed(module), {}
    for at, name in enumerate(names):
        packed = module.get_parameter(name)
        count, outputs, inputs = (packed.mT if transposed else packed).shape
        like = {"dtype": torch.float32 if asked.dtype == "fp32" else packed.dtype, "device": packed.device}
        part = f"{name}{PACKED}{len(names) - 1 - at}"
        known = count * rank_of(asked, f"{path}.{name}"), factor_of(asked, f"{path}.{name}")
        found[part] = outputs, Adapter(inputs, outputs, *known, like)
    widths = {part: outputs for part, (outputs, _) in found.items()}
    adapters = PackedAdapters(widths, transposed)
    for part, (_, adapter) in found.items():
        adapters.add_module(part, adapter)
    module.lora = adapters
    module.register_forward_pre_hook(_replace)
    module.register_forward_hook(_restore, always_call=True)


def _give(layer: nn.Module, parts: Mapping[str, str], asked: LoraConfig) -> None:
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


# -- names ---------------------------------------------------------------------------------------------------------


def names_there(model: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Return the modules that a built-in model's are in Hugging Face's; empty of other models, which have their own."""
    if model.external or hugging.known(model):
        return {}
    found = {
        mapping.ours.removesuffix(".weight"): tuple(name.removesuffix(".weight") for name in mapping.theirs)
        for mapping in hugging.mappings(model)
        if mapping.ours.endswith(".weight")
    }
    return found | ({"head": ("lm_head",)} if model.tie else {})


def name_there(ours: str, theirs: Theirs) -> str:
    """Return peft's name of a parameter of an adapter, or of one that is trained whole."""
    layer, part, which = split_name(ours)
    if not which:
        module, _, last = ours.rpartition(".")
        return f"{theirs.get(module, (module,))[0]}.{last}"
    return f"{module_there(layer, part, theirs)}.{_PEFT[which]}"


def module_there(layer: str, part: str, theirs: Theirs) -> str:
    """Return Hugging Face's name of a layer, or of one of the matrices that are fused in it; peft's of packed ones."""
    if layer in theirs:
        return theirs[layer][_PLACES.get(part, 0)]
    if PACKED in part:
        return layer + ".base_layer" * int(part.partition(PACKED)[2])
    return layer if part == WHOLE else f"{layer.rpartition('.')[0]}.{part}"


_PEFT = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
_PLACES = {"k": 1, "v": 2, "up": 1}
"""The places of matrices in a fused layer that are not its first."""


def has_adapters(model: nn.Module) -> bool:
    return any(isinstance(module, Adapters) for module in model.modules())


def idle_note(model: nn.Module) -> str:
    """Return which adapters have not run yet, in words; empty if all have."""
    found = {path: layer.lora.ran for path, layer, _, _ in adapters_of(model)}  # type: ignore[union-attr]
    idle = [path for path, ran in found.items() if not ran]
    if not idle:
        return ""
    shown = ", ".join(idle[:4]) + (", ..." if len(idle) > 4 else "")
    return (
        f"lora: {len(idle)} of {len(found)} layers with adapters were not called in the first step: {shown}; where a "
        "model reads a layer's weight without calling the layer, an adapter adds nothing: other targets leave it out"
    )


def unadapted(model: nn.Module) -> list[str]:
    """Return the names of the packed tensors that have no adapter."""
    adapted = {f"{path}.{part.partition(PACKED)[0]}" for path, _, part, _ in adapters_of(model) if PACKED in part}
    packed = (f"{path}.{name}" for path, names in packed_modules(model) for name in names)
    return [name for name in packed if name not in adapted]


def adapter_names(model: nn.Module) -> set[str]:
    """Return the names of all parameters of adapters."""
    return {
        f"{path}.lora.{part}.{name}"
        for path, _, part, adapter in adapters_of(model)
        for name, _ in adapter.named_parameters()
    }


def is_adapter(name: str) -> bool:
    """Return whether a parameter, by its name in a checkpoint, is of an adapter."""
    return bool(split_name(name)[2])


def split_name(name: str) -> tuple[str, str, str]:
    """Return the layer, the part and the parameter of an adapter's parameter; the last two are empty of others."""
    layer, _, rest = name.partition(".lora.")
    part, _, which = rest.partition(".")
    return layer, part, which


def adapters_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Adapter]]:
    """Yield (path of the layer, layer, part, adapter)."""
    for path, layer in model.named_modules():
        for part, adapter in layer.lora.named_children() if isinstance(getattr(layer, "lora", None), Adapters) else ():
            yield path, layer, part, adapter
