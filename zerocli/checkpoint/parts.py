"""Parts: what one rank holds of one saved tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerocli.checkpoint.boxes import Box, boxes
from zerocli.checkpoint.sources import Memory, Source
from zerocli.layout.shards import Span


@dataclass(eq=False)
class Part:
    """The boxes of one global tensor that this rank holds, and the array that contains them."""

    name: str
    shape: tuple[int, ...]
    source: Source
    boxes: Sequence[Box]
    owner: Any = None
    """The flat whose update changes the array, and whose move frees it; None if neither happens to it."""

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def nbytes(self) -> int:
        return sum(box.numel for box in self.boxes) * self.dtype.itemsize


def tensor_part(name: str, tensor: torch.Tensor) -> Part:
    """Return a part that is a whole tensor; it must not change afterwards."""
    flat = tensor.detach().contiguous().reshape(-1)
    return Part(name, tuple(tensor.shape), Memory(flat), list(boxes(tuple(tensor.shape), Span(0, flat.numel()))))
