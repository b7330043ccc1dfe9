"""Tiers by name: `name → dotted path`, imported only when opened, extensible by other packages.

A package offers its own tier with an entry point in the group `zerocli.tiers`, or with `register`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tiers.errors import TierError

if TYPE_CHECKING:
    from tiers.base import Tier

ENTRY_POINT_GROUP = "zerocli.tiers"
ALIASES: Mapping[str, str] = MappingProxyType({"cpu": "dram"})

_paths = {
    "hbm": "tiers.hbm:HbmTier",
    "dram": "tiers.dram:DramTier",
    "nvme": "tiers.nvme:NvmeTier",
    "null": "tiers.null:NullTier",
}

TIERS: Mapping[str, str] = MappingProxyType(_paths)
"""Read-only view of the tiers registered in this process; `available()` adds those that other packages offer."""


def register(name: str, dotted: str) -> None:
    """Make `name` open the class at `dotted` (`package.module:Class`); a name that is taken is refused."""
    taken = available()
    if name in ALIASES or taken.get(name, dotted) != dotted:
        raise ValueError(f"tier {name!r} is taken by {taken.get(ALIASES.get(name, name))}")
    _paths[name] = dotted


def available() -> dict[str, str]:
    """Return every available tier, as name → dotted path; nothing is imported."""
    offered = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
    return {**offered, **_paths}


def open_tier(name: str, **options: Any) -> Tier:
    """Return a new tier of that name (`cpu` means `dram`), made with `options`; its class is imported now."""
    known = available()
    dotted = known.get(ALIASES.get(name, name))
    if dotted is None:
        names = [*known, *ALIASES]
        close = get_close_matches(name, names, n=2, cutoff=0.5)
        meant = f"did you mean {' or '.join(close)}? " if close else ""
        raise TierError(
            f"there is no tier {name!r}; there are {', '.join(sorted(names))}",
            tier=name,
            hint=f"{meant}install the package that offers it (entry-point group {ENTRY_POINT_GROUP})",
        )
    try:
        found: type[Tier] = pkgutil.resolve_name(dotted)
    except (ImportError, AttributeError) as error:
        raise TierError(
            f"tier {name!r} could not be loaded from {dotted}: {error}",
            tier=name,
            hint=f"install or repair the package that offers {dotted.partition(':')[0].partition('.')[0]}",
        ) from error
    return found(**options)
