"""What the parts of one engine share: its device and ranks, the sizes of its buffers, and whom it reports to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zerocli.engine.comm import Collectives
from zerocli.engine.events import Events
from zerocli.engine.grouped import Shards
from zerocli.engine.streams import Waits
from zerocli.engine.tensor_parallel import TensorParallel
from zerocli.layout.flats import Sizing


@dataclass(frozen=True)
class Context:
    """Given to every part of an engine that issues work."""

    device: torch.device
    collectives: Collectives
    """Of the data-parallel ranks."""
    shards: Shards
    """Of the ranks over which states are partitioned: these, or a group of neighbours."""
    replicas: Collectives
    """Of the ranks that hold the same slices as this one."""
    tensor_parallel: TensorParallel
    waits: Waits
    events: Events
    sizing: Sizing
