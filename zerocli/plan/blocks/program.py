"""What a traced model allocates, keeps and computes in a step, block by block, as data. Needs no torch.

A step is a row of parts: what comes before the first block, then each block and what comes between it and the next one
(usually nothing), and last the loss. A part is what one call allocates, saves for backward and frees, in order, and the
same for its backward. Equal blocks have the same parts, so a deep model is few parts and their order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerocli.plan.blocks.shape import Parameter, Unit
from zerocli.plan.blocks.work import Work

FORMAT = 4
"""Changes with what a program consists of, or with how it is traced."""
ALLOCATE, FREE, SAVE, GRADIENT, ENTER = "allocate", "free", "save", "gradient", "enter"
Event = tuple[str, int, int, int]
"""One of
(ALLOCATE, storage, bytes, 1 if a selective block keeps it),
(FREE, parts back, storage, 0), where Python or a node of autograd drops the last reference to it,
(SAVE, parts back, storage, 0), which keeps it for the part's backward,
(GRADIENT, parts back, storage, unit), which hands the gradient of a parameter of that unit over (`OWN`: the block's),
(ENTER, unit, 0, 0), the call of a unit that is not recomputed as a block.

A storage has a number in the part that allocated it. `parts back` is how far that part is behind this one in forward's
order: 0 for its own, negative for one whose backward comes earlier, and `FIRST` or `LAST` for the ends of all.
"""
FIRST = 1 << 20
LAST = -FIRST
OWN = -1
Place = tuple[int, int]
"""(parts back, storage)."""
WORKS = ("computed", "computed_back", "repeated", "cheap")
"""The fields of a part that are work."""


@dataclass(frozen=True)
class Part:
    """What one call and its backward allocate and compute."""

    forward: tuple[Event, ...] = ()
    backward: tuple[Event, ...] = ()
    input: Place | None = None
    output: Place | None = None
    arguments: tuple[Place, ...] = ()
    """The other tensors of its call, which a recomputed block holds until its backward."""
    copied_nbytes: int = 0
    """Bytes of those that have a gradient, which a recomputed block keeps as it does its input; the first that has one.
    """
    long_lived: tuple[int, ...] = ()
    """Storages that blocks far behind use too: they stay to the end of the pass."""
    gradient: Place | None = None
    """The gradient of the input, at the end of backward; None if it has none."""
    computed: Work = Work()
    computed_back: Work = Work()
    repeated: Work = Work()
    """Of forward, what runs again if the block is recomputed: all up to the last operation that saves a tensor."""
    cheap: Work = Work()
    """The part of that which runs again if the block is recomputed selectively."""

    @property
    def num_saves(self) -> int:
        return sum(event[0] == SAVE for event in self.forward)

    def resized(self, other: Part, factor: float) -> Part | None:
        """Return the part with each size moved along from this one's to the other's; None if the two differ in kind."""
        forward = _resized(self.forward, other.forward, factor)
        backward = _resized(self.backward, other.backward, factor)
        if forward is None or backward is None:
            return None
        counts = {
            name: getattr(self, name) + (getattr(other, name) + getattr(self, name).times(-1)).times(factor)
            for name in WORKS
        }
        copied_nbytes = round(self.copied_nbytes + (other.copied_nbytes - self.copied_nbytes) * factor)
        return dataclasses.replace(self, forward=forward, backward=backward, copied_nbytes=copied_nbytes, **counts)


def _resized(one: Sequence[Event], other: Sequence[Event], factor: float) -> tuple[Event, ...] | None:
    if len(one) != len(other) or any(a[:2] != b[:2] or a[3] != b[3] for a, b in zip(one, other, strict=True)):
        return None
    return tuple(
        (a[0], a[1], round(a[2] + (b[2] - a[2]) * factor) if a[0] == ALLOCATE else a[2], a[3])
        for a, b in zip(one, other, strict=True)
    )


@dataclass(frozen=True)
class Program:
    """A traced model: its units, and the parts of a micro-step of one batch."""

    name: str
    units: tuple[Unit, ...]
    """In the engine's order; of equal ones each is the same object."""
    buffers: int
    """Bytes of the model's own buffers."""
    parts: tuple[Part, ...]
    """The different ones; the first comes before the blocks, the last after them."""
    blocks: tuple[tuple[int, int, int], ...]
    """Of each call of a block: its unit, its part, and the part between it and the next block."""
    repeated: int
    """Blocks that the engine counts; others are called if some have no part in the loss, or are called again."""

    def calls(self) -> Iterator[Part]:
        """Yield the parts of a micro-step in order."""
        yield self.parts[0]
        for at, (_, block, between) in enumerate(self.blocks):
            yield self.parts[block]
            if at + 1 < len(self.blocks):
                yield self.parts[between]
        yield self.parts[-1]

    @property
    def input_nbytes(self) -> int:
        """The bytes of a block's input; of the largest where they differ."""
        found = [0]
        for number, part in enumerate(self.parts):
            if part.input is not None:
                back, storage = part.input
                made = self.parts[0 if back == FIRST else number - back].forward
                found += [event[2] for event in made if event[:2] == (ALLOCATE, storage)]
        return max(found)

    def resized(self, other: Program, factor: float) -> Program | None:
        """Return the program of another batch: sizes moved along from this one's to the other's, `factor` of the way.

        None if the two do not allocate alike, as where a model chooses another way for a larger batch.
        """
        if self.blocks != other.blocks or len(self.parts) != len(other.parts):
            return None
        parts = [one.resized(two, factor) for one, two in zip(self.parts, other.parts, strict=True)]
        if any(part is None for part in parts):
            return None
        return dataclasses.replace(self, parts=tuple(part for part in parts if part is not None))

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON-able values; equal units once."""
        known: dict[Unit, int] = {}
        order = [known.setdefault(unit, len(known)) for unit in self.units]
        found = dataclasses.asdict(dataclasses.replace(self, units=()))
        return found | {"units": [dataclasses.asdict(unit) for unit in known], "order": order}

    @staticmethod
    def of(values: Mapping[str, Any]) -> Program:
        """Return the program that `as_dict` wrote; KeyError, TypeError or ValueError for anything else."""
        values = _with_tuples(values)
        units = [Unit(each["kind"], tuple(Parameter(**p) for p in each["parameters"])) for each in values["units"]]
        parts = tuple(Part(**each | {name: Work(**each[name]) for name in WORKS}) for each in values["parts"])
        rest = {name: value for name, value in values.items() if name != "order"}
        return Program(**rest | {"units": tuple(units[at] for at in values["order"]), "parts": parts})


def _with_tuples(value: Any) -> Any:
    """Return a JSON value with tuples in place of lists."""
    if isinstance(value, list | tuple):
        return tuple(map(_with_tuples, value))
    return {name: _with_tuples(each) for name, each in value.items()} if isinstance(value, dict) else value
