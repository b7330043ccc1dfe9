"""Activation checkpoints: of each block that is recomputed only its input is kept, on the tier that the placement says.

The seam is torch's own non-reentrant checkpointing: it saves a block's inputs through the saved-tensor hooks that are
active around it. Ours take those that were computed (not masks, positions or other things that blocks share), hand them
to a `Stack` (offload/stack.py), and bring them back in reverse order, one ahead of the block that backward is in.

With tensor parallelism every rank has the same input (Pa of the paper): each keeps its part of it, and the parts are
gathered just before the recomputation.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload import HBM
from offload.stack import Saved, Stack
from tiers.transfer import Transfer
from zerocli.engine.comm import Collectives, Pending
from zerocli.engine.streams import SideStream, Waits
from zerocli.layout.shards import Span


@dataclass(eq=False)
class Arrival:
    """A checkpoint on its way back: first this rank's part, then everyone's."""

    full: torch.Tensor
    own: torch.Tensor
    transfer: Transfer
    gather: Pending | None = None


class Checkpoint:
    """What autograd holds in place of a block's input."""

    def __init__(self, saved: Saved, tensor: torch.Tensor, total: int, own: Span) -> None:
        self.saved, self.total, self.own = saved, total, own
        self.size, self.stride, self.numel, self.dtype = tensor.size(), tensor.stride(), tensor.numel(), tensor.dtype
        self.arrival: Arrival | None = None

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.as_strided(self.size, self.stride)


