"""Activation checkpoints: only the input of each recomputed block is kept, on the tier that the placement says.

Torch's non-reentrant checkpointing saves a block's inputs through the active saved-tensor hooks. Our hooks take the
computed inputs (not masks, positions or other tensors without a gradient) and push them to a `Stack`
(offload/stack.py). Backward fetches them in reverse order, prefetching one block ahead. An input of several blocks is
kept once: such as an encoder's output, which each block of a decoder takes.

With tensor parallelism every rank has the same input (Pa of the ZeRO paper): each rank keeps a part of it, and the
parts are all-gathered just before the recomputation.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from offload.placement import ACTIVATIONS, HBM
from offload.stack import Saved, Stack
from tiers.transfer import Transfer
from zerocli.engine.comm import Collectives, Pending
from zerocli.engine.streams import SideStream
from zerocli.errors import Refused
from zerocli.layout.shards import Span

if TYPE_CHECKING:
    from zerocli.engine.engine import Engine


@dataclass(eq=False)
class Arrival:
    """A checkpoint being fetched: first this rank's part, then the all-gather of all parts."""

    full: torch.Tensor
    own: torch.Tensor
    transfer: Transfer
    gather: Pending | None = None


class Checkpoint:
    """The object that autograd saves in place of a block's input."""

    def __init__(self, saved: Saved, tensor: torch.Tensor, total: int, own: Span) -> None:
        self.saved, self.total, self.own = saved, total, own
        self.size, self.stride, self.numel, self.dtype = tensor.size(), tensor.stride(), tensor.numel(), tensor.dtype
        self.arrival: Arrival | None = None
        self.is_shared = False
        """Whether several blocks have this input."""
        self.fetched: torch.Tensor | None = None
        """A shared input that one block of backward has fetched, for the others."""


