"""The plan: every byte that a training run needs, on every tier, before anything is allocated. Needs no torch.

    zerocli.plan("llama3-8b", stage=3, offload="cpu", ranks=8)

returns a `Plan`: rows of (category, tier, bytes, formula), the device's peaks by phase and the moment of the highest.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerocli.plan.rows import Plan


def plan(model: Any, **settings: Any) -> Plan:
    """Return the plan of a model: a config's name or path, a count (`7.5B`), or a `Shape`.

    `settings` are fields of `Setup` (stage, offload, ranks, tp, batch, seq, precision, recompute, ...), named as
    `zerocli.shard` has them; others come from the config. Raises `zerocli.errors.UserError` for an impossible setup.
    """
    from zerocli.plan.blocks.inputs import read_source
    from zerocli.plan.blocks.shape import Shape
    from zerocli.plan.models.counted import Counted
    from zerocli.plan.models.formula import Formula
    from zerocli.plan.setup import Setup, setup_of

    if isinstance(model, Shape):
        return Formula(model).plan(Setup(**settings))
    source = read_source(
        str(model), (), {f"train.{name}": settings.get(name) for name in ("batch", "seq", "precision")}
    )
    setup = setup_of(source.config, **settings)
    if source.factory:
        from zerocli.plan.blocks.factory import count_both

        return Counted(count_both(source.factory)[0]).plan(setup)
    if source.shape is None:
        return Counted(source.count).plan(setup)
    lora = source.config.lora
    return Formula(source.shape.adapted(lora) if lora.rank else source.shape).plan(setup)


class _Callable(ModuleType):
    """Makes the package callable: importing it binds the name `zerocli.plan`, which is also the function's."""

    def __call__(self, model: Any, **settings: Any) -> Plan:
        return plan(model, **settings)


sys.modules[__name__].__class__ = _Callable
