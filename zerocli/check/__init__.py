"""`zerocli check` and `zerocli.check`: training unsharded and under every stage and placement, compared."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerocli.check.report import Report


class _Callable(ModuleType):
    """Makes the package callable: importing it binds the name `zerocli.check`, which is also the function's."""

    def __call__(self, *args: Any, **keywords: Any) -> Report:
        from zerocli.check.loop import check

        return check(*args, **keywords)


sys.modules[__name__].__class__ = _Callable