class Activations:
    """Keeps the inputs of at most `most` recomputed blocks at a time, on the tiers of the placement."""

    def __init__(self, engine: Engine, most: int) -> None:
        tiers = engine.tiers
        about = (engine.placement.of(ACTIVATIONS), most, tiers.traffic, tiers.verifier)
        self.stack = Stack(lambda name: tiers.open(name, ACTIVATIONS), *about)
        self._device, self._waits, self._side = engine.device, engine.waits, SideStream(engine.device)
        # Tensor-parallel ranks have equal checkpoints, so each keeps only a part of them by default.
        parted = engine.settings.partition_activations
        self._group = engine.tensor_parallel if parted else Collectives.alone(engine.device)
        self._order: list[weakref.ref[Checkpoint]] = []
        """Live checkpoints, in forward order."""
        self._kept: dict[int, tuple[weakref.ref[torch.Tensor], int, weakref.ref[Checkpoint]]] = {}
        """Inputs that were kept: the tensor and its version, by the tensor's id."""
        self._loaded: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._notes: dict[str, str] = {}
        self.peak_nbytes = 0
        """Peak bytes of checkpoints on the device."""

    def takes(self, name: str, leaves: Sequence[Any]) -> bool:
        """Whether the unit `name` can be recomputed: its input has a tensor, maybe nested; if not, add one note."""
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return True
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves})) or "nothing"
        self._notes.setdefault(name, f"{name}: its input is no tensor ({kinds}), so its activations are kept")
        return False

    @property
    def notes(self) -> list[str]:
        """Notes on automatic decisions, one line each."""
        return [*self._notes.values(), *self.stack.notes]

    def holdings(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield (category, name, tensor) of the arena of checkpoints on the device."""
        for memory in self.stack.near():
            yield "activations", "checkpoints of blocks", memory

    @property
    def nbytes(self) -> int:
        """Bytes of checkpoints on the device: the arena, those being written out, and those fetched back."""
        loaded = sum(storage.nbytes() for storage in self._loaded)
        return self.stack.nbytes().get(HBM, 0) + self.stack.in_flight_nbytes + loaded

    @contextlib.contextmanager
    def keeping(self, name: str, leaves: Sequence[Any]) -> Iterator[None]:
        """Push the computed inputs among `leaves` to the stack while the body runs the checkpointed unit `name`."""
        computed = {_place(leaf): leaf for leaf in leaves if _is_computed(leaf)}
        inputs = {place: leaf._version for place, leaf in computed.items()}
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        outer_pack, outer_unpack = outer if outer is not None else (None, None)

        def pack(tensor: torch.Tensor) -> Any:
            if (leaf := computed.get(_place(tensor))) is not None:
                return self._keep_once(leaf, name)
            return tensor if outer_pack is None else outer_pack(tensor)

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, Checkpoint):
                return self._bring_back(packed)
            return packed if outer_unpack is None else outer_unpack(packed)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        computed.clear()  # the hooks may live as long as the graph
        if inputs != {_place(leaf): leaf._version for leaf in leaves if _is_computed(leaf)}:
            raise Refused(
                f"{name} changes its input in place, so it cannot be recomputed from it: change a copy, or exclude the "
                "block with shard(..., recompute=...)"
            )

    def abandon(self) -> None:
        """Wait for all fetches after an error: none may still write into memory that is freed."""
        for checkpoint in self._alive():
            if checkpoint.arrival is not None:
                with contextlib.suppress(Exception):
                    self._wait(checkpoint.arrival)
                checkpoint.arrival = None
        self._order.clear()
        self._kept.clear()

    # -- offload ---------------------------------------------------------------------------------------------------

    def _keep_once(self, leaf: torch.Tensor, name: str) -> Checkpoint:
        """Return the checkpoint of a block's input: that of an earlier block if it took the same unchanged tensor."""
        tensor, version, kept = self._kept.get(id(leaf), (None, 0, None))
        if tensor is not None and kept is not None and tensor() is leaf and version == leaf._version:
            if (checkpoint := kept()) is not None:
                checkpoint.is_shared = True
                return checkpoint
        checkpoint = self._keep(leaf, name)
        self._kept = {key: each for key, each in self._kept.items() if each[2]() is not None}
        self._kept[id(leaf)] = weakref.ref(leaf), leaf._version, weakref.ref(checkpoint)
        return checkpoint

    def _keep(self, tensor: torch.Tensor, name: str) -> Checkpoint:
        flat = tensor.detach().as_strided((tensor.numel(),), (1,))
        total = flat.numel() + -flat.numel() % self._group.world
        each = total // self._group.world
        own = Span(self._group.rank * each, (self._group.rank + 1) * each)
        part = flat
        if self._group.world > 1:  # a copy, so that a part being written does not keep the whole input alive
            part = flat.new_zeros(own.numel)
            mine = flat[own.start : min(own.stop, flat.numel())]
            part[: mine.numel()].copy_(mine)
        with self._waits.waiting("transfers"):  # if the tier is slower than compute
            saved = self.stack.push(part, f"the activations of {name}")
        checkpoint = Checkpoint(saved, tensor, total, own)
        self._order = [ref for ref in self._order if ref() is not None]
        self._order.append(weakref.ref(checkpoint))
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        return checkpoint

    # -- fetch -----------------------------------------------------------------------------------------------------

    def _bring_back(self, checkpoint: Checkpoint) -> torch.Tensor:
        """Return a block's input, and start fetching the input of the next block of backward."""
        flat = self._ready(checkpoint)
        if flat is None:
            arrival = checkpoint.arrival or self._start(checkpoint)
            checkpoint.arrival = None
            with self._waits.waiting("transfers"):
                self._wait(arrival)
            flat = arrival.full
            checkpoint.fetched = flat if checkpoint.is_shared else None
        alive = self._alive()
        at = next((i for i, other in enumerate(alive) if other is checkpoint), 0)
        if at > 0 and alive[at - 1].arrival is None and self._ready(alive[at - 1]) is None:
            alive[at - 1].arrival = self._start(alive[at - 1])
        return flat[: checkpoint.numel].as_strided(checkpoint.size, checkpoint.stride)

    def _alive(self) -> list[Checkpoint]:
        return [checkpoint for ref in self._order if (checkpoint := ref()) is not None]

    def _ready(self, checkpoint: Checkpoint) -> torch.Tensor | None:
        """Return the input if it is still on the device; None if partitioned, so that all ranks take the same path."""
        if checkpoint.fetched is not None:
            return checkpoint.fetched
        held = checkpoint.saved.held() if self._group.world == 1 else None
        # With create_graph, what is recomputed now may be read after the checkpoint's memory was given to another one.
        return held.clone() if held is not None and torch.is_grad_enabled() else held

    def _start(self, checkpoint: Checkpoint) -> Arrival:
        slot = checkpoint.saved.slot
        checkpoint.saved.finish_write()  # the copy that is still being written is not needed any more
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
        if slot.tier.addressable:  # only streams wait; for a disk the host would wait before it issues the block
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


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.size(), tensor.stride()


def _is_computed(leaf: Any) -> bool:
    """Whether an input belongs to one block: a non-empty floating-point result of a computation, dense in memory."""
    if not isinstance(leaf, torch.Tensor) or leaf.grad_fn is None or not leaf.numel():
        return False
    return leaf.is_floating_point() and _is_dense(leaf)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill memory without gaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
