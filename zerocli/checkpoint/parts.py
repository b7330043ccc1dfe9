"""Parts: what one rank holds of one saved tensor, in the form that torch.distributed.checkpoint (DCP) needs.

DCP asks an object for its write items, its chunks and its global size; it never sees a tensor. The planners here are
DCP's own, without traversing nested dictionaries and without the one place that unpickles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType

from zerocli.checkpoint.boxes import Box, boxes
from zerocli.checkpoint.sources import Memory, Source
from zerocli.garbage import paused
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
    _by_offsets: dict[tuple[int, ...], Box] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._by_offsets = {box.offsets: box for box in self.boxes}

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def nbytes(self) -> int:
        return sum(box.numel for box in self.boxes) * self.dtype.itemsize

    def box(self, index: MetadataIndex) -> Box:
        """Return the box that DCP's index names."""
        return self._by_offsets[tuple(index.offset or ())]

    def size(self) -> torch.Size:
        return torch.Size(self.shape)

    def __create_write_items__(self, fqn: str, part: Part) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        box = self.box(index)
        memory = torch.empty(box.numel, dtype=self.dtype)
        self.source.read(box.start, memory)()
        return memory.view(box.sizes)


def tensor_part(name: str, tensor: torch.Tensor) -> Part:
    """Return a part that is a whole tensor; it must not change afterwards."""
    flat = tensor.detach().contiguous().reshape(-1)
    return Part(name, tuple(tensor.shape), Memory(flat), list(boxes(tuple(tensor.shape), Span(0, flat.numel()))))


class SavePlanner(DefaultSavePlanner):
    """DCP's planner for parts; they are set as an attribute because DCP would traverse an argument.

    The plan is cached: the saves of a run differ only in their bytes, and planning holds the GIL.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True)
        self.parts: dict[str, Part] = {}
        self._layout: list[tuple[Any, ...]] = []
        self._plan = SavePlan([])
        self._plans: list[SavePlan] = []
        self._merged: tuple[list[SavePlan], Metadata] | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        layout = [(part.name, part.shape, part.dtype, part.boxes) for part in self.parts.values()]
        if layout != self._layout:
            items = [item for name, part in self.parts.items() for item in part.__create_write_items__(name, part)]
            self._layout, self._plan = layout, SavePlan(items)
        return self._plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if self._merged is None or all_plans != self._plans:
            self._plans, self._merged = all_plans, merged(all_plans)
        return self._merged


@paused()
def merged(all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Return the plans without the boxes that an earlier rank writes too, and what they write together.

    DCP's own merging took a minute for 145,000 boxes. It also checks that they tile their tensors; here
    `manifest.encode` does that.
    """
    entries: dict[str, TensorStorageMetadata] = {}
    seen: set[tuple[str, torch.Size | None]] = set()
    plans = []
    for plan in all_plans:
        items = []
        for item in plan.items:
            box, data = (item.index.fqn, item.index.offset), item.tensor_data
            assert data is not None, "a plan writes tensors only"
            if box in seen:
                continue
            seen.add(box)
            if item.index.fqn not in entries:
                entries[item.index.fqn] = TensorStorageMetadata(data.properties, data.size, [])
            entries[item.index.fqn].chunks.append(data.chunk)
            items.append(item)
        plans.append(SavePlan(items))
    return plans, Metadata(dict(entries))


class LoadPlanner(DefaultLoadPlanner):
    """DCP's planner for a flat dictionary of parts; it loads no bytes, so it unpickles none."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def part(self, item: ReadItem) -> Part:
        return self.state_dict[item.dest_index.fqn]

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError("a checkpoint holds tensors only")
