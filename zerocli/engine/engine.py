"""The engine: one ZeRO runtime for all stages, around any nn.Module, from a user's own loop.

In a step, the forward of each unit gathers its parameters (gather.py) and releases them afterwards. `backward` gathers
them again in reverse order while gradients are reduce-scattered to their owners (reduce.py). `step` computes the exact
global norm (step.py), updates the slices this rank holds (update.py) and all-gathers them. The stage's three booleans
say what is partitioned; a world of one and resident parameters run the same code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from offload.mover import Mover
from offload.placement import Placement, per_rank
from offload.tierset import TierSet
from zerocli.config.placement import placement_at
from zerocli.console import say
from zerocli.engine.agreement import Agreement, Member, open_channel
from zerocli.engine.build import Builder
from zerocli.engine.comm import Collectives
from zerocli.engine.device import choose_device
from zerocli.engine.events import BACKWARD, EXCHANGE, OPTIMIZER, Subscribers
from zerocli.engine.grouped import Grouped, Shards, open_groups
from zerocli.engine.guards.accept import refuse_full_graphs, refuse_model, refuse_scripts
from zerocli.engine.guards.aliases import ReleasedViews
from zerocli.engine.guards.owners import Owners
from zerocli.engine.guards.parameters import guard, is_sharded, unguard
from zerocli.engine.optimizer.compiled_update import CompiledAdam
from zerocli.engine.optimizer.counts import Counts
from zerocli.engine.optimizer.facade import ShardedOptimizer
from zerocli.engine.optimizer.groups import arrange
from zerocli.engine.optimizer.optim import StepValues
from zerocli.engine.optimizer.piece import can_fuse
from zerocli.engine.optimizer.rules import make_optimizer, prove, unsuitable
from zerocli.engine.optimizer.step import StepResult, called_step, exchange_norms, scaling
from zerocli.engine.optimizer.update import Updater
from zerocli.engine.optimizer.update_place import choose_compiled, choose_update
from zerocli.engine.precision import LossScale, precision, refuse_half
from zerocli.engine.recompute.activations import Activations
from zerocli.engine.recompute.compiled import CompiledBlocks
from zerocli.engine.settings import Settings
from zerocli.engine.states import moves, relayout, states, whole
from zerocli.engine.states.buffers import held_buffers
from zerocli.engine.states.held import adopt_edits, may_differ, refuse_different
from zerocli.engine.states.named import IncompatibleKeys
from zerocli.engine.states.verified import VerifiedReads
from zerocli.engine.streams import Waits
from zerocli.engine.tensor_parallel import TensorParallel, open_axes
from zerocli.engine.units.backward import Backward
from zerocli.engine.units.divide import recomputed_units
from zerocli.engine.units.gather import Gatherer
from zerocli.engine.units.hooks import Hooks
from zerocli.engine.units.modules import outside_of_units, register_method
from zerocli.engine.units.reduce import Reducer
from zerocli.engine.units.unit import Flat, Unit
from zerocli.errors import Refused
from zerocli.layout.buffers import Spec, persistent
from zerocli.layout.categories import HELD
from zerocli.layout.flats import Sizing
from zerocli.layout.recompute import Recompute
from zerocli.layout.stage import stage as stage_of


class Engine:
    """A sharded model with its optimizer: call it, then `backward(loss)`, then `step()`."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.model, self.settings = getattr(model, "_orig_mod", model), settings  # torch.compile wraps the model
        self._call = model
        self._refuse_unsuitable()
        self._open_ranks()
        settings.watch(self)
        self.tensor_parallel.split(self.model)
        self._choose_rule()
        self.loss_scale = LossScale(self.precision.scales, self.device)
        self.steps = 0
        self.updates = torch.zeros((), device=self.device)
        self.passes = Backward(self)
        self.passes.gradients.deferred = settings.defer_update
        self.member = Member(type(self.model).__name__)
        self.channel = open_channel(self)
        self._open_groups()
        self._closed = False
        self._held_whole = 0
        self._views = ReleasedViews(self.model)
        self._open_tiers()
        self._choose_update()
        self.units = self._build_units()
        self._open_optimizer()
        self._guard_parameters()
        self.connect()
        self.open_updater()
        self._wrap_modules()
        self.forget_traffic()

    # -- building, in the order of __init__ ------------------------------------------------------------------------

    def _refuse_unsuitable(self) -> None:
        """Choose the device and the precision; refuse a model or settings that cannot be trained."""
        settings = self.settings
        refuse_model(self.model)
        self.device = choose_device(settings.device, self._call)
        self.stage = stage_of(settings.stage)
        self.precision, _ = precision(settings.precision, self.device)
        refuse_half(self._call, self.precision, settings.state is not None)
        if settings.accumulate < 1:
            raise ValueError(f"accumulate must be at least 1, not {settings.accumulate}")
        if settings.reduce not in ("compute", "fp32"):
            raise ValueError(f"reduce {settings.reduce!r} is not one of compute, fp32")

    def _open_ranks(self) -> None:
        """Open both axes of ranks: data-parallel and tensor-parallel."""
        self.events = Subscribers(self.settings.events)
        self.waits = Waits(self.device, self.events)
        data_parallel, mesh = open_axes(self.settings.tp, self.settings.group, self.device)
        self.collectives = Collectives(data_parallel, self.device, self.events)
        self.tensor_parallel = TensorParallel(mesh, self.device, self.waits, self.events)
        self.inside = self.collectives

    def _open_groups(self) -> None:
        """Open groups of ranks, once all ranks are known to ask for the same."""
        self.inside, self.across = open_groups(self.collectives, self.settings.shard_ranks, self.events)
        copies = self.settings.num_copies(self.collectives.world) > 1
        self.shards: Shards = Grouped(self.inside, self.across) if copies else self.inside
        self.replicas = Collectives.alone(self.device) if copies else self.across
        if self.inside is not self.collectives:
            self.settings.watch(self)

    @property
    def axes(self) -> dict[str, Collectives]:
        """The axes of ranks, by name; the data-parallel ones may be divided into groups."""
        axes = {"data": self.collectives, "tensor": self.tensor_parallel}
        return axes if self.inside is self.collectives else axes | {"inside": self.inside, "across": self.across}

    def forget_traffic(self) -> None:
        """Exclude the bytes moved so far from the training traffic counts."""
        for axis in self.axes.values():
            axis.take_nbytes()

    def _choose_rule(self) -> None:
        """Make the update rule and its groups; raise Refused if no way to run a user's own optimizer is exact."""
        settings, named = self.settings, list(self.model.named_parameters())
        rule = make_optimizer(settings.optimizer, settings.options)
        self.arranged = arrange(self.model, rule, settings)
        groups = (self.arranged.groups, self.arranged.group_of)
        self.rule, words = prove(rule, settings.optimizer, settings.options, named, *groups)
        if self.rule.whole and self.tensor_parallel.world > 1:
            raise ValueError(f"optimizer {settings.optimizer} needs whole matrices, which tp splits: use tp=1")
        if words and self.collectives.rank == 0 and self.tensor_parallel.rank == 0:
            say(words)
        if reason := unsuitable(self.rule, named):
            raise ValueError(reason)

    @property
    def local_world(self) -> int:
        """Number of ranks on this machine: LOCAL_WORLD_SIZE, or all ranks if that is not set."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.collectives.world * self.tensor_parallel.world))

    def _open_tiers(self) -> None:
        """Open the tiers of the placement, and choose the sizes of the buffers."""
        settings = self.settings
        self.placement = per_rank(placement_at(settings.offload, settings.stage), self.local_world)
        about = (settings.nvme_path, settings.tier_options, settings.verify, self.events)
        self.tiers = TierSet(self.local_world, self.device, *about)
        self.verified = VerifiedReads(self.tiers.verifier, self.device, self.gather_control)
        self.mover = Mover(settings.read_ahead_nbytes, self.tiers.open_cache)
        shape = (len(self.rule.state_names), self.device.type, self.precision.name, can_fuse(self.rule, self.device))
        self.sizing: Sizing = settings.sizing_at(self.shards.world, *shape)
        keep = self.sizing.keep_gradients if settings.keep_gradients is None else settings.keep_gradients
        self.sizing = dataclasses.replace(self.sizing, threads=torch.get_num_threads(), keep_gradients=keep)

    def _choose_update(self) -> None:
        """Choose where offloaded states are updated, and whether that is compiled on the CPU.

        Ways to do it are tried and timed before states take that memory.
        """
        settings, dtype, split = self.settings, self.precision.compute, self.sizing.split_master
        numel = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        held = numel // self.shards.world if self.stage.optimizer else numel
        self.update = choose_update(settings, self.rule, self.device, self.placement, held, self.sizing, dtype)
        self.compiled: CompiledAdam | None = None
        self.compiled_reason = "nothing is updated on the CPU"
        if self.update.on_cpu:
            self.compiled, self.compiled_reason = choose_compiled(
                settings.compile_update, self.rule, held, split, dtype
            )

    def _build_units(self) -> list[Unit]:
        self.builder = Builder(self)
        try:
            return self.builder.build()
        except BaseException:  # e.g. a full disk: the caller gets no engine that could be closed
            self.tiers.close()
            raise

    def _open_optimizer(self) -> None:
        """Make the counts of updates, and the optimizer that users see."""
        units = [unit.module for unit in self.units]
        refuse_scripts([(u.name, u.module) for u in self.units if any(flat.resident is None for flat in u.flats)])
        refuse_full_graphs(self._call, [*units, *outside_of_units(self.model, self.units)], units[1:])
        self.counts = Counts(self.device, self.rule.split)
        self.counts.add(entry.name for flat in self.trainable() for entry in flat.layout.entries)
        self.optimizer = ShardedOptimizer(self)

    def _guard_parameters(self) -> None:
        """Make reads of parameters without values, and later changes of the model's parameters, known errors."""
        names = {}
        for flat in self.flats():
            for parameter, entry in zip(flat.parameters, flat.layout.entries, strict=True):
                guard(parameter, entry.name, self.passes.gradients)
                names[id(parameter)] = entry.name
            flat.guarded = all(is_sharded(parameter) for parameter in flat.parameters)
            flat.note_values() if flat.buffer is not None else flat.detach()
        self.builder.aliases.redirect(self.flats())
        self._owners = Owners(self.model, names)

    def connect(self) -> None:
        """Make what issues the collectives of the current flats."""
        self.gatherer = Gatherer(self)
        self.reducer = Reducer(self)
        self.agreement = self.gatherer.agreement = Agreement(self)

    @property
    def agrees(self) -> bool:
        """Whether ranks exchange what they need before each gather."""
        return self.channel is not None and self.gatherer.moves and self.settings.uneven is not False

    def open_updater(self) -> None:
        """Make what updates the states, wherever they are now."""
        self.sizing = dataclasses.replace(
            self.sizing,
            update_on_cpu=self.update.on_cpu,
            cpu_share=self.update.share,
            addressable=self.tiers.addressable(),
        )
        self.updater = Updater(
            self.rule,
            self.counts,
            self.shards,
            self.device,
            sizing=self.sizing,
            events=self.events,
            compiled=self.compiled,
            beside=self.update.kernel,
            waits=self.waits,
        )

    def _wrap_modules(self) -> None:
        """Choose which units are recomputed or compiled, and wrap the modules' forwards."""
        settings, recomputed = self.settings, self.recomputed_units()
        self.open_activations(recomputed)
        blocks = CompiledBlocks(self.units, settings.compile, settings.compile_backend, self.device, settings.steps)
        self.hooks = Hooks(self, recomputed, blocks)

    def recomputed_units(self) -> dict[Unit, bool]:
        """Return the units that are recomputed, each with whether selectively."""
        settings = self.settings
        choice = settings.recomputed if isinstance(settings.recompute, Recompute) else settings.recompute
        return recomputed_units(self.units, choice)

    def open_activations(self, recomputed: Mapping[Unit, bool]) -> None:
        """Make what keeps the inputs of recomputed units, on the tiers of the placement."""
        self.activations = Activations(self, len(recomputed))

    # -- forward and backward --------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def register_forward_method(self, module: nn.Module, name: str) -> None:
        """Let a method other than `forward` use the module's own parameters: they are gathered while it runs."""
        register_method(module, name)

    def before_forward(self) -> None:
        """Lay out newly unfrozen parameters as trainable; called before each outermost forward."""
        if self.gatherer.moves and torch._C._get_tracing_state() is not None:
            raise Refused(
                "torch.jit.trace would record parameters that are gathered for this call only: trace the copy that "
                "engine.unsharded_model() returns"
            )
        if torch.is_grad_enabled() and (changed := relayout.unfrozen(self.units)):
            relayout.refit(self, changed)
            self.connect()

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, create_graph: bool = False) -> None:
        """Accumulate the gradient of the mean of `loss` over the ranks and the step's backward passes."""
        with self.events.phase(BACKWARD):
            self.passes.run(loss, retain_graph, create_graph)

    @property
    def has_gradients(self) -> bool:
        """Whether backward has been called since the last step."""
        return self.passes.count > 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that this step has accumulated so far.

        If not `set_to_none`, parameters that had one have a zero gradient in the next step, as in torch: momentum and
        weight decay act on them even if it brings them no other.
        """
        self.reducer.keep_zeros(not set_to_none)
        self.reducer.free_grads()
        self.passes.forget()

    # -- the optimizer step ----------------------------------------------------------------------------------------

    def step(self) -> StepResult:
        """Clip by the exact global norm, update this rank's slices and all-gather them; skip a non-finite step."""
        with self.events.phase(OPTIMIZER):
            self.optimizer.run_hooks("pre")
            result = self._step()
            self.optimizer.run_hooks("post")
        self.events.step()
        return result

    @torch.no_grad()
    def _step(self) -> StepResult:
        groups = self.optimizer.hyperparameters(self.steps + 1)
        passes = self.passes.count
        edited = self.agreement.meet(
            "engine.step()",
            lambda: (passes, [group.plain() for group in groups]),
            lambda: called_step(passes, groups),
            self._may_differ,
        )
        if not self.has_gradients:
            raise Refused("step() needs a backward(loss) before it")
        if self.passes.count < self.settings.accumulate:
            self.reducer.finish_early()
        if self._held_whole:
            raise Refused("step() inside `with engine.gathered(...)` would change what it gives: leave it first")
        self.verified.look()
        self._owners.refuse_replaced()
        self.agreement.refuse()  # checks the previous step on a GPU, where step() itself does not wait for the result
        self.adopt_edits()
        self._refuse_different(edited)
        self.steps += 1
        lr = self.optimizer.base_lr
        with self.waits.waiting("optimizer"):
            self.gatherer.agree_on_order()
            trainable = list(self.trainable())
            squares, inactive = exchange_norms(trainable, self.reducer, self.collectives, self.tensor_parallel)
            scaled = scaling(squares, self.passes.divisor, self.settings.clip, self.agreement.compare(passes))
            # New tensors each step: the previous step's update may still be reading the old ones.
            self.updates = self.updates + (1 - scaled.skip)
            self.counts.advance(inactive, 1 - scaled.skip)
            values = StepValues(groups, self.counts.values, scaled.grad_scale, scaled.skip)
            if self.device.type == "cpu":
                self.agreement.refuse()
            order = [flat for unit in self.gatherer.forward_order() for flat in unit.trainable]
            deferred = self.gatherer.deferred
            self.updater.start(order, values, self.gatherer.refresh, inactive, deferred)
            # Each all-gather overlapped with the next update. Unless it is deferred, the user can read resident
            # parameters after this: the compute stream, which reads them without a gather, waits for their updates.
            self.gatherer.release_all(resident=not deferred)
            for flat in trainable:
                if deferred:
                    flat.forbid_reads(True)
                elif flat.resident is not None and flat.written is not None:
                    flat.written.wait()
        self.loss_scale.update(scaled.skip)
        self.gatherer.end_step()
        self.reducer.end_step()
        self.hooks.end_step()
        self._invalidate_views(trained=True)
        self.passes.forget()
        return StepResult(self.steps, lr, scaled.norm, scaled.skip)

    def _invalidate_views(self, trained: bool = False) -> None:
        """Refuse further use of views of gathered parameters that have changed, `trained` ones or all."""
        if self.gatherer.moves:
            found = self.gatherer.released_with_views
            self._views.invalidate(lambda: [each for each in found() if each.flat.trainable or not trained])

    # -- inspection ------------------------------------------------------------------------------------------------

    def trainable(self) -> Iterator[Flat]:
        return (flat for flat in self.flats() if flat.trainable)

    def flats(self) -> Iterator[Flat]:
        for unit in self.units:
            yield from unit.flats

    def adopt_edits(self) -> None:
        """Copy resident parameters that were moved back into their flat, and in-place edits into the fp32 master."""
        adopt_edits(self.flats(), self.device)

    def synchronize(self) -> None:
        """Make the current stream wait for all pending work of the engine except transfers between tiers."""
        if self._closed:
            raise Refused("the engine is closed, and its states are freed: read or save them before engine.close()")
        self.adopt_edits()
        if self.updater.interrupted:
            self.verified.look_now()  # what was read wrong is the reason to give
        self.updater.issue_updates()
        self.gatherer.release_all()
        for flat in self.trainable():
            if flat.written is not None:
                flat.written.wait()
            flat.forbid_reads(False)
        self.verified.look_now()

    def move(self, placement: Placement | str, recompute: Recompute | None = None) -> list[str]:
        """Move states to the tiers of another placement, between two steps; no number changes. Collective.

        `recompute` also changes which blocks are recomputed. Returns what some rank had no room to move, which stays
        where it was on all ranks, a line each. A loss that was computed before it is refused by `backward`.
        """
        self._meet_and_synchronize("engine.move", str(placement), str(recompute))
        return moves.move(self, placement, recompute)

    def verify(self) -> None:
        """Raise `zerocli.Corrupted` if any read so far returned other bytes than were written.

        Collective, and waits for the device; does nothing without `shard(..., verify=True)`.
        """
        if self.verified.active:
            self.meet("engine.verify")
            self.updater.issue_updates()
            self.verified.look_everywhere()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Refused(
            "an engine cannot be copied or pickled, as it holds a part of the states on each rank: save "
            "engine.state_dict() and engine.optimizer_state_dict(), or copy what engine.unsharded_model() returns"
        )

    def close(self) -> None:
        """Free all memory and files but the model's own buffers and resident parameters, which stay usable.

        The engine cannot be used after this.
        """
        if self._closed:
            return
        failed = self.updater.interrupted
        if not failed:
            self.updater.issue_updates()
        self.gatherer.release_all(quietly=failed)
        self.member.agreement = None
        self.hooks.close()
        self.reducer.close()
        for flat in self.flats():
            flat.forbid_reads(False)
            if flat.resident is not None:  # the others have no values, and reading them stays an error
                for parameter in flat.parameters:
                    unguard(parameter)
        self.mover.close()
        residents = [flat.resident for flat in self.flats() if flat.resident is not None]
        buffers = [tensor for _, tensor in held_buffers(self.model)]
        kept = {tensor.untyped_storage().data_ptr() for tensor in (*residents, *buffers)}
        held = [tensor.untyped_storage() for _, _, tensor in self.holdings()]
        self.updater.close()  # its thread may still use the tiers' memory if an update has failed
        self.tiers.close()  # ends their transfers, which may still read or write what is freed below
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        # Freed here and not with the last reference: cycles would keep it until Python's collector runs.
        for storage in held:
            if storage.data_ptr() not in kept and storage.resizable():  # others share memory with numpy: small ones
                storage.resize_(0)
        self._closed = True

    def holdings(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield (category, name, tensor) of all persistent tensors; of several on one storage the first one counts."""
        for flat in self.flats():
            yield from flat.holdings()
        for name, buffer in held_buffers(self.model):
            yield "buffers", name, buffer
        for part in (self.gatherer, self.reducer, self.updater, self.activations):
            yield from part.holdings()

    def scalars(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield (category, name, tensor) of single-element tensors; there are a few per unit."""
        for flat in self.flats():
            yield from flat.scalars()
        yield "buffers", "counters", self.updates
        yield "buffers", "counters", self.counts.values

    def memory(self) -> dict[str, int]:
        """Return the bytes this rank holds on its device, by category; activations are the checkpoint arena only."""
        seen: set[int] = set()
        nbytes = dict.fromkeys(HELD, 0)
        for category, _, tensor in self.holdings():
            storage = tensor.untyped_storage()
            if tensor.device.type == self.device.type and tensor.numel() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                nbytes[category] += storage.nbytes()
        return nbytes

    def specs(self) -> list[Spec]:
        """Return the specifications of all persistent tensors except scalars and the model's buffers."""
        units = [[flat.spec for flat in unit.flats] for unit in self.gatherer.forward_order()]
        return persistent(units, self.sizing)

    @property
    def numel(self) -> int:
        """Number of parameters of the whole model, without padding."""
        return self._count(self.flats())

    @property
    def trained_numel(self) -> int:
        """Number of those that are trained."""
        return self._count(self.trainable())

    def _count(self, flats: Iterable[Flat]) -> int:
        entries = (entry for flat in flats for entry in flat.layout.entries)
        return sum(math.prod(self.tensor_parallel.whole_shape(e.name, e.shape)) for e in entries)

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of both axes that train this model. The first use is collective."""
        if self.collectives.world * self.tensor_parallel.world == 1:
            return (dist.get_rank() if dist.is_initialized() else 0,)
        mine = torch.tensor([dist.get_rank()], device=self.device)
        return tuple(sorted(int(rank) for rank in self.gather_control(mine).flatten().tolist()))

    def _may_differ(self) -> int:
        data_read, self.passes.gradients.data_read = self.passes.gradients.data_read, False
        return may_differ(self.flats(), data_read)

    def _refuse_different(self, edited: int) -> None:
        """Raise Refused on all ranks if they have edited these flats differently: see states/held.py."""
        if edited:
            refuse_different(self.flats(), edited, self.collectives)

    def meet(self, call: str, *key: object, bits: Callable[[], int] = lambda: 0) -> int:
        """Return when all ranks make this call with this key; refused on all ranks if they make different ones.

        Returns the `bits` that any rank has set.
        """
        if self._closed:
            raise Refused("the engine is closed, and its states are freed: read or save them before engine.close()")
        return self.agreement.meet(call, lambda: key, lambda: f"called {call}({', '.join(map(str, key))})", bits)

    def _meet_and_synchronize(self, call: str, *key: object, writes: bool = False) -> None:
        """Meet for a call that reads all parameters, or `writes` them."""
        edited = self.meet(call, *key) if writes else self.meet(call, *key, bits=self._may_differ)
        self.synchronize()
        self._refuse_different(edited)

    def gather_control(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return every rank's copy of a small tensor, stacked, over both axes of ranks. Collective."""
        with self.events.phase(EXCHANGE):
            return self.tensor_parallel.gather_control(self.collectives.gather_control(tensor)).flatten(0, 1)

    def reduce_control(self, sums: torch.Tensor, most: torch.Tensor) -> None:
        """Reduce small tensors over both axes of ranks, in place: to sums, and to the largest elements. Collective."""
        with self.events.phase(EXCHANGE):
            for axis in (self.collectives, self.tensor_parallel):
                axis.sum_control(sums)
                axis.max_control(most)

    # -- whole parameters and gradients: see states/whole.py -------------------------------------------------------

    @contextlib.contextmanager
    def gathered(self, *what: str | nn.Parameter | nn.Module, write: bool = False) -> Iterator[None]:
        """Gather these parameters on every rank while the body runs; without arguments, all of them.

        `what` is names, parameters or modules. With `write`, in-place changes made on rank 0 are kept on every rank;
        without it, a change is refused. Collective.
        """
        names = [each if isinstance(each, str) else type(each).__name__ for each in what]
        self._meet_and_synchronize("engine.gathered", names, write, writes=write)
        self._held_whole += 1
        try:
            flats = whole.choose(self.model, list(self.flats()), what)
            try:
                with whole.gathered(self, flats, write):
                    yield
            finally:
                if write:
                    self.hooks.parameters_changed(flats)
                    self._invalidate_views()
        finally:
            self._held_whole -= 1

    def grad(self, name: str) -> torch.Tensor | None:
        """Return a parameter's whole gradient (fp32, on the CPU): the mean over the ranks and the passes made so far.

        None if no rank has one. Call it between backward and step. Collective.
        """
        self.meet("engine.grad", name, self.passes.count)
        return whole.gradient(self, name)

    # -- whole states, under the model's own names: see states/states.py -------------------------------------------

    @torch.no_grad()
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the full, unsharded parameters (fp32) and buffers on the CPU, under the model's own names.

        Collective: every rank calls it, and every rank gets all of it.
        """
        self._meet_and_synchronize("engine.state_dict")
        self._owners.refuse_replaced()
        return states.model_state(self)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> IncompatibleKeys:
        """Load full, unsharded tensors under the model's own names; every rank passes the same. Collective.

        `strict` raises ValueError if a name is missing or unknown; otherwise known names are loaded and both lists are
        returned. A wrong shape is always refused. A tied weight needs one of its names; several must be equal.
        """
        self._meet_and_synchronize("engine.load_state_dict", writes=True)
        loaded = states.load_model_state(self, self.model, state, strict)
        self._invalidate_views()
        return loaded

    @torch.no_grad()
    def load_part(self, module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> IncompatibleKeys:
        """Load full tensors under a submodule's own names, as `load_state_dict` does for the model. Collective."""
        if self.tensor_parallel.world > 1:
            raise Refused("the layers of this model are split by tensor parallelism: load engine.load_state_dict()")
        self._meet_and_synchronize("load_state_dict of a part of the model", type(module).__name__, writes=True)
        return states.load_model_state(self, module, state, strict)

    @torch.no_grad()
    def unsharded_model(self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> nn.Module:
        """Return an independent, unsharded copy of the model, which later steps do not change. Collective.

        Its parameters are fp32, as in `state_dict()`, or `dtype`; buffers, ties and requires_grad are the model's.
        """
        if (tp := self.tensor_parallel.world) > 1:
            raise Refused(
                f"the layers of this model are split over {tp} tensor-parallel ranks: a whole copy has other shapes; "
                "build the model again and load engine.state_dict() into it"
            )
        self._meet_and_synchronize("engine.unsharded_model")
        return whole.copy_module(self.model, states.parameter_values(self), torch.device(device), dtype)

    @torch.no_grad()
    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the optimizer's full states on the CPU, by parameter name, with its counters. Collective."""
        self._meet_and_synchronize("engine.optimizer_state_dict")
        return states.optimizer_state(self)

    @torch.no_grad()
    def load_optimizer_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load the result of `optimizer_state_dict`, saved at any stage, placement and world size.

        The state dict of a torch optimizer over the same parameters and groups is taken too.
        """
        self._meet_and_synchronize("engine.load_optimizer_state_dict")
        states.load_optimizer_state(self, saved)
