"""Tensor parallelism: the ranks that split each layer between them, and how a whole parameter is cut for them.

The ranks form a mesh of (data-parallel, tensor-parallel) with the tensor-parallel axis inside, so that its ranks are
neighbours: same machine, fastest links. ZeRO runs over the other axis and does not depend on this one.

[Note: plain parameters] Layers are split by torch's own `parallelize_module`, with styles of ours (models/parallel.py)
that leave each rank a plain parameter of its part. ZeRO's flats then hold what a rank has, as without tensor
parallelism: gathers, reductions and updates are the same code. A DTensor in their place would dispatch every operation
in Python, hide saved tensors from the gatherer, and has no public placement for a fused projection, whose sections
(queries, keys, values) are each split separately.

[Note: replicated parameters] A parameter is either split (each rank has a part) or replicated (all have the same:
norms, biases of row-parallel layers, positions, a vocabulary that does not divide). Replicated ones see the same
activations on all tensor-parallel ranks, and so get the same gradients. But each rank reduces them in a different
data-parallel group, which may round in another order, so the copies could drift apart over a long run. Each rank's
slice of the reduced gradient is therefore taken from tensor-parallel rank 0. In the global norm, squares of replicated
parameters count once; those of split parameters are summed over the ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from zerocli.engine.comm import Collectives
from zerocli.engine.events import SILENT, Events
from zerocli.engine.recompute.selective import change_once
from zerocli.engine.states.buffers import take_first
from zerocli.engine.streams import SideStream, Waits
from zerocli.errors import WrongValue
from zerocli.layout.shards import nearest_divisor
from zerocli.ranks.startup import STARTUP

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Cut:
    """How a whole parameter is split: along `dim`, each of its `sections` separately."""

    shape: tuple[int, ...]
    dim: int
    sections: tuple[int, ...]
    """Lengths of the sections along `dim`, such as queries, keys and values."""

    def runs(self, rank: int, world: int) -> list[tuple[int, int]]:
        """Return (start in the whole, length) along `dim` of `rank`'s part of each section, in the part's order."""
        starts = itertools.accumulate(self.sections[:-1], initial=0)
        each = [length // world for length in self.sections]
        return [(start + rank * length, length) for start, length in zip(starts, each, strict=True)]

    def part(self, whole: torch.Tensor, rank: int, world: int) -> torch.Tensor:
        """Return a copy of `rank`'s part of the whole; `join` of all ranks' parts restores the whole."""
        runs = self.runs(rank, world)
        return torch.cat([whole.narrow(self.dim, start, length) for start, length in runs], self.dim)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole parameter from all ranks' parts in rank order."""
        lengths = [length // len(parts) for length in self.sections]
        pieces = [part.split(lengths, self.dim) for part in parts]
        return torch.cat([piece for section in zip(*pieces, strict=True) for piece in section], self.dim)


class TensorParallel(Collectives):
    """The tensor-parallel axis: its collectives, counted separately, and the cuts of the parameters it splits.

    `mesh` is one-dimensional; None is an axis of one rank, which splits nothing.
    """

    def __init__(
        self, mesh: DeviceMesh | None, device: torch.device, waits: Waits | None = None, events: Events = SILENT
    ) -> None:
        super().__init__(mesh.get_group() if mesh is not None else None, device, events)
        if mesh is None:  # torch takes group=None for all ranks
            self.rank, self.world = 0, 1
        self._mesh = mesh
        self._waits, self._side = waits or Waits(device), SideStream(device)
        self.cuts: dict[str, Cut] = {}
        """The cut of each parameter that is split, by its name in the model."""
        self._unchecked = {"batches", "random numbers"}
        self._trusts = self._is_split = False

    def trust(self) -> None:
        """Do not compare batches or random numbers between ranks, and draw none: for tensors without values."""
        self._unchecked.clear()
        self._trusts = True

    # -- splitting a model -----------------------------------------------------------------------------------------

    def split(self, model: nn.Module) -> None:
        """Replace the model's split parameters by this rank's parts; existing values are taken from rank 0.

        A second call changes nothing.
        """
        if self.world == 1 or self._is_split:
            return
        self._is_split = True
        from torch.distributed.tensor.parallel import parallelize_module

        plan, self.cuts = plan_of(model, self)
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if not value.is_meta:
                take_first(name, value, self)
        parallelize_module(model, self._mesh, plan)
        model.register_forward_pre_hook(self._check_input, with_kwargs=True)

    def replicates(self, name: str) -> bool:
        """Whether the axis has several ranks and all of them hold the same parameter of this name."""
        return self.world > 1 and name not in self.cuts

    # -- whole parameters ------------------------------------------------------------------------------------------

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole parameter, or of an optimizer state of its shape."""
        return self.cuts[name].part(whole, self.rank, self.world) if name in self.cuts else whole

    def join(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor from every rank's part, on the device of `part`. Collective."""
        if name not in self.cuts:
            return part
        everyone = torch.empty((self.world, *part.shape), dtype=part.dtype, device=self.device)
        self.all_gather(everyone.view(-1), part.to(self.device).reshape(-1)).wait()
        return self.cuts[name].join(everyone.unbind()).to(part.device)

    def whole_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the unsplit shape of a parameter whose part on this rank has `shape`."""
        return self.cuts[name].shape if name in self.cuts else tuple(shape)

    # -- inside a step ---------------------------------------------------------------------------------------------

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum an activation over the ranks in place; the result is ready on the current stream."""

        def add() -> None:
            with self._waits.waiting("collectives"):
                self.all_reduce(tensor, "activations").wait()

        change_once(tensor, add)
        return tensor

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the maximum over the ranks in place."""
        if self.world > 1:
            self.nbytes["all_reduce"] += 2 * tensor.nbytes
            with self._waits.waiting("collectives"), self._noted("all_reduce", "the logits' maxima"):
                dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor

    def start_sum_(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Start a sum over the ranks in place, overlapped with later compute; return the function that waits for it."""
        with self._side.run():
            pending = self.all_reduce(tensor, "activations' gradients")

        def finish() -> None:
            with self._waits.waiting("collectives"):
                pending.wait()

        return finish

    def agree_(self, tensor: torch.Tensor, what: str) -> None:
        """Overwrite a replicated gradient with rank 0's."""
        self.nbytes["broadcast"] += tensor.nbytes
        with self._noted("broadcast", what):
            dist.broadcast(tensor, group=self.group, group_src=0)

    def take_nbytes(self) -> dict[str, int]:
        """Return the bytes moved since the last call, by kind, and reset the counts."""
        broadcast = self.nbytes["broadcast"]
        return super().take_nbytes() | {"broadcast": broadcast}

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of a small value over the ranks, added in rank order: the same bits on all of them."""
        return self.gather_control(value).sum(0)

    def _check_input(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if "batches" not in self._unchecked:
            return
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        # Weighted, so that the sums depend on the order.
        weights = (torch.arange(1, x.numel() + 1, dtype=torch.float64, device=x.device) for x in leaves)
        prints = [float(x.detach().double().flatten() @ weight) for x, weight in zip(leaves, weights, strict=True)]
        self._check_alike("batches", torch.tensor(prints, dtype=torch.float64, device=self.device))

    def _check_alike(self, what: str, value: torch.Tensor) -> None:
        """Raise if tensor-parallel ranks do not get the same input: the result would be meaningless."""
        self._unchecked.discard(what)
        everyone = self.gather_control(value)
        if not bool((everyone == everyone[:1]).all()):
            raise ValueError(
                f"the {self.world} ranks that split each layer between them (tp) were given different {what}: "
                "they need the same, by engine.collectives.rank and not by the rank among all"
            )

    @contextlib.contextmanager
    def own_masks(self) -> Iterator[None]:
        """Let each rank draw different random numbers while the body runs; before and after, all draw the same.

        For dropout on split activations. The seed comes from the CPU generator, whose state recomputation restores.
        """
        if self._trusts:
            yield
            return
        seed = int(torch.randint(2**62, ()))
        if "random numbers" in self._unchecked:
            self._check_alike("random numbers", torch.tensor([seed], device=self.device))
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed + self.rank)
            yield


def open_axes(
    tp: int | DeviceMesh, group: dist.ProcessGroup | None, device: torch.device
) -> tuple[dist.ProcessGroup | None, DeviceMesh | None]:
    """Return the data-parallel group and the tensor-parallel mesh; an int creates both from all ranks. Collective."""
    if not isinstance(tp, int):
        if group is None or tp.ndim != 1:
            raise ValueError(
                'tp takes one axis of a mesh, beside the other: tp=mesh["tp"], group=mesh["dp"].get_group()'
            )
        return group, tp
    if tp < 1:
        raise ValueError(f"tp {tp} is below 1")
    if tp == 1:
        return group, None
    if group is not None:
        raise ValueError(f'tp={tp} divides all ranks; with a group of your own pass the other axis: tp=mesh["tp"]')
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    check_degree(tp, {"ranks": world})
    from torch.distributed.device_mesh import init_device_mesh

    with STARTUP.waiting("making the process groups of both axes"):
        mesh = init_device_mesh(device.type, (world // tp, tp), mesh_dim_names=("dp", "tp"))
    return mesh["dp"].get_group(), mesh["tp"]


# -- plans: which modules of a model are split, and how ----------------------------------------------------------------


def plan_of(model: nn.Module, tp: TensorParallel) -> tuple[dict[str, Any], dict[str, Cut]]:
    """Return a whole model's own plan (patterns of module names, each with its style), and the cuts of its parameters.

    Raises ValueError for a model without a plan, and for a degree that does not divide what is split.
    """
    own = getattr(model, "tensor_parallel_plan", None)
    if own is None:
        raise ValueError(
            f"{type(model).__name__} has no tensor_parallel_plan(): tp splits the built-in gpt2 and llama families, "
            "and models that say how they are split; other models train with tp 1"
        )
    plan: dict[str, Any] = own(tp)
    planned = [
        (path, module, style)
        for path, module in model.named_modules()
        for pattern, style in plan.items()
        if path.count(".") == pattern.count(".") and fnmatch(path, pattern)
    ]
    sizes: dict[str, int] = {}
    for path, module, style in planned:
        for name, number in style.extents(module).items():
            sizes.setdefault(name if "heads" in name else f"{name} of {path}", number)
    check_degree(tp.world, sizes)
    cuts = {f"{path}.{name}": cut for path, module, style in planned for name, cut in style.cuts(module).items()}
    return plan, cuts


def check_degree(tp: int, numbers: Mapping[str, int]) -> None:
    """Raise ValueError for the first number that `tp` does not divide, with the nearest degree that divides all."""
    for name, number in numbers.items():
        if number % tp:
            nearest = nearest_divisor(tp, math.gcd(*numbers.values()))
            fact = f"tp {tp} does not divide {name} {number}; the nearest that works is tp {nearest}"
            raise WrongValue(fact, hint=f"--tp {nearest}")


def planned_cuts(model: nn.Module, degree: int) -> dict[str, Cut]:
    """Return the cuts of a whole model's parameters at this tensor-parallel degree; needs no ranks."""
    if degree == 1:
        return {}
    axis = TensorParallel(None, torch.device("cpu"))
    axis.world = degree  # only for planning: there is no process group
    return plan_of(model, axis)[1]


def local_numel(model: nn.Module, degree: int) -> int:
    """Return how many of a whole model's parameters each rank has at this tensor-parallel degree; needs no ranks."""
    cuts = planned_cuts(model, degree)
    return sum(p.numel() // (degree if name in cuts else 1) for name, p in model.named_parameters())