class Activations:
    """Keeps the inputs of recomputed blocks; `group` is the ranks that hold equal ones (one, without partitioning)."""

    def __init__(self, stack: Stack, group: Collectives, device: torch.device, waits: Waits) -> None:
        self.stack = stack
        self._group, self._device, self._waits = group, device, waits
        self._side = SideStream(device)
        self._order: list[weakref.ref[Checkpoint]] = []
        """Those alive, in the order of forward."""
        self._loaded: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._notes: dict[str, str] = {}
        self.peak_nbytes = 0
        """The most bytes of checkpoints that were ever on the device."""

    def takes(self, name: str, leaves: Sequence[Any]) -> bool:
        """Whether the unit `name` can be recomputed: its input is tensors, if in lists or dicts; else says so once."""
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return True
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves})) or "nothing"
        self._notes.setdefault(name, f"{name}: its input is no tensor ({kinds}), so its activations are kept")
        return False

    @property
    def notes(self) -> list[str]:
        """What was decided on the way, a line each."""
        return [*self._notes.values(), *self.stack.notes]

    def holdings(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield (category, name, tensor) of the arena of checkpoints on the device."""
        for memory in self.stack.near():
            yield "activations", "checkpoints of blocks", memory

    @property
    def nbytes(self) -> int:
        """Bytes of checkpoints on the device: the arena, and what is on its way out or was brought back."""
        loaded = sum(storage.nbytes() for storage in self._loaded)
        return self.stack.nbytes().get(HBM, 0) + self.stack.in_flight_nbytes + loaded

    @contextlib.contextmanager
    def keeping(self, name: str, leaves: Sequence[Any]) -> Iterator[None]:
        """While the body runs the checkpointed unit `name` on `leaves`, those that were computed go to the stack."""
        inputs = _versions(leaves)
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        outer_pack, outer_unpack = outer if outer is not None else (None, None)

        def pack(tensor: torch.Tensor) -> Any:
            if _place(tensor) in inputs:
                return self._keep(tensor, name)
            return tensor if outer_pack is None else outer_pack(tensor)

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, Checkpoint):
                return self._bring_back(packed)
            return packed if outer_unpack is None else outer_unpack(packed)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        if inputs != _versions(leaves):
            raise RuntimeError(f"{name} changes its input in place, so it cannot be recomputed from it")

    def abandon(self) -> None:
        """After an error: nothing may be on its way into memory that is given up."""
        for checkpoint in self._alive():
            if checkpoint.arrival is not None:
                with contextlib.suppress(Exception):
                    self._wait(checkpoint.arrival)
                checkpoint.arrival = None
        self._order.clear()

    # -- out -------------------------------------------------------------------------------------------------------

    def _keep(self, tensor: torch.Tensor, name: str) -> Checkpoint:
        flat = tensor.detach().as_strided((tensor.numel(),), (1,))
        total = flat.numel() + -flat.numel() % self._group.world
        each = total // self._group.world
        own = Span(self._group.rank * each, (self._group.rank + 1) * each)
        part = flat
        if self._group.world > 1:  # a copy, so that a part on its way out does not hold the whole
            part = flat.new_zeros(own.numel)
            mine = flat[own.start : min(own.stop, flat.numel())]
            part[: mine.numel()].copy_(mine)
        with self._waits.waiting("transfers"):  # for a tier that is behind
            saved = self.stack.push(part, f"the activations of {name}")
        checkpoint = Checkpoint(saved, tensor, total, own)
        self._order = [ref for ref in self._order if ref() is not None]
        self._order.append(weakref.ref(checkpoint))
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        return checkpoint

    # -- and back --------------------------------------------------------------------------------------------------

    def _bring_back(self, checkpoint: Checkpoint) -> torch.Tensor:
        """Return a block's input, and start bringing back that of the block which backward comes to next."""
        flat = self._ready(checkpoint)
        if flat is None:
            arrival = checkpoint.arrival or self._start(checkpoint)
            checkpoint.arrival = None
            with self._waits.waiting("transfers"):
                self._wait(arrival)
            flat = arrival.full
        alive = self._alive()
        at = next((i for i, other in enumerate(alive) if other is checkpoint), 0)
        if at > 0 and alive[at - 1].arrival is None and self._ready(alive[at - 1]) is None:
            alive[at - 1].arrival = self._start(alive[at - 1])
        return checkpoint.shaped(flat[: checkpoint.numel])

    def _alive(self) -> list[Checkpoint]:
        return [checkpoint for ref in self._order if (checkpoint := ref()) is not None]

    def _ready(self, checkpoint: Checkpoint) -> torch.Tensor | None:
        """Return the whole input where it is on the device anyway: a part never is, whichever rank is faster."""
        return checkpoint.saved.held() if self._group.world == 1 else None

    def _start(self, checkpoint: Checkpoint) -> Arrival:
        slot = checkpoint.saved.slot
        checkpoint.saved.let_go()  # a part that was still held for its writing serves nobody any more
        full = torch.empty(checkpoint.total, dtype=checkpoint.dtype, device=self._device)
        self._loaded.add(full.untyped_storage())
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        own = full[checkpoint.own.start : checkpoint.own.stop]
        with self._side.run():
            if slot.near:
                held = checkpoint.saved.held()
                assert held is not None
                own.copy_(held)
                arrival = Arrival(full, own, Transfer.finished(own.nbytes))
            else:
                arrival = Arrival(full, own, self.stack.fetch(checkpoint.saved, own))
        if slot.tier.addressable:  # only streams wait; a disk would hold up the host before the block is issued
            self._gather(arrival)
        return arrival

    def _gather(self, arrival: Arrival) -> None:
        with self._side.run():
            arrival.transfer.wait()
            arrival.gather = self._group.all_gather(arrival.full, arrival.own)

    def _wait(self, arrival: Arrival) -> None:
        if arrival.gather is None:
            self._gather(arrival)
        assert arrival.gather is not None
        arrival.gather.wait()


_Place = tuple[int, torch.Size, tuple[int, ...]]


def _place(tensor: torch.Tensor) -> _Place:
    return tensor.data_ptr(), tensor.size(), tensor.stride()


def _versions(leaves: Sequence[Any]) -> dict[_Place, int]:
    """Return how often each input that was computed has been changed in place, by where it lies."""
    return {_place(leaf): leaf._version for leaf in leaves if _is_computed(leaf)}


def _is_computed(leaf: Any) -> bool:
    """Whether an input is a block's own and not shared with others: the result of a computation, dense in memory."""
    if not isinstance(leaf, torch.Tensor) or leaf.grad_fn is None or not leaf.numel():
        return False
    return leaf.is_floating_point() and _is_dense(leaf)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie one after another without a gap, in whichever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
