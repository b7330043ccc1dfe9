"""Update counts: like torch, counts the updates per parameter, and skips a parameter that got no gradient.

Parameters with the same history share a count. Usually that is all of them: one number on the device, which the host
never reads. If some get no gradient on any rank in a step, their count is not incremented, and from then on a flat is
updated in segments of equal count.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import torch

from zerocli.layout.shards import Layout, Span

Part = tuple[Span, int, int]
"""A span to update, its group and its class of counts."""


class Counts:
    """The number of updates of every parameter, by name; `values` holds one number for each class of equal history."""

    def __init__(self, device: torch.device, split: Callable[[int, int], None] = lambda old, new: None) -> None:
        self.values = torch.zeros(1, device=device)
        """By class (fp32, as torch's fused kernels need it). A new tensor each step: an update may read the old one."""
        self._class_of: dict[str, int] = {}
        self.version = 0
        """Incremented when a parameter's class changes."""
        self._split = split
        """Called with a class and the new one that some of its parameters move to."""

    def add(self, names: Iterable[str]) -> None:
        """Start counting these parameters from 0; those already counted keep their count."""
        new = [name for name in names if name not in self._class_of]
        if not new:
            return
        # Before the first update every class is at 0, so class 0 serves.
        at = 0 if not self._class_of else self._new_class(None)
        self._class_of.update(dict.fromkeys(new, at))
        self.version += 1

    def _new_class(self, source: int | None) -> int:
        new = self.values.numel()
        value = self.values.new_zeros(1) if source is None else self.values[source : source + 1]
        self.values = torch.cat([self.values, value])
        if source is not None:
            self._split(source, new)
        return new

    def class_of(self, name: str) -> int:
        return self._class_of[name]

    def by_name(self) -> dict[str, int]:
        """Return the count of every parameter; waits for the device."""
        values = [int(value) for value in self.values.tolist()]
        return {name: values[at] for name, at in self._class_of.items()}

    def adopt(self, counts: Mapping[str, int], alike: Callable[[str], Hashable] = lambda name: None) -> None:
        """Set the counts of these parameters; the others keep theirs.

        Parameters with the same count and the same `alike` key share a class.
        """
        merged = {name: (count, None) for name, count in self.by_name().items()}
        merged |= {name: (int(count), alike(name)) for name, count in counts.items()}  # type: ignore[misc]
        places: dict[Hashable, int] = {}
        self.version += 1
        self._class_of = {name: places.setdefault(key, len(places)) for name, key in merged.items()}
        self.values = torch.tensor([float(key[0]) for key in places] or [0.0], device=self.values.device)  # type: ignore[index]

    def advance(self, inactive: frozenset[str], counted: torch.Tensor) -> None:
        """Count an update (`counted` is 1, or 0 for a skipped step) of all parameters except the inactive ones."""
        if not inactive:
            self.values = self.values + counted
            return
        members: dict[int, list[str]] = {}
        for name, at in self._class_of.items():
            members.setdefault(at, []).append(name)
        active = [1.0] * self.values.numel()
        for at, names in members.items():
            behind = [name for name in names if name in inactive]
            if len(behind) == len(names):
                active[at] = 0.0
            elif behind:
                new = self._new_class(at)
                self._class_of.update(dict.fromkeys(behind, new))
                self.version += 1
                active.append(0.0)
        mask = torch.tensor(active).to(self.values.device, non_blocking=True)
        self.values = self.values + mask * counted

    def segments(self, layout: Layout, inactive: frozenset[str]) -> list[tuple[Span, int]]:
        """Return (span, class) of the parts of a flat to update, in order; neighbours of the same class are merged.

        Each parameter's part extends to the next parameter, so that boundaries are multiples of PARAM_ALIGN.
        """
        found: list[tuple[Span, int]] = []
        stops = [*(entry.offset for entry in layout.entries[1:]), layout.total]
        for entry, stop in zip(layout.entries, stops, strict=True):
            if entry.name in inactive:
                continue
            at = self._class_of[entry.name]
            if found and found[-1][1] == at and found[-1][0].stop == entry.offset:
                found[-1] = (Span(found[-1][0].start, stop), at)
            else:
                found.append((Span(entry.offset, stop), at))
        return found


def within(parts: Sequence[Part], chunk: Span) -> tuple[Part, ...]:
    """Return what a chunk has of these parts, relative to the chunk's start."""
    cut = [(span.intersect(chunk).shifted(-chunk.start), group, at) for span, group, at in parts]
    return tuple(part for part in cut if part[0].numel)
