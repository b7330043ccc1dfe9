"""A deep model traced as shallow ones: equal blocks keep equal bytes, so two depths give those of every depth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from zerocli.plan.time.compute import Work

KEPT = 2
"""Blocks of each kind that stay: with two, a unit is gathered and reduced while another one computes."""
ROUNDED = 512
"""Bytes to which a GPU's allocator rounds."""


@dataclass(frozen=True)
class Measured:
    """What a traced step needs beyond what the engine holds between steps."""

    peak: int
    forward: int
    """At the end of forward: what is kept for backward."""
    work: tuple[Work, Work, Work]
    """Of forward, of backward, and of recomputation."""


def extrapolate(make: Callable[[], nn.Module], measure: Callable[[nn.Module], Measured]) -> Measured:
    """Return the bytes of the whole model, from shallow ones: `KEPT` blocks of each kind, then one more of one kind.

    The peak is never below that at full depth: a further block adds at most what it adds to the peak or to the end of
    forward, whichever is more, since the moment of the peak may be another one in a deeper model. The arena of
    checkpoints is rounded as a whole, so it may add `ROUNDED` bytes more than in the shallow model.
    """
    left = {kind: number - KEPT for kind, number in kinds(make()).items() if number > KEPT + 1}
    base = measure(shallow(make(), dict.fromkeys(left, KEPT)))
    total, forward, work = base.peak, base.forward, base.work
    for kind, number in left.items():
        deeper = measure(shallow(make(), dict.fromkeys(left, KEPT) | {kind: KEPT + 1}))
        total += number * (max(deeper.peak - base.peak, deeper.forward - base.forward, 0) + ROUNDED)
        forward += number * (deeper.forward - base.forward)
        added = [(more + less.times(-1)).times(number) for more, less in zip(deeper.work, base.work, strict=True)]
        work = work[0] + added[0], work[1] + added[1], work[2] + added[2]
    return Measured(total, forward, work)


def kinds(model: nn.Module) -> Counter[Any]:
    """Return the number of blocks of each kind: equal classes with equal parameters, in one list of modules."""
    return Counter(kind for name, blocks in _lists(model) for kind in _kinds(name, blocks))


def shallow(model: nn.Module, keep: dict[Any, int]) -> nn.Module:
    """Return the model with only the first `keep[kind]` blocks of each of these kinds; it is changed in place."""
    for name, blocks in list(_lists(model)):
        seen: Counter[Any] = Counter()
        kept = []
        for kind, block in zip(_kinds(name, blocks), blocks, strict=True):
            seen[kind] += 1
            if seen[kind] <= keep.get(kind, len(blocks)):
                kept.append(block)
        if len(kept) < len(blocks):
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, nn.ModuleList(kept))
    return model


def _lists(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    """Yield the outermost lists of modules: those inside a block belong to it."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield f"{prefix}{name}", child
        else:
            yield from _lists(child, f"{prefix}{name}.")


def _kinds(name: str, blocks: nn.ModuleList) -> list[Any]:
    return [(name, type(b), tuple((n, p.shape, p.dtype) for n, p in b.named_parameters())) for b in blocks]
