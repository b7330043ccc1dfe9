"""Which modules of a model are units, and which unit has each parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from torch import nn

from zerocli.engine.units.unit import Unit
from zerocli.layout.recompute import Recompute, read_recompute

UnitChoice = Callable[[nn.Module], bool] | type[nn.Module] | Sequence[nn.Module] | None


def chooses(choice: Callable[[nn.Module], bool] | type[nn.Module] | Sequence[nn.Module]) -> Callable[[nn.Module], bool]:
    """Return a predicate on modules from a class, a predicate, or a list of modules."""
    if isinstance(choice, type):
        return lambda module: isinstance(module, choice)
    if callable(choice):
        return choice
    ids = {id(module) for module in choice}
    return lambda module: id(module) in ids


def recomputed_units(units: Sequence[Unit], choice: bool | int | str | Recompute | UnitChoice) -> dict[Unit, bool]:
    """Return the units that are recomputed, each with whether selectively: those chosen, or the first repeated blocks.

    Repeated blocks are units that share their class with another unit; if there are none, the members of a list of
    modules (a model of one block), and else all units but the rest. An embedding has next to no activations to save.
    Layers after the last block are needed again as soon as backward begins, so recomputing them would only double their
    cost. For the same reason a number of blocks means the first ones: backward needs them last.
    """
    inner = [unit for unit in units if unit.index > 0]
    asked = read_recompute(choice)
    if isinstance(asked, str):
        raise ValueError(f"recompute={choice!r}: pass True, False, 'selective', a number of blocks, or the units")
    if isinstance(asked, Recompute):
        blocks = repeated_units(units) or inner
        asked = asked.of(len(blocks))
        return {unit: at >= asked.whole for at, unit in enumerate(blocks[: asked.count])}
    chosen = [unit for unit in inner if chooses(asked)(unit.module)]
    if not chosen:
        raise ValueError(f"no unit of the model matches recompute={choice!r}")
    return dict.fromkeys(chosen, False)


def repeated_units(units: Sequence[Unit]) -> list[Unit]:
    """Return the repeated blocks: units that share their class with another; else members of a list of modules."""
    return of_one_class(units) or [unit for unit in units if unit.name.rpartition(".")[2].isdigit()]


def of_one_class(units: Sequence[Unit]) -> list[Unit]:
    """Return the units, other than the rest, that share their class with another unit."""
    classes = Counter(type(unit.module) for unit in units if unit.index > 0)
    return [unit for unit in units if unit.index > 0 and classes[type(unit.module)] > 1]


def find_units(model: nn.Module, choice: UnitChoice = None) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of the modules that become units, in the model's order; the rest is the model itself.

    By default these are the modules that the model's own `unit_modules()` returns, as that of a built-in model does;
    without it repeated blocks: two or more children of one class in a ModuleList, ModuleDict or Sequential. `choice`
    selects others: a class, a predicate, or a list of modules. The rest comes first, named "".
    """
    chosen: list[tuple[str, nn.Module]] = [("", model)]
    if choice is None and callable(own := getattr(model, "unit_modules", None)):
        choice = own()
    if choice is None:
        return [*chosen, *repeated_blocks(model)]
    wanted = chooses(choice)
    for name, module in model.named_modules():
        if module is model or getattr(module, "read_by_its_layer", False):
            continue
        if wanted(module) and any(True for _ in module.parameters()):
            chosen.append((name, module))
    if len(chosen) == 1:
        raise ValueError(f"no module of {type(model).__name__} matches units={choice!r}")
    return chosen


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of two or more children of one class in a ModuleList, ModuleDict or Sequential."""
    found: list[tuple[str, nn.Module]] = []
    _walk_blocks(model, "", found)
    return found


def _walk_blocks(module: nn.Module, prefix: str, chosen: list[tuple[str, nn.Module]]) -> None:
    children = [(n, c) for n, c in module.named_children() if any(True for _ in c.parameters())]
    classes = [type(child) for _, child in children]
    container = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    for name, child in children:
        path = f"{prefix}.{name}" if prefix else name
        listed = isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        if container and classes.count(type(child)) >= 2 and not listed:
            if not any(child is other for _, other in chosen):  # a block may be in several places
                chosen.append((path, child))
        else:
            _walk_blocks(child, path, chosen)


def claim_parameters(
    model: nn.Module, found: Sequence[tuple[str, nn.Module]]
) -> list[tuple[Unit, list[tuple[str, nn.Parameter]]]]:
    """Assign each parameter to the innermost unit that holds it; one held by several units goes to the rest."""
    names = {id(p): name for name, p in model.named_parameters()}
    holder: dict[int, int] = {}
    inner_first = sorted(range(1, len(found)), key=lambda i: -found[i][0].count("."))
    for i in inner_first:
        for p in found[i][1].parameters():
            before = holder.get(id(p))
            if before is None:
                holder[id(p)] = i
            elif not _inside(found[before][1], found[i][1]):
                holder[id(p)] = 0
    # A weight tied between a unit and a module outside all units is needed by both, so it goes to the rest.
    for module in outside(model, {id(unit) for name, unit in found if name}):
        for p in module.parameters(recurse=False):
            holder[id(p)] = 0
    claimed: list[tuple[Unit, list[tuple[str, nn.Parameter]]]] = []
    for i, (name, module) in enumerate(found):
        mine = [(names[id(p)], p) for p in model.parameters() if holder.get(id(p), 0) == i]
        claimed.append((Unit(i, name, module), mine))
    return claimed


def outside(module: nn.Module, units: set[int]) -> Iterator[nn.Module]:
    """Yield the module and its submodules that are not inside one of the units (given by id)."""
    seen: set[int] = set()
    left = [module]
    while left:
        here = left.pop()
        if id(here) not in seen and id(here) not in units:
            seen.add(id(here))
            yield here
            left.extend(here.children())


def _inside(inner: nn.Module, outer: nn.Module) -> bool:
    return any(module is inner for module in outer.modules())
