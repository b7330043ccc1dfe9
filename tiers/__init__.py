"""Where bytes live: device memory, pinned host memory, NVMe; one interface, and transfers between them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiers.base import Block as Block
    from tiers.base import Tier as Tier
    from tiers.errors import TierError as TierError
    from tiers.errors import TierFull as TierFull
    from tiers.registry import TIERS as TIERS
    from tiers.registry import open_tier as open_tier
    from tiers.registry import register as register
    from tiers.transfer import Transfer as Transfer

_HOMES = {
    "Block": "tiers.base",
    "Tier": "tiers.base",
    "TierError": "tiers.errors",
    "TierFull": "tiers.errors",
    "TIERS": "tiers.registry",
    "open_tier": "tiers.registry",
    "register": "tiers.registry",
    "Transfer": "tiers.transfer",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    # Imported on first use, so that reading the registry does not import torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'tiers' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
