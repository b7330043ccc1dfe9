"""LoRA: which layers of a frozen model get adapters of low rank, and what the adapters are called here and in peft.

`adapters.py` has what an adapter is, `packed_adapters.py` those of matrices that are packed into one tensor. Parameters
of the model keep their names: weights are loaded and exported as without adapters.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from zerocli.config import Config, LoraConfig, ModelConfig
from zerocli.config.lora import fitting, matches, pattern_problem
from zerocli.config.schema import ALL_LINEAR
from zerocli.errors import UserError, closest
from zerocli.models import hugging
from zerocli.models.adapters import WHOLE, adapters_of, give, has_adapters, refuse_layer, widths_of
from zerocli.models.packed_adapters import give_to_tensors, module_in_peft, packed_modules, refuse_tensors, tensor_of

Theirs = Mapping[str, tuple[str, ...]]
"""The names that layers have in Hugging Face's models: one for each matrix of a fused layer."""


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
        refuse_layer(layers[path], path, parts, asked)
    for path, own in inside.items():
        refuse_tensors(model.get_submodule(path), path, own, asked)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in kept)
    for path, parts in names.items():
        if parts:
            give(layers[path], parts, asked)
    for path, own in inside.items():
        if own:
            give_to_tensors(model.get_submodule(path), path, own, asked)


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


def trained_whole(model: nn.Module, modules: Sequence[str], theirs: Theirs) -> set[str]:
    """Return the parameters of the modules that are trained whole beside adapters; UserError if one is not there."""
    found: set[str] = set()
    first = {each: name for name, others in tied_names(model).items() for each in others}
    for wanted in modules:
        here = {
            first.get(name, name)
            for name, _ in model.named_parameters(remove_duplicate=False)
            for module in (theirs.get(name.rpartition(".")[0], ()) or (name.rpartition(".")[0],))
            if re.search(rf"{re.escape(wanted)}(\.|$)", module)  # the end of a module's name, as in peft
        }
        if not here:
            paths = [path for path, module in model.named_modules() if next(module.parameters(), None) is not None]
            names = (name for path in paths for name in theirs.get(path, (path,)))
            known = dict.fromkeys(part for name in names for part in name.split(".")[-1:] if part)
            shown = [name for name in known if not name.isdigit()]
            raise UserError(
                f"lora.save_modules: there is no module {wanted}; there are {', '.join(shown[:20])}",
                hint=f"--set lora.save_modules={closest(wanted, shown) or 'lm_head'}",
            )
        for layer in sorted({name.rpartition(".")[0] for name in here}):
            if len(parts := theirs.get(layer, ())) > 1:
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
    if tensor_of(part):
        return module_in_peft(layer, part)
    return layer if part == WHOLE else f"{layer.rpartition('.')[0]}.{part}"


_PEFT = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
_PLACES = {"k": 1, "v": 2, "up": 1}
"""The places of matrices in a fused layer that are not its first."""


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
