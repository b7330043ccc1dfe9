"""Where bytes live: device memory, pinned host memory, NVMe; one interface, and transfers between them.

Importing this imports no torch; `Tier` and `Block` are in `tiers.base`, `Transfer` in `tiers.transfer`.
"""

from __future__ import annotations

from tiers.errors import TierError, TierFull
from tiers.registry import TIERS, open_tier, register

__all__ = ["TIERS", "TierError", "TierFull", "open_tier", "register"]
